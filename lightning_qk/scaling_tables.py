"""What the report says of an experiment over sizes and lengths: a scaling law for every arm, and how they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lightning_qk.runs import Arm, Run, read_experiment
from lightning_qk.scaling_law import HUBER, RESAMPLES, Fit, ScalingLaw, fit, shift
from lightning_qk.tables import Table, short

Points = dict[str, list[tuple[float, float, float]]]


def scaling_tables(arms: Sequence[Arm]) -> list[Table]:
    """The laws and their differences, for every experiment whose YAML says ``report: {scaling_law: true}``."""
    tables = []
    for directory in dict.fromkeys(arm.runs[0].path.parent.parent for arm in arms):
        stated = read_experiment(directory)
        if stated.get("scaling_law"):
            mine = [run for arm in arms for run in arm.runs if run.path.parent.parent == directory]
            tables += _tables(points_of(mine, stated["bases"]), stated)
    return tables


def points_of(runs: Sequence[Run], bases: Mapping[str, str]) -> Points:
    """By arm of the YAML: parameters, tokens and validation loss of its runs at all points of the grid."""
    found: Points = {}
    for run in runs:
        numbers = [run.number(key) for key in ("parameters", "tokens", "val_loss")]
        if run.counted and all(value is not None and np.isfinite(value) for value in numbers):
            found.setdefault(bases.get(run.arm, run.arm), []).append(tuple(numbers))  # type: ignore[arg-type]
    return found


def _tables(points: Points, stated: Mapping[str, Any]) -> list[Table]:
    fits: dict[str, Fit] = {}
    rows = []
    for arm, found in points.items():
        try:
            N, D, losses = zip(*found, strict=True)
            fits[arm] = fit(N, D, losses)
        except ValueError as error:
            rows.append({"arm": arm, "runs": str(len(found)), "E": f"not fitted: {error}"})
            continue
        rows.append({"arm": arm, "runs": str(len(found)), **law_row(fits[arm])})
    laws = Table(
        "Scaling law",
        rows,
        f"Validation loss as E + A / N^alpha + B / D^beta; N all parameters, D tokens. Huber loss of log L (delta "
        f"{HUBER:g}), best of many starts; error is the root mean square of log L. 95 % by {RESAMPLES} residual "
        "bootstraps; limits that span orders of magnitude mean that these runs do not tell.",
    )
    reference = _base(stated)
    if reference not in fits:
        return [laws]
    corners = _corners(points)
    rows = [
        {"arm": arm, **{where: _shift(one, fits[reference], *corner) for where, corner in corners.items()}}
        for arm, one in fits.items()
        if arm != reference
    ]
    note = "Loss of the arm's law less that of the reference's at the same N and D, in nats, with 95 % limits."
    return [laws, Table(f"Shift of the law against {reference}", rows, note)] if rows else [laws]


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
    N, D = (np.array([point[axis] for found in points.values() for point in found]) for axis in (0, 1))

    def name(N: float, D: float) -> str:
        return f"N {short(N)}, D {short(D)}"

    low, high = (float(N.min()), float(D.min())), (float(N.max()), float(D.max()))
    middle = float(np.exp(np.log(N).mean())), float(np.exp(np.log(D).mean()))
    return {name(*corner): corner for corner in (low, middle, high)}


def _shift(one: Fit, other: Fit, N: float, D: float) -> str:
    value, (low, high) = shift(one, other, N, D)
    return f"{value:+.3f} ({low:+.3f}..{high:+.3f})"
