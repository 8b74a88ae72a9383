"""Draw collapse steps over the extrapolated setting, the line of each fit, and how little is known past the data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lightning_qk.extrapolation import Extrapolation, ending
from lightning_qk.figures import MUTED, PALETTE, STYLE, save
from lightning_qk.survival_regression import Fit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DECADES = 3.0
"""How far past the steps that were trained the axis goes; lines and bands are cut there."""


def draw_extrapolation(extrapolations: Sequence[Extrapolation], out: Path) -> None:
    """Write `extrapolation.png` and `extrapolation.svg`: a row an arm, a panel a family of the fit.

    Args:
        extrapolations: those that have fits.
        out: Directory to write to; both files are replaced atomically.
    """
    import matplotlib
    from matplotlib.figure import Figure

    rows, columns = len(extrapolations), max(len(one.fits) for one in extrapolations)
    with matplotlib.rc_context(STYLE):
        height = 1.3 + 2.9 * rows
        figure = Figure(figsize=(9, height), dpi=200, facecolor="white")
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        figure.subplots_adjust(left=0.085, right=0.985, top=1 - 0.95 / height, bottom=0.5 / height, wspace=0.08)
        for line, one in zip(grid, extrapolations, strict=True):
            for axes, found in zip(line, one.fits, strict=True):
                _panel(axes, one, found)
            line[0].set_ylabel("Collapse step", color=MUTED, fontsize=9)
        name = ", ".join(dict.fromkeys(run.path.parent.parent.name for each in extrapolations for run, _ in each.runs))
        figure.text(0.085, 1 - 0.12 / height, f"{name}: an extrapolation", fontsize=13, weight="bold", va="top")
        note = (
            "Dots: collapses; hollow: ended healthy; line: half collapsed, dotted past the last; band: 95 % of the fit"
        )
        figure.text(0.085, 1 - 0.42 / height, note, color=MUTED, fontsize=8.5, va="top")
        save(figure, out / "extrapolation")


def _panel(axes: Axes, one: Extrapolation, found: Fit) -> None:
    values = [point[one.key] for _, point in one.runs]
    fastest, longest = min(run.end for run, _ in one.runs), max(run.end for run, _ in one.runs)
    seen = max((point[one.key] for run, point in one.runs if run.collapsed), key=lambda value: abs(value - values[0]))
    top = math.log(longest) + DECADES * math.log(10)
    at = np.linspace(min(*values, one.to), max(*values, one.to), 200)
    for index, others in enumerate(one.settings):
        colour = PALETTE[index % len(PALETTE)]
        middle, low, high = np.minimum([found.log_median(one.row(value, others)) for value in at], top).T
        inside = (at <= seen) if one.to > seen else (at >= seen)
        axes.fill_between(at, np.exp(low), np.exp(high), color=colour, alpha=0.13, linewidth=0)
        label = ", ".join(f"{ending(key)} {value:g}" for key, value in zip(one.log, others, strict=True)) or one.arm
        axes.plot(at[inside], np.exp(middle[inside]), color=colour, linewidth=2.0, label=label)
        axes.plot(at[~inside], np.exp(middle[~inside]), color=colour, linewidth=1.5, linestyle=":")
        for number, (run, value) in enumerate(one.at(others)):
            aside = 0.012 * (at[-1] - at[0]) * (index - (len(one.settings) - 1) / 2 + 0.1 * (number % 5 - 2))
            face = colour if run.collapsed else "white"
            marker = "o" if run.collapsed else "^"
            axes.plot([value + aside], [run.end], marker, markersize=4.5, color=colour, markerfacecolor=face)
    axes.axvline(one.to, color=MUTED, linewidth=0.8, linestyle="--")
    axes.set_yscale("log")
    axes.set_ylim(fastest / 2, math.exp(top))
    axes.set_title(f"{one.arm}, {found.family}", loc="left", weight="bold", fontsize=9.5)
    axes.set_xlabel(one.key, color=MUTED, fontsize=9)
    axes.legend(frameon=False, fontsize=8.5, loc="upper left")
