"""Confidence intervals of rates."""

from __future__ import annotations

import math


def wilson(k: int, n: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """Wilson score interval of a rate, 95 % by default; (0, 1) where nothing was observed."""
    if n == 0:
        return 0.0, 1.0
    rate, z2 = k / n, z * z
    centre = (rate + z2 / (2 * n)) / (1 + z2 / n)
    half = z / (1 + z2 / n) * math.sqrt(rate * (1 - rate) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def newcombe(k1: int, n1: int, k2: int, n2: int) -> tuple[float, float]:
    """Newcombe's 95 % interval of the difference k1/n1 - k2/n2, built from both Wilson intervals."""
    rate1, rate2, (low1, high1), (low2, high2) = k1 / n1, k2 / n2, wilson(k1, n1), wilson(k2, n2)
    difference = rate1 - rate2
    return (
        difference - math.hypot(rate1 - low1, high2 - rate2),
        difference + math.hypot(high1 - rate1, rate2 - low2),
    )
