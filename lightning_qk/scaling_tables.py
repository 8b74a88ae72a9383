"""What the report says of an experiment over sizes and lengths: a scaling law for every arm, and how they differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lightning_qk.runs import Arm, Run, read_experiment
from lightning_qk.scaling_law import HUBER, RESAMPLES, Fit, ScalingLaw, fit, shift
from lightning_qk.tables import Table, short

Key = tuple[str, int]  # point of the grid and seed: what pairs the runs of two arms
Points = dict[str, dict[Key, tuple[float, float, float]]]


def scaling_tables(arms: Sequence[Arm]) -> list[Table]:
    """The laws and their differences, for every experiment whose YAML says ``report: {scaling_law: true}``."""
    tables = []
    for directory in dict.fromkeys(arm.runs[0].path.parent.parent for arm in arms):
        stated = read_experiment(directory)
        if stated.get("scaling_law"):
            mine = [run for arm in arms for run in arm.runs if run.path.parent.parent == directory]
            tables += _tables(mine, stated)
    return tables


def points_of(runs: Sequence[Run], bases: Mapping[str, str]) -> Points:
    """By arm of the YAML: parameters, tokens and validation loss of its runs that trained to their end."""
    found: Points = {}
    for run in runs:
        if _fault(run) is None:
            base = bases.get(run.arm, run.arm)
            numbers = (run.number("parameters"), run.number("tokens"), run.number("val_loss"))
            found.setdefault(base, {})[run.arm.removeprefix(base), run.seed] = numbers  # type: ignore[assignment]
    return found


def _fault(run: Run) -> str | None:
    """Why a run says nothing of the law, or None: what a collapse or an early end leaves is no loss of its length."""
    if not run.counted:
        return "not done"
    if run.collapsed:
        return "collapsed"
    if run.ended_early:
        return "ended early"
    numbers = [run.number(key) for key in ("parameters", "tokens", "val_loss")]
    return None if all(value is not None and np.isfinite(value) for value in numbers) else "without a loss"


def _tables(runs: Sequence[Run], stated: Mapping[str, Any]) -> list[Table]:
    points, bases = points_of(runs, stated["bases"]), stated["bases"]
    fits: dict[str, Fit] = {}
    rows = []
    for arm in dict.fromkeys(bases.get(run.arm, run.arm) for run in runs):
        found = points.get(arm, {})
        left_out = Counter(fault for run in runs if bases.get(run.arm, run.arm) == arm and (fault := _fault(run)))
        row = {"arm": arm, "runs": str(len(found)), "left out": ", ".join(f"{n} {why}" for why, n in left_out.items())}
        try:
            fits[arm] = _fit(found, sorted(found))
        except ValueError as error:
            rows.append({**row, "E": f"not fitted: {error}"})
            continue
        rows.append({**row, **law_row(fits[arm])})
    laws = Table(
        "Scaling law",
        rows,
        f"Validation loss as E + A / N^alpha + B / D^beta; N all parameters, D tokens. Huber loss of log L (delta "
        f"{HUBER:g}), best of many starts; error is the root mean square of log L. Only runs that trained to their end "
        f"without a collapse. 95 % by {RESAMPLES} residual bootstraps; limits that span orders of magnitude mean that "
        "these runs do not tell.",
    )
    reference = _base(stated)
    if reference not in fits:
        return [laws]
    corners = _corners(points)
    rows = [{"arm": arm, **_shifts(arm, reference, points, fits, corners)} for arm in fits if arm != reference]
    note = (
        "Loss of the arm's law less that of the reference's at the same N and D, in nats, with 95 % limits; both laws "
        "are of the points and seeds that both arms have, resampled together."
    )
    return [laws, Table(f"Shift of the law against {reference}", rows, note)] if rows else [laws]


def _fit(found: Mapping[Key, tuple[float, float, float]], keys: Sequence[Key]) -> Fit:
    return fit(*np.array([found[key] for key in keys]).reshape(-1, 3).T)


def _shifts(
    arm: str, reference: str, points: Points, fits: Mapping[str, Fit], corners: Mapping[str, tuple[float, float]]
) -> dict[str, str]:
    """How far the arm's law is from the reference's, both of the runs that they have in common."""
    common = sorted(points[arm].keys() & points[reference].keys())
    try:
        one, other = (
            fits[each] if len(common) == len(points[each]) else _fit(points[each], common) for each in (arm, reference)
        )
    except ValueError as error:
        return {"pairs": f"{len(common)}: {error}"}
    return {"pairs": str(len(common)), **{where: _shift(one, other, *corner) for where, corner in corners.items()}}


def law_row(one: Fit) -> dict[str, str]:
    """The five numbers with their limits, and the error."""
    cells = {
        key: f"{short(value)} ({'..'.join(map(short, one.interval(key)))})"
        for key, value in zip(ScalingLaw._fields, one.law, strict=True)
    }
    return {**cells, "error": f"{one.error:.2g}"}


def _base(stated: Mapping[str, Any]) -> str | None:
    """The arm of the YAML that is the reference: in a grid it has a twin at every point."""
    twin = stated["reference"] or next(iter(stated["twins"].values()), None)
    return stated["bases"].get(twin, twin)


def _corners(points: Points) -> dict[str, tuple[float, float]]:
    """Smallest, middle and largest N and D of all arms."""
    N, D = (np.array([point[axis] for found in points.values() for point in found.values()]) for axis in (0, 1))

    def name(N: float, D: float) -> str:
        return f"N {short(N)}, D {short(D)}"

    low, high = (float(N.min()), float(D.min())), (float(N.max()), float(D.max()))
    middle = float(np.exp(np.log(N).mean())), float(np.exp(np.log(D).mean()))
    return {name(*corner): corner for corner in (low, middle, high)}


def _shift(one: Fit, other: Fit, N: float, D: float) -> str:
    value, (low, high) = shift(one, other, N, D)
    return f"{value:+.3f} ({low:+.3f}..{high:+.3f})"
