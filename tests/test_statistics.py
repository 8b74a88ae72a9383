"""Intervals, tests and survival against published values, statsmodels, lifelines and direct computations."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from lifelines import KaplanMeierFitter
from lifelines.statistics import logrank_test
from scipy.stats import fisher_exact
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import confint_proportions_2indep, proportion_confint

from lightning_qk.statistics import (
    RESAMPLES,
    Lifetimes,
    bootstrap_mean,
    fisher,
    holm,
    kaplan_meier,
    log_rank,
    newcombe,
    wilson,
)


# Reference values: Newcombe 1998 (Stat. Med. 17, 857-872, table I; 873-890, table II).
@pytest.mark.parametrize(
    ("k", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_matches_published_values(k: int, n: int, low: float, high: float) -> None:
    assert wilson(k, n) == pytest.approx((low, high), abs=5e-5)
    assert wilson(n - k, n) == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_wilson_of_nothing_is_everything() -> None:
    assert wilson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("counts", "low", "high"),
    [((56, 70, 48, 80), 0.0524, 0.3339), ((9, 10, 3, 10), 0.1705, 0.8090), ((10, 10, 0, 10), 0.6075, 1.0)],
)
def test_newcombe_matches_published_values(counts: tuple[int, int, int, int], low: float, high: float) -> None:
    assert newcombe(*counts) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 17])
def test_rates_of_every_small_table(n: int) -> None:
    m = n + 2
    for k, j in itertools.product(range(n + 1), range(m + 1)):
        assert wilson(k, n) == pytest.approx(proportion_confint(k, n, method="wilson"), abs=1e-12)
        expected = confint_proportions_2indep(k, n, j, m, compare="diff", method="newcomb")
        assert newcombe(k, n, j, m) == pytest.approx(expected, abs=1e-12)
        assert fisher(k, n, j, m) == pytest.approx(fisher_exact([[k, n - k], [j, m - j]])[1], abs=1e-15)


@pytest.mark.parametrize(("n", "smallest"), [(3, 2 / 20), (4, 2 / 70), (5, 2 / 252)])
def test_fisher_by_counting(n: int, smallest: float) -> None:
    assert fisher(n, n, 0, n) == pytest.approx(smallest), "2 / C(2n, n): both corners of the hypergeometric law"
    assert fisher(0, n, 0, n) == 1


@pytest.mark.parametrize("p", [[], [0.03], [0.04, 0.01, 0.03, 0.005], [0.5, 0.5, 1.0, 0.02], [0.01] * 5])
def test_holm(p: list[float]) -> None:
    expected = multipletests(p, method="holm")[1].tolist() if p else []
    assert holm(p) == pytest.approx(expected, abs=1e-15)


def lifetimes(seed: int, n: int) -> Lifetimes:
    draw = np.random.default_rng(seed)
    steps, dead = draw.integers(1, 12, n) * 10.0, draw.random(n) < 0.6
    return Lifetimes(steps[dead].tolist(), steps[~dead].tolist())


@pytest.mark.parametrize("seed", range(8))
def test_survival_and_log_rank_match_lifelines(seed: int) -> None:
    one, other = lifetimes(seed, 9), lifetimes(seed + 100, 7)
    fitters = []
    for side in (one, other):
        durations = [*side.collapsed, *side.censored]
        observed = [True] * len(side.collapsed) + [False] * len(side.censored)
        fitters.append((durations, observed))
        fitter = KaplanMeierFitter().fit(durations, observed)
        curve = kaplan_meier(side)
        assert curve.steps.tolist() == fitter.survival_function_.index[1:].tolist()
        assert curve.fraction == pytest.approx(fitter.survival_function_.to_numpy()[1:, 0], abs=1e-12)
        defined = np.isfinite(curve.low)
        assert defined.tolist() == ((curve.fraction < 1) & (curve.fraction > 0)).tolist()
        limits = fitter.confidence_interval_.to_numpy()[1:][defined]
        assert np.column_stack([curve.low, curve.high])[defined] == pytest.approx(limits, abs=1e-9)
        median = fitter.median_survival_time_
        assert curve.median() == (None if math.isinf(median) else median)
    expected = logrank_test(fitters[0][0], fitters[1][0], fitters[0][1], fitters[1][1]).p_value
    assert log_rank(one, other) == pytest.approx(expected, abs=1e-9)


def test_survival_by_hand() -> None:
    curve = kaplan_meier(Lifetimes([10, 20, 20], [15, 30]))
    assert curve.steps.tolist() == [10, 15, 20, 30]
    assert curve.fraction.tolist() == pytest.approx([4 / 5, 4 / 5, 4 / 5 * 1 / 3, 4 / 5 * 1 / 3])


@pytest.mark.parametrize("n", [2, 24, 38, 88])
def test_the_median_of_a_half_is_there_whatever_the_rounding(n: int) -> None:
    collapsed = [10.0 * (index + 1) for index in range(n // 2)]
    assert kaplan_meier(Lifetimes(collapsed, [1_000.0] * (n // 2))).median() == collapsed[-1]


@pytest.mark.parametrize(("one", "other"), [([], []), ([10.0], [10.0])])
def test_log_rank_that_can_not_tell(one: list[float], other: list[float]) -> None:
    assert log_rank(Lifetimes(one, [30.0] if not one else []), Lifetimes(other, [30.0] if not other else [])) is None


def test_bootstrap_is_the_percentiles_of_resampled_means() -> None:
    values = np.array([0.3, 1.9, -0.4, 2.2, 0.8])
    rows = np.random.default_rng(0).integers(0, 5, (RESAMPLES, 5))
    assert bootstrap_mean(values.tolist()) == pytest.approx(np.percentile(values[rows].mean(1), [2.5, 97.5]), abs=1e-12)


def test_bootstrap_against_all_resamples_there_are() -> None:
    values = [0.0, 1.0, 3.0, 7.0]
    means = [sum(rows) / 4 for rows in itertools.product(values, repeat=4)]
    assert bootstrap_mean(values) == pytest.approx(np.percentile(means, [2.5, 97.5]), abs=0.26)


def test_bootstrap_of_few_values() -> None:
    assert bootstrap_mean([1.0, 2.0]) is None
    assert bootstrap_mean([1.0, 2.0, 4.0]) == (1.0, 4.0), "the range: 1/27 of the resamples are three times one value"
    assert bootstrap_mean([2.0, 2.0, 2.0]) == (2.0, 2.0)
