"""Draw every run's error of the gradient: how coherent it was, how large, and whether the run left."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_qk.error_coherence import Errors
from lightning_qk.figures import DASHES, LINE, MUTED, STYLE, line_styles, save
from lightning_qk.outcomes import TESTED_RUNAWAY, ran_away
from lightning_qk.runs import Arm

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHAPES = dict(zip(DASHES, "osD^", strict=True))
"""Marks of arms that share a colour, as lines differ in dashes elsewhere."""
AROUND = 2.5
"""Factor from the sizes to the ends of their axis: so at least two of 1, 2, 5, 10, ... are on it."""


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
        height = 1.5 + max(2.8, LINE * len(shown) / 72)
        margin = min(3.2, 0.95 + 0.075 * max(len(arm.name) for arm in shown))
        figure = Figure(figsize=(9, height), dpi=200, facecolor="white")
        (panels,) = figure.subplots(1, len(routes), sharex=True, sharey=True, squeeze=False)
        top, bottom = 1 - 0.95 / height, 0.5 / height
        figure.subplots_adjust(left=0.075, right=1 - margin / 9, top=top, bottom=bottom, wspace=0.08)
        for axes, route in zip(panels, routes, strict=True):
            for arm in shown:
                _marks(axes, arm, route, errors, styles[arm.name])
            axes.set_title(route.lstrip("/"), loc="left", weight="bold", fontsize=9.5)
            axes.set_xlabel("Sign-coherence of the error", color=MUTED, fontsize=9)
            axes.tick_params(labelsize=8.5)
        _finish_axes(panels[0], [error.relative for found in errors.values() for error in found.values()])
        _name_arms(panels[-1], shown, styles)
        name = ", ".join(dict.fromkeys(run.path.parent.parent.name for arm in shown for run in arm.runs))
        figure.text(0.065, 1 - 0.12 / height, name, fontsize=13, weight="bold", va="top")
        note = (
            f"Error of the gradient, a mark a run: means before it collapsed or a logit passed {TESTED_RUNAWAY:,}; "
            "filled: it did; hollow: it did not"
        )
        figure.text(0.065, 1 - 0.42 / height, note, color=MUTED, fontsize=8.5, va="top")
        save(figure, out / "coherence")


def _marks(axes: Axes, arm: Arm, route: str, errors: Errors, style: dict[str, Any]) -> None:
    for run in arm.counted:
        error = errors.get(run.path, {}).get(route)
        if error is not None:
            left = run.collapsed or ran_away(run, TESTED_RUNAWAY)
            axes.plot([error.coherence], [error.relative], zorder=3, clip_on=False, **_mark(style, filled=bool(left)))


def _mark(style: dict[str, Any], filled: bool) -> dict[str, Any]:
    """A mark in an arm's colour; a white rim parts filled ones that lie on each other."""
    colour, shape = style["color"], SHAPES[style["linestyle"]]
    mark = {"linestyle": "", "marker": shape, "color": colour, "markersize": 7}
    if filled:
        return mark | {"markeredgecolor": "white", "markeredgewidth": 0.8}
    return mark | {"markerfacecolor": "none", "markeredgewidth": 1.4, "markersize": 6.2}


def _finish_axes(axes: Axes, sizes: Sequence[float]) -> None:
    """Scales of the panels, which share them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = min(sizes) / AROUND, max(sizes) * AROUND
    axes.set_xlim(-0.03, 1.03)
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 200 else (1,), numticks=6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("Its norm over the clean gradient's", color=MUTED, fontsize=9)


def _name_arms(axes: Axes, arms: Sequence[Arm], styles: dict[str, dict[str, Any]]) -> None:
    """The arms beside the panel, each with its mark and how many collapsed."""
    from matplotlib.lines import Line2D

    beside, inches = axes.transAxes, axes.get_window_extent().height / axes.figure.dpi
    for index, arm in enumerate(arms):
        y, style = 1 - LINE * (index + 0.5) / 72 / inches, styles[arm.name]
        axes.add_line(Line2D([1.03], [y], transform=beside, clip_on=False, **_mark(style, filled=True)))
        name = axes.text(
            1.05, y, arm.name, color=style["color"], weight="bold", fontsize=8.5, va="center", transform=beside
        )
        axes.annotate(
            f"{arm.k}/{arm.n}", (1, 0.5), (6, 0), xycoords=name, textcoords="offset points", color=MUTED, fontsize=8.5,
            va="center",
        )  # fmt: skip
