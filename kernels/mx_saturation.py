"""How much of a tensor an MX format squeezes into its largest number.

Under a floor scale the magnitudes of a block reach to twice a power of two, the largest number of the format only to
1.75 (E4M3, E5M2, E3M2), 1.875 (E2M3) or 1.5 (E2M1) times it. What lies beyond *overflows* and saturates, and a block
whose numbers are close together above the last rounding boundary becomes one number: all of it is in the *last bin*.
arXiv 2506.20752 counts the overflow and calls it the last bin; these are the two apart, of the formats as they are
(the released table is wrong for E2M1 and bfloat16 and lacks E2M3).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.mx_blocks import check, round_blocks
from kernels.mx_formats import block_scales


class Saturation(NamedTuple):
    """Counts over a tensor.

    Attributes:
        last_bin: int64 [], elements that round or saturate to the format's largest number.
        overflow: int64 [], elements beyond it.
        elements: how many there are.
    """

    last_bin: Tensor
    overflow: Tensor
    elements: int


@torch.no_grad()
def mx_saturation(
    x: Tensor,
    fmt: str = "mxfp8_e4m3",
    axis: int = -1,
    block: int | None = 32,
    scale: str = "floor",
    rounding: str = "rne",
) -> Saturation:
    """Counts what :func:`kernels.mx_quantize` with these options makes the largest number, and what saturates.

    A block of zeros, or with a number that is not finite, counts as neither.

    Raises:
        ValueError: as there; ``rounding`` may not be ``sr``, whose result is drawn.
    """
    if rounding == "sr":
        raise ValueError("mx_saturation: rounding='sr' draws its result; count with 'rne'.")
    s = check("mx_saturation", x, fmt, axis, block, scale, rounding, 0, False)
    last, over = (torch.zeros((), dtype=torch.int64, device=x.device) for _ in range(2))
    if x.numel() == 0:
        return Saturation(last, over, 0)
    for blocks, units, scales in round_blocks(x, s):
        finite = ~scales.isnan()
        last += ((units == s.fmt.max_normal) & finite).sum()
        _, inverse = block_scales(blocks.abs().amax(s.axis + 1, keepdim=True), s.fmt, scale)
        over += ((blocks.abs() * inverse > s.fmt.max_normal) & finite).sum()
    return Saturation(last, over, x.numel())
