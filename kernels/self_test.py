"""What a machine's kernels must give: known bits of roundings and formats, one attention on all backends, and biases.

The known bits are digests of the results on fixed inputs, which no library draws; they were taken where the tests
compare the same functions with their oracles.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import tied_rows
from kernels.mx_blocks import mx_quantize
from kernels.mx_formats import FORMATS, ROUNDINGS, SCALES
from kernels.rounding import MODES, round_to
from kernels.sites import PRESETS
from kernels.streaming import streaming_attention

BIAS = {  # preset and tile: the sign of delta's error on tied rows, 0 for none
    ("qiu_untiled", 1024): 1,
    ("o_carry_only", 512): 1,
    ("l_only", 512): 1,
    ("bf16_carry", 1024): 1,
    ("fa2", 512): 0,
    ("fp32", 512): 0,
}
ROUNDED = "6c45fc3028ed6e9e"
QUANTISED = "ea12a10793f9e347"
EQUAL = {"cpu": 1.0, "triton": 0.99}  # share of elements that must have the reference's bits; a GPU's exp2 differs


class Check(NamedTuple):
    """One check of a kernel: what it is of, whether it holds, and what was found."""

    name: str
    good: bool
    found: str


def run(device: str = "cpu") -> Iterator[Check]:
    """All checks, one by one.

    Args:
        device: ``cpu`` or ``cuda``.
    """
    backend = "cpu" if device == "cpu" else "triton"
    for name, digest, known in (("round_to", rounded(device), ROUNDED), ("mx_quantize", quantised(device), QUANTISED)):
        yield Check(f"{name}: known bits", digest == known, digest if digest == known else f"{digest}, not {known}")
    yield from attention(device, backend)
    yield from biases(device, backend)


def numbers(count: int) -> Tensor:
    """Fixed float32 values of both signs over 24 binades, some of them 0."""
    n = torch.arange(count, dtype=torch.int64)
    mixed = (n * 2654435761 + 40503) % (1 << 32)
    powers = torch.tensor([2.0**exponent for exponent in range(-12, 12)])  # exact, as exp2 need not be
    return (mixed % 4096 - 2048).float() * powers[(mixed >> 20) % 24] / 1000


def rounded(device: str) -> str:
    """Digest of :func:`kernels.round_to` in every mode and at every number of bits."""
    x = numbers(4096).to(device)
    return _digest([round_to(x, bits, mode, seed=5) for mode in MODES for bits in range(1, 24)])


def quantised(device: str) -> str:
    """Digest of :func:`kernels.mx_quantize` in every format, scale and rounding."""
    x = numbers(2560).view(8, 320).to(device)
    modes = [(fmt, scale, rounding) for fmt in FORMATS for scale in SCALES for rounding in ROUNDINGS]
    return _digest([mx_quantize(x, f, scale=scale, rounding=rounding, seed=3) for f, scale, rounding in modes])


def attention(device: str, backend: str) -> Iterator[Check]:
    """Every preset, forward and backward, against the readable reference on the CPU."""
    whole = numbers(4 * 2 * 2 * 96 * 64).tanh().to(torch.bfloat16)
    qkvg = tuple(x.reshape(2, 2, 96, 64) for x in whole.chunk(4))
    for preset in PRESETS:
        want = _everything(qkvg, preset, "reference")
        got = _everything(tuple(x.to(device) for x in qkvg), preset, backend).cpu()
        share = (want == got).double().mean().item()
        yield Check(f"attention {preset}: bits of the reference", share >= EQUAL[backend], f"{100 * share:.3f} %")


def biases(device: str, backend: str) -> Iterator[Check]:
    """The gate of the whole project: narrow carries err to one side on tied rows, and wide ones to none."""
    for (preset, tile), sign in BIAS.items():
        delta = tied_rows.bias(tied_rows.case("random"), preset, tile, device=device, backend=backend).delta
        wanted = "above 3" if sign else "within 1.2"
        good = delta > 3 if sign else abs(delta) < 1.2
        yield Check(f"bias {preset}, tile {tile}", good, f"{delta:+.2f} deviations, wanted {wanted}")


def _everything(qkvg: tuple[Tensor, ...], preset: str, backend: str) -> Tensor:
    q, k, v = (x.detach().requires_grad_() for x in qkvg[:3])
    result = streaming_attention(q, k, v, sites=preset, tile=32, backend=backend)
    gradients = torch.autograd.grad(result.out, (q, k, v), qkvg[3])
    return torch.cat([x.float().flatten() for x in (result.out.detach(), result.lse, *gradients)])


def _digest(tensors: list[Tensor]) -> str:
    whole = torch.cat([x.flatten() for x in tensors]).cpu().contiguous()
    return hashlib.sha256(whole.numpy().tobytes()).hexdigest()[:16]
