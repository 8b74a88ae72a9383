"""Rounding a float32 tensor to fewer significand bits, by integer arithmetic on its bit pattern.

A float32 value is ``(-1)^s * 1.f * 2^e`` with 23 explicit bits in ``f``. Keeping ``m`` of them means dropping
``d = 23 - m`` low bits of the pattern, and because a float's pattern is ordered like its magnitude, every rounding mode
is one integer addition before the low bits are cut:

====  =====================================  =================================================================
mode  added before the cut                   meaning
====  =====================================  =================================================================
rne   ``2^(d-1) - 1 + lowest kept bit``      nearest, ties to even: unbiased on random data, biased on exact ties
rz    ``0``                                  towards zero: always biased
sr    a random integer in ``[0, 2^d)``       stochastic: unbiased for every value, at the price of variance
====  =====================================  =================================================================

The same addition carries into the exponent, so rounding up across a binade and overflow to infinity come out right, and
subnormals round on their fixed grid. Seven bits give exactly ``x.to(torch.bfloat16)``. The trick survives
``torch.compile``, which deletes a ``float32 -> bfloat16 -> float32`` round trip (pytorch#179561).

Stochastic rounding draws from a counter: the random integer is a hash of (seed, index), never of generator state, so
that it is the same on every rank, on resume and in a recomputed pass. The 32-bit finaliser is "lowbias32" of
C. Wellons, https://nullprogram.com/blog/2018/07/31/.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

MANTISSA_FP32 = 23  # explicit bits, as in IEEE 754 "trailing significand"
MANTISSA_BF16 = 7
MANTISSA_FP16 = 10
MODES = ("rne", "rz", "sr")
_FP16_MAX = 65504.0
_FP16_MIN_NORMAL = 2.0**-14
_FP16_QUANTUM_MAGIC = (
    1.5 * 2.0**23 * 2.0**-24
)  # adding it makes 2^-24, fp16's subnormal step, the last place of a float32


def hash32(x: Tensor) -> Tensor:
    """lowbias32 on int32 lanes; multiplication wraps, and ``>>`` is masked because int32 shifts copy the sign."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - (1 << 32))
    return x ^ ((x >> 16) & 0xFFFF)


def splitmix64(x: int) -> int:
    """One output of the SplitMix64 generator (Steele, Lea and Flood 2014) at state ``x``, taken modulo 2^64."""
    z = (x + 0x9E3779B97F4A7C15) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return z ^ (z >> 31)


def split_seed(seed: int) -> tuple[int, int]:
    """A seed as two signed 32-bit integers, mixed so that seeds of any pattern draw unlike each other."""
    low, high = ((splitmix64(seed) >> shift) & 0xFFFFFFFF for shift in (0, 32))
    return low - ((low >> 31) << 32), high - ((high >> 31) << 32)


def random_bits(index: Tensor, seed: int) -> Tensor:
    """int32 random bits that depend only on (seed, index): ``hash32(hash32(index ^ high) + low)``."""
    low, high = split_seed(seed)
    return hash32(hash32(index ^ high) + low)


def flat_index(x: Tensor) -> Tensor:
    """int32 position of every element of ``x`` in row-major order."""
    return torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape)


def round_to(x: Tensor, mantissa_bits: int, mode: str = "rne", seed: int = 0, index: Tensor | None = None) -> Tensor:
    """Rounds every element of ``x`` to ``mantissa_bits`` explicit significand bits, keeping float32's exponent range.

    Args:
        x: float32 tensor of any shape. bfloat16 and float16 are widened first (exactly) and come back as float32.
        mantissa_bits: explicit bits to keep, 1 to 23 (bfloat16 has 7, float16 has 10; 23 keeps everything).
        mode: ``rne`` (nearest, ties to even), ``rz`` (towards zero) or ``sr`` (stochastic).
        seed: for ``sr`` only; the draw is a function of (seed, index).
        index: for ``sr`` only: int32, broadcastable to ``x``; None is the element's row-major position.

    Returns:
        A float32 tensor of the same shape. Infinities and NaN pass through.

    Raises:
        ValueError: for another dtype, mode or number of bits.
    """
    if mode not in MODES:
        raise ValueError(f"round_to: mode={mode!r} is not one of {', '.join(MODES)}.")
    if type(mantissa_bits) is not int or not 1 <= mantissa_bits <= MANTISSA_FP32:
        raise ValueError(
            f"round_to: mantissa_bits={mantissa_bits!r} must be an int from 1 to {MANTISSA_FP32} (bfloat16 has 7)."
        )
    if x.dtype in (torch.bfloat16, torch.float16):
        x = x.float()
    if x.dtype is not torch.float32:
        raise ValueError(f"round_to: got {x.dtype}; give float32, bfloat16 or float16 (x.float()).")
    drop = MANTISSA_FP32 - mantissa_bits
    if drop == 0:
        return x
    bits = x.contiguous().view(torch.int32)
    if mode == "rne":
        bits = bits + (((bits >> drop) & 1) + ((1 << (drop - 1)) - 1))
    elif mode == "sr":
        bits = bits + (random_bits(flat_index(x) if index is None else index, seed) & ((1 << drop) - 1))
    rounded = (bits & (-1 << drop)).view(torch.float32)
    # an infinity has no low bits to carry from, so it stays; a NaN's payload could carry or be cut into a number
    return torch.where(x != x, x, rounded)


@dataclasses.dataclass(frozen=True)
class Rounding:
    """One rounding: how many significand bits are kept, how ties go, and how wide the exponent is.

    Written in YAML as ``fp32``, ``bf16``, ``fp16`` or a number of mantissa bits, each with an optional mode behind a
    colon: ``bf16:sr``, ``"3:rz"``.

    Args:
        mantissa_bits: explicit significand bits, 1 to 23; 23 means "leave the value alone".
        mode: ``rne``, ``rz`` or ``sr``.
        exponent_bits: 8 (float32's range) or 5 (float16's range, with its subnormals and overflow).
    """

    mantissa_bits: int = MANTISSA_FP32
    mode: str = "rne"
    exponent_bits: int = 8

    def __post_init__(self) -> None:
        if isinstance(self.mantissa_bits, bool) or not 1 <= self.mantissa_bits <= MANTISSA_FP32:
            raise ValueError(f"mantissa_bits={self.mantissa_bits!r} must be from 1 to {MANTISSA_FP32}.")
        if self.mode not in MODES:
            raise ValueError(f"rounding mode {self.mode!r} is not one of {', '.join(MODES)}.")
        if self.exponent_bits not in (5, 8) or (self.exponent_bits == 5 and self.mantissa_bits != MANTISSA_FP16):
            raise ValueError("exponent_bits is 8, or 5 with 10 mantissa bits (fp16).")
        if self.is_identity:  # nothing is dropped in any mode, and equal roundings must compare equal
            object.__setattr__(self, "mode", "rne")

    @classmethod
    def parse(cls, value: Any) -> Rounding:
        """Reads ``fp32 | bf16 | fp16 | <bits>``, each with an optional ``:rne | :rz | :sr``."""
        if isinstance(value, Rounding):
            return value
        name, colon, mode = str(value).partition(":")
        named = {"fp32": (MANTISSA_FP32, 8), "bf16": (MANTISSA_BF16, 8), "fp16": (MANTISSA_FP16, 5)}
        if name in named:
            bits, exponent = named[name]
        elif name.isascii() and name.isdigit() and mode in ("", *MODES):
            bits, exponent = int(name), 8
        else:
            raise ValueError(
                f"rounding {value!r}: write fp32, bf16, fp16 or mantissa bits, e.g. bf16, 3, bf16:sr, 2:rz."
            )
        if colon and not mode:
            raise ValueError(f"rounding {value!r}: a mode must follow the colon: {', '.join(MODES)}.")
        return cls(bits, mode or "rne", exponent)

    def __str__(self) -> str:
        name = {(23, 8): "fp32", (7, 8): "bf16", (10, 5): "fp16"}.get(
            (self.mantissa_bits, self.exponent_bits), str(self.mantissa_bits)
        )
        return name if self.mode == "rne" else f"{name}:{self.mode}"

    @property
    def is_identity(self) -> bool:
        """Whether float32 values pass unchanged."""
        return self.mantissa_bits == MANTISSA_FP32

    @property
    def is_bf16_rne(self) -> bool:
        """Whether this is what ``x.to(torch.bfloat16)`` does, so that the hardware's own cast may be used."""
        return self == Rounding(MANTISSA_BF16)

    @property
    def fits_bf16(self) -> bool:
        """Whether every result is a bfloat16 value, so that it may be stored as one without loss."""
        return self.mantissa_bits <= MANTISSA_BF16

    def __call__(self, x: Tensor, seed: int = 0, index: Tensor | None = None) -> Tensor:
        """Rounds a float32 (or narrower) tensor; returns float32. ``seed`` and ``index`` as in :func:`round_to`."""
        if self.is_identity:
            return x if x.dtype is torch.float64 else x.float()
        if self.mode == "sr" and index is None:
            index = flat_index(x)
        rounded = round_to(x, self.mantissa_bits, self.mode, seed, index)
        return rounded if self.exponent_bits == 8 else self._to_fp16_range(x.float(), rounded, seed, index)

    def _to_fp16_range(self, x: Tensor, rounded: Tensor, seed: int, index: Tensor | None) -> Tensor:
        if self.mode == "rne":
            subnormal = (x + _FP16_QUANTUM_MAGIC) - _FP16_QUANTUM_MAGIC
            ceiling: float = torch.inf
        else:
            steps = x.abs() * 2.0**24  # a power of two: exact
            whole = steps.floor()
            if self.mode == "sr":
                assert index is not None
                uniform = ((random_bits(index, seed) >> 8) & 0xFFFFFF).float() * 2.0**-24
                whole = whole + (uniform < steps - whole)  # the sum of step and draw could round up by itself
            subnormal = whole * 2.0**-24
            ceiling = _FP16_MAX if self.mode == "rz" else torch.inf
        rounded = torch.where(x.abs() < _FP16_MIN_NORMAL, torch.copysign(subnormal, x), rounded)
        over = (rounded.abs() > _FP16_MAX) & (x.abs() < torch.inf)
        return torch.where(over, torch.copysign(torch.full_like(x, ceiling), x), rounded)


FP32 = Rounding()
