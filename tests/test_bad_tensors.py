"""What a caller of the kernels may get wrong: one line that names the argument and what it takes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels import RoundingSites, TopSingular, mx_quantize, round_to, streaming_attention

X = torch.zeros(2, 2, 8, 4)
TENSORS: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: streaming_attention(X, X[..., :2], X),
        "k (2, 2, 8, 2), v (2, 2, 8, 4) differ: k and v need one shape, with q's batch and dim",
    ),
    (lambda: streaming_attention(X[0], X[0], X[0]), "q has shape (2, 8, 4); give [batch, heads, time, dim]"),
    (
        lambda: streaming_attention(X.double(), X, X),
        "k is torch.float32 on cpu, q is torch.float64 on cpu; give all three one dtype and device",
    ),
    (lambda: streaming_attention(X, X, X, sites="fp8"), "preset 'fp8' is not one of fp32, fa2, bf16_carry, "),
    (lambda: streaming_attention(X, X, X, tile=0), "tile=0: give a positive int, or two: (queries, keys)"),
    (lambda: streaming_attention(X, X, X, backend="tpu"), "backend='tpu' is not one of auto, reference, cpu, triton"),
    (
        lambda: RoundingSites.build("fp32", {"lse": "fp7"}),
        "site lse: rounding 'fp7': write fp32, bf16, fp16 or mantissa bits, e.g. bf16, 3, ",
    ),
    (lambda: mx_quantize(X.int()), "mx_quantize: got torch.int32; give float32, bfloat16 or float16 (x.float())"),
    (lambda: mx_quantize(X, "mxfp5"), "fmt='mxfp5' is not one of mxfp8_e4m3, mxfp8_e5m2, "),
    (lambda: mx_quantize(X, axis=7), "axis=7 must be from -4 to 3 for shape (2, 2, 8, 4)"),
    (lambda: mx_quantize(X, scale="round"), "scale='round' is not one of floor, ceil, even, rceil"),
    (lambda: round_to(X, 99), "mantissa_bits=99 must be an int from 1 to 23"),
    (lambda: round_to(X, 3, mode="up"), "mode='up' is not one of rne, rz, sr"),
    (lambda: TopSingular(k=0), "TopSingular: k=0 must be from 1 to block=5"),
]


@pytest.mark.parametrize(("call", "said"), TENSORS, ids=[said for _, said in TENSORS])
def test_tensors(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        call()
