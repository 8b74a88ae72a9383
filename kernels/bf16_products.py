"""Products of bfloat16 matrices on CPUs that have no instructions for them.

PyTorch multiplies bfloat16 matrices on a CPU by oneDNN where that supports the type (on x86 from AVX-512 on), elsewhere
by a plain loop, many times slower than a float32 product. float32 holds every bfloat16 number and, up to the order of
the sum, a float32 accumulator holds what the hardware's would; so the float32 product of the widened matrices, rounded
once, is the same product at the speed of float32.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")  # all that layers, einsum and their gradients come down to


def has_bf16_products() -> bool:
    """Whether PyTorch has fast bfloat16 products on this CPU."""
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


@contextmanager
def widened_bf16_products() -> Generator[None]:
    """Products of bfloat16 matrices on the CPU run in float32 and are rounded once, in all threads.

    Products of other dtypes are untouched.
    """
    library = torch.library.Library("aten", "IMPL", "CPU")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*[Oo]verrid.*")  # that is the purpose
        for name in _PRODUCTS:
            library.impl(name, _widened(getattr(torch, name)))
    try:
        yield
    finally:
        library._destroy()


def _widened(multiply: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def product(*operands: Tensor, **scalars: Any) -> Tensor:
        first = operands[0]
        if all(operand.dtype is torch.bfloat16 for operand in operands):
            wide = [operand.float() for operand in operands]
            return multiply(*wide, **scalars, out=wide[0].new_empty(0)).bfloat16()
        return multiply(*operands, **scalars, out=first.new_empty(0))  # with `out` it is another operator: no recursion

    return product
