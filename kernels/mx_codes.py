"""Tensors as a microscaling format stores them: element codes and E8M0 scales, and back.

Decoding an encoded tensor gives what :func:`kernels.mx_blocks.mx_quantize` gives, bit for bit.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.mx_blocks import MXSettings, check, join_blocks, round_blocks, scale_back_
from kernels.mx_formats import BIAS_FP32, FRACTION_FP32, ElementFormat, scale_codes, scale_values


class MXEncoded(NamedTuple):
    """A tensor in a microscaling format. The blocked axis, of length n, comes last.

    Attributes:
        codes: uint8 [..., n], one code a byte in its low bits; for FP4 [..., ceil(n / 2)], two a byte, the first one
            low.
        scales: uint8 [..., blocks], E8M0: 2^(code - 127); 255 makes its block NaN.
        settings: what the tensor was encoded with.
        length: n.
        dtype: the dtype to decode to.
    """

    codes: Tensor
    scales: Tensor
    settings: MXSettings
    length: int
    dtype: torch.dtype


@functools.cache
def code_values(fmt: ElementFormat) -> tuple[float, ...]:
    """The number behind every code, from code 0 on."""
    half = 1 << (fmt.bits - 1)
    if not fmt.exponent_bits:
        return tuple((code - 2 * half * (code >= half)) * 2.0**-fmt.mantissa_bits for code in range(2 * half))
    positive = [_value(fmt, code) for code in range(half)]
    return (*positive, *(-value for value in positive))


def _value(fmt: ElementFormat, code: int) -> float:
    exponent, fraction = divmod(code, 1 << fmt.mantissa_bits)
    significand = fraction / 2**fmt.mantissa_bits + (exponent > 0)
    value = significand * 2.0 ** (max(exponent, 1) - fmt.bias)
    if value <= fmt.max_normal:
        return value
    return math.inf if exponent - fmt.bias > fmt.emax and fraction == 0 else math.nan


def element_codes(units: Tensor, negative: Tensor, fmt: ElementFormat) -> Tensor:
    """uint8 codes of elements given by magnitude, on the grid of ``fmt``, and sign."""
    # a normal number's code is its float32 pattern with another bias and fewer bits; a subnormal's counts steps
    normal = (units.view(torch.int32) >> (FRACTION_FP32 - fmt.mantissa_bits)) - (
        (BIAS_FP32 - fmt.bias) << fmt.mantissa_bits
    )
    steps = (units * (2.0**fmt.mantissa_bits / fmt.min_normal)).to(torch.int32)
    code = torch.where(units < fmt.min_normal, steps, normal)
    if fmt.exponent_bits:
        signed = code | (negative.to(torch.int32) << (fmt.bits - 1))
    else:
        signed = torch.where(negative, -code, code) & 0xFF
    return signed.to(torch.uint8)


def _pack(codes: Tensor) -> Tensor:
    pairs = F.pad(codes, (0, codes.shape[-1] % 2)).unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def _unpack(packed: Tensor, length: int) -> Tensor:
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)[..., :length]


@torch.no_grad()
def mx_encode(
    x: Tensor,
    fmt: str = "mxfp4_e2m1",
    axis: int = -1,
    block: int | None = 32,
    scale: str = "floor",
    rounding: str = "rne",
    seed: int = 0,
    prescale: bool = False,
) -> MXEncoded:
    """Quantises ``x`` and keeps the codes. The options are those of :func:`kernels.mx_blocks.mx_quantize`.

    Raises:
        ValueError: as there, and for a tensor without elements.
    """
    s = check("mx_encode", x, fmt, axis, block, scale, rounding, seed, prescale)
    if x.numel() == 0:
        raise ValueError(f"mx_encode: shape {tuple(x.shape)} has no elements.")
    pieces = round_blocks(x, s)
    # a NaN block is known by its scale; its elements are zeros
    codes = [
        element_codes(units, blocks.signbit(), s.fmt).masked_fill(scales.isnan(), 0) for blocks, units, scales in pieces
    ]
    last_codes, last_scales = (
        join_blocks(x, s.axis).movedim(s.axis, -1).contiguous()
        for x in (codes, [scale_codes(scales) for _, _, scales in pieces])
    )
    return MXEncoded(_pack(last_codes) if s.fmt.bits == 4 else last_codes, last_scales, s, x.shape[s.axis], x.dtype)


def mx_decode(encoded: MXEncoded) -> Tensor:
    """The tensor behind the codes, in its original shape and dtype."""
    s = encoded.settings
    codes = _unpack(encoded.codes, encoded.length) if s.fmt.bits == 4 else encoded.codes
    table = torch.tensor(code_values(s.fmt), dtype=torch.float32, device=codes.device)
    scales = scale_values(encoded.scales).repeat_interleave(s.block, -1)[..., : encoded.length]
    return scale_back_(table[codes.long()], scales, s).movedim(-1, s.axis).contiguous().to(encoded.dtype)
