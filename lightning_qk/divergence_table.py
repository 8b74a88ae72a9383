"""The moving-average rule of arXiv 2506.20752 in the report, beside the crash rules."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from lightning_qk.outcomes import interval
from lightning_qk.runs import Arm
from lightning_qk.statistics import wilson
from lightning_qk.tables import Table, spread


def divergence_table(arms: Sequence[Arm]) -> Table:
    """How many runs diverged by `DivergenceStop`, and when; no rows where no run had it among its callbacks."""
    rows = []
    for arm in arms:
        watched = [run for run in arm.counted if "divergence_step" in (run.verdict or {})]
        steps = [step for run in watched if (step := run.number("divergence_step")) is not None]
        if watched:
            rows.append(
                {
                    "arm": arm.name,
                    "diverged": f"{len(steps)}/{len(watched)}",
                    "95 % interval": interval(wilson(len(steps), len(watched))),
                    "first step": spread(steps, statistics.median),
                }
            )
    return Table(
        "Divergence by the moving average",
        rows,
        "The first step at which DivergenceStop's average loss rose by more than its `rise`; a loss that came back "
        "counts too. Wilson 95 % intervals; median [min..max].",
    )
