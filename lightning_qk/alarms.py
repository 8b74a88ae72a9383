"""How far ahead of a collapse the early-warning monitors spoke, and how often for nothing.

Every run's verdict has the alarms of its own thresholds. Where a threshold is a guess it can be calibrated instead: for
each reading, the worst value that the healthy twin's completed runs ever logged, the seed under judgement left out, so
that no run is judged by a threshold that has seen its own data. The twin's own alarms are then false ones on held-out
seeds. The alarm is the first logged reading beyond that value.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from lightning_qk.events import Scalars, Series
from lightning_qk.runs import Arm, Run
from lightning_qk.tables import Table, spread

PREFIX = "warning/"
Seen = tuple[Run, float, float | None]
"""A run, its threshold and the step of its alarm, if there was one."""


def readings(arms: Sequence[Arm]) -> list[str]:
    """What the monitors of these arms read, as their verdicts name it."""
    return list(dict.fromkeys(name for arm in arms for run in arm.runs for name in run.warnings))


def is_below(arms: Sequence[Arm], reading: str) -> bool:
    """Whether low values of a reading are the bad ones: `below` in the verdict; without it, high ones are."""
    found = [run.warnings[reading] for arm in arms for run in arm.runs if reading in run.warnings]
    return any(warning.get("below") for warning in found)


def after_warm_up(series: Series, run: Run, reading: str) -> Series:
    """What a run logged from its monitor's ``first_step`` on: before it there are no alarms."""
    first = run.warnings.get(reading, {}).get("first_step", 0)
    keep = series.steps + 1 >= first  # what follows step s is logged at s - 1
    return Series(series.steps[keep], series.values[keep])


def worst(series: Series, below: bool) -> float | None:
    """The finite value nearest to an alarm; None where nothing finite was logged."""
    values = series.finite().values
    return None if not len(values) else float(values.min() if below else values.max())


def first_beyond(series: Series, threshold: float, below: bool) -> float | None:
    """The optimizer step of the first reading beyond the threshold; one that is not a number is."""
    inside = series.values >= threshold if below else series.values <= threshold
    beyond = np.flatnonzero(~inside)
    return float(series.steps[beyond[0]]) + 1 if len(beyond) else None  # what follows step s is logged at s - 1


def healthy_worst(twin: Arm, reading: str, below: bool, scalars: Scalars) -> list[tuple[int, float]]:
    """Seed and worst reading of every completed run of a twin."""
    logged = [(run, scalars[run.path].get(PREFIX + reading)) for run in twin.counted if not run.collapsed]
    found = [
        (run.seed, worst(after_warm_up(series, run, reading), below)) for run, series in logged if series is not None
    ]
    return [(seed, value) for seed, value in found if value is not None]


def calibrated(arm: Arm, twin: Arm, reading: str, below: bool, scalars: Scalars) -> tuple[list[Seen], list[Run]]:
    """The counted runs that logged the reading: those with a threshold from the twin's other seeds, and the others."""
    healthy = healthy_worst(twin, reading, below, scalars)
    seen: list[Seen] = []
    without = []
    for run in arm.counted:
        series = scalars[run.path].get(PREFIX + reading)
        others = [value for seed, value in healthy if seed != run.seed]
        if series is not None and others:
            threshold = min(others) if below else max(others)
            seen.append((run, threshold, first_beyond(after_warm_up(series, run, reading), threshold, below)))
        elif series is not None:
            without.append(run)
    return seen, without


def own(arm: Arm, reading: str) -> list[Seen]:
    """Every counted run whose monitor had a threshold, with the alarm of its verdict."""
    found = [(run, run.warnings[reading]) for run in arm.counted if reading in run.warnings]
    return [
        (run, item["threshold"], item.get("alarm_step")) for run, item in found if item.get("threshold") is not None
    ]


def alarm_row(arm: Arm, reading: str, seen: Sequence[Seen]) -> dict[str, str]:
    """How often there was an alarm, when, and how far ahead.

    In runs that collapsed an alarm is a warning if it came before; in the others it is a false one.
    """
    alarms = [(run, step) for run, _, step in seen if step is not None]
    leads = [lead for run, step in alarms if run.collapsed and (lead := run.end - step) > 0]
    collapsed = sum(run.collapsed for run, _, _ in seen)
    return {
        "arm": arm.name,
        "reading": reading,
        "threshold": spread([threshold for _, threshold, _ in seen], statistics.median),
        "alarms": f"{len(alarms)}/{len(seen)}",
        "alarm step": spread([step for _, step in alarms], statistics.median),
        "warned of collapses": f"{len(leads)}/{collapsed}" if collapsed else "-",
        "steps ahead": spread(leads, statistics.median),
        "false alarms": f"{sum(not run.collapsed for run, _ in alarms)}/{len(seen) - collapsed}",
    }


def alarm_tables(arms: Sequence[Arm], twins: Mapping[str, Arm], scalars: Scalars) -> list[Table]:
    """Early warnings by the monitors' own thresholds, and by thresholds of the healthy twin."""
    names = readings(arms)
    given = [alarm_row(arm, name, seen) for arm in arms for name in names if (seen := own(arm, name))]
    learned, blind = [], []
    for arm in arms:
        for name in names if arm.name in twins else ():
            below = is_below(arms, name)
            seen, without = calibrated(arm, twins[arm.name], name, below, scalars)
            blind += [f"{name} of {arm.name}/seed_{run.seed}" for run in without]
            if seen or without:
                learned.append(alarm_row(arm, f"{name} (low is bad)" if below else name, seen))
    left_out = f" No other seed of the twin to learn from: {', '.join(blind)}." if blind else ""
    tables = [
        Table(
            "Early warnings, thresholds of the monitors",
            given,
            "Steps ahead: from an alarm that came before the collapse to it. Alarms of runs that did not collapse are "
            "false ones.",
        ),
        Table(
            "Early warnings, thresholds of the healthy twin",
            learned,
            "Threshold: the worst reading in the twin's completed runs, the judged run's own seed left out "
            f"(median [least..largest] over seeds); alarm: the first logged reading beyond it.{left_out}",
        ),
    ]
    return [table for table in tables if table.rows]
