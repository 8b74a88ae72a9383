"""The report in TensorBoard, read back with TensorBoard's own readers and plugins."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from made_up_runs import write_run
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams.backend_context import Context
from tensorboard.plugins.hparams.list_session_groups import Handler

from lightning_qk.report import main, make_report
from lightning_qk.runs import find_runs


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    root = tmp_path / "demo"
    for seed, height in enumerate((1.0, 2.0, 6.0)):
        write_run(root, "fp32", seed, logged={"loss/train": [height] * 10})
    write_run(root, "fault", 0, "collapsed", collapse_step=20, step=30, logged={"loss/train": [4.0, 5.0, 6.0]})
    write_run(root, "fault", 1, "nonfinite", collapse_step=20, logged={"loss/train": [2.0, math.nan]}, loss="nan")
    write_run(root, "fault", 2, "unfinished", logged={"loss/train": [1000.0] * 10})
    (root / "experiment.json").write_text(json.dumps({"arms": ["fp32", "fault"], "reference": "fp32"}))
    make_report([root])
    return root


def accumulate(directory: Path) -> EventAccumulator:
    return EventAccumulator(str(directory), size_guidance={"scalars": 0, "images": 0, "tensors": 0}).Reload()


def points(events: EventAccumulator, tag: str) -> dict[int, float]:
    return {event.step: event.value for event in events.Scalars(tag)}


def test_mean_and_band_at_every_logged_step(experiment: Path) -> None:
    events = accumulate(experiment / "aggregate" / "fp32")
    steps = range(9, 100, 10)
    for suffix, value in (("", 3.0), ("/low", 1.0), ("/high", 6.0), ("/seeds", 3.0)):
        assert points(events, f"loss/train{suffix}") == dict.fromkeys(steps, value)
    names = {
        f"{tag}{suffix}" for tag in ("loss/train", "sigma/q", "logit/max") for suffix in ("", "/low", "/high", "/seeds")
    }
    assert set(events.Tags()["scalars"]) == names


def test_seeds_that_stopped_or_are_not_finite_show(experiment: Path) -> None:
    events = accumulate(experiment / "aggregate" / "fault")
    means = points(events, "loss/train")
    assert (means[9], means[29]) == (3.0, 6.0), "the unfinished run does not count"
    assert math.isnan(means[19])
    assert math.isnan(points(events, "loss/train/high")[19])
    assert points(events, "loss/train/seeds") == {9: 2.0, 19: 2.0, 29: 1.0}
    assert set(points(events, "sigma/q/seeds").values()) == {2.0, 1.0}


def test_layout_has_a_margin_chart_for_each_tag(experiment: Path) -> None:
    (event,) = accumulate(experiment / "aggregate").Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    found = [(chart.title, chart.margin.series[0]) for category in layout.category for chart in category.chart]
    assert [(title, series.value, series.lower, series.upper) for title, series in found] == [
        (tag, tag, f"{tag}/low", f"{tag}/high") for tag in ("loss/train", "sigma/q", "logit/max")
    ]


def test_figures_are_images(experiment: Path) -> None:
    events = accumulate(experiment / "aggregate")
    for name in ("figure", "survival"):
        (image,) = events.Images(f"report/{name}")
        assert image.encoded_image_string == (experiment / f"{name}.png").read_bytes()
        assert image.width == 1800


def sessions(directory: Path) -> tuple[Any, dict[tuple[str, float], dict[str, Any]]]:
    """The columns of the hyperparameter dashboard, and its rows by arm and seed."""
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(directory))
    multiplexer.Reload()
    context = Context(TBContext(data_provider=MultiplexerDataProvider(multiplexer, str(directory))))
    request = RequestContext()
    metadata = context.hparams_metadata(request, "")
    experiment = context.experiment_from_metadata(
        request, "", include_metrics=True, hparams_run_to_tag_to_content=metadata, data_provider_hparams=[]
    )
    wanted = api_pb2.ListSessionGroupsRequest(
        start_index=0,
        slice_size=100,
        allowed_statuses=[api_pb2.STATUS_UNKNOWN, api_pb2.STATUS_RUNNING, api_pb2.STATUS_SUCCESS],
        include_metrics=True,
    )
    response = Handler(request, context, "", wanted).run()
    rows = {}
    for group in response.session_groups:
        values = {metric.name.tag: metric.value for metric in group.metric_values}
        key = (group.hparams["arm"].string_value, group.hparams["seed"].number_value)
        hparams = {name: value.string_value or value.number_value for name, value in group.hparams.items()}
        rows[key] = {name: value for name, value in hparams.items() if name not in ("arm", "seed")} | values
    return experiment, rows


def test_hyperparameter_table(experiment: Path) -> None:
    columns, rows = sessions(experiment / "aggregate")
    assert [info.name for info in columns.hparam_infos] == ["arm", "seed", "status"]
    metrics = ("collapse_step", "guard_step", "loss", "min_loss", "val_loss", "sigma_q", "max_logit_peak")
    assert [info.name.tag for info in columns.metric_infos] == [f"final/{key}" for key in metrics]
    assert set(rows) == {("fp32", 0), ("fp32", 1), ("fp32", 2), ("fault", 0), ("fault", 1)}
    assert rows["fault", 0] == {
        **{"status": "collapsed", "final/collapse_step": 20.0, "final/loss": 2.0},
        **{
            "final/min_loss": 1.5,
            "final/val_loss": pytest.approx(2.1),
            "final/sigma_q": 4.0,
            "final/max_logit_peak": 50.0,
        },
    }
    assert rows["fp32", 2]["status"] == "completed"
    assert "final/collapse_step" not in rows["fp32", 2]


def test_the_values_of_a_grid_are_hyperparameters(tmp_path: Path) -> None:
    root = tmp_path / "demo"
    points = {"fp32-lr_1": {"model.lr": 1, "model.kind": "a"}, "fp32-lr_2": {"model.lr": 2, "model.kind": None}}
    for arm in points:
        write_run(root, arm, 0)
    (root / "experiment.json").write_text(json.dumps({"arms": list(points), "points": points}))
    make_report([root])
    columns, rows = sessions(root / "aggregate")
    assert {"model.lr", "model.kind"} < {info.name for info in columns.hparam_infos}
    found = rows["fp32-lr_2", 0]
    assert (found["model.lr"], found["model.kind"]) == (2, "null")


def test_writing_again_changes_no_point(experiment: Path) -> None:
    def tree() -> set[str]:
        return {str(path.relative_to(experiment)) for path in experiment.rglob("*") if path.is_dir()}

    before, curve = tree(), points(accumulate(experiment / "aggregate" / "fp32"), "loss/train")
    watching = accumulate(experiment / "aggregate" / "fp32")
    make_report([experiment])
    watching.Reload()
    assert tree() == before
    assert len(list((experiment / "aggregate" / "fp32").iterdir())) == 1
    for events in (watching, accumulate(experiment / "aggregate" / "fp32")):
        assert [event.step for event in events.Scalars("loss/train")] == sorted(curve), "each step once"
        assert points(events, "loss/train") == curve


def test_an_arm_that_is_gone_is_gone(experiment: Path) -> None:
    for path in (experiment / "fault").glob("*/verdict.json"):
        path.unlink()
    make_report([experiment / "fp32"], out=experiment)
    assert not (experiment / "aggregate" / "fault").exists()


def test_aggregate_is_no_run(experiment: Path) -> None:
    runs = find_runs([experiment])
    assert len(runs) == 6
    with pytest.raises(ValueError, match="holds no runs"):
        find_runs([experiment / "aggregate"])
    write_run(experiment / "aggregate" / "hparams", "seed_9", 1)  # what an arm called seed_9 would look like
    assert len(find_runs([experiment])) == 6


def test_an_arm_called_aggregate_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path / "demo", "aggregate", 0)
    assert len(find_runs([tmp_path / "demo"])) == 1
    assert main([str(tmp_path / "demo")]) == 2
    assert f"{path.parent}: not written by `report`, so it stays" in capsys.readouterr().err
    assert (path / "verdict.json").exists()
    assert not (tmp_path / "demo" / "report.md").exists()
    assert main([str(tmp_path / "demo"), "--out", str(tmp_path / "out")]) == 0
