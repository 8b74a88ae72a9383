"""What interventions came to: runs that began with a checkpoint of another run, beside that run.

An intervention averts a collapse if its run does not collapse by its last step, and delays it if it collapses later
than the run that it began as did. A control, which changes nothing, repeats that run and says nothing of chance; a
placebo, with other batches, does.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_qk.outcomes import interval
from lightning_qk.runs import Arm, Run
from lightning_qk.statistics import wilson
from lightning_qk.tables import Table, spread


def fork_row(arm: Arm, runs: Mapping[Path, Run]) -> dict[str, str]:
    """One arm of forks, each beside the run of the same seed that it began as."""
    pairs = [(run, runs.get(run.path.parent.parent / run.begun_as / run.path.name)) for run in arm.counted]
    known = [(run, parent) for run, parent in pairs if parent is not None and parent.collapsed]
    delays = [run.end - parent.end for run, parent in known if run.collapsed]
    averted = sum(not run.collapsed for run, _ in known)
    return {
        "arm": arm.name,
        "began as": ", ".join(dict.fromkeys(run.begun_as for run in arm.counted)),
        "at step": spread([run.begin for run in arm.counted], statistics.median),
        "averted": f"{averted}/{len(known)}",
        "95 % interval": interval(wilson(averted, len(known))),
        "delay of the others": spread(delays, statistics.median),
        "later": f"{sum(delay > 0 for delay in delays)}/{len(delays)}" if delays else "-",
    }


def fork_table(arms: Sequence[Arm]) -> Table:
    """Every arm of forks; no rows where there is none."""
    runs = {run.path: run for arm in arms for run in arm.runs}
    rows = [fork_row(arm, runs) for arm in arms if arm.n and all(run.begun_as for run in arm.counted)]
    return Table(
        "Interventions",
        rows,
        "Forks of runs that collapsed: averted are those that did not by their last step, with Wilson's 95 % interval; "
        "the others' delay is from the collapse of the run that each began as to its own, in steps, median "
        "[least..largest].",
    )
