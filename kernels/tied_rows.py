"""The tied rows of arXiv 2510.04212 without training: inputs on which any narrow output carry errs one way.

Two probabilities of exactly 1 add two bfloat16 values of one sign: the sum ends halfway between two bfloat16 values,
the small terms push it over, and the rounding goes away from zero. As dO has one sign too, every delta errs upwards.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.sites import RoundingSites
from kernels.streaming import streaming_attention

T, D, HEADS, CODES = 1024, 64, 2, 32


def case(ties: str, logits: tuple[float, float] = (14.0, 14.0), value_mean: float = -2.0) -> list[Tensor]:
    """Every query matches one of 32 keys of kind A and one of 32 of kind B with one logit; all others give 0.

    Args:
        ties: where the 64 matched keys lie: ``random``, or all in ``one tile`` of 64.
        logits: range of the rows' maxima.
        value_mean: mean of the values; their standard deviation is 0.5.
    """
    generator = torch.Generator().manual_seed(0)
    q, k = torch.zeros(1, HEADS, T, D), torch.zeros(1, HEADS, T, D)
    for head in range(HEADS):
        order = torch.randperm(T, generator=generator)
        keys = order[: 2 * CODES] if ties == "random" else 5 * 64 + torch.randperm(64, generator=generator)
        k[0, head, keys, torch.arange(2 * CODES)] = 8.0
        size = logits[0] + (logits[1] - logits[0]) * torch.rand(T, generator=generator)
        # row t matches A[order[t] // 32] and B[order[t] % 32]: all 1024 pairs occur
        q[0, head, torch.arange(T), order // CODES] = size
        q[0, head, torch.arange(T), CODES + order % CODES] = size
    v = torch.randn(1, HEADS, T, D, generator=generator) * 0.5 + value_mean
    dout = -torch.randn(1, HEADS, T, D, generator=generator).abs()
    return [x.to(torch.bfloat16) for x in (q, k, v, dout)]


@dataclasses.dataclass
class Bias:
    """Errors of one case: mean of the output's in units of its last place, delta's mean over its deviation by row."""

    out: float
    delta: float
    upwards: float


def bias(
    qkvg: list[Tensor], sites: RoundingSites | str, tile: int, seed: int = 0, device: str = "cpu", backend: str = "auto"
) -> Bias:
    q, k, v, dout = qkvg
    there = [x.to(device) for x in (q, k, v)]
    result = streaming_attention(
        there[0], there[1], there[2], sites=sites, tile=tile, causal=False, seed=seed, backend=backend
    )
    assert (result.tied_rows == T).all()
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    error = result.out.double().cpu() - exact
    last_place = torch.exp2(exact.abs().log2().floor() - 7)
    delta = (dout.double() * error).sum(-1)
    return Bias(
        (error / last_place).mean().item(), (delta.mean() / delta.std()).item(), (delta > 0).double().mean().item()
    )
