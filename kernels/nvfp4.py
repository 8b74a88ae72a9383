"""NVFP4 fake quantisation: E2M1 elements, an E4M3 scale for every 16 of them, and one float32 scale for the tensor.

An element is ``t * s * P`` with ``P`` in E2M1 (at most 6), ``s`` in E4M3 (at most 448) and ``t = amax / (6 * 448)``, so
that the largest block has the largest scale. ``s`` is rounded to nearest and is at least 2^-6, E4M3's smallest normal
number, as in torchao; blocks whose largest magnitude is below ``amax / 28672`` lose precision to that.

An ``s`` that was rounded down makes the top of its block saturate, by up to 1/16. Stochastic rounding is unbiased but
for the elements that saturate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.mx_blocks import check_blocks, join_blocks, split_blocks, split_draws, straight_through
from kernels.mx_formats import FORMATS, ROUNDINGS, check_choice, round_elements

BLOCK = 16
_ELEMENT = FORMATS["mxfp4_e2m1"]
_SCALE = FORMATS["mxfp8_e4m3"]
_MIN_TENSOR_SCALE = 2.0**-120  # keeps the reciprocal of the smallest product of scales finite


def _quantize(blocks: Tensor, draws: Tensor | None, tensor_scale: Tensor, axis: int, rounding: str) -> Tensor:
    magnitude = blocks.abs()
    scales = _divided(magnitude.amax(axis + 1, keepdim=True), _ELEMENT.max_normal) / tensor_scale
    scales = round_elements(scales.clamp(_SCALE.min_normal, _SCALE.max_normal), _SCALE, "rne")
    units = round_elements(magnitude * (tensor_scale.reciprocal() / scales), _ELEMENT, rounding, draws)
    return (units * (tensor_scale * scales)).copysign(blocks)


def _divided(x: Tensor, divisor: float) -> Tensor:
    # by a tensor, because CUDA multiplies by the reciprocal of a Python number instead
    return x / torch.full_like(x, divisor)


def nvfp4_quantize(x: Tensor, axis: int = -1, rounding: str = "rne", seed: int = 0) -> Tensor:
    """Rounds ``x`` to what NVFP4 can hold.

    An infinity or a NaN anywhere makes the whole tensor NaN, since all of it shares a scale. Zeros keep their sign.

    Args:
        x: float32, bfloat16 or float16, any shape of at least one dimension.
        axis: the axis that blocks of 16 run along; a last, shorter block comes out as if filled up with zeros.
        rounding: of the elements: ``rne | away | rz | sr``, as in :func:`kernels.mx_blocks.mx_quantize`.
        seed: for ``sr``, as there.

    Returns:
        A tensor of ``x``'s shape and dtype, rounded to nearest in it; the gradient is passed on to ``x`` unchanged.

    Raises:
        ValueError: for another dtype, axis or rounding.
    """
    check_choice("nvfp4_quantize", "rounding", rounding, ROUNDINGS)
    axis, block = check_blocks("nvfp4_quantize", x, axis, BLOCK)
    if x.numel() == 0:
        return x.clone()
    wide = x.detach().float()
    amax = wide.abs().amax()
    tensor_scale = _divided(amax, _ELEMENT.max_normal * _SCALE.max_normal).clamp_min(_MIN_TENSOR_SCALE)
    tensor_scale = torch.where(amax < torch.inf, tensor_scale, torch.nan)
    draws = split_draws(wide, axis, block, rounding, seed)
    pieces = [
        _quantize(blocks, draw, tensor_scale, axis, rounding)
        for blocks, draw in zip(split_blocks(wide, axis, block), draws, strict=False)
    ]
    return straight_through(x, join_blocks(pieces, axis).to(x.dtype))
