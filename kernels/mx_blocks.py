"""Microscaling (MX) fake quantisation: every block of a tensor becomes numbers that its MX format can hold.

``mx_quantize`` runs in PyTorch operations on any device, eager or compiled, and in one Triton kernel on CUDA tensors;
all of them give the same bits. The arithmetic is in :mod:`kernels.mx_formats`.

When is stochastic rounding unbiased? When nothing saturates. With ``scale="rceil"`` or ``"ceil"`` the expectation of
the result is ``x``: exactly for elements in the normal range of the element format, below it to 2^-24 of a grid step.
With ``"floor"`` or ``"even"`` elements beyond the largest number are pulled down, unless ``prescale`` shrinks the
elements by 3/4 once the scale is chosen: that leaves less than 1.5 * 2^emax of the 2^(emax+1) that these rules allow,
and every format reaches that far (Tseng et al., "Training LLMs with MXFP4", arXiv 2502.20586). The factors 3/4 and 4/3
round once each, so then the expectation is ``x`` to a relative 2^-23, and for a bfloat16 tensor, whose values cannot
hold the 4/3, to 2^-8.

The results are those of torchao 0.18, bit for bit, except for three kinds of block. One whose scale is 2^-127: torchao
divides by 2^-126, or in "rceil" by 1, and multiplies by 2^-127. In "rceil", one whose largest magnitude exceeds max
normal times a power of two by less than a few millionths: torchao's logarithm rounds the excess away, so it saturates.
And one with an infinity, which torchao saturates; here it becomes NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.mx_formats import (
    FORMATS,
    ROUNDINGS,
    SCALES,
    ElementFormat,
    block_scales,
    check_choice,
    round_elements,
    uniform,
)

BACKENDS = ("auto", "torch", "triton")
PRESCALE = 0.75
_MAX_ELEMENTS = (1 << 31) - (1 << 16)  # indices are int32, and a kernel's last program reaches past the end
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class MXSettings(NamedTuple):
    """A checked set of options for a tensor of known shape: ``axis`` is not negative, ``block`` at most its length."""

    fmt: ElementFormat
    axis: int
    block: int
    scale: str
    rounding: str
    seed: int
    prescale: bool


def check(
    caller: str, x: Tensor, fmt: str, axis: int, block: int | None, scale: str, rounding: str, seed: int, prescale: bool
) -> MXSettings:
    """The settings of :func:`mx_quantize`, checked against ``x``.

    Raises:
        ValueError: naming the option and what it may be.
    """
    check_choice(caller, "fmt", fmt, FORMATS)
    check_choice(caller, "scale", scale, SCALES)
    check_choice(caller, "rounding", rounding, ROUNDINGS)
    if type(seed) is not int:
        raise ValueError(f"{caller}: seed={seed!r} must be an int.")
    axis, block = check_blocks(caller, x, axis, block)
    return MXSettings(FORMATS[fmt], axis, block, scale, rounding, seed, prescale)


def check_blocks(caller: str, x: Tensor, axis: int, block: int | None) -> tuple[int, int]:
    """``axis`` from the front, and ``block`` bounded by its length.

    Raises:
        ValueError: for a dtype, an axis or a block that cannot be.
    """
    if not isinstance(x, Tensor):
        raise ValueError(f"{caller}: got {type(x).__name__}; give a tensor.")
    if x.dtype not in _DTYPES:
        raise ValueError(f"{caller}: got {x.dtype}; give float32, bfloat16 or float16 (x.float()).")
    if type(axis) is not int or not -x.ndim <= axis < x.ndim:
        raise ValueError(f"{caller}: axis={axis} must be from {-x.ndim} to {x.ndim - 1} for shape {tuple(x.shape)}.")
    if block is not None and (type(block) is not int or block < 1):
        raise ValueError(f"{caller}: block={block!r} must be an int of at least 1, or None for the whole axis.")
    if x.numel() > _MAX_ELEMENTS:
        raise ValueError(f"{caller}: {x.numel()} elements; split the tensor, up to {_MAX_ELEMENTS} are supported.")
    axis %= x.ndim
    length = x.shape[axis]
    return axis, length if block is None else min(block, length)


def split_blocks(x: Tensor, axis: int, block: int) -> list[Tensor]:
    """Views of ``x`` with ``axis`` split in two, (blocks, elements): all whole blocks, and the shorter last one if any.

    Filling that up with zeros would be simpler. But PyTorch 2.13 then compiles wrong code for a CPU: it splits the loop
    that reads the results back into blocks, whether or not they divide the axis.
    """
    length = x.shape[axis]
    whole = length // block * block
    pieces = [x.narrow(axis, 0, whole).unflatten(axis, (whole // block, block))]
    return pieces if whole == length else [*pieces, x.narrow(axis, whole, length - whole).unsqueeze(axis)]


def join_blocks(pieces: list[Tensor], axis: int) -> Tensor:
    """Undoes :func:`split_blocks`; contiguous."""
    flat = [piece.flatten(axis, axis + 1) for piece in pieces]
    return (flat[0] if len(flat) == 1 else torch.cat(flat, axis)).contiguous()


def split_draws(x: Tensor, axis: int, block: int, rounding: str, seed: int) -> list[Tensor | None]:
    """A draw for every element, split as :func:`split_blocks` splits ``x``; Nones if ``rounding`` needs none."""
    if rounding == "sr":
        return [*split_blocks(uniform(x.shape, seed, x.device), axis, block)]
    return [None, None]


def round_blocks(x: Tensor, s: MXSettings) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Pieces of ``x`` in float32, their magnitudes rounded in units of their scale, and the scales."""
    pieces = []
    draws = split_draws(x, s.axis, s.block, s.rounding, s.seed)
    for blocks, draw in zip(split_blocks(x.float(), s.axis, s.block), draws, strict=False):
        magnitude = blocks.abs()
        scales, inverse = block_scales(magnitude.amax(s.axis + 1, keepdim=True), s.fmt, s.scale)
        y = magnitude.mul_(inverse)
        if s.prescale:  # after the scale is chosen: it is this that makes room
            y = y.mul_(PRESCALE)
        pieces.append((blocks, round_elements(y, s.fmt, s.rounding, draw), scales))
    return pieces


def scale_back_(units: Tensor, scales: Tensor, s: MXSettings) -> Tensor:
    """Elements times their scale, undoing the prescale; in place."""
    result = units.mul_(scales)
    return result.mul_(1 / PRESCALE) if s.prescale else result


def _dequantize(blocks: Tensor, units: Tensor, scales: Tensor, s: MXSettings) -> Tensor:
    result = scale_back_(units, scales, s)
    if s.fmt.signed_zero:
        return result.copysign_(blocks)
    return torch.where(result > 0, result.copysign(blocks), result)


def _quantize(x: Tensor, s: MXSettings, backend: str) -> Tensor:
    if x.numel() == 0:
        return x.clone()
    if backend == "auto":
        backend = _automatic(x, s)
    if backend == "triton":
        from kernels import mx_triton  # not everyone has Triton

        return mx_triton.quantize(x, s)
    return join_blocks([_dequantize(*piece, s) for piece in round_blocks(x, s)], s.axis).to(x.dtype)


def _automatic(x: Tensor, s: MXSettings) -> str:
    if not x.is_cuda or torch.compiler.is_compiling():  # Inductor fuses the operations by itself
        return "torch"
    from kernels import mx_triton

    return "triton" if mx_triton.supports(s) else "torch"


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, quantized: Tensor) -> Tensor:
        return quantized.view_as(quantized)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def straight_through(x: Tensor, quantized: Tensor) -> Tensor:
    """``quantized``, with the gradient passed on to ``x`` unchanged; a cast through bits would stop it silently."""
    if x.requires_grad and torch.is_grad_enabled():
        return _StraightThrough.apply(x, quantized)
    return quantized


def mx_quantize(
    x: Tensor,
    fmt: str = "mxfp4_e2m1",
    axis: int = -1,
    block: int | None = 32,
    scale: str = "floor",
    rounding: str = "rne",
    seed: int = 0,
    prescale: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Rounds ``x`` to what a microscaling format can hold: quantises and dequantises, block by block.

    A block with an infinity or a NaN becomes NaN throughout; other blocks are untouched by it. A zero, and what is
    rounded to zero, keeps its sign (mxint8 has no -0). Blocks too small for the smallest scale, 2^-127, use it.

    Args:
        x: float32, bfloat16 or float16, any shape of at least one dimension, fewer than about 2^31 elements.
        fmt: ``mxfp8_e4m3 | mxfp8_e5m2 | mxfp6_e2m3 | mxfp6_e3m2 | mxfp4_e2m1 | mxint8``.
        axis: the axis blocks run along.
        block: elements that share a scale, or None for the whole axis. A last, shorter block comes out as if filled up
            with zeros.
        scale: ``floor`` (OCP) | ``ceil`` | ``even`` | ``rceil``: see :mod:`kernels.mx_formats`.
        rounding: ``rne`` | ``away`` | ``rz`` | ``sr``.
        seed: for ``sr`` only: a draw is a hash of all 64 bits of the seed and the element's position in ``x``, so every
            rank and a resumed or recomputed step draw alike; change the seed with the step and with the tensor.
        prescale: multiplies the elements by 3/4 before they are rounded and by 4/3 after, so that nothing saturates
            whatever the scale. The result then lies on 4/3 of the grid, and is rounded to nearest in ``x``'s dtype.
        backend: ``torch``, ``triton`` (CUDA tensors) or ``auto``: the Triton kernel for CUDA tensors where Triton is
            installed, unless ``torch.compile`` is tracing.

    Returns:
        A contiguous tensor of ``x``'s shape and dtype. Its gradient is passed on to ``x`` unchanged (straight-through),
        also for saturated elements. Without ``prescale`` every result is exactly a number of ``x``'s dtype, or infinite
        where it rounds up past the largest one (float16: 65504 to 65536).

    Raises:
        ValueError: for another dtype, or an option that cannot be.
    """
    check_choice("mx_quantize", "backend", backend, BACKENDS)
    s = check("mx_quantize", x, fmt, axis, block, scale, rounding, seed, prescale)
    return straight_through(x, _quantize(x.detach(), s, backend))
