"""Draw an experiment: loss, sigma_q and the largest logit over the steps, and what each arm came to."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_qk.events import Scalars, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lightning_qk.runs import Arm, Run

TAGS = ("loss/train", "sigma/q", "logit/max")
SMOOTH = 5
"""Logged points in the trailing mean of the loss, once a run has 100 of them."""
LINE = 12.5
"""Points from one name beside the curves to the next."""
THIN = 0.03
"""Inches of a bar below which no hatch can be seen."""
MANY = 8
"""Seeds above which an arm's thin lines are pixels in the SVG too, which would grow to hundreds of megabytes."""

# Okabe-Ito less its yellow, with a brown and a purple: colour-blind readers tell them apart; healthy twins are in ink.
PALETTE = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5B3A00", "#7A0177")
DASHES = ("-", "--", "-.", ":")
INK, MUTED, GRID = "#22262B", "#6B7178", "#E7E9EC"
STYLE: Any = {  # matplotlib's own type spells out every key
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": "#B9BEC4",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "hatch.linewidth": 0.8,
    "svg.fonttype": "none",
}
MARKERS: dict[str, dict[str, Any]] = {
    "guard_step": {"marker": "^", "markersize": 8, "markeredgecolor": "white", "markeredgewidth": 0.9},
    "collapse_step": {"marker": "X", "markersize": 8, "markeredgecolor": "white", "markeredgewidth": 0.9},
}


def draw(arms: Sequence[Arm], healthy: Collection[str], scalars: Scalars, out: Path) -> None:
    """Write `figure.png` and `figure.svg`.

    Args:
        arms: Arms in the order in which they are listed.
        healthy: Names of the healthy twins among them, drawn in black.
        scalars: What each run logged, by run directory and tag.
        out: Directory to write to; both files are replaced atomically.
    """
    import matplotlib
    from matplotlib.figure import Figure

    styles = line_styles(arms, healthy)
    # the twins last and thinner, so that they show where arms lie on each other
    order = sorted(arms, key=lambda arm: arm.name in healthy)
    with matplotlib.rc_context(STYLE):
        # A bare Figure draws with Agg and leaves the user's pyplot backend alone.
        strip = sum(_row_height(arm) for arm in arms)
        inches = [max(2.15, LINE * len(arms) / 72 + 0.1), 1.25, 1.25, strip]
        figure = Figure(figsize=(9, 2.0 + sum(inches)), dpi=200, facecolor="white")
        panels = _panels(figure, inches, max(len(arm.name) for arm in arms))
        ceiling = _ceiling(arms, scalars)
        lines = {tag: {path: _line(scalars[path], tag, ceiling) for path in scalars} for tag in TAGS}
        for axes, tag in zip(panels, TAGS, strict=False):
            for arm in order:
                _curves(axes, arm, [lines[tag][run.path] for run in arm.runs], styles[arm.name])
        _finish_panels(figure, panels, arms, scalars, ceiling)
        colours = {name: style["color"] for name, style in styles.items()}
        _name_curves(panels[0], arms, colours, lines["loss/train"])
        _outcomes(panels[3], arms, colours, scalars)
        save(figure, out / "figure")


def line_styles(arms: Sequence[Arm], healthy: Collection[str]) -> dict[str, dict[str, Any]]:
    """How each arm's line is drawn: colours in turn, then again with other dashes; the healthy twins in ink."""
    styles: dict[str, dict[str, Any]] = {}
    for group, colours, width in (
        ([arm for arm in arms if arm.name not in healthy], PALETTE, 2.1),
        ([arm for arm in arms if arm.name in healthy], (INK,), 1.5),
    ):
        for index, arm in enumerate(group):
            dash = DASHES[index // len(colours) % len(DASHES)]
            styles[arm.name] = {"color": colours[index % len(colours)], "linestyle": dash, "linewidth": width}
    return styles


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG and SVG; a reader finds the old file or the new."""
    for suffix in ("png", "svg"):
        temporary = path.with_name(f".{path.name}.tmp.{suffix}")
        figure.savefig(temporary)
        os.replace(temporary, path.with_name(f"{path.name}.{suffix}"))


def _row_height(arm: Arm) -> float:
    """Inches of an arm's row in the outcome strip: room for the name, and for one bar a seed, however thin."""
    return min(0.7, max(0.25, 0.07 * len(arm.runs) + 0.06))


def _bar(arm: Arm) -> float:
    """Inches from one seed's bar to the next."""
    return min(0.15, (_row_height(arm) - 0.07) / len(arm.runs))


def _panels(figure: Figure, inches: Sequence[float], longest_name: int) -> list[Axes]:
    """Four axes over one step axis; the right margin is left free for names."""
    height = figure.get_figheight()
    margin = min(3.2, 0.95 + 0.075 * longest_name)
    gap = (height - 0.62 - 0.45 - sum(inches)) / 3
    grid = figure.add_gridspec(4, 1, height_ratios=inches)
    top, bottom = 1 - 0.62 / height, 0.45 / height
    grid.update(left=0.065, right=1 - margin / 9, top=top, bottom=bottom, hspace=gap / (sum(inches) / 4))
    first = figure.add_subplot(grid[0])
    return [first, *(figure.add_subplot(grid[row], sharex=first) for row in (1, 2, 3))]


def _ceiling(arms: Sequence[Arm], scalars: Scalars) -> float:
    """Where the loss axis is cut: above the losses of the start, so that one explosion hides no other arm."""
    losses = [loss for arm in arms for run in arm.runs if (loss := _finite(scalars[run.path], "loss/train"))]
    limit = 1.25 * max((loss.values[0] for loss in losses), default=np.inf)
    return float(limit) if any((_smooth(loss).values > limit).any() for loss in losses) else np.inf


def _finite(scalars: Mapping[str, Series], tag: str) -> Series:
    return scalars.get(tag, Series(np.empty(0), np.empty(0))).finite()


def _line(scalars: Mapping[str, Series], tag: str, ceiling: float) -> Series:
    """A run's curve as drawn: the loss smoothed and cut, and of the others what a logarithm can show."""
    series = _finite(scalars, tag)
    if tag == "loss/train":
        smooth = _smooth(series)
        return Series(smooth.steps, np.minimum(smooth.values, ceiling))
    keep = series.values > 0
    return Series(series.steps[keep], series.values[keep])


def _smooth(series: Series) -> Series:
    """Trailing mean, so that nothing is drawn before it happened; short runs are left as they are."""
    if len(series) < 100:
        return series
    total = np.cumsum(np.concatenate([[0.0], series.values]))
    end = np.arange(1, len(series) + 1)
    start = np.maximum(end - SMOOTH, 0)
    return Series(series.steps, (total[end] - total[start]) / (end - start))


def _median(lines: Sequence[Series]) -> Series:
    """Median over the seeds, only while every seed runs: later, it would be a median of the survivors."""
    steps = lines[0].steps
    for line in lines[1:]:
        steps = np.intersect1d(steps, line.steps)
    values = [line.values[np.isin(line.steps, steps)] for line in lines]
    return Series(steps, np.median(values, axis=0) if len(steps) else np.empty(0))


def _curves(axes: Axes, arm: Arm, lines: Sequence[Series], style: dict[str, Any]) -> None:
    """One arm in one panel: seeds, the median of those that count, and where the guard fired and the loss collapsed."""
    drawn = [(run, line) for run, line in zip(arm.runs, lines, strict=True) if len(line)]
    counted = [line for run, line in drawn if run.counted]
    many = len(drawn) > 1
    thin = {**style, "linewidth": 0.8, "alpha": 0.5, "rasterized": len(drawn) > MANY} if many else style
    for run, line in drawn:
        axes.plot(line.steps, line.values, **(thin if run.counted else {**thin, "linestyle": ":"}))
    if many and counted:
        median = _median(counted)
        axes.plot(median.steps, median.values, **style)
    for run, line in drawn:
        for key, marker in MARKERS.items():
            if (step := run.number(key)) is not None:
                point = {**style, **marker, "linestyle": "", "zorder": 5, "clip_on": False}
                axes.plot([step], [line.at(step)], **point)


def _finish_panels(
    figure: Figure, panels: Sequence[Axes], arms: Sequence[Arm], scalars: Scalars, ceiling: float
) -> None:
    """Titles, scales and the key to the markers."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    longest = max((len(scalars[run.path].get("loss/train", ())) for arm in arms for run in arm.runs), default=0)
    smoothed = f", mean of {SMOOTH} logged points" if longest >= 100 else ""
    seeds = "; thin: seeds, bold: their median while all run" if any(len(arm.runs) > 1 for arm in arms) else ""
    cut = f", cut at {ceiling:.1f}" if np.isfinite(ceiling) else ""
    open_ended = not all(run.counted for arm in arms for run in arm.runs)
    collapsed = "; hatched or pale: collapsed" if any(_bar(arm) < THIN for arm in arms) else "; hatched: collapsed"
    titles = (
        ("Training loss", f"nat{smoothed}{cut}{seeds}"),
        ("Query weight  $\\sigma(W_Q)$", "largest singular value, log scale"),
        ("Max attention logit", "log scale"),
        ("Outcome", "how far each seed trained" + collapsed + (", dotted: not counted" if open_ended else "")),
    )
    for axes, (title, note) in zip(panels, titles, strict=True):
        text = axes.annotate(
            title, (0, 1), (0, 6), xycoords="axes fraction", textcoords="offset points", weight="bold", va="bottom"
        )
        axes.annotate(
            note, (1, 0), (7, 0), xycoords=text, textcoords="offset points", color=MUTED, fontsize=8.5, va="bottom"
        )
        axes.tick_params(labelbottom=axes is panels[3], labelsize=8.5)
    for axes in panels[1:3]:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 200 else (1,), numticks=6))
        axes.yaxis.set_major_formatter(FuncFormatter(_plain))
        axes.yaxis.set_minor_locator(NullLocator())
    panels[3].set_xlabel("Optimizer step", color=MUTED, fontsize=9)
    runs = [run for arm in arms for run in arm.runs]
    panels[0].set_xlim(0, max(1.0, *(max(run.number("max_steps") or 0, _reached(run, scalars)) for run in runs)))
    labels = {"guard_step": "guard fired", "collapse_step": "collapse"}
    used = [key for key in labels if any(run.number(key) is not None for run in runs)]
    handles = [Line2D([], [], linestyle="", color=MUTED, label=labels[key], **MARKERS[key]) for key in used]
    if handles:
        figure.legend(handles=handles, loc="upper right", ncols=2, frameon=False, fontsize=8.5, handletextpad=0.2)
    name = ", ".join(dict.fromkeys(run.path.parent.parent.name for arm in arms for run in arm.runs))
    figure.text(0.065, 1 - 0.12 / figure.get_figheight(), name, fontsize=13, weight="bold", va="top")


def _plain(value: float, _: int) -> str:
    """Tick labels as they are read aloud: 0.5, 20, 10k, 1M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _name_curves(axes: Axes, arms: Sequence[Arm], colours: Mapping[str, str], losses: Mapping[Path, Series]) -> None:
    """Write each arm's name beside the end of its loss curve, moved apart where they would touch."""
    ends = []
    for arm in arms:
        lines = [line for run in arm.runs if len(line := losses[run.path])]
        if lines:
            line = max(lines, key=lambda line: line.steps[-1])
            ends.append((arm.name, float(line.steps[-1]), float(line.values[-1])))
    (low, high), last = axes.get_ylim(), axes.get_xlim()[1]
    points = axes.get_window_extent().height / axes.figure.dpi * 72
    heights = [(value - low) / (high - low) for _, _, value in ends]
    places = _spread([height * points for height in heights], gap=LINE, height=points)
    for (name, step, _), height, place in zip(ends, heights, places, strict=True):
        colour, y = colours[name], place / points
        leader: dict[str, Any] = {"color": colour, "linewidth": 0.8, "alpha": 0.7, "linestyle": ":", "clip_on": False}
        axes.plot([step / last, 1, 1.017], [height, height, y], transform=axes.transAxes, scalex=False, **leader)
        axes.text(1.02, y, name, color=colour, weight="bold", fontsize=8.5, va="center", transform=axes.transAxes)


def _spread(wanted: Sequence[float], gap: float, height: float) -> list[float]:
    """Positions at least `gap` apart, in the same order, close to the wanted ones and inside the panel if they fit."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    placed = list(wanted)
    floor = 0.0
    for index in order:
        placed[index] = floor = max(floor, placed[index])
        floor += gap
    ceiling = max(height, gap * (len(wanted) - 1))
    for index in reversed(order):
        placed[index] = ceiling = min(ceiling, placed[index])
        ceiling -= gap
    return placed


def _outcomes(axes: Axes, arms: Sequence[Arm], colours: dict[str, str], scalars: Scalars) -> None:
    """One row an arm, one bar a seed: solid where healthy, hatched where collapsed, an outline where not counted."""
    top = 0.0
    for arm in arms:
        colour, height, bar = colours[arm.name], _row_height(arm), _bar(arm)
        for index, run in enumerate(arm.runs):
            y = top + height / 2 + bar * (index + 0.5 - len(arm.runs) / 2)
            _outcome_bar(axes, run, y, bar * (0.8 if len(arm.runs) > 1 else 1.0), colour, scalars)
        middle = top + height / 2
        beside = axes.get_yaxis_transform()
        name = axes.text(
            1.02, middle, arm.name, color=colour, weight="bold", fontsize=8.5, va="center", transform=beside
        )
        count = f"{arm.k}/{arm.n}" if arm.n else "none yet"
        axes.annotate(
            count, (1, 0.5), (6, 0), xycoords=name, textcoords="offset points", color=MUTED, fontsize=8.5, va="center"
        )
        top += height
    axes.set_ylim(top, 0)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)


def _reached(run: Run, scalars: Scalars) -> float:
    """How far a run went: by its verdict, or by its last logged loss where it has none."""
    loss = scalars[run.path].get("loss/train")
    return run.number("step") or (float(loss.steps[-1]) if loss is not None else 0.0)


def _outcome_bar(axes: Axes, run: Run, y: float, height: float, colour: str, scalars: Scalars) -> None:
    reached = _reached(run, scalars)
    if not run.counted:
        axes.barh(y, reached, height, facecolor="none", edgecolor=colour, linewidth=0.8, linestyle=":")
    elif run.collapsed and height < 0.8 * THIN:
        axes.barh(y, reached, height, facecolor=colour, linewidth=0, alpha=0.25)
    elif run.collapsed:
        axes.barh(y, reached, height, facecolor="white", edgecolor=colour, linewidth=0.8, hatch="//////")
    else:
        edge = 0.8 if height >= 0.8 * THIN else 0.0
        axes.barh(y, reached, height, facecolor=colour, edgecolor=colour, linewidth=edge, alpha=0.8)
    for key, marker in MARKERS.items():
        if (step := run.number(key)) is not None:
            size = min(6.5, 80 * height)  # of one seed's bar, in points
            small = {**marker, "markersize": size, "markeredgewidth": min(0.9, size / 7)}
            axes.plot([step], [y], color=INK, linestyle="", zorder=5, clip_on=False, **small)
