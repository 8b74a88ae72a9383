# mypy: allow-untyped-defs
"""The roundings of :mod:`kernels.rounding` in Triton device code, and the reductions that keep NaN.

``rounded`` is ``Rounding.__call__`` on a block: the same integer addition on the bit pattern, the same counter-based
draws, the same float16 range. A site that does not round compiles to nothing. When compiled, nearest rounding to
bfloat16 and float16 is the hardware's conversion (``cvt.rn``), which gives the same values.

Triton's interpreter, which runs these kernels on a CPU for tests, truncates a float32 that is cast to bfloat16 or
stored as one, multiplies the bit patterns of bfloat16 operands, and drops NaN in ``tl.max``. Under it, therefore,
bfloat16 is always rounded by bits and never stored, and every product is one of float32.

Importing this module imports Triton.
"""

import triton
import triton.language as tl

from kernels.sites import SITE_NAMES

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)
SEEDS_PER_TILE = tl.constexpr(2 * len(SITE_NAMES))  # two 32-bit halves for each site
_FP16_MAX = tl.constexpr(65504.0)
_FP16_MIN_NORMAL = tl.constexpr(2.0**-14)
_FP16_STEP = tl.constexpr(2.0**-24)  # of its subnormals


@triton.constexpr_function
def rounding_at(c, site):
    """The :class:`kernels.rounding.Rounding` at a named site."""
    return c.rounding(site)


@triton.constexpr_function
def _dropped_bits(c, site):
    return c.dropped_bits(site)


@triton.constexpr_function
def _seed_offset(c, site):
    return c.seed_offset(site)


@triton.jit
def hash32(x):
    """lowbias32 on uint32 lanes, as :func:`kernels.rounding.hash32`."""
    x = tl.mul(x ^ (x >> 16), 0x7FEB352D, sanitize_overflow=False)
    x = tl.mul(x ^ (x >> 15), 0x846CA68B, sanitize_overflow=False)
    return x ^ (x >> 16)


@triton.jit
def random_bits(index, seed):
    """uint32 draws for the positions ``index`` (taken modulo 2^32); ``seed`` points at its low and high half."""
    low = tl.load(seed).to(tl.uint32, bitcast=True)
    high = tl.load(seed + 1).to(tl.uint32, bitcast=True)
    return hash32(tl.add(hash32(index.to(tl.uint32) ^ high), low, sanitize_overflow=False))


@triton.jit
def _copysign(x, sign):
    bits = (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) | (sign.to(tl.int32, bitcast=True) & (-1 << 31))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _to_fp16_range(x, rounded, random, MODE: tl.constexpr):
    # subnormals have a fixed step: magnitudes are cut on it, or go up where the draw is below what would be cut
    steps = tl.abs(x) * (1.0 / _FP16_STEP)
    whole = tl.floor(steps)
    if MODE == "sr":
        draw = (random >> 8).to(tl.int32).to(tl.float32) * _FP16_STEP
        whole += tl.where(draw < steps - whole, 1.0, 0.0)
        ceiling = float("inf")
    else:
        ceiling = _FP16_MAX
    rounded = tl.where(tl.abs(x) < _FP16_MIN_NORMAL, _copysign(whole * _FP16_STEP, x), rounded)
    over = (tl.abs(rounded) > _FP16_MAX) & (tl.abs(x) < float("inf"))
    return tl.where(over, _copysign(tl.full(x.shape, ceiling, tl.float32), x), rounded)


@triton.jit
def rounded(x, C: tl.constexpr, SITE: tl.constexpr, seeds, index, STREAM: tl.constexpr = None):
    """Rounds a block at a named site.

    Args:
        x: float32 (or float64, which no site may round).
        C: the :class:`kernels.triton_attention.Constants`.
        SITE: name of the site.
        seeds: pointer to the seeds of the tile, two int32 a site; read at stochastic sites only.
        index: int64 position of every element in its whole tensor; used at stochastic sites only.
        STREAM: name of the site whose seed is drawn from, if that is another one.
    """
    R: tl.constexpr = rounding_at(C, SITE)
    DROP: tl.constexpr = _dropped_bits(C, SITE)
    if R.is_identity:
        result = x
    elif R.mode == "rne" and R.exponent_bits == 5:
        result = x.to(tl.float16).to(tl.float32)
    elif R.is_bf16_rne and not INTERPRET:
        result = x.to(tl.bfloat16).to(tl.float32)
    else:
        bits = x.to(tl.int32, bitcast=True)
        random = None
        if R.mode == "rne":
            bits += ((bits >> DROP) & 1) + ((1 << (DROP - 1)) - 1)
        elif R.mode == "sr":
            random = random_bits(index, seeds + _seed_offset(C, SITE if STREAM is None else STREAM))
            bits += random.to(tl.int32, bitcast=True) & ((1 << DROP) - 1)
        result = (bits & (-1 << DROP)).to(tl.float32, bitcast=True)
        if R.exponent_bits == 5:
            result = _to_fp16_range(x, result, random, R.mode)
        result = tl.where(x == x, result, x)  # a NaN's payload could carry or be cut into a number
    return result


@triton.jit
def maximum(a, b):
    """The larger of the two, NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def row_max(x):
    """The largest value of every row, NaN if any is."""
    if INTERPRET:  # a custom combine is a Python loop over the elements there
        any_nan = tl.max((x != x).to(tl.int32), 1) > 0
        return tl.where(any_nan, float("nan"), tl.max(tl.where(x == x, x, float("-inf")), 1))
    else:
        return tl.reduce(x, 1, maximum)
