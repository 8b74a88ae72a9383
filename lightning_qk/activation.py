"""At which logit should a guard fire? False activations and misses of thresholds on the largest logit.

The threshold that healthy runs suggest is the largest logit that any of them had. Chosen and judged on the same runs
it would look better than it is, so seeds are halved: the lower half chooses, the upper half is judged, for the chosen
threshold and for others alike. A guard that would fire in a healthy twin that did not collapse is a false activation; a
collapse before which no logit passed the threshold is a miss. Only runs without a guard tell.

Logits are ``logit/peak``, the largest of all steps between two readings, and ``logit/max``, the reading's own, of runs
that were made before there was the other.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from lightning_qk.alarms import first_beyond, worst
from lightning_qk.events import Scalars, Series
from lightning_qk.outcomes import interval
from lightning_qk.runs import Arm, Run
from lightning_qk.statistics import wilson
from lightning_qk.tables import Table, short, spread

TAGS = ("logit/peak", "logit/max")
THRESHOLDS = (10.0, 20.0, 30.0, 45.0, 60.0, 100.0)
FEWEST_SEEDS = 4
QUANTILES = (0, 25, 50, 75, 90, 100)


def largest_logits(run: Run, scalars: Scalars) -> Series | None:
    """The best record of a run's largest logits; None where it logged none."""
    return next((scalars[run.path][tag] for tag in TAGS if tag in scalars[run.path]), None)


def without_guard(arm: Arm) -> list[Run]:
    """The counted runs of an arm that no guard could change."""
    return [run for run in arm.counted if "guard" not in (run.verdict or {})]


def halves(runs: Sequence[Run]) -> tuple[set[int], set[int]]:
    """The lower and the upper half of the seeds; the upper one has one more where they are odd."""
    seeds = sorted({run.seed for run in runs})
    middle = len(seeds) // 2
    return set(seeds[:middle]), set(seeds[middle:])


def activation_row(
    threshold: float, runs: Sequence[Run], twins: set[Path], scalars: Scalars, chosen: bool
) -> dict[str, str]:
    """What a guard at this threshold would have done in these runs; ``twins`` are the healthy ones."""
    known = [(run, series) for run in runs if (series := largest_logits(run, scalars)) is not None]
    fired = {run.path: first_beyond(series, threshold, below=False) for run, series in known}
    healthy = [fired[run.path] for run in runs if run.path in twins]
    collapses = [(run.end, fired[run.path]) for run in runs if run.collapsed]
    ahead = [end - step for end, step in collapses if step is not None and step < end]
    false = sum(step is not None for step in healthy)
    missed = len(collapses) - len(ahead)
    return {
        "threshold": short(threshold) + (" (chosen)" if chosen else ""),
        "false activations": f"{false}/{len(healthy)}",
        "95 %": interval(wilson(false, len(healthy))),
        "missed collapses": f"{missed}/{len(collapses)}",
        "95 % ": interval(wilson(missed, len(collapses))) if collapses else "-",
        "steps ahead": spread(ahead, statistics.median),
    }


def activation_table(arms: Sequence[Arm], twins: Mapping[str, Arm], scalars: Scalars) -> Table:
    """Thresholds on held-out seeds; empty with fewer than four seeds of healthy twins."""
    paired = [arm for arm in arms if arm.name in twins]
    runs = [run for arm in paired for run in without_guard(arm) if largest_logits(run, scalars) is not None]
    of_twins = {run.path for twin in twins.values() for run in twin.counted}
    healthy = [run for run in runs if run.path in of_twins and not run.collapsed]
    choosing, judging = halves(healthy)
    judged = [run for run in runs if run.seed in judging]
    logits = [largest_logits(run, scalars) for run in healthy if run.seed in choosing]
    known = [peak for series in logits if series is not None and (peak := worst(series, below=False)) is not None]
    if len(choosing) + len(judging) < FEWEST_SEEDS or not known:
        return Table("", [])
    chosen = max(known)
    twin_paths = {run.path for run in healthy}
    values = sorted({*THRESHOLDS, chosen})
    rows = [activation_row(value, judged, twin_paths, scalars, value == chosen) for value in values]
    sampled = not all("logit/peak" in scalars[run.path] for run in runs)
    return Table(
        "Where would a guard fire?",
        rows,
        f"Of a guard on the largest logit, in runs without one, seeds {_listed(judging)}; the chosen threshold is the "
        f"largest logit of the healthy twins at seeds {_listed(choosing)}. Wilson 95 % intervals, which take every run "
        "for one on its own, those of a seed at several points of a grid too. Steps ahead: of collapses not missed."
        + (" Logits of the readings alone: a guard looks at every step." if sampled else ""),
    )


def logit_row(arm: Arm) -> dict[str, str]:
    """How the largest logits of an arm's runs are distributed."""
    peaks = [peak for run in without_guard(arm) if (peak := run.number("max_logit_peak")) is not None]
    names = {0: "least", 50: "median", 100: "largest"}
    cells = {names.get(q, f"{q} %"): short(float(np.percentile(peaks, q))) for q in QUANTILES if peaks}
    return {"arm": arm.name, "runs": str(len(peaks)), **cells}


def logit_table(arms: Sequence[Arm]) -> Table:
    """The distribution over seeds of a run's largest logit, of arms without a guard; empty with fewer than four."""
    rows = [logit_row(arm) for arm in arms if len(without_guard(arm)) >= FEWEST_SEEDS and arm.values("max_logit_peak")]
    return Table("The largest logit of a run", rows, "Quantiles over seeds, of runs without a guard.")


def _listed(seeds: set[int]) -> str:
    return ", ".join(map(str, sorted(seeds)))
