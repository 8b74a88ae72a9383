"""The format of one operand of a matrix product, in fake quantisation: rounded to the format, kept in its own dtype."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kernels import mx_quantize, nvfp4_quantize
from kernels.mx_blocks import join_blocks, split_blocks
from kernels.mx_formats import FORMATS, ROUNDINGS, SCALES, block_scales, check_choice, round_elements

NVFP4 = "nvfp4"
RELEASED_BUMP = "bump_released"
_MANTISSA_FP32 = 0x7FFFFF
_THREE_QUARTERS = 0x600000  # the mantissa bits of 1.75


@dataclasses.dataclass(frozen=True)
class OperandFormat:
    """A block format and how numbers are rounded into it; called with a tensor, it rounds it.

    Args:
        fmt: a format of :func:`kernels.mx_quantize`, or ``nvfp4``, whose scales and blocks of 16 are its own: ``scale``
            and ``block`` stay as they are by default.
        scale: rule of the shared scale, ``floor | ceil | even | rceil``; or, of E4M3, ``bump_released``, see
            :func:`released_bump`.
        rounding: of the elements, ``rne | away | rz | sr``.
        block: elements that share a scale; None is a whole axis.

    Raises:
        ValueError: naming the option; also ``nvfp4`` with another scale or block, and ``bump_released`` with another
            format or ``sr``.
    """

    fmt: str = "mxfp4_e2m1"
    scale: str = "floor"
    rounding: str = "rne"
    block: int | None = 32

    def __post_init__(self) -> None:
        check_choice("OperandFormat", "fmt", self.fmt, (*FORMATS, NVFP4))
        check_choice("OperandFormat", "scale", self.scale, (*SCALES, RELEASED_BUMP))
        check_choice("OperandFormat", "rounding", self.rounding, ROUNDINGS)
        if self.block is not None and self.block < 1:
            raise ValueError(f"OperandFormat: block={self.block} must be at least 1, or null for a whole axis.")
        if self.fmt == NVFP4 and (self.scale, self.block) != ("floor", 32):
            raise ValueError(
                f"OperandFormat: scale={self.scale!r} and block={self.block} are none of fmt='nvfp4', which has scales "
                "and blocks of its own: leave them out, and the change bump too."
            )
        if self.scale == RELEASED_BUMP:
            _check_released_bump(self.fmt, self.rounding)

    def __call__(self, x: Tensor, axis: int, seed: int) -> Tensor:
        """``x`` rounded to the format in blocks along ``axis``.

        Raises:
            ValueError: the axis has no blocks of that length.
        """
        if self.fmt == NVFP4:
            return nvfp4_quantize(x, axis, self.rounding, seed)
        if self.scale == RELEASED_BUMP:
            return released_bump(x, self.fmt, axis, self.block or x.shape[axis], self.rounding)
        return mx_quantize(x, self.fmt, axis, self.block, self.scale, self.rounding, seed)


@torch.no_grad()
def released_bump(x: Tensor, fmt: str, axis: int, block: int, rounding: str) -> Tensor:
    """The exponent bump of the code released with arXiv 2506.20752, whose maximum runs over the wrong axis.

    The bump that the paper describes doubles the scale of a block whose largest magnitude has a significand over 1.75,
    which for E4M3 is ``scale="rceil"``. The released one takes the maximum *across* the blocks, at every position
    within them, and doubles the scale of the elements at that position. Of the elements that a floor scale saturates
    it thus corrects some: a tenth where there are 64 blocks, a half where there are 16.

    Args:
        x: the tensor.
        fmt: ``mxfp8_e4m3``.
        axis: the axis blocks run along.
        block: elements of a block; divides the axis.
        rounding: ``rne | away | rz``.

    Raises:
        ValueError: the axis is no multiple of the block, the rounding is stochastic, or the format another one.
    """
    _check_released_bump(fmt, rounding)
    axis %= x.ndim
    if x.shape[axis] % block:
        raise ValueError(
            f"scale='bump_released': axis {axis} of length {x.shape[axis]} must be a multiple of block={block}; use "
            "another block, or scale='rceil', the bump as described."
        )
    (blocks,) = split_blocks(x.float(), axis, block)
    magnitude = blocks.abs()
    scales, inverse = block_scales(magnitude.amax(axis + 1, keepdim=True), FORMATS[fmt], "floor")
    top = magnitude.amax(axis, keepdim=True)
    factor = torch.where((top.view(torch.int32) & _MANTISSA_FP32) > _THREE_QUARTERS, 2.0, 1.0)
    units = round_elements(magnitude * inverse / factor, FORMATS[fmt], rounding)
    return join_blocks([(units * scales * factor).copysign(blocks)], axis).to(x.dtype)


def _check_released_bump(fmt: str, rounding: str) -> None:
    if fmt != "mxfp8_e4m3":
        raise ValueError(
            f"scale='bump_released' is of fmt='mxfp8_e4m3' alone, not of {fmt!r}: leave out as_released or the change "
            "bump, or use scale='rceil', the bump as described."
        )
    if rounding == "sr":
        raise ValueError(
            "scale='bump_released' has no rounding='sr': use rne, away or rz, or scale='rceil', the bump as described."
        )
