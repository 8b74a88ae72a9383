"""Microscaling fake quantisation in one Triton kernel: the operations of :mod:`kernels.mx_blocks`, so the same bits.

The tensor, seen as [outer, axis, inner], is read once and written once. A program takes several whole blocks,
neighbours in memory, whichever the axis. Arithmetic is float32 and int32; only the load and the store know the tensor's
dtype, and without ``prescale`` the store is exact. Contraction of products and sums is off.

Importing this module needs no Triton; calling :func:`quantize` does. The tests compare the kernel with PyTorch bit for
bit in Triton's interpreter, and on a GPU where there is one.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernels.mx_formats import seed_key

if TYPE_CHECKING:
    from kernels.mx_blocks import MXSettings

try:
    import triton
    import triton.language as tl
except ImportError:  # there are wheels for Linux only
    triton = None

MAX_BLOCK = 16384  # longest block that a program holds in registers
_ELEMENTS = 2048  # elements of a program whose blocks are shorter than that


def _jit(function: Any) -> Any:
    return function if triton is None else triton.jit(function, do_not_specialize=["key"])


@_jit
def _hash32(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@_jit
def _round_elements(  # type: ignore[no-untyped-def]
    y, draws, mantissa: tl.constexpr, smallest: tl.constexpr, largest: tl.constexpr, mode: tl.constexpr
):
    pattern = tl.maximum(y.to(tl.int32, bitcast=True) & 0x7F800000, smallest)
    step = pattern.to(tl.float32, bitcast=True) * 2.0**-mantissa
    if mode == "rne":
        magic = step * 12582912.0  # 1.5 * 2^23
        rounded = (y + magic) - magic
    else:
        steps = ((254 << 23) - pattern).to(tl.float32, bitcast=True) * 2.0**mantissa * y
        below = steps.to(tl.int32).to(tl.float32)  # tl.floor would flush subnormals
        if mode == "away":
            below = tl.where(steps - below >= 0.5, below + 1.0, below)
        elif mode == "sr":
            below = tl.where(steps - below > draws, below + 1.0, below)
        rounded = below * step
    return tl.minimum(rounded.to(tl.int32, bitcast=True), largest).to(tl.float32, bitcast=True)


@_jit
def _kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, key, length, inner, blocks, total,
    block: tl.constexpr, padded: tl.constexpr, rows: tl.constexpr,
    mantissa: tl.constexpr, smallest: tl.constexpr, largest: tl.constexpr, emax: tl.constexpr, carry: tl.constexpr,
    signed_zero: tl.constexpr, mode: tl.constexpr, prescale: tl.constexpr,
):  # fmt: skip
    # a row is one block; rows count through [outer, blocks, inner], inner fastest
    row = (tl.program_id(0) * rows + tl.arange(0, rows))[:, None]
    lane = tl.arange(0, padded)[None, :]
    position = row // inner % blocks * block + lane
    offset = (row // inner // blocks * length + position) * inner + row % inner
    mask = (row < total) & (lane < block) & (position < length)
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)

    magnitude = tl.abs(x)
    amax = tl.max(magnitude.to(tl.int32, bitcast=True), axis=1, keep_dims=True)
    exponent = ((amax + carry) & 0x7F800000) - (emax << 23)
    exponent = tl.minimum(tl.maximum(exponent, 0), 254 << 23)
    scale = tl.maximum(exponent, 1 << 22).to(tl.float32, bitcast=True)
    inverse = tl.maximum((254 << 23) - exponent, 1 << 22).to(tl.float32, bitcast=True)
    scale = tl.where(amax < 0x7F800000, scale, float("nan"))

    y = magnitude * inverse
    if prescale:
        y = y * 0.75
    draws = y
    if mode == "sr":
        bits = _hash32(_hash32(offset.to(tl.uint32)) + key.to(tl.uint32))
        draws = (bits >> 8).to(tl.float32) * 2.0**-24
    units = _round_elements(y, draws, mantissa, smallest, largest, mode)
    result = units * scale
    if prescale:
        result = result * (1 / 0.75)
    signed = tl.where(x.to(tl.int32, bitcast=True) < 0, -result, result)
    if not signed_zero:
        signed = tl.where(units > 0, signed, result)
    tl.store(out_ptr + offset, signed, mask=mask)


def _require() -> None:
    if triton is None:
        raise RuntimeError("mx_quantize: backend='triton' needs Triton (pip install triton); use 'torch' or 'auto'.")


def supports(s: MXSettings) -> bool:
    """Whether Triton is installed and the blocks fit into a program."""
    return triton is not None and s.block <= MAX_BLOCK


def constants(s: MXSettings) -> dict[str, Any]:
    """The kernel's compile-time arguments."""
    padded = 1 << (s.block - 1).bit_length()
    return {
        "block": s.block,
        "padded": padded,
        "rows": max(1, _ELEMENTS // padded),
        "mantissa": s.fmt.mantissa_bits,
        "smallest": s.fmt.min_normal_pattern,
        "largest": s.fmt.max_pattern,
        "emax": s.fmt.emax,
        "carry": s.fmt.carry(s.scale),
        "signed_zero": s.fmt.signed_zero,
        "mode": s.rounding,
        "prescale": s.prescale,
    }


def quantize(x: Tensor, s: MXSettings) -> Tensor:
    """As :func:`kernels.mx_blocks.mx_quantize` with checked settings.

    Args:
        x: CUDA tensor, not empty; one that is not contiguous is copied first. (Any tensor in Triton's interpreter.)
        s: its settings.

    Returns:
        A contiguous tensor of ``x``'s shape and dtype.

    Raises:
        RuntimeError: Triton is not installed.
        ValueError: a block is longer than ``MAX_BLOCK``, or ``x`` is on another device.
    """
    _require()
    if s.block > MAX_BLOCK:
        raise ValueError(f"mx_quantize: backend='triton' takes blocks up to {MAX_BLOCK}, got {s.block}; use 'torch'.")
    if not x.is_cuda and not triton.knobs.runtime.interpret:
        raise ValueError(f"mx_quantize: backend='triton' got a tensor on {x.device}; use 'auto' or 'torch'.")
    x = x.contiguous()
    out = torch.empty_like(x)
    length, inner = x.shape[s.axis], x.shape[s.axis + 1 :].numel()
    blocks = -(-length // s.block)
    total = x.numel() // length * blocks
    compile_time = constants(s)
    key = int(seed_key(s.seed, torch.device("cpu")))
    with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext():
        _kernel[(triton.cdiv(total, compile_time["rows"]),)](
            x, out, key, length, inner, blocks, total, **compile_time, num_warps=4, enable_fp_fusion=False
        )
    return out
