"""Draw every run's error of the gradient: how coherent it was, how large, and whether the run left."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_qk.error_coherence import Errors
from lightning_qk.events import FloatArray
from lightning_qk.figures import DASHES, LINE, MUTED, STYLE, line_styles, save
from lightning_qk.outcomes import TESTED_RUNAWAY, ran_away
from lightning_qk.runs import Arm, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHAPES = dict(zip(DASHES, "osD^", strict=True))
"""Marks of arms that share a colour, as lines differ in dashes elsewhere."""
AROUND = 2.0
"""Factor from the sizes to the ends of their axis, so that one of 1, 2, 5, 10, ... is on it."""
MARK = 6.5
"""Points from one mark to the next that it does not cover."""
LANES = tuple((MARK * lane, 0.0) for lane in (0, 1, -1, 2, -2))
"""How far aside an arm may lie."""


def draw_coherence(arms: Sequence[Arm], healthy: Collection[str], errors: Errors, out: Path) -> None:
    """Write `coherence.png` and `coherence.svg`: a panel a route, a mark a run.

    Args:
        arms: All arms in the order in which they are listed, for the colours that they have in the other figures.
        healthy: Names of the healthy twins among them.
        errors: What is drawn, of one run at least.
        out: Directory to write to; both files are replaced atomically.
    """
    import matplotlib
    from matplotlib.figure import Figure

    shown = [arm for arm in arms if any(run.path in errors for run in arm.runs)]
    routes = list(dict.fromkeys(suffix for found in errors.values() for suffix in found))
    styles = line_styles(arms, healthy)
    with matplotlib.rc_context(STYLE):
        above = 0.95 if len(routes) > 1 else 0.75
        height = above + max(2.8, LINE * len(shown) / 72) + 0.5
        margin = min(3.35, 1.1 + 0.075 * max(len(arm.name) for arm in shown))
        figure = Figure(figsize=(9, height), dpi=200, facecolor="white")
        (panels,) = figure.subplots(1, len(routes), sharex=True, sharey=True, squeeze=False)
        top, bottom = 1 - above / height, 0.5 / height
        figure.subplots_adjust(left=0.075, right=1 - margin / 9, top=top, bottom=bottom, wspace=0.08)
        _scale(panels[0], [error.relative for found in errors.values() for error in found.values()])
        for axes, route in zip(panels, routes, strict=True):
            _marks(axes, shown, route, errors, styles)
            axes.set_title(route.lstrip("/"), loc="left", weight="bold", fontsize=9.5)
            axes.set_xlabel("Sign-coherence of the error", color=MUTED, fontsize=9)
            axes.tick_params(labelsize=8.5)
        _name_arms(panels[-1], shown, styles)
        name = ", ".join(dict.fromkeys(run.path.parent.parent.name for arm in shown for run in arm.runs))
        figure.text(0.065, 1 - 0.12 / height, name, fontsize=13, weight="bold", va="top")
        low, high = panels[0].get_xlim()
        aside = LANES[-2][0] / 72 * (high - low) / (panels[0].get_position().width * 9)
        note = (
            f"Mean error of a run until it collapsed or a logit passed {TESTED_RUNAWAY:,} (filled; hollow: neither); "
            f"aside, by up to {aside:.2f}, where arms coincide"
        )
        figure.text(0.065, 1 - 0.42 / height, note, color=MUTED, fontsize=8.5, va="top")
        save(figure, out / "coherence")


def _marks(axes: Axes, arms: Sequence[Arm], route: str, errors: Errors, styles: Mapping[str, dict[str, Any]]) -> None:
    """Every run on one route, an arm's all as far aside as it takes, in whole marks, to cover the fewest of others."""
    from matplotlib.transforms import Affine2D

    to_points = axes.transData + Affine2D().scale(72 / axes.figure.dpi)
    placed: FloatArray = np.empty((0, 2))
    for arm in arms:
        runs = [run for run in arm.counted if route in errors.get(run.path, {})]
        if not runs:
            continue
        points = to_points.transform([errors[run.path][route] for run in runs])
        # of each lane, how many marks lie on others there
        covered = [(np.abs(points[:, None] + lane - placed).max(axis=-1) < 0.99 * MARK).sum() for lane in LANES]
        points += LANES[int(np.argmin(covered))]
        placed = np.concatenate([placed, points])
        for run, place in zip(runs, to_points.inverted().transform(points), strict=True):
            axes.plot(*place[:, None], clip_on=False, **_mark(styles[arm.name], filled=_left(run)))


def _left(run: Run) -> bool:
    return run.collapsed or bool(ran_away(run, TESTED_RUNAWAY))


def _mark(style: dict[str, Any], filled: bool) -> dict[str, Any]:
    """A mark in an arm's colour: where some lie on others, rims part the filled ones, and hollow ones are on top."""
    mark = {"linestyle": "", "marker": SHAPES[style["linestyle"]], "color": style["color"]}
    if filled:
        return mark | {"markersize": 6.5, "markeredgecolor": "white", "markeredgewidth": 0.6, "zorder": 3}
    return mark | {"markersize": 5.2, "markerfacecolor": "none", "markeredgewidth": 1.3, "zorder": 4}


def _scale(axes: Axes, sizes: Sequence[float]) -> None:
    """Scales of the panels, which share them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = min(sizes) / AROUND, max(sizes) * AROUND
    axes.set_xlim(-0.05, 1.05)
    axes.set_xticks(np.linspace(0, 1, 6))
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 200 else (1,), numticks=6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("Its norm over the clean gradient's, log scale", color=MUTED, fontsize=9)


def _name_arms(axes: Axes, arms: Sequence[Arm], styles: dict[str, dict[str, Any]]) -> None:
    """The arms beside the panel, each with its mark and how many of its runs left."""
    box, dpi = axes.get_window_extent(), axes.figure.dpi
    width, height = 72 * box.width / dpi, 72 * box.height / dpi  # in points
    for index, arm in enumerate(arms):
        y, style = 1 - LINE * (index + 0.5) / height, styles[arm.name]
        beside: dict[str, Any] = {"transform": axes.transAxes, "clip_on": False}
        axes.plot(
            [1 + 12 / width],
            [y],
            scalex=False,
            scaley=False,
            **_mark(style, filled=any(map(_left, arm.counted))),
            **beside,
        )
        name = axes.text(
            1 + 19 / width, y, arm.name, color=style["color"], weight="bold", fontsize=8.5, va="center", **beside
        )
        axes.annotate(
            f"{sum(map(_left, arm.counted))}/{arm.n}", (1, 0.5), (6, 0), xycoords=name, textcoords="offset points",
            color=MUTED, fontsize=8.5, va="center",
        )  # fmt: skip
