"""How the step of a collapse depends on settings, from runs of which some never collapsed: accelerated failure times.

The logarithm of the collapse step is linear in the settings, log T = x . b + s e, with e standard normal (T log-normal)
or of the smallest extreme value (T Weibull). A run that ended healthy at step t says only that T > t. Coefficients are
those of maximum likelihood; in b / s and 1 / s its logarithm is concave (Burridge, J. R. Stat. Soc. B 43, 41-45, 1981),
so that Newton's method finds the only maximum. Intervals are normal ones from the observed information.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import stats

from lightning_qk.statistics import FloatArray

Z95 = float(stats.norm.ppf(0.975))
MAX_ITERATIONS, TOLERANCE = 200, 1e-9


class Family(NamedTuple):
    """The distribution of e: logarithms of density and of survival, with their first two derivatives, by e."""

    density: Callable[[FloatArray], tuple[FloatArray, FloatArray, FloatArray]]
    survival: Callable[[FloatArray], tuple[FloatArray, FloatArray, FloatArray]]
    median: float


def _normal_density(z: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    return stats.norm.logpdf(z), -z, np.full_like(z, -1.0)


def _normal_survival(z: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    log_survival = stats.norm.logsf(z)
    hazard = np.exp(stats.norm.logpdf(z) - log_survival)
    return log_survival, -hazard, -hazard * (hazard - z)


def _extreme_density(z: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    return z - np.exp(z), 1 - np.exp(z), -np.exp(z)


def _extreme_survival(z: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    return -np.exp(z), -np.exp(z), -np.exp(z)


FAMILIES = {
    "log-normal": Family(_normal_density, _normal_survival, 0.0),
    "Weibull": Family(_extreme_density, _extreme_survival, math.log(math.log(2))),
}


@dataclass(frozen=True)
class Fit:
    """Coefficients b of log T and the scale s, the covariance of (b, s), and the logarithm of the likelihood of T."""

    family: str
    coefficients: FloatArray
    scale: float
    covariance: FloatArray
    log_likelihood: float

    def interval(self, index: int) -> tuple[float, float]:
        """95 % interval of a coefficient."""
        half = Z95 * math.sqrt(self.covariance[index, index])
        return self.coefficients[index] - half, self.coefficients[index] + half

    def log_median(self, x_p: Sequence[float]) -> tuple[float, float, float]:
        """Logarithm of the step by which half have collapsed at settings x, with its 95 % interval."""
        median = FAMILIES[self.family].median
        slope = np.array([*x_p, median])
        middle, half = (
            float(slope[:-1] @ self.coefficients + median * self.scale),
            Z95 * math.sqrt(slope @ self.covariance @ slope),
        )
        return middle, middle - half, middle + half


def fit(family: str, x_np: FloatArray, steps_n: FloatArray, collapsed_n: Sequence[bool]) -> Fit:
    """The maximum of the likelihood.

    Args:
        family: `log-normal` or `Weibull`.
        x_np: settings of every run, the first column ones.
        steps_n: the step of the collapse, or the last one of a run without.
        collapsed_n: whether the run collapsed.

    Raises:
        ValueError: the likelihood has no maximum, for there are too few collapses or too few settings that have any.
    """
    seen, count = np.asarray(collapsed_n, bool), x_np.shape[1]
    if seen.sum() <= count or np.linalg.matrix_rank(x_np[seen]) < count:
        raise ValueError(f"{seen.sum()} collapses, at too few different settings for {count} coefficients")
    log_steps_n = np.log(steps_n)
    w_nq = np.column_stack([-x_np, log_steps_n])  # e = w . (b / s, 1 / s)
    theta_q = np.zeros(count + 1)
    theta_q[[0, -1]] = log_steps_n.mean(), 1.0
    value, gradient_q, hessian_qq = _likelihood(FAMILIES[family], w_nq, seen, theta_q)
    for _ in range(MAX_ITERATIONS):
        step_q = -np.linalg.solve(hessian_qq, gradient_q)
        if gradient_q @ step_q < TOLERANCE:
            break
        size = 1.0
        while not (found := _likelihood(FAMILIES[family], w_nq, seen, theta_q + size * step_q))[0] > value:
            size /= 2
            if size < 1e-12:
                raise ValueError(f"the {family} likelihood has no maximum that could be found")
        theta_q, (value, gradient_q, hessian_qq) = theta_q + size * step_q, found
    else:
        raise ValueError(f"the {family} likelihood has no maximum within {MAX_ITERATIONS} steps of Newton's method")
    scale = 1 / theta_q[-1]
    jacobian_qq = scale * np.eye(count + 1)  # of (b, s) by (b / s, 1 / s)
    jacobian_qq[:, -1] = [*(-scale * scale * theta_q[:-1]), -scale * scale]
    covariance_qq = jacobian_qq @ np.linalg.inv(-hessian_qq) @ jacobian_qq.T
    return Fit(family, scale * theta_q[:-1], float(scale), covariance_qq, float(value - log_steps_n[seen].sum()))


def _likelihood(
    family: Family, w_nq: FloatArray, seen_n: np.ndarray, theta_q: FloatArray
) -> tuple[float, FloatArray, FloatArray]:
    """Logarithm of the likelihood of log T, with gradient and matrix of second derivatives; -inf where 1 / s <= 0."""
    if theta_q[-1] <= 0:
        return -math.inf, theta_q, np.eye(len(theta_q))
    with np.errstate(over="ignore", invalid="ignore"):
        terms = [part(w_nq[rows] @ theta_q) for part, rows in ((family.density, seen_n), (family.survival, ~seen_n))]
    w_nq = np.concatenate([w_nq[seen_n], w_nq[~seen_n]])
    value_n, first_n, second_n = (np.concatenate([term[at] for term in terms]) for at in range(3))
    collapses = int(seen_n.sum())
    gradient_q, hessian_qq = w_nq.T @ first_n, (w_nq.T * second_n) @ w_nq
    gradient_q[-1] += collapses / theta_q[-1]
    hessian_qq[-1, -1] -= collapses / theta_q[-1] ** 2
    return float(value_n.sum() + collapses * math.log(theta_q[-1])), gradient_q, hessian_qq
