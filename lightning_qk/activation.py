"""At which logit should a guard fire? False activations and misses of thresholds on the largest logit.

The threshold that healthy runs suggest is the largest logit that any of them logged. Chosen and judged on the same runs
it would look better than it is, so seeds are halved: the lower half chooses, the upper half is judged, for the chosen
threshold and for others alike. A guard that would fire in a healthy twin that did not collapse is a false activation; a
collapse before which no logged logit passed the threshold is a miss. Only runs without a guard tell.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_qk.alarms import first_beyond, worst
from lightning_qk.events import Scalars
from lightning_qk.outcomes import interval
from lightning_qk.runs import Arm, Run
from lightning_qk.statistics import wilson
from lightning_qk.tables import Table, short, spread

TAG = "logit/max"
THRESHOLDS = (10.0, 20.0, 30.0, 45.0, 60.0, 100.0)
FEWEST_SEEDS = 4


def halves(runs: Sequence[Run]) -> tuple[set[int], set[int]]:
    """The lower and the upper half of the seeds; the upper one has one more where they are odd."""
    seeds = sorted({run.seed for run in runs})
    middle = len(seeds) // 2
    return set(seeds[:middle]), set(seeds[middle:])


def activation_row(
    threshold: float, runs: Sequence[Run], twins: set[Path], scalars: Scalars, chosen: bool
) -> dict[str, str]:
    """What a guard at this threshold would have done in these runs; ``twins`` are the healthy ones."""
    fired = {run.path: first_beyond(scalars[run.path][TAG], threshold, below=False) for run in runs}
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
        "95 % ": interval(wilson(missed, len(collapses))),
        "steps ahead": spread(ahead, statistics.median),
    }


def activation_table(arms: Sequence[Arm], twins: Mapping[str, Arm], scalars: Scalars) -> Table:
    """Thresholds on held-out seeds; empty with fewer than four seeds of healthy twins, or without a collapse."""
    paired = [arm for arm in arms if arm.name in twins]
    runs = [run for arm in paired for run in arm.counted if "guard" not in (run.verdict or {})]
    runs = [run for run in runs if TAG in scalars[run.path]]
    of_twins = {run.path for twin in twins.values() for run in twin.counted}
    healthy = [run for run in runs if run.path in of_twins and not run.collapsed]
    choosing, judging = halves(healthy)
    judged = [run for run in runs if run.seed in judging]
    peaks = [worst(scalars[run.path][TAG], below=False) for run in healthy if run.seed in choosing]
    known = [peak for peak in peaks if peak is not None]
    if len(choosing) + len(judging) < FEWEST_SEEDS or not known or not any(run.collapsed for run in judged):
        return Table("", [])
    chosen = max(known)
    twin_paths = {run.path for run in healthy}
    values = sorted({*THRESHOLDS, chosen})
    rows = [activation_row(value, judged, twin_paths, scalars, value == chosen) for value in values]
    return Table(
        "Where would a guard fire?",
        rows,
        f"Of a guard on the largest logit, in runs without one, seeds {_listed(judging)}; the chosen threshold is the "
        f"largest logit of the healthy twins at seeds {_listed(choosing)}. Wilson 95 % intervals; logits as sampled.",
    )


def _listed(seeds: set[int]) -> str:
    return ", ".join(map(str, sorted(seeds)))
