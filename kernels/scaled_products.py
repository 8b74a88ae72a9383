"""Products of two MX tensors by the hardware's own scaled matrix multiplication, where a GPU has one.

The operands are encoded (:func:`kernels.mx_encode`) and multiplied by ``torch.nn.functional.scaled_mm``, cuBLAS's
block-scaled product. It computes what the emulation does, a product of the fake-quantised operands: the elements and
their scales are the same numbers, and what differs is the order of the sum and the precision of its accumulator. So the
two agree to ``TOLERANCE``, relative to the root mean square of the result, before that is rounded to its dtype.

Only MXFP8 with blocks of 32 is there, with at least one operand in E4M3, on compute capability 10.0 (Blackwell) and
later; on anything else :func:`native_obstacle` says why not. cuBLAS reads the scales of 128 rows by 4 blocks as one
tile of 32 by 16 bytes, rows r, r + 32, r + 64 and r + 96 side by side
(https://docs.nvidia.com/cuda/cublas/index.html#d-block-scaling-factors-layout).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.mx_codes import MXEncoded, mx_encode
from kernels.mx_formats import SCALES

BLOCK = 32
CAPABILITY = (10, 0)
TOLERANCE = 1e-3
_DTYPES = {"mxfp8_e4m3": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2}
_MULTIPLE = 16  # of rows and columns of the result


class BlockFormat(Protocol):
    """What of an operand does not depend on its shape."""

    @property
    def fmt(self) -> str: ...

    @property
    def scale(self) -> str: ...

    @property
    def block(self) -> int | None: ...


class ScaledOperand(NamedTuple):
    """One operand and how it is quantised; ``axis`` is the one that the product sums over."""

    x: Tensor
    axis: int
    fmt: str
    scale: str
    rounding: str
    block: int | None
    seed: int

    @property
    def length(self) -> int:
        """Of the axis that is summed over."""
        return self.x.shape[self.axis]

    def encode(self) -> MXEncoded:
        """Codes and scales, the summed axis last."""
        return mx_encode(self.x, self.fmt, self.axis, self.block, self.scale, self.rounding, self.seed)


def device_obstacle(device: torch.device) -> str | None:
    """Why a device has no native MX product, or None if it has."""
    if device.type != "cuda":
        return f"the device is {device.type}, not cuda"
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} has compute capability {capability}, below {CAPABILITY}"
    if not hasattr(F, "scaled_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_mm"
    return None


def format_obstacle(a: BlockFormat, b: BlockFormat) -> str | None:
    """Why a pair of formats has no native product, whatever the shapes, or None if it has."""
    if a.fmt not in _DTYPES or b.fmt not in _DTYPES:
        return f"{a.fmt} by {b.fmt} is not MXFP8"
    if a.fmt == b.fmt == "mxfp8_e5m2":
        return "cuBLAS has no product of two E5M2 operands"
    for one in (a, b):
        if one.scale not in SCALES:
            return f"scale {one.scale} is not one scale a block"
        if one.block != BLOCK:
            return f"cuBLAS has blocks of {BLOCK}, not of {one.block}"
    return None


def shape_obstacle(a: ScaledOperand, b: ScaledOperand) -> str | None:
    """Why these two shapes have no native product, or None if they have."""
    for one in (a, b):
        if one.length % BLOCK:
            return f"an axis of {one.length} is not whole blocks of {BLOCK}"
        if (side := one.x.numel() // one.length) % _MULTIPLE:
            return f"a side of the result, {side}, is no multiple of {_MULTIPLE}"
    return None


def native_obstacle(a: ScaledOperand, b: ScaledOperand) -> str | None:
    """Why these two can not be multiplied natively, or None if they can."""
    return format_obstacle(a, b) or shape_obstacle(a, b) or device_obstacle(a.x.device)


def tiled_scales(scales_RK: Tensor) -> Tensor:
    """E8M0 scales [rows, blocks] as cuBLAS reads them: whole tiles of 128 by 4, filled up with zeros, flat."""
    rows, blocks = scales_RK.shape
    padded = F.pad(scales_RK, (0, -blocks % 4, 0, -rows % 128))
    tiles = padded.unflatten(0, (-1, 4, 32)).unflatten(3, (-1, 4))  # row tile, quarter, row, block tile, block
    return tiles.permute(0, 3, 2, 1, 4).flatten()


def native_product(a: ScaledOperand, b: ScaledOperand) -> Tensor:
    """The sum over both ``axis`` of quantised ``a`` times quantised ``b``; call where :func:`native_obstacle` is None.

    Returns:
        ``a``'s other axes, then ``b``'s, in ``a``'s dtype.
    """
    encoded = [operand.encode() for operand in (a, b)]
    codes = [one.codes.flatten(0, -2).view(_DTYPES[operand.fmt]) for one, operand in zip(encoded, (a, b), strict=True)]
    scales = [tiled_scales(one.scales.flatten(0, -2)).view(torch.float8_e8m0fnu) for one in encoded]
    recipe, swizzle = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    product = F.scaled_mm(
        codes[0], codes[1].T, scales[0], recipe, scales[1], recipe, swizzle, swizzle,
        output_dtype=torch.bfloat16 if a.x.dtype is torch.bfloat16 else torch.float32,
    )  # fmt: skip
    return product.view(*encoded[0].codes.shape[:-1], *encoded[1].codes.shape[:-1]).to(a.x.dtype)
