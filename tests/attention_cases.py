"""Inputs for attention and comparisons of everything that it computes, shared by tests."""

from typing import Any

import torch
from torch import Tensor

from kernels import streaming_attention

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs(
    B: int, H: int, T: int, D: int, dtype: torch.dtype = torch.float32, S: int | None = None, G: int | None = None
) -> list[Tensor]:
    """q, k, v and the gradient of the output; logits of a few units, like early training.

    ``S`` keys and ``G`` key heads; None is as many as queries.
    """
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(B, heads, length, D, generator=generator) * size).to(dtype)
        for heads, length, size in ((H, T, 1.5), (G or H, S or T, 1.5), (G or H, S or T, 1.0), (H, T, 1.0))
    ]


def run(qkvg: list[Tensor], **settings: Any) -> dict[str, Tensor]:
    """Everything that attention computes, forward and backward."""
    q, k, v = (x.detach().requires_grad_() for x in qkvg[:3])
    result = streaming_attention(q, k, v, **settings)
    dq, dk, dv = torch.autograd.grad(result.out, (q, k, v), qkvg[3])
    return {**{name: x.detach() for name, x in result._asdict().items()}, "dq": dq, "dk": dk, "dv": dv}


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for name, want in expected.items():
        got = actual[name]
        assert got.dtype is want.dtype and got.shape == want.shape, name
        nan = want.isnan()
        assert torch.equal(got.isnan(), nan), name
        kind = integers[want.element_size()]
        assert torch.equal(got[~nan].view(kind), want[~nan].view(kind)), f"{name} differs"


def assert_backends_agree(qkvg: list[Tensor], **settings: Any) -> None:
    assert_same_bits(run(qkvg, backend="cpu", **settings), run(qkvg, backend="reference", **settings))
