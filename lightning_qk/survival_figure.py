"""Draw how long the runs of every arm lived: a Kaplan-Meier curve each, in small panels over one step axis."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lightning_qk.figures import INK, MUTED, STYLE, line_styles, save
from lightning_qk.runs import Arm
from lightning_qk.statistics import Survival, kaplan_meier

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 4
LONGEST = 22
"""Characters of a name that fit over a panel."""


def draw_survival(arms: Sequence[Arm], others: Mapping[str, Arm], healthy: Collection[str], out: Path) -> None:
    """Write `survival.png` and `survival.svg`.

    Args:
        arms: Arms with counted runs, in the order in which they are listed.
        others: What an arm is compared with, by name: its healthy twin or, without one, a second arm; drawn behind it.
        healthy: Names of the arms that are twins.
        out: Directory to write to; both files are replaced atomically.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    styles = line_styles(arms, healthy)
    forked = any(run.begin for arm in arms for run in arm.counted)
    columns = min(COLUMNS, len(arms))
    rows = -(-len(arms) // columns)
    with matplotlib.rc_context(STYLE):
        height = 0.72 + 1.45 * rows + 0.45
        figure = Figure(figsize=(9, height), dpi=200, facecolor="white")
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        figure.subplots_adjust(
            left=0.065, right=0.985, top=1 - 0.92 / height, bottom=0.5 / height, hspace=0.42, wspace=0.1
        )
        for axes, arm in zip(grid.flat, arms, strict=False):
            other = others.get(arm.name)
            if other is not None and other.n and other is not arm:
                _curve(axes, kaplan_meier(other.lifetimes), INK, 0.9)
            _arm(axes, arm, styles[arm.name]["color"])
        for axes in grid.flat[len(arms) :]:
            axes.set_visible(False)
        for column in range(columns):  # the lowest panel of a column that the last row may leave open
            lowest = grid.flat[max(index for index in range(len(arms)) if index % columns == column)]
            lowest.tick_params(labelbottom=True)
            lowest.set_xlabel("Steps since it began" if forked else "Optimizer step", color=MUTED, fontsize=8.5)
        grid[0, 0].set_xlim(0, max(1.0, *(run.end - run.begin for arm in arms for run in arm.counted)))
        grid[0, 0].set_ylim(-0.04, 1.08)
        grid[0, 0].set_yticks([0, 0.5, 1], ["0", "0.5", "1"])
        grid[0, 0].xaxis.set_major_locator(MaxNLocator(4, prune="upper"))  # the last label would touch the next panel
        title = ", ".join(dict.fromkeys(run.path.parent.parent.name for arm in arms for run in arm.runs))
        figure.text(0.065, 1 - 0.12 / height, title, fontsize=13, weight="bold", va="top")
        note = "Fraction of runs not collapsed; band: 95 % interval; ticks: runs that ended healthy; thin: other arm"
        figure.text(0.065, 1 - 0.42 / height, note, color=MUTED, fontsize=8.5, va="top")
        save(figure, out / "survival")


def _arm(axes: Axes, arm: Arm, colour: str) -> None:
    """One arm's curve, its band and its censored runs."""
    curve = kaplan_meier(arm.lifetimes)
    # drawn step by step: between a limit and none `fill_between` would leave out the step before, too
    steps = np.repeat(curve.steps, 2)[1:]
    low, high = (np.repeat(side, 2)[:-1] for side in (curve.low, curve.high))
    axes.fill_between(steps, low, high, color=colour, alpha=0.18, linewidth=0)
    _curve(axes, curve, colour, 2.1)
    censored = np.unique(arm.lifetimes.censored)
    at = curve.fraction[np.searchsorted(curve.steps, censored, side="right") - 1]
    axes.plot(censored, at, linestyle="", marker="|", markersize=7, markeredgewidth=1.6, color=colour, clip_on=False)
    # of a long name the point of the grid or the fork, which would be cut off, goes into the panel
    name, _, point = arm.name.partition("-") if len(arm.name) > LONGEST else (arm.name, "", "")
    axes.annotate(point, (0.02, 0.1), xycoords="axes fraction", color=MUTED, fontsize=8)
    label = axes.annotate(
        name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…", (0, 1), (0, 3), xycoords="axes fraction",
        textcoords="offset points", color=colour, weight="bold", fontsize=8.5, va="bottom",
    )  # fmt: skip
    axes.annotate(
        f"{arm.k}/{arm.n}", (1, 0), (5, 0), xycoords=label, textcoords="offset points", color=MUTED, fontsize=8.5,
        va="bottom",
    )  # fmt: skip
    axes.tick_params(labelsize=8)


def _curve(axes: Axes, curve: Survival, colour: str, width: float) -> None:
    steps, fraction = np.concatenate([[0.0], curve.steps]), np.concatenate([[1.0], curve.fraction])
    axes.step(steps, fraction, where="post", color=colour, linewidth=width)
