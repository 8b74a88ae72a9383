"""The error of the gradient in the report: what counts of it, in tables, CSV files and the figure, in made-up runs."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_runs import cells, write_run
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_qk import coherence_figure
from lightning_qk.coherence_figure import MARK, draw_coherence
from lightning_qk.error_coherence import Error, error_table, measure, tags
from lightning_qk.events import read_scalars
from lightning_qk.figures import PALETTE
from lightning_qk.report import main, make_report
from lightning_qk.runs import Run, find_runs, group_arms

TITLE = "## Error of the gradient"


def write(
    root: Path, arm: str, seed: int, coherence: Any, relative: Any, status: str = "completed", **rest: Any
) -> Path:
    """A run with an error of these values at steps 10, 20, ..., 100."""
    logged = {"error/coherence": coherence, "error/relative": relative, **rest.pop("logged", {})}
    return write_run(root, arm, seed, status, logged=logged, error_coherence=0.9, **rest)


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """Errors that are 1 and 8 from step 50 on, where the runs that leave do so, and known before."""
    root = tmp_path / "demo"
    after = [1.0] * 6, [8.0] * 6
    for seed in range(3):
        write_run(root, "fp32", seed)
        values = [0.1, 0.2, 0.3, 0.4 + 0.4 * seed, *after[0]], [0.25 * 2**seed] * 4 + after[1]
        write(root, "frozen", seed, *values, "collapsed", collapse_step=50)
    write(root, "random", 0, [0.1] * 10, [0.5, math.inf, *[0.5] * 8])
    logits = {"logit/max": [5.0] * 4 + [1e4] * 6}
    write(root, "runaway", 0, [0.5] * 4 + after[0], [2.0] * 4 + after[1], logged=logits, max_logit_peak=1e4)
    return root


def gathered(root: Path) -> tuple[list[Run], dict[str, Any]]:
    runs = find_runs([root])
    return runs, measure(runs, {run.path: read_scalars(run.path) for run in runs})


def rows(path: Path) -> dict[str, dict[str, str]]:
    with path.open() as file:
        return {f"{row['arm']}{row.get('seed', '')}": row for row in csv.DictReader(file)}


def test_only_what_came_before_the_collapse_or_the_runaway_counts(experiment: Path) -> None:
    _, errors = gathered(experiment)
    found = {f"{path.parent.name}{path.name[-1]}": one for path, one in errors.items()}
    assert found == {
        **{f"frozen{seed}": {"": (pytest.approx(0.25 + 0.1 * seed), 0.25 * 2**seed)} for seed in range(3)},
        "random0": {"": (pytest.approx(0.1), 0.5)},  # what is not finite does not count
        "runaway0": {"": (0.5, 2.0)},  # by its logits alone
    }


def test_the_table_is_in_every_output(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(experiment)]) == 0
    printed, text = capsys.readouterr().out, (experiment / "report.md").read_text()
    assert "Error of the gradient\n" in printed and f"{experiment}/coherence.png" in printed
    frozen = ["frozen", "0.350 [0.250..0.450]", "0.500 [0.250..1]", "3/3", "0/3"]
    assert cells(text, "frozen", TITLE) == frozen
    assert cells(text, "random", TITLE) == ["random", "0.100", "0.500", "0/1", "0/1"]
    assert cells(text, "runaway", TITLE) == ["runaway", "0.500", "2", "0/1", "1/1"]
    assert "| fp32" not in text[text.index(TITLE) :].split("##")[1], "an arm whose error nobody read has no row"
    assert "![coherence of demo](coherence.png)" in text
    assert " & ".join(frozen) in (experiment / "report.tex").read_text()
    arm, run = rows(experiment / "arms.csv"), rows(experiment / "report.csv")
    values = [float(arm["frozen"][f"error_coherence_before_{name}"]) for name in ("median", "min", "max")]
    assert values == pytest.approx([0.35, 0.25, 0.45])
    assert float(arm["frozen"]["error_relative_before_max"]) == 1
    assert arm["fp32"]["error_coherence_before_median"] == run["fp320"]["error_coherence_before"] == ""
    assert float(run["frozen2"]["error_coherence_before"]) == pytest.approx(0.45)
    for suffix in ("png", "svg"):
        assert (experiment / f"coherence.{suffix}").stat().st_size > 10_000
    board = EventAccumulator(str(experiment / "aggregate"), size_guidance={"images": 0})
    assert "report/coherence" in board.Reload().Tags()["images"]


def test_nothing_without_the_tags(tmp_path: Path) -> None:
    write_run(tmp_path / "demo", "fault", 0)
    _, out = make_report([tmp_path / "demo"])
    assert "Error of the gradient" not in (out / "report.md").read_text()
    assert not (out / "coherence.png").exists()
    assert "error_" not in (out / "arms.csv").read_text()


def test_a_run_without_an_error_before_it_left_is_named(tmp_path: Path) -> None:
    root = tmp_path / "demo"
    write(root, "early", 0, [0.5] * 10, [1.0] * 10, "collapsed", collapse_step=10)  # its first reading is at 10
    write(root, "silent", 0, None, [1.0] * 10)
    write(root, "zero", 0, [0.0] * 10, [0.0] * 10)
    make_report([root])
    text = (root / "report.md").read_text()
    names = "early/seed_0, silent/seed_0, zero/seed_0"
    assert f"no error/coherence of an error before it collapsed or ran away: {names}\n" in text
    assert cells(text, "early", TITLE) == ["early", "-", "-", "1/1", "0/1"]
    assert not (root / "coherence.png").exists()


def test_routes_are_apart(tmp_path: Path) -> None:
    values = {"/qk": (1.0, 0.25), "/mlp/layers_0": (0.125, 4.0)}
    logged = {
        f"error/{name}{suffix}": [value] * 10
        for suffix, both in values.items()
        for name, value in zip(("coherence", "relative"), both, strict=True)
    }
    fields = {f"error_coherence{suffix}": 0.5 for suffix in values}
    write_run(tmp_path / "demo", "both", 0, logged=logged, **fields)
    write(tmp_path / "demo", "one", 0, [0.5] * 10, [1.0] * 10)
    runs, errors = gathered(tmp_path / "demo")
    assert errors[runs[0].path] == {suffix: Error(*both) for suffix, both in values.items()}
    assert set(tags(runs)) == {*logged, "error/coherence", "error/relative"}
    found = [line[:4] for line in error_table(group_arms(runs), errors).lines()[1:]]
    assert found == [["both", "qk", "1", "0.250"], ["both", "mlp/layers_0", "0.125", "4"], ["one", "-", "0.500", "1"]]
    make_report([tmp_path / "demo"])
    row = rows(tmp_path / "demo" / "report.csv")["both0"]
    assert row["error_relative_before/qk"] == "0.25" and row["error_relative_before"] == ""


def drawn(root: Path, monkeypatch: pytest.MonkeyPatch) -> Figure:
    kept: list[Figure] = []
    monkeypatch.setattr(coherence_figure, "save", lambda figure, path: kept.append(figure))
    runs, errors = gathered(root)
    draw_coherence(group_arms(runs), {"fp32"}, errors, root)
    return kept[0]


def marks(figure: Figure, colour: str, panel: int = 0) -> list[Line2D]:
    axes = figure.axes[panel]
    return [line for line in axes.lines if line.get_transform() == axes.transData and line.get_color() == colour]


def test_the_figure_has_a_mark_a_run(experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = drawn(experiment, monkeypatch)
    found = [marks(figure, colour) for colour in PALETTE[:3]]  # frozen, random, runaway; the twin is in ink
    places = [[(line.get_xdata()[0], line.get_ydata()[0]) for line in lines] for lines in found]
    expected = [[(0.25, 0.25), (0.35, 0.5), (0.45, 1.0)], [(0.1, 0.5)], [(0.5, 2.0)]]
    assert [np.round(place, 6).tolist() for place in places] == [[list(pair) for pair in arm] for arm in expected]
    filled = [{to_hex(line.get_markerfacecolor()) == line.get_color().lower() for line in lines} for lines in found]
    assert filled == [{True}, {False}, {True}]
    assert figure.axes[0].get_yscale() == "log"


def test_arms_at_one_spot_lie_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arm in ("a", "b", "c", "d", "e"):
        for seed in range(2):
            write(tmp_path / "demo", arm, seed, [1.0] * 10, [1.0] * 10)
    figure = drawn(tmp_path / "demo", monkeypatch)
    axes = figure.axes[0]
    x = sorted({round(float(line.get_xdata()[0]), 9) for colour in PALETTE[:5] for line in marks(figure, colour)})
    points = 72 / figure.dpi * axes.transData.transform([(value, 1.0) for value in x])[:, 0]
    assert np.diff(points) == pytest.approx([MARK] * 4) and x[2] == 1
