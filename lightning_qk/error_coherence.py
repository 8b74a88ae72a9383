"""How coherent the error of the gradient was, and how large, before anything came of it.

`callbacks.ErrorShaping` logs both of the error that it applied, over the whole run. What it logs after the loss or the
logits have left is a consequence of that, not its cause: here each run counts up to the step before.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning_qk.alarms import first_beyond
from lightning_qk.events import Scalars, Series
from lightning_qk.outcomes import TESTED_RUNAWAY, runaways
from lightning_qk.runs import Arm, Run
from lightning_qk.tables import Table, spread

COHERENCE, RELATIVE, LOGIT = "error/coherence", "error/relative", "logit/max"
FIELD = "error_coherence"
"""What a verdict has of every ErrorShaping, with the same suffix as its tags."""


class Error(NamedTuple):
    """Means over the steps of a run before it collapsed or ran away: sign-coherence, and size over the gradient's."""

    coherence: float
    relative: float


Errors = Mapping[Path, Mapping[str, Error]]
"""The errors of the counted runs, by run directory and suffix: none, or `/<route>` where a run has several."""


def suffixes(runs: Sequence[Run]) -> list[str]:
    """What stands behind the tags of the errors that these runs logged."""
    found = (key.removeprefix(FIELD) for run in runs for key in run.verdict or {} if key.startswith(FIELD))
    return list(dict.fromkeys(found))


def tags(runs: Sequence[Run]) -> list[str]:
    """What is read of these runs."""
    return [tag + suffix for suffix in suffixes(runs) for tag in (COHERENCE, RELATIVE)]


def departure(run: Run, scalars: Mapping[str, Series]) -> float:
    """The optimizer step at which a run collapsed or its logits ran away, whichever came first; infinite if neither."""
    ran_away = first_beyond(scalars[LOGIT], TESTED_RUNAWAY, below=False) if LOGIT in scalars else None
    return min(run.end if run.collapsed else math.inf, math.inf if ran_away is None else ran_away)


def error_of(run: Run, suffix: str, scalars: Mapping[str, Series]) -> Error | None:
    """The error of a run; None where it logged none before it left, or had none: what has no size has no signs."""
    end, means = departure(run, scalars), []
    for tag in (COHERENCE + suffix, RELATIVE + suffix):
        series = scalars[tag].finite() if tag in scalars else None
        # what follows step s is logged at s - 1; a window of coherence, where it ends
        early = [] if series is None else series.values[series.steps + 1 < end].tolist()
        if not early:
            return None
        means.append(statistics.fmean(early))
    return Error(*means) if means[1] > 0 else None


def measure(runs: Sequence[Run], scalars: Scalars) -> Errors:
    """The errors of the counted runs that have any."""
    found = {
        run.path: {suffix: error for suffix in suffixes([run]) if (error := error_of(run, suffix, scalars[run.path]))}
        for run in runs
        if run.counted
    }
    return {path: errors for path, errors in found.items() if errors}


def of_arm(arm: Arm, suffix: str, errors: Errors) -> list[Error]:
    """The errors of an arm's runs on one route."""
    found = (errors.get(run.path, {}).get(suffix) for run in arm.counted)
    return [error for error in found if error is not None]


def error_table(arms: Sequence[Arm], errors: Errors) -> Table:
    """Errors and what the arms came to; a row an arm and, where some run has several, a route."""
    several = any(suffixes(arm.counted) not in ([], [""]) for arm in arms)
    rows = [
        {
            "arm": arm.name,
            **({"route": suffix.lstrip("/") or "-"} if several else {}),
            "coherence": spread([error.coherence for error in of_arm(arm, suffix, errors)], statistics.median),
            "relative size": spread([error.relative for error in of_arm(arm, suffix, errors)], statistics.median),
            "collapsed": f"{arm.k}/{arm.n}",
            "ran away": "{}/{}".format(*runaways(arm, TESTED_RUNAWAY)),
        }
        for arm in arms
        for suffix in suffixes(arm.counted)
    ]
    return Table(
        "Error of the gradient",
        rows,
        f"Of each run the mean before it collapsed or a logit passed {TESTED_RUNAWAY:,}, whichever came first, to the "
        "end where neither did; median [least..largest] over seeds. Coherence: over a window of steps, the mean over "
        "the elements of the size of the mean sign; signs that never change have 1, signs drawn anew at each of W "
        "steps about sqrt(2 / (pi W)). Relative size: the error's norm over the clean gradient's.",
    )


def run_numbers(run: Run, errors: Errors) -> dict[str, Any]:
    """What a row of `report.csv` has of it."""
    found = errors.get(run.path, {})
    return {f"error_{key}_before{suffix}": value for suffix in found for key, value in found[suffix]._asdict().items()}


def arm_numbers(arm: Arm, errors: Errors) -> dict[str, Any]:
    """What a row of `arms.csv` has of it."""
    row = {}
    for suffix in suffixes(arm.counted):
        for key, values in zip(Error._fields, zip(*of_arm(arm, suffix, errors), strict=True), strict=False):
            for name, statistic in (("median", statistics.median), ("min", min), ("max", max)):
                row[f"error_{key}_before_{name}{suffix}"] = statistic(values)
    return row
