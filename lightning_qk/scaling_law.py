"""L(N, D) = E + A / N^alpha + B / D^beta: its fit to runs of many sizes and lengths, and how far it can be trusted.

Fitted as by Hoffmann et al. (arXiv 2203.15556, approach 3): the Huber loss, delta 1e-3, of log L, by L-BFGS from many
starts. Intervals are percentiles of a residual bootstrap: the law is fitted again to its own losses with residuals
drawn from those of the fit, made larger by sqrt(n / (n - 5)) for the five numbers that were fitted. Drawing runs
instead would leave small grids without whole rows. All fits of as many runs draw the residuals of the same runs, by
their place, so that laws of paired runs differ by no more than the runs do.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import optimize

FloatArray = npt.NDArray[np.float64]
HUBER, FEWEST, RESAMPLES, SEED = 1e-3, 8, 400, 0
_LOWEST_E = 1e-6  # times the least loss: below, the data does not tell E from nothing


class ScalingLaw(NamedTuple):
    """The five numbers; losses in nats, N in parameters, D in tokens."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, N: npt.ArrayLike, D: npt.ArrayLike) -> FloatArray:
        """L(N, D)."""
        N, D = np.asarray(N, np.float64), np.asarray(D, np.float64)
        return np.asarray(self.E + self.A * N**-self.alpha + self.B * D**-self.beta)


class Fit(NamedTuple):
    """A law and the laws of its bootstrap.

    Attributes:
        law: the fit.
        resampled: [resamples, 5], laws of the resamples; two fits of as many runs have drawn the same places.
        error: root mean square of the residuals of log L.
        runs: how many were fitted.
    """

    law: ScalingLaw
    resampled: FloatArray
    error: float
    runs: int

    def interval(self, key: str) -> tuple[float, float]:
        """95 % limits of one of the five numbers."""
        return _percentiles(self.resampled[:, ScalingLaw._fields.index(key)])


class _Points:
    """Runs in logarithms, N and D relative to their geometric means, so that all numbers of the fit are near one."""

    def __init__(self, N: FloatArray, D: FloatArray) -> None:
        self.n, self.d = np.log(N), np.log(D)
        self.n_mean, self.d_mean = float(self.n.mean()), float(self.d.mean())
        self.n, self.d = self.n - self.n_mean, self.d - self.d_mean

    def objective(self, x: FloatArray, log_L: FloatArray) -> tuple[float, FloatArray]:
        """Huber loss and gradient in (log E, log A, log B, alpha, beta), A and B at the means."""
        e, a, b, alpha, beta = x
        parts = np.exp(np.stack([np.full_like(self.n, e), a - alpha * self.n, b - beta * self.d]))
        total = parts.sum(0)
        residual = np.log(total) - log_L
        bounded = np.clip(residual, -HUBER, HUBER)
        slope = bounded * parts / total
        gradient = [*slope.sum(1), -(slope[1] @ self.n), -(slope[2] @ self.d)]
        value = (bounded * (residual - bounded / 2)).sum()
        return float(value) / HUBER**2, np.array(gradient) / HUBER**2

    def solve(self, log_L: FloatArray, starts: list[FloatArray]) -> FloatArray:
        """The best of the local minima."""
        least = float(log_L.min())
        bounds = [(least + math.log(_LOWEST_E), least), *[(least - 25.0, least + 10.0)] * 2, *[(0.0, 5.0)] * 2]
        found = [
            optimize.minimize(
                self.objective, start, (log_L,), "L-BFGS-B", True, bounds=bounds,
                options={"maxiter": 2_000, "maxfun": 4_000, "ftol": 1e-12, "gtol": 1e-8},
            )
            for start in starts
        ]  # fmt: skip
        return np.asarray(min(found, key=lambda one: one.fun).x)

    def law(self, x: FloatArray) -> ScalingLaw:
        e, a, b, alpha, beta = map(float, x)
        return ScalingLaw(math.exp(e), math.exp(a + alpha * self.n_mean), math.exp(b + beta * self.d_mean), alpha, beta)


def _starts(log_L: FloatArray) -> list[FloatArray]:
    """36 of them: how much of the least loss is E, how the rest is divided, how steep both terms are."""
    least, steep = math.exp(float(log_L.min())), (0.2, 0.5, 1.0)
    return [
        np.array([*np.log([least * share, least * (1 - share) * part, least * (1 - share) * (1 - part)]), alpha, beta])
        for share, part, alpha, beta in itertools.product((0.2, 0.8), (0.3, 0.7), steep, steep)
    ]


def fit(N: npt.ArrayLike, D: npt.ArrayLike, L: npt.ArrayLike, resamples: int | None = None) -> Fit:
    """Fits the law to runs.

    Args:
        N: parameters, [runs].
        D: tokens, [runs].
        L: losses, [runs], in nats.
        resamples: laws of the bootstrap; None is :data:`RESAMPLES`.

    Raises:
        ValueError: too few runs, fewer than three sizes or lengths, or a number that is not positive and finite.
    """
    sizes, tokens, losses = (np.asarray(value, np.float64) for value in (N, D, L))
    if len(losses) < FEWEST or min(len(np.unique(sizes)), len(np.unique(tokens))) < 3:
        raise ValueError(
            f"a scaling law needs at least {FEWEST} runs of three sizes and three lengths, got {len(losses)} of "
            f"{len(np.unique(sizes))} and {len(np.unique(tokens))}"
        )
    if not all(np.isfinite(value).all() and (value > 0).all() for value in (sizes, tokens, losses)):
        raise ValueError("a scaling law needs positive and finite sizes, lengths and losses")
    points, log_L = _Points(sizes, tokens), np.log(losses)
    best = points.solve(log_L, _starts(log_L))
    law = points.law(best)
    fitted = np.log(law.loss(sizes, tokens))
    residuals, generator = log_L - fitted, np.random.default_rng(SEED)
    wide = (residuals - residuals.mean()) * math.sqrt(len(log_L) / (len(log_L) - len(law)))
    count = RESAMPLES if resamples is None else resamples
    drawn = fitted + wide[generator.integers(len(wide), size=(count, len(wide)))]
    resampled = np.array([points.law(points.solve(one, [best])) for one in drawn])
    return Fit(law, resampled, float(np.sqrt((residuals**2).mean())), len(losses))


def shift(one: Fit, other: Fit, N: float, D: float) -> tuple[float, tuple[float, float]]:
    """By how many nats the law of ``one`` lies above that of ``other`` at N and D, with 95 % limits.

    Args:
        one: a fit.
        other: a fit of the runs that those of ``one`` are paired with, in the same order and with as many resamples.
        N: parameters.
        D: tokens.

    Raises:
        ValueError: they were not resampled alike.
    """
    if one.runs != other.runs or one.resampled.shape != other.resampled.shape:
        raise ValueError(f"the shift of paired runs needs as many of each, got {one.runs} and {other.runs}")

    def losses(resampled: FloatArray) -> FloatArray:
        E, A, B, alpha, beta = resampled.T
        return np.asarray(E + A * N**-alpha + B * D**-beta)

    between = losses(one.resampled) - losses(other.resampled)
    return float(one.law.loss(N, D) - other.law.loss(N, D)), _percentiles(between)


def _percentiles(values: FloatArray) -> tuple[float, float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)
