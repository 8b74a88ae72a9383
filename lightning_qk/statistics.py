"""What the report says of small samples: intervals, exact tests and survival.

Rates have Wilson's score interval, differences of rates Newcombe's (method 10 of Newcombe, Stat. Med. 17, 873-890,
1998), built from both Wilson intervals. Two rates are compared by Fisher's exact test, two-sided, and the p-values of
one table are corrected by Holm's step-down rule (Scand. J. Stat. 6, 65-70, 1979). Survival is Kaplan and Meier's
estimate S(t) = prod over collapses at s <= t of (1 - collapses / runs still training), with Greenwood's variance on the
log(-log) scale; two arms are compared by the log-rank test. Mean differences have a percentile bootstrap interval. All
but Newcombe's interval and Holm's rule, which it lacks, are SciPy's.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import stats

FloatArray = npt.NDArray[np.float64]
RESAMPLES, BOOTSTRAP_SEED, FEWEST_PAIRS = 9_999, 0, 3


def wilson(k: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a rate; (0, 1) where nothing was observed."""
    if n == 0:
        return 0.0, 1.0
    interval = stats.binomtest(k, n).proportion_ci(0.95, method="wilson")
    return float(interval.low), float(interval.high)


def newcombe(k1: int, n1: int, k2: int, n2: int) -> tuple[float, float]:
    """Newcombe's 95 % interval of the difference k1/n1 - k2/n2."""
    rate1, rate2, (low1, high1), (low2, high2) = k1 / n1, k2 / n2, wilson(k1, n1), wilson(k2, n2)
    difference = rate1 - rate2
    return (
        difference - math.hypot(rate1 - low1, high2 - rate2),
        difference + math.hypot(high1 - rate1, rate2 - low2),
    )


def fisher(k1: int, n1: int, k2: int, n2: int) -> float:
    """Two-sided p-value of Fisher's exact test that both rates are one."""
    return float(stats.fisher_exact([[k1, n1 - k1], [k2, n2 - k2]])[1])


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's corrected p-values, in the given order."""
    adjusted, floor = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        floor = max(floor, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = floor
    return adjusted


def bootstrap_mean(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % percentile bootstrap interval of a mean; None below three values."""
    if len(values) < FEWEST_PAIRS:
        return None
    result = stats.bootstrap(
        (np.asarray(values),),
        np.mean,
        n_resamples=RESAMPLES,
        confidence_level=0.95,
        method="percentile",
        random_state=np.random.default_rng(BOOTSTRAP_SEED),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


class Lifetimes(NamedTuple):
    """Steps at which runs collapsed, and at which others ended without."""

    collapsed: Sequence[float]
    censored: Sequence[float]

    def as_scipy(self) -> stats.CensoredData:
        return stats.CensoredData(uncensored=list(self.collapsed), right=list(self.censored))


class Survival(NamedTuple):
    """A Kaplan-Meier curve: the fraction not collapsed from each step on, with 95 % limits.

    The limits are nan before the first collapse and where nothing is left: Greenwood's variance is not defined there.
    """

    steps: FloatArray
    fraction: FloatArray
    low: FloatArray
    high: FloatArray

    def median(self) -> float | None:
        """The first step by which half have collapsed; None if that never came."""
        below = np.flatnonzero(self.fraction <= 0.5 + 1e-9)  # a product of fractions that are not exact
        return float(self.steps[below[0]]) if len(below) else None


def kaplan_meier(lifetimes: Lifetimes) -> Survival:
    """The survival curve of at least one run."""
    curve = stats.ecdf(lifetimes.as_scipy()).sf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that the limits are nan at 0 and 1, which we say ourselves
        interval = curve.confidence_interval(0.95, method="log-log")
    return Survival(curve.quantiles, curve.probabilities, interval.low.probabilities, interval.high.probabilities)


def log_rank(one: Lifetimes, other: Lifetimes) -> float | None:
    """Two-sided p-value that both arms collapse at one rate; None where nothing, or all at once, collapsed."""
    with np.errstate(invalid="ignore", divide="ignore"):
        p_value = float(stats.logrank(one.as_scipy(), other.as_scipy()).pvalue)
    return p_value if math.isfinite(p_value) else None
