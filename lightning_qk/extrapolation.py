"""Where would runs collapse at a setting at which they were not seen to? The fit that an experiment's YAML asks for.

`report: {extrapolate: {key: trainer.plugins.init_args.carry, to: 7, log: [model.lr]}}`: over the points of the grid,
the logarithm of the collapse step is linear in `key` and in the logarithms of the keys of `log`. Runs that ended
healthy count as such. Log-normal and Weibull steps are fitted alike: how far they differ where nothing was seen says
how much of the answer is the assumption's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lightning_qk.runs import Arm, Run, read_experiment
from lightning_qk.statistics import FloatArray
from lightning_qk.survival_regression import FAMILIES, Fit, fit
from lightning_qk.tables import Table, short


@dataclass(frozen=True)
class Extrapolation:
    """The runs of one arm over the grid, with what was fitted to them.

    Attributes:
        arm: the arm of the YAML.
        key: the key that is extrapolated, and `to` which value.
        log: the keys whose logarithms enter.
        runs: the counted runs with their points of the grid.
        fits: by family; empty where `problem` says why.
    """

    arm: str
    key: str
    to: float
    log: tuple[str, ...]
    runs: Sequence[tuple[Run, Mapping[str, Any]]]
    fits: Sequence[Fit] = ()
    problem: str = ""

    def row(self, value: float, others: Sequence[float]) -> list[float]:
        """A row of the regression's matrix: one, the key's value, the logarithms of the others."""
        return [1.0, value, *map(math.log, others)]

    @property
    def settings(self) -> list[tuple[float, ...]]:
        """The points of the grid in the keys of `log`."""
        return sorted({tuple(point[key] for key in self.log) for _, point in self.runs})

    def at(self, others: Sequence[float]) -> list[tuple[Run, float]]:
        """The runs at such a point, each with the key's value."""
        return [
            (run, point[self.key]) for run, point in self.runs if tuple(point[k] for k in self.log) == tuple(others)
        ]

    def fitted(self) -> Extrapolation:
        """The same with its fits, or why there are none."""
        x_np: FloatArray = np.array([self.row(point[self.key], [point[k] for k in self.log]) for _, point in self.runs])
        steps_n, collapsed_n = np.array([run.end for run, _ in self.runs]), [run.collapsed for run, _ in self.runs]
        try:
            return replace(self, fits=[fit(family, x_np, steps_n, collapsed_n) for family in FAMILIES])
        except ValueError as error:
            return replace(self, problem=str(error))


def extrapolate(arms: Sequence[Arm]) -> list[Extrapolation]:
    """What the experiments of these arms ask for; nothing where they do not."""
    found = []
    for directory in dict.fromkeys(arm.runs[0].path.parent.parent for arm in arms):
        stated = read_experiment(directory)
        wanted, points, bases = (stated.get(key) for key in ("extrapolate", "points", "bases"))
        if not wanted or not points or not bases:
            continue
        mine = [arm for arm in arms if arm.runs[0].path.parent.parent == directory and arm.runs[0].arm in points]
        for base in dict.fromkeys(bases[arm.runs[0].arm] for arm in mine):
            chosen = [arm for arm in mine if bases[arm.runs[0].arm] == base]
            runs = [(run, points[run.arm]) for arm in chosen for run in arm.counted if run.end > 0]
            if runs:
                log = tuple(wanted["log"])
                found.append(Extrapolation(base, wanted["key"], wanted["to"], log, runs).fitted())
    return found


def tables(extrapolations: Sequence[Extrapolation]) -> list[Table]:
    """The coefficients, and what they say of the value that was asked for."""
    fitted = [(one, found) for one in extrapolations for found in one.fits]
    coefficients = [_coefficient_row(one, found) for one, found in fitted]
    medians = [_median_row(one, found, others) for one, found in fitted for others in one.settings]
    names = " and ".join(dict.fromkeys(f"{ending(one.key)} = {one.to:g}" for one in extrapolations))
    return [
        Table(
            "Collapse step over the grid",
            coefficients,
            "Accelerated failure times, by maximum likelihood; runs that did not collapse are censored at their last "
            "step. By what the collapse step is multiplied when a setting grows by one, and with which power of a "
            "setting it grows; s: the scale of its logarithm. 95 % intervals from the observed information.",
        ),
        Table(
            f"Extrapolation to {names}",
            medians,
            "AN EXTRAPOLATION: the fit's line goes on past the values at which runs collapsed. The step by which half "
            "of the runs would have collapsed, with the fit's 95 % interval, which holds only if the line does. Seen "
            "there: runs at that very point that collapsed, and how far the longest went.",
        ),
    ]


def ending(key: str) -> str:
    """The end of a dotted key, by which tables call it."""
    return key.rpartition(".")[2]


def _large(value: float) -> str:
    """A step count that may be astronomic; e to the value."""
    return short(math.exp(value)) if value < math.log(1e6) else f"1e{value / math.log(10):.1f}"


def _coefficient_row(one: Extrapolation, found: Fit) -> dict[str, str]:
    low, high = found.interval(1)
    row = {
        "arm": one.arm,
        "steps are": found.family,
        "collapsed": f"{sum(run.collapsed for run, _ in one.runs)}/{len(one.runs)}",
        f"times a {ending(one.key)}": f"{_large(found.coefficients[1])} ({_large(low)}..{_large(high)})",
    }
    for index, key in enumerate(one.log, start=2):
        low, high = found.interval(index)
        row[f"power of {ending(key)}"] = f"{found.coefficients[index]:.2f} ({low:.2f}..{high:.2f})"
    return row | {"s": f"{found.scale:.2f}", "log-likelihood": f"{found.log_likelihood:.1f}"}


def _median_row(one: Extrapolation, found: Fit, others: Sequence[float]) -> dict[str, str]:
    middle, low, high = found.log_median(one.row(one.to, others))
    there = [run for run, value in one.at(others) if value == one.to]
    last = max((run.number("step") or 0.0 for run in there), default=0.0)
    return {
        "arm": one.arm,
        "steps are": found.family,
        **{ending(key): f"{value:g}" for key, value in zip(one.log, others, strict=True)},
        "half collapsed by step": _large(middle),
        "95 %": f"{_large(low)}..{_large(high)}",
        "seen there": f"{sum(run.collapsed for run in there)}/{len(there)} by step {last:,.0f}" if there else "-",
    }


def numbers(extrapolations: Sequence[Extrapolation]) -> Iterator[dict[str, Any]]:
    """Rows of `extrapolation.csv`: every coefficient, and the logarithm of every extrapolated median."""
    for one, found in ((each, found) for each in extrapolations for found in each.fits):
        names = ["intercept", one.key, *(f"log {key}" for key in one.log)]
        row = {"arm": one.arm, "family": found.family}
        for index, name in enumerate(names):
            low, high = found.interval(index)
            yield {
                **row,
                "number": f"coefficient of {name}",
                "value": found.coefficients[index],
                "low": low,
                "high": high,
            }
        yield {**row, "number": "scale", "value": found.scale}
        yield {**row, "number": "log-likelihood", "value": found.log_likelihood}
        for others in one.settings:
            point = ", ".join(
                f"{key} = {value:g}" for key, value in zip((one.key, *one.log), (one.to, *others), strict=True)
            )
            middle, low, high = found.log_median(one.row(one.to, others))
            yield {**row, "number": f"log median at {point}", "value": middle, "low": low, "high": high}
