"""The figures: what is drawn, that no label lies on another, and that colour-blind readers tell the arms apart."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lifelines import KaplanMeierFitter
from made_up_runs import write_run
from matplotlib.figure import Figure
from matplotlib.text import Text
from torch.utils.tensorboard import SummaryWriter

from lightning_qk import coherence_figure, figures, survival_figure
from lightning_qk.coherence_figure import draw_coherence
from lightning_qk.error_coherence import measure
from lightning_qk.events import Scalars, Series, read_scalars
from lightning_qk.figures import DASHES, INK, PALETTE, _ceiling, _curves, _median, _smooth, _spread, draw, line_styles
from lightning_qk.runs import Arm, find_runs, group_arms, pick_twins
from lightning_qk.survival_figure import draw_survival

NAMES = (
    *("fp32", "fault", "clean_qk", "clean_mlp", "clean_v", "qk_norm", "guard", "guard_optimizer_reset"),
    *("guard_tighter_clip", "probe_random_subspace", "error_time_shuffled", "mlp_frozen_signs"),
)


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """Twelve arms whose losses end in two places, as those of an experiment do; every second one collapses."""
    for index, name in enumerate(NAMES):
        for seed in range(3):
            status = "collapsed" if index % 2 else "completed"
            loss = [3.0 - 0.1 * step + (0.3 * step if index % 2 else 0.0) for step in range(10)]
            logged = {"loss/train": loss, "error/coherence": [1.0] * 10, "error/relative": [0.1] * 10}
            steps = {"collapse_step": 20 + 10 * seed} if index % 2 else {"guard_step": 10}
            write_run(tmp_path / "demo", name, seed, status, logged=logged, error_coherence=1.0, **steps)
    return tmp_path / "demo"


def read(experiment: Path) -> tuple[list[Arm], Scalars]:
    runs = find_runs([experiment])
    return group_arms(runs), {run.path: read_scalars(run.path) for run in runs}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """Figures by name, instead of files."""
    found: dict[str, Figure] = {}

    def keep(figure: Figure, path: Path) -> None:
        figure.draw_without_rendering()
        found[path.name] = figure

    for module in (figures, survival_figure, coherence_figure):
        monkeypatch.setattr(module, "save", keep)
    return found


def draw_curves(experiment: Path) -> None:
    arms, scalars = read(experiment)
    draw(arms, {"fp32"}, scalars, experiment)


def draw_lifetimes(experiment: Path) -> None:
    arms, _ = read(experiment)
    draw_survival(arms, pick_twins(arms, "fp32").arms, {"fp32"}, experiment)


def draw_errors(experiment: Path) -> None:
    arms, scalars = read(experiment)
    draw_coherence(arms, {"fp32"}, measure([run for arm in arms for run in arm.runs], scalars), experiment)


@pytest.mark.parametrize("make", [draw_curves, draw_lifetimes, draw_errors])
def test_no_label_lies_on_another_with_twelve_arms(
    make: Callable[[Path], None], experiment: Path, drawn: dict[str, Figure], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[Text] = []
    paint = Text.draw

    def note(text: Text, renderer: Any) -> None:  # matplotlib keeps labels that it does not draw
        texts.extend([text] if text.get_visible() else [])
        paint(text, renderer)

    monkeypatch.setattr(Text, "draw", note)
    make(experiment)
    (figure,) = drawn.values()
    boxes = [(text.get_text(), text.get_window_extent()) for text in dict.fromkeys(texts) if text.get_text().strip()]
    shown = [text for text, _ in boxes]
    assert all(name in shown for name in NAMES)
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        touch = min(a.x1, b.x1) - max(a.x0, b.x0) > 0.5 and min(a.y1, b.y1) - max(a.y0, b.y0) > 0.5
        assert not touch, f"{one!r} lies on {other!r}"
    for text, box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, text


def test_survival_curve_is_drawn_as_estimated(experiment: Path, drawn: dict[str, Figure]) -> None:
    draw_lifetimes(experiment)
    axes = drawn["survival"].axes[sorted(NAMES).index("fault")]
    twin, curve = axes.lines[0], axes.lines[1]
    assert twin.get_color() == INK
    assert twin.get_ydata().tolist() == [1, 1]
    assert curve.get_xdata().tolist() == [0, 20, 30, 40]
    assert curve.get_ydata().tolist() == pytest.approx([1, 2 / 3, 1 / 3, 0])
    (band,) = axes.collections
    corners = np.concatenate([path.vertices for path in band.get_paths()])
    assert (corners[:, 0].min(), corners[:, 0].max()) == (20, 40), "from the first collapse to the last"
    limits = KaplanMeierFitter().fit([20, 30, 40]).confidence_interval_.to_numpy()[1:3]
    assert set(corners[:, 1].round(6)) == set(limits.ravel().round(6))


def test_markers_are_where_the_verdicts_say(experiment: Path, drawn: dict[str, Figure]) -> None:
    draw_curves(experiment)
    loss = drawn["figure"].axes[0]
    crosses = sorted(line.get_xdata()[0] for line in loss.lines if line.get_marker() == "X")
    triangles = [line.get_xdata()[0] for line in loss.lines if line.get_marker() == "^"]
    assert crosses == [20] * 6 + [30] * 6 + [40] * 6
    assert triangles == [10] * 18


def test_lines_of_many_arms_differ() -> None:
    arms = [Arm(f"arm_{index}", ()) for index in range(len(PALETTE) * 2 + 3)]
    styles = line_styles(arms, {"arm_0", "arm_5"})
    assert len({(style["color"], style["linestyle"]) for style in styles.values()}) == len(arms)
    assert [styles[name]["color"] for name in ("arm_0", "arm_5")] == [INK, INK]
    assert styles["arm_5"]["linestyle"] == DASHES[1]


# Machado, Oliveira and Fernandes 2009 (IEEE TVCG 15, 1291-1298): full protanopia, deuteranopia and tritanopia.
BLINDNESS = {
    "none": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def lab(colour: str, blindness: str) -> np.ndarray:
    """CIE L*a*b* of a colour as it is seen."""
    code = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    linear = np.where(code <= 0.04045, code / 12.92, ((code + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(BLINDNESS[blindness]) @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ seen / np.array([0.95047, 1, 1.08883])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("blindness", BLINDNESS)
def test_colours_are_told_apart(blindness: str) -> None:
    seen = {colour: lab(colour, blindness) for colour in (*PALETTE, INK)}
    for one, other in itertools.combinations(seen, 2):
        assert np.linalg.norm(seen[one] - seen[other]) > 15, (one, other)


def test_median_stops_where_a_seed_stops() -> None:
    long = Series(np.arange(0.0, 50, 10), np.ones(5))
    short = Series(np.arange(0.0, 30, 10), np.full(3, 3.0))
    assert _median([long, short]).steps.tolist() == [0, 10, 20]
    assert _median([long, short]).values.tolist() == [2, 2, 2]


def test_the_median_is_of_runs_that_count(tmp_path: Path) -> None:
    for seed in range(3):
        write_run(tmp_path / "demo", "fault", seed)
    write_run(tmp_path / "demo", "fault", 3, "unfinished", step=20)
    (arm,), scalars = read(tmp_path / "demo")
    axes = Figure().add_subplot()
    lines = [scalars[run.path]["sigma/q"] for run in arm.runs]
    _curves(axes, arm, lines, {"color": INK, "linestyle": "-", "linewidth": 2.0})
    drawn = axes.get_lines()
    assert [line.get_linestyle() for line in drawn] == ["-", "-", "-", ":", "-"]
    assert len(np.asarray(drawn[-1].get_xdata())) == len(lines[0]) > len(lines[3])


def test_smoothing_is_a_trailing_mean_of_long_runs_only() -> None:
    few = Series(np.arange(99.0), np.arange(99.0))
    assert _smooth(few) is few
    many = _smooth(Series(np.arange(100.0), np.arange(100.0)))
    assert many.values[:3].tolist() == [0.0, 0.5, 1.0]
    assert many.values[50] == pytest.approx(48.0)


def test_loss_axis_is_cut_only_for_an_explosion(tmp_path: Path) -> None:
    path = write_run(tmp_path / "demo", "fp32", 0)
    arms, scalars = read(tmp_path / "demo")
    assert _ceiling(arms, scalars) == math.inf
    with SummaryWriter(str(path)) as writer:
        writer.add_scalar("loss/train", 900.0, 105)
    assert _ceiling(*read(tmp_path / "demo")) == pytest.approx(1.25 * 3.0)


def test_labels_are_moved_apart_and_stay_inside() -> None:
    placed = _spread([10, 10, 99, 98, 100], gap=12, height=100)
    ordered = sorted(placed)
    assert all(b - a >= 12 - 1e-9 for a, b in itertools.pairwise(ordered))
    assert ordered[0] >= 0
    assert ordered[-1] <= 100
