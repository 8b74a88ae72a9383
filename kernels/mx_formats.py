"""The arithmetic of microscaling (MX) formats: element formats, the scale of a block, and rounding onto the grid.

An MX block is up to 32 numbers ``X * P_i``: one scale ``X``, a power of two from 2^-127 to 2^127 (E8M0), and an element
``P_i`` each in a format of 4 to 8 bits (OCP Microscaling Formats MX v1.0):

========  ====  ========  =====  ====  ====  ==========  =============  ========================================
element   bits  exponent  frac.  bias  emax  max normal  min subnormal  codes that are no number
========  ====  ========  =====  ====  ====  ==========  =============  ========================================
FP8 E5M2  8     5         2      15    15    57344       2^-16          infinity and NaN, as in IEEE 754
FP8 E4M3  8     4         3      7     8     448         2^-9           NaN, all ones: the top is 1.75 * 2^8
FP6 E3M2  6     3         2      3     4     28          2^-4           none
FP6 E2M3  6     2         3      1     2     7.5         2^-3           none
FP4 E2M1  4     2         1      1     2     6           2^-1           none
INT8      8     none      6      (1)   0     127/64      2^-6           none; -2 is unused, zero has no sign
========  ====  ========  =====  ====  ====  ==========  =============  ========================================

INT8 is a fixed-point number with 6 fractional bits. Its grid is that of a float whose smallest normal number is 1,
which is what a bias of 1 says, so it needs no code of its own.

**Scale.** With ``a`` the largest magnitude of the block, ``X = 2^(e - emax)``, where ``e`` is the exponent of ``a``, or
one more if its significand is large. "Large" is all that the four rules differ in, and each is one integer addition to
the bit pattern of ``a``, whose carry reaches the exponent or does not:

=====  =====================================  ================================================================
rule   rounds up a significand that           consequence
=====  =====================================  ================================================================
floor  (none; OCP, section 6.3)               magnitudes from max normal to 2^(emax+1) saturate: 6 to 8 in E2M1
even   rounds to 2 in ``frac.`` bits          fewer saturate, 6 to 7 in E2M1
rceil  exceeds that of max normal             none saturates, and the grid is as fine as that allows
ceil   exceeds 1                              none saturates; the grid may be twice as coarse as needed
=====  =====================================  ================================================================

**Rounding.** The grid's step at a magnitude, in units of ``X``, is that of its binade, or of the smallest normal
number's. Adding and subtracting ``1.5 * 2^23`` steps rounds to nearest even; the other modes divide by the step and
round an integer. All products are by powers of two, hence exact, so no compiler can change a bit by contracting one
with an addition. Magnitudes are bounded through their bit patterns, which are ordered like them; that costs one
instruction where a float minimum has to look for NaN as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor

from kernels.rounding import hash32

SCALES = ("floor", "ceil", "even", "rceil")
ROUNDINGS = ("rne", "away", "rz", "sr")
FRACTION_FP32 = 23
BIAS_FP32 = 127
EXPONENT_FP32 = 0x7F800000
E8M0_MAX = 254  # the code of 2^127; 255 is NaN
E8M0_NAN = 255
_SALT = 0x5BD1E995  # the hash maps 0 to 0; without this element 0 under seed 0 would always draw 0
_MIN_SCALE = 1 << (FRACTION_FP32 - 1)  # the pattern of 2^-127, a float32 subnormal


@dataclasses.dataclass(frozen=True)
class ElementFormat:
    """One element format of the table above.

    Args:
        exponent_bits: 0 for a fixed-point number in two's complement.
        mantissa_bits: explicit fraction bits.
        bias: the exponent of the smallest normal number is ``1 - bias``.
        emax: exponent of the largest normal number; not ``2^exponent_bits - 1 - bias`` where codes are reserved.
        max_normal: the largest number; larger ones saturate to it.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    emax: int
    max_normal: float

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 1 + max(self.exponent_bits, 1) + self.mantissa_bits

    @property
    def signed_zero(self) -> bool:
        """Whether -0 has a code; two's complement has one zero."""
        return self.exponent_bits > 0

    @property
    def min_normal(self) -> float:
        """Smallest normal number; below it the grid is uniform."""
        return 2.0 ** (1 - self.bias)

    @property
    def min_normal_pattern(self) -> int:
        """float32 bit pattern of ``min_normal``."""
        return (1 - self.bias + BIAS_FP32) << FRACTION_FP32

    @property
    def max_pattern(self) -> int:
        """float32 bit pattern of ``max_normal``."""
        return int((self.emax + BIAS_FP32 - 1 + self.max_normal / 2.0**self.emax) * 2**FRACTION_FP32)

    def carry(self, scale: str) -> int:
        """What rule ``scale`` adds to the bit pattern of a block's largest magnitude."""
        full = (1 << FRACTION_FP32) - 1
        half_step = 1 << (FRACTION_FP32 - 1 - self.mantissa_bits)
        return {"floor": 0, "even": half_step, "rceil": full - (self.max_pattern & full), "ceil": full}[scale]


FORMATS = {
    "mxfp8_e4m3": ElementFormat(4, 3, bias=7, emax=8, max_normal=448.0),
    "mxfp8_e5m2": ElementFormat(5, 2, bias=15, emax=15, max_normal=57344.0),
    "mxfp6_e2m3": ElementFormat(2, 3, bias=1, emax=2, max_normal=7.5),
    "mxfp6_e3m2": ElementFormat(3, 2, bias=3, emax=4, max_normal=28.0),
    "mxfp4_e2m1": ElementFormat(2, 1, bias=1, emax=2, max_normal=6.0),
    "mxint8": ElementFormat(0, 6, bias=1, emax=0, max_normal=127 / 64),
}


def check_choice(caller: str, key: str, value: object, allowed: Iterable[str]) -> None:
    """Raises ValueError unless ``value`` is one of ``allowed``."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise ValueError(f"{caller}: {key}={value!r} is not one of {', '.join(allowed)}.")


def block_scales(amax: Tensor, fmt: ElementFormat, scale: str) -> tuple[Tensor, Tensor]:
    """The scale of every block and its reciprocal, both exact powers of two.

    Args:
        amax: float32, the largest magnitude of every block.
        fmt: element format.
        scale: one of ``SCALES``.

    Returns:
        The scale, float32, within 2^-127 and 2^127, NaN where ``amax`` is infinite or NaN; and its reciprocal, some
        finite number where the scale is NaN.
    """
    exponent = ((amax.view(torch.int32) + fmt.carry(scale)) & EXPONENT_FP32) - (fmt.emax << FRACTION_FP32)
    exponent = exponent.clamp(0, E8M0_MAX << FRACTION_FP32)
    scales = exponent.clamp_min(_MIN_SCALE).view(torch.float32)
    inverse = ((E8M0_MAX << FRACTION_FP32) - exponent).clamp_min(_MIN_SCALE).view(torch.float32)
    return torch.where(amax < torch.inf, scales, torch.nan), inverse


def scale_codes(scales: Tensor) -> Tensor:
    """E8M0 codes, uint8, of the scales that :func:`block_scales` gives."""
    return ((scales.view(torch.int32) >> FRACTION_FP32) & 0xFF).to(torch.uint8)


def scale_values(codes: Tensor) -> Tensor:
    """float32 scales of E8M0 codes."""
    scales = (codes.to(torch.int32) << FRACTION_FP32).clamp_min(_MIN_SCALE).view(torch.float32)
    return torch.where(codes == E8M0_NAN, torch.nan, scales)


def round_elements(y: Tensor, fmt: ElementFormat, rounding: str, draws: Tensor | None = None) -> Tensor:
    """Rounds magnitudes onto the grid of ``fmt`` and saturates.

    Args:
        y: float32, not negative, in units of the block's scale.
        fmt: element format.
        rounding: ``rne`` (nearest, ties to even), ``away`` (nearest, ties away from zero), ``rz`` (towards zero) or
            ``sr`` (stochastic).
        draws: for ``sr``: float32 in [0, 1), one for every element; a magnitude rounds up if the fraction of a step it
            lies above the grid exceeds its draw.

    Returns:
        float32 magnitudes, at most ``fmt.max_normal``; for an infinity or a NaN, anything.
    """
    pattern = (y.view(torch.int32) & EXPONENT_FP32).clamp_min_(fmt.min_normal_pattern)
    step = pattern.view(torch.float32) * 2.0**-fmt.mantissa_bits
    if rounding == "rne":
        magic = step.mul_(1.5 * 2.0**FRACTION_FP32)  # its last place is a step
        rounded = (y + magic).sub_(magic)
    else:
        per_step = ((E8M0_MAX << FRACTION_FP32) - pattern).view(torch.float32).mul_(2.0**fmt.mantissa_bits)
        rounded = _round_steps(per_step.mul_(y), rounding, draws).mul_(step)
    return rounded.view(torch.int32).clamp_max_(fmt.max_pattern).view(torch.float32)


def _round_steps(steps: Tensor, rounding: str, draws: Tensor | None) -> Tensor:
    below, fraction = steps.floor(), steps.frac()
    if rounding == "away":
        below += fraction.mul_(2.0).floor_()
    elif rounding == "sr":
        assert draws is not None
        below += fraction.sub_(draws).ceil_()
    return below


def seed_key(seed: int, device: torch.device) -> Tensor:
    """All 64 bits of a seed hashed to 32; a tensor, so that a compiled function takes any seed without recompiling."""
    low, high = (
        torch.full((), (half & 0xFFFFFFFF) - ((half & 0x80000000) << 1), dtype=torch.int32, device=device)
        for half in (seed, seed >> 32)
    )
    return hash32(hash32(high ^ _SALT) + low)


def _hash32_(x: Tensor) -> Tensor:
    """:func:`kernels.rounding.hash32` in place: the memory of temporaries costs eager mode more than the arithmetic."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x7FEB352D
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= 0x846CA68B - (1 << 32)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def uniform(shape: torch.Size, seed: int, device: torch.device) -> Tensor:
    """float32 draws from 0, 2^-24, ... 1 - 2^-24 that depend only on (seed, flat element index)."""
    bits = torch.arange(shape.numel(), dtype=torch.int32, device=device).view(shape)
    bits = _hash32_(_hash32_(bits).add_(seed_key(seed, device)))
    return (bits >> 8).bitwise_and_(0xFFFFFF).to(torch.float32).mul_(2.0**-24)
