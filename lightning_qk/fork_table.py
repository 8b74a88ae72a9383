"""What interventions came to: runs that began with a checkpoint of another run, beside that run.

An intervention averts an onset, a collapse or a divergence by the moving average, if its run has none by its last step,
and delays it if its own comes later than that of the run that it began as. A control, which changes nothing, repeats
that run and says nothing of chance; a placebo, with other batches, does.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lightning_qk.outcomes import interval
from lightning_qk.runs import Arm, Run
from lightning_qk.statistics import wilson
from lightning_qk.tables import Table, spread

Onset = Callable[[Run], float | None]
RULES: dict[str, Onset] = {
    "collapse": lambda run: run.end if run.collapsed else None,
    "divergence": lambda run: run.number("divergence_step"),
}


def averted(pairs: Sequence[tuple[Run, Run]], rule: str) -> dict[str, str]:
    """What became of the onsets of one rule: of forks that began before their parent had one."""
    onset = RULES[rule]
    steps = [(onset(run), begun) for run, parent in pairs if (begun := onset(parent) or 0) > run.begin]
    delays = [step - begun for step, begun in steps if step is not None]
    n, k = len(steps), len(steps) - len(delays)
    return {
        f"{rule} averted": f"{k}/{n}" if n else "-",
        f"{rule}: 95 % interval": interval(wilson(k, n)) if n else "-",
        f"{rule}: delay of the others": spread(delays, statistics.median),
        f"{rule}: later": f"{sum(delay > 0 for delay in delays)}/{len(delays)}" if delays else "-",
    }


def fork_row(arm: str, done: Sequence[Run], runs: Mapping[Path, Run]) -> dict[str, str]:
    """Forks of one arm, each beside the run of the same seed that it began as."""
    pairs = [(run, parent) for run in done if (parent := runs.get(run.parent)) is not None]
    return {
        "arm": arm,
        "began as": ", ".join(dict.fromkeys(run.begun_as for run in done)),
        "at step": spread([run.begin for run in done], statistics.median),
        **averted(pairs, "collapse"),
        **averted(pairs, "divergence"),
    }


def fork_table(arms: Sequence[Arm]) -> Table:
    """Every arm of forks; no rows where there is none."""
    runs = {run.path: run for arm in arms for run in arm.runs}
    done = {arm.name: [run for run in arm.runs if run.done] for arm in arms}
    rows = [fork_row(name, mine, runs) for name, mine in done.items() if mine and all(run.begun_as for run in mine)]
    return Table(
        "Interventions",
        rows,
        "Forks, beside the runs that they began as. Averted: of those that began as a run that collapsed (or diverged, "
        "by the moving average) after it the ones that did not, with Wilson's 95 % interval; delay of the "
        "others: from the onset of the run that each began as to its own, in steps, median [least..largest].",
    )
