"""The report: what is counted, the numbers in the table, and how events are read back."""

from __future__ import annotations

import csv
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

from lightning_qk.events import Series, read_scalars
from lightning_qk.figures import _ceiling, _median, _smooth, _spread
from lightning_qk.intervals import newcombe, wilson
from lightning_qk.report import main, make_report
from lightning_qk.runs import find_runs, group_arms
from lightning_qk.tables import spread, stays_above

MAX_STEPS = 100


def write_run(experiment: Path, arm: str, seed: int, status: str = "completed", **verdict: Any) -> Path:
    """A run directory as `fit` leaves it: events, and a verdict unless the status is `unfinished`."""
    path = experiment / arm / f"seed_{seed}"
    path.mkdir(parents=True)
    with SummaryWriter(str(path)) as writer:
        for step in range(0, verdict.get("step", MAX_STEPS), 10):
            writer.add_scalar("loss/train", 3.0 - step / 100, step)
            writer.add_scalar("sigma/q", 2.0 + step / 50, step)
            writer.add_scalar("logit/max", 5.0 + step, step)
            writer.add_scalar("collapse/excess", step / 50 if status == "collapsed" else 0.0, step)
    if status != "unfinished":
        content = {
            **{"schema": 1, "status": status, "experiment": experiment.name, "arm": arm, "seed": seed},
            **{"step": MAX_STEPS, "max_steps": MAX_STEPS, "collapse_step": None, "guard_step": None, "loss": 2.0},
            **{"min_loss": 1.5, "val_loss": 2.1, "sigma_q": 4.0, "sigma_k": 4.0, "max_logit": 40.0},
            **{"max_logit_peak": 50.0, "seconds": 1.0, "versions": {}, "config_hash": "abc", "error": None},
            **verdict,
        }
        (path / "verdict.json").write_text(json.dumps(content))
    return path


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    root = tmp_path / "runs" / "demo"
    for seed, loss in enumerate((1.0, 2.0, 3.0)):
        write_run(root, "fp32", seed, loss=loss)
    write_run(
        root, "fault", 0, "collapsed", collapse_step=30, loss=5.0, max_logit=1000.0, max_logit_peak=2000.0, step=60
    )
    write_run(root, "fault", 1, "nonfinite", collapse_step=50, loss="nan", sigma_q="inf", max_logit="nan", step=60)
    write_run(root, "fault", 2, "unfinished")
    write_run(root, "arm_z", 0, "failed", error="Traceback\nRuntimeError: out of memory")
    write_run(root, "arm_z", 1, guard_step=40)
    (root / "experiment.json").write_text(json.dumps({"arms": ["fp32", "fault", "arm_z"], "reference": "fp32"}))
    return root


def cells(text: str, arm: str) -> list[str]:
    """The cells of an arm's first row in a Markdown table."""
    row = next(line for line in text.splitlines() if line.startswith(f"| {arm} "))
    return [cell.strip() for cell in row.strip("|").split("|")]


# Reference values: Newcombe 1998 (Stat. Med. 17, 857-872, table I; 873-890, table II).
@pytest.mark.parametrize(
    ("k", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_matches_published_values(k: int, n: int, low: float, high: float) -> None:
    assert wilson(k, n) == pytest.approx((low, high), abs=5e-5)
    assert wilson(n - k, n) == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_wilson_of_nothing_is_everything() -> None:
    assert wilson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("counts", "low", "high"),
    [((56, 70, 48, 80), 0.0524, 0.3339), ((9, 10, 3, 10), 0.1705, 0.8090), ((10, 10, 0, 10), 0.6075, 1.0)],
)
def test_newcombe_matches_published_values(counts: tuple[int, int, int, int], low: float, high: float) -> None:
    assert newcombe(*counts) == pytest.approx((low, high), abs=5e-5)


def test_table_counts_and_statistics(experiment: Path) -> None:
    make_report([experiment])
    text = (experiment / "report.md").read_text()
    assert cells(text, "fp32") == ["fp32", "0/3", "0.00..0.56", "-", "2 [1..3]", "4", "40", "50", "-"]
    fault = cells(text, "fault")
    assert fault[1:4] == ["2/2 (1 not finite)", "0.34..1.00", "40 [30..50]"]
    assert fault[4:8] == ["5 + 1 not finite", "4 + 1 not finite", "1,000 + 1 not finite", "2,000"]
    assert cells(text, "arm_z")[1] == "0/1"
    assert cells(text, "arm_z")[8] == "1/1 at 40"
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    assert rows[2:5] == ["fp32", "fault", "arm_z"], "arms keep the order of the sweep"


def test_failed_and_unfinished_are_named_and_not_counted(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(experiment)]) == 0
    out = capsys.readouterr().out
    assert "Not counted: fault/seed_2 is unfinished" in out
    assert "Not counted: arm_z/seed_0 is failed (RuntimeError: out of memory)" in out
    with (experiment / "report.csv").open() as file:
        rows = {(row["arm"], row["seed"]): row for row in csv.DictReader(file)}
    assert len(rows) == 8
    assert rows["fault", "2"]["status"] == "unfinished"
    assert rows["fault", "2"]["loss"] == ""
    assert rows["fault", "1"]["loss"] == "nan"


def test_differences_from_the_reference_are_paired_by_seed(experiment: Path) -> None:
    text, _, _ = make_report([experiment])
    against = text[text.index("Against fp32") :]
    fault = next(line for line in against.splitlines() if line.startswith("fault"))
    # Seed 0: 5.0 - 1.0; the loss of seed 1 is not finite.
    assert fault.split()[1] == "+1.00"
    assert "4 + 1 not finite" in fault
    assert next(line for line in against.splitlines() if line.startswith("arm_z")).split()[-1] == "1"


def test_other_thresholds_keep_stopped_runs_apart(experiment: Path) -> None:
    text, _, _ = make_report([experiment])
    moved = text[text.index("Collapsed if") :]
    row = next(line for line in moved.splitlines() if line.startswith("fault"))
    # The excess of seed 0 rises to 1.0 and the run stops there; seed 1 is not finite and always counts.
    assert row.split() == ["fault", "2/2", "1/2", "+1?", "1/2", "+1?", "1/2", "+1?"]


def test_runaway_counts_peaks_with_intervals(tmp_path: Path) -> None:
    for seed, peak in enumerate((50.0, 100.0, 5000.0, "nan")):
        write_run(tmp_path / "demo", "fault", seed, max_logit_peak=peak)
    make_report([tmp_path / "demo"])
    text = (tmp_path / "demo" / "report.md").read_text()
    row = cells(text[text.index("Logits ran away") :], "fault")
    assert row == ["fault", "2/4 (0.15..0.85)", "2/4 (0.15..0.85)", "1/4 (0.05..0.70)"]


def test_warnings_are_counted_ahead_of_collapses_and_as_false_alarms(tmp_path: Path) -> None:
    def warned(alarm: int | None, lead: int | None, threshold: float | None = 0.5) -> dict[str, Any]:
        return {"warnings": {"tied_rows": dict(threshold=threshold, alarm_step=alarm, last=0.1, lead_steps=lead)}}

    runs = tmp_path / "demo"
    for seed, (alarm, lead) in enumerate(((20, 30), (40, 10), (60, -10), (None, None))):
        write_run(runs, "fault", seed, "collapsed", collapse_step=50, **warned(alarm, lead))
    write_run(runs, "fault", 4, **warned(70, None))
    write_run(runs, "fp32", 0, **warned(None, None))
    write_run(runs, "silent", 0, **warned(None, None, threshold=None))
    text, _, _ = make_report([runs])
    rows = [line.split() for line in text[text.index("Early warnings") :].splitlines() if " tied_rows " in line]
    assert rows == [
        ["fault", "tied_rows", "0.500", "4/5", "50", "[20..70]", "2/4", "10", "[-10..30]", "1/1"],
        ["fp32", "tied_rows", "0.500", "0/1", "-", "-", "-", "0/1"],
    ]


@pytest.mark.parametrize(
    ("values", "threshold", "expected"),
    [([0, 2, 2], 1.5, True), ([0, 2, 0.7, 1], 1.5, False), ([0, 2, 0.8, 1], 1.5, True), ([0, 1.5], 1.5, False)],
)
def test_collapse_needs_no_return_to_half(values: list[float], threshold: float, expected: bool) -> None:
    assert (
        stays_above(Series(np.arange(len(values), dtype=float), np.array(values, dtype=float)), threshold) is expected
    )


def test_files_are_complete_and_leave_nothing_behind(experiment: Path) -> None:
    _, data, figure = make_report([experiment])
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (experiment / "figure.svg").read_text()
    assert not [path for path in experiment.iterdir() if path.name.endswith(".tmp") or ".tmp." in path.name]
    summary = json.loads(data)
    assert summary["reference"] == "fp32"
    assert [(arm["arm"], arm["collapsed"], arm["n"]) for arm in summary["arms"]][1] == ("fault", 2, 2)


def test_json_format_and_other_directory(experiment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(experiment), "--out", str(tmp_path / "out"), "--format", "json", "--reference", "arm_z"]) == 0
    assert json.loads(capsys.readouterr().out)["reference"] == "arm_z"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("report.md", "report.csv", "figure.png", "figure.svg")
    }
    assert not (experiment / "report.md").exists()


def test_broken_verdict_names_the_file(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = experiment / "fp32" / "seed_1" / "verdict.json"
    broken.write_text('{"status": "comp')
    assert main([str(experiment)]) == 2
    assert str(broken) in capsys.readouterr().err
    assert not (experiment / "report.md").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere"], "nowhere: no such directory"),
        (["."], "holds no runs"),
        (["runs/demo", "--reference", "fp23"], "--reference fp23: give one of the arms fp32, fault, arm_z"),
        (["runs/demo", "--outt", "x"], "--outt"),
        (["runs/demo", "--format", "xml"], "xml"),
    ],
)
def test_bad_input_is_named(
    args: list[str],
    message: str,
    experiment: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty" if args == ["."] else tmp_path)
    assert main(args) == 2
    assert message in capsys.readouterr().err


def test_broken_experiment_json_names_the_file(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (experiment / "experiment.json").write_text("[]")
    assert main([str(experiment)]) == 2
    assert f"{experiment / 'experiment.json'}: broken" in capsys.readouterr().err


def test_two_experiments_get_full_names_and_need_out(experiment: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "runs" / "other", "fp32", 0).parent.parent
    with pytest.raises(ValueError, match="--out DIR"):
        make_report([experiment, other])
    assert [arm.name for arm in group_arms(find_runs([experiment, other]))] == [
        *("demo/fp32", "demo/fault", "demo/arm_z", "other/fp32")
    ]


def test_overlapping_directories_count_once(experiment: Path) -> None:
    assert len(find_runs([experiment, experiment / "fp32", experiment / "fp32" / "seed_0"])) == 8


def test_nothing_finished_still_reports(tmp_path: Path) -> None:
    write_run(tmp_path / "demo", "fp32", 0, "unfinished")
    text, _, figure = make_report([tmp_path / "demo"])
    assert "Not counted: fp32/seed_0 is unfinished" in text
    assert figure.exists()


def test_spread_shows_range_only_where_there_is_one() -> None:
    assert spread([], max) == "-"
    assert spread([3.0, 3.0], max) == "3"
    assert spread([math.nan], max) == "not finite"
    assert spread([1.25, 378880.0], max) == "378,880 [1.25..378,880]"


# ---- events --------------------------------------------------------------------------------------------------------


def write_events(path: Path, steps: range, value: float, purge: int | None = None, new_style: bool = False) -> None:
    with SummaryWriter(str(path), purge_step=purge) as writer:
        for step in steps:
            writer.add_scalar("x", value, step, new_style=new_style)
            writer.add_scalar("other", value, step)


def test_last_write_wins_after_resume(tmp_path: Path) -> None:
    write_events(tmp_path, range(0, 10), 1.0)
    write_events(tmp_path, range(6, 9), 2.0, new_style=True)
    series = read_scalars(tmp_path, ["x"])
    assert list(series) == ["x"]
    assert series["x"].steps.tolist() == list(range(10))
    assert series["x"].values.tolist() == [1.0] * 6 + [2.0] * 3 + [1.0]


def test_session_start_purges_orphaned_steps(tmp_path: Path) -> None:
    write_events(tmp_path, range(0, 10), 1.0)
    write_events(tmp_path, range(6, 8), 2.0, purge=6)
    assert read_scalars(tmp_path)["x"].steps.tolist() == list(range(8))


def test_truncated_and_empty_event_files(tmp_path: Path) -> None:
    write_events(tmp_path, range(0, 10), 1.0)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    (tmp_path / "events.out.tfevents.9999999999.killed").touch()
    series = read_scalars(tmp_path)
    assert len(series["x"]) == 10
    assert len(series["other"]) == 9, "the record that was cut is the last one"


def test_run_without_events(tmp_path: Path) -> None:
    assert read_scalars(tmp_path) == {}


# ---- figure helpers ------------------------------------------------------------------------------------------------


def test_median_stops_where_a_seed_stops() -> None:
    long = Series(np.arange(0.0, 50, 10), np.ones(5))
    short = Series(np.arange(0.0, 30, 10), np.full(3, 3.0))
    assert _median([long, short]).steps.tolist() == [0, 10, 20]
    assert _median([long, short]).values.tolist() == [2, 2, 2]


def test_smoothing_is_a_trailing_mean_of_long_runs_only() -> None:
    few = Series(np.arange(99.0), np.arange(99.0))
    assert _smooth(few) is few
    many = _smooth(Series(np.arange(100.0), np.arange(100.0)))
    assert many.values[:3].tolist() == [0.0, 0.5, 1.0]
    assert many.values[50] == pytest.approx(48.0)


def test_loss_axis_is_cut_only_for_an_explosion(experiment: Path) -> None:
    runs = find_runs([experiment])
    scalars = {run.path: read_scalars(run.path) for run in runs}
    assert _ceiling(group_arms(runs), scalars) == math.inf
    with SummaryWriter(str(runs[0].path)) as writer:
        writer.add_scalar("loss/train", 900.0, 95)
    scalars[runs[0].path] = read_scalars(runs[0].path)
    assert _ceiling(group_arms(runs), scalars) == pytest.approx(1.25 * 3.0)


def test_labels_are_moved_apart_and_stay_inside() -> None:
    placed = _spread([10, 10, 99, 98, 100], gap=12, height=100)
    ordered = sorted(placed)
    assert all(b - a >= 12 - 1e-9 for a, b in itertools.pairwise(ordered))
    assert ordered[0] >= 0
    assert ordered[-1] <= 100
