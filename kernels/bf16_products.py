"""Products of bfloat16 matrices on CPUs that have no instructions for them.

PyTorch multiplies bfloat16 matrices on a CPU by oneDNN where that supports the type (on x86 from AVX-512 on), elsewhere
by a plain loop, many times slower than a float32 product. oneDNN needs bfloat16 instructions to be fast (AVX512_BF16 or
AMX on x86); with plain AVX-512 it emulates them. float32 holds every bfloat16 number and, up to the order of
the sum, a float32 accumulator holds what the hardware's would; so the float32 product of the widened matrices, rounded
once, is the same product at the speed of float32.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")  # all that layers, einsum and their gradients come down to


def has_bf16_products() -> bool:
    """Whether this CPU has bfloat16 instructions and PyTorch multiplies with them."""
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


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
