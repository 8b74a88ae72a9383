# mypy: allow-untyped-defs
"""The recurrence of :mod:`kernels.reference` as three Triton kernels: forward, dQ (with delta), and dK with dV.

A program owns a block of rows of one *logical* tile (the unit after which the running values are rounded) and walks
the logical tiles of the other axis as the reference does. A logical tile may be larger than what fits a multiprocessor,
so it is worked on in blocks: a product over it is summed up in float32 block by block, and rounded once at its end. The
forward pass goes twice over the blocks of a key tile, first for the row maximum alone, because every P of the tile is
relative to the maximum of the whole tile. Only the order of the float32 sums differs from the reference.

That every row of a program belongs to one query tile matters: which key tiles a row visits, masked whole or not, is up
to its query tile, and a visit rounds even what it does not change. Blocks that are masked whole inside a visited tile
only add zeros and are skipped, unless ``everything`` says that 0 * NaN may be among them.

``T`` queries, ``S`` keys; ``C`` is a :class:`kernels.triton_attention.Constants`. No atomics: results do not depend on
timing. Structure after FlashAttention-2 (arXiv 2307.08691, section 3.2). Importing this module imports Triton.
"""

import triton
import triton.language as tl

from kernels import reference
from kernels.triton_rounding import SEEDS_PER_TILE, maximum, rounded, rounding_at, row_max

LOG2_E = tl.constexpr(reference.LOG2_E)
RAISE_LIMIT = tl.constexpr(reference.RAISE_LIMIT)

# sizes vary from call to call: no recompilation when one is 1 or divisible by 16
_SIZES = ["T", "S", "q_tile", "k_tile", "first_head"]


@triton.jit
def _owned(length, tile, BLOCK: tl.constexpr):
    """Head, logical tile, first row and end (of the tile) of the block that this program owns."""
    per_tile = tl.cdiv(tile, BLOCK)
    blocks = tl.cdiv(length, tile) * per_tile
    n, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    i = block // per_tile
    return n.to(tl.int64), i, i * tile + (block % per_tile) * BLOCK, tl.minimum((i + 1) * tile, length)


@triton.jit
def _load(x, row, stop, C: tl.constexpr):
    """Rows of a [time, D] matrix; 0 from ``stop`` on and in the padding of D."""
    d = tl.arange(0, C.padded_dim)[None, :]
    return tl.load(x + row[:, None] * C.head_dim + d, mask=(row[:, None] < stop) & (d < C.head_dim), other=0.0)


@triton.jit
def _store(x, row, stop, value, C: tl.constexpr):
    d = tl.arange(0, C.padded_dim)[None, :]
    tl.store(x + row[:, None] * C.head_dim + d, value, mask=(row[:, None] < stop) & (d < C.head_dim))


@triton.jit
def _product(a, b, total, NATIVE: tl.constexpr):
    """``total + a b``; ``a`` in the dtype of ``b`` if that holds its values (NATIVE), else both in the widest."""
    if NATIVE:
        a = a.to(b.dtype)
    else:
        b = b.to(a.dtype)
    return tl.dot(a, b, total, input_precision="ieee", out_dtype=total.dtype)


@triton.jit
def _scaled_chunk(chunk, C: tl.constexpr, SITE: tl.constexpr, seeds, index):
    """``scale * dS . X`` rounded; a hardware product that rounds to bfloat16 does so before the scale, too."""
    if C.bf16_ds and rounding_at(C, SITE).is_bf16_rne:
        chunk = rounded(chunk, C, SITE, seeds, index)
    return rounded(chunk * C.scale, C, SITE, seeds, index)


@triton.jit
def _scores(a, b, seen, index, seeds, C: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, DTYPE: tl.constexpr):
    """Scaled, masked scores of ``a`` against ``b``."""
    s = _product(a, tl.trans(b), tl.zeros([a.shape[0], b.shape[0]], DTYPE), True)
    # the streams of the forward pass: the backward pass must recompute the very scores that were drawn there
    s = rounded(s, C, FIRST, seeds, index, "s") * C.scale
    s = rounded(s, C, SECOND, seeds, index, "s_scaled")
    return tl.where(seen, s, float("-inf"))


@triton.jit
def _raised(h, tied, C: tl.constexpr):
    """Row maxima as the stabilised softmax has them (:func:`kernels.reference.raised`)."""
    by = tl.where(h > 0, (C.sites.sfa_beta - 1.0) * h, -h)
    # from 64 on, the exponent becomes that of [32, 64): halved until it is below the limit
    if h.dtype == tl.float64:
        halved = ((by.to(tl.int64, bitcast=True) & ((1 << 52) - 1)) | (1028 << 52)).to(tl.float64, bitcast=True)
    else:
        by = tl.minimum(by, 3.4028234663852886e38)
        halved = ((by.to(tl.int32, bitcast=True) & ((1 << 23) - 1)) | (132 << 23)).to(tl.float32, bitcast=True)
    by = tl.where(by >= RAISE_LIMIT, halved, by)
    return tl.where(tied & (tl.abs(h) < float("inf")), h + by, h)


@triton.jit
def _finite_or_zero(m):
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def _divide(a, b):
    if a.dtype == tl.float64:
        return a / b
    else:
        return tl.div_rn(a, b)  # the plain sign is approximate


@triton.jit
def _tiles_seen(row_stop, T, S, k_tile, C: tl.constexpr):
    """How many key tiles the rows of a query tile see any of."""
    return tl.cdiv(tl.maximum(row_stop + S - T, 0), k_tile) if C.causal else tl.cdiv(S, k_tile)


@triton.jit
def _columns(j, last_row, everything, T, S, k_tile, C: tl.constexpr):
    """First column of a key tile, its end, and the end of what the rows up to ``last_row`` see of it."""
    first, stop = j * k_tile, tl.minimum((j + 1) * k_tile, S)
    seen = tl.where(everything != 0, stop, tl.minimum(stop, last_row + S - T + 1)) if C.causal else stop
    return first, stop, seen


@triton.jit
def _seen(row, row_stop, col, col_stop, T, S, C: tl.constexpr):
    """Whether both exist, in tiles that end at ``row_stop`` and ``col_stop``, and the query sees the key."""
    exist = (row < row_stop) & (col < col_stop)
    return exist & (col <= row + (S - T)) if C.causal else exist


@triton.jit(do_not_specialize=_SIZES)
def forward_kernel(
    q, k, v, out, lse, top_of_row, ties_of_row, seeds, everything, T, S, q_tile, k_tile, first_head, C: tl.constexpr
):  # fmt: skip
    n, _, start, row_stop = _owned(T, q_tile, C.block_rows)
    if start >= row_stop:
        return
    DTYPE: tl.constexpr = lse.dtype.element_ty
    k, v, everything = k + n * S * C.head_dim, v + n * S * C.head_dim, tl.load(everything)
    row = start + tl.arange(0, C.block_rows)
    last_row = tl.minimum(start + C.block_rows, row_stop) - 1
    q_i = _load(q + n * T * C.head_dim, row, row_stop, C)
    position = (first_head + n) * T + row  # for stochastic draws, as in kernels.reference._Tile
    position_o = position[:, None] * C.head_dim + tl.arange(0, C.padded_dim)[None, :]

    o = tl.zeros([C.block_rows, C.padded_dim], DTYPE)
    length = tl.zeros([C.block_rows], DTYPE)
    m = tl.full([C.block_rows], float("-inf"), DTYPE)  # the maximum subtracted
    top = m  # and the true one
    count = tl.zeros([C.block_rows], tl.int32)
    tiles = _tiles_seen(row_stop, T, S, k_tile, C)
    for step in range(tiles):
        j = tiles - 1 - step if C.sites.kv_order == "descending" else step
        seeds_j = seeds + j * SEEDS_PER_TILE
        first, stop, end = _columns(j, last_row, everything, T, S, k_tile, C)

        h = tl.full([C.block_rows], float("-inf"), DTYPE)
        second = h  # the second largest score, equal to h when tied
        tied = tl.zeros([C.block_rows], tl.int32)
        for left in range(first, end, C.block_columns):
            col = left + tl.arange(0, C.block_columns)
            seen = _seen(row[:, None], row_stop, col[None, :], stop, T, S, C)
            index = position[:, None] * S + col[None, :]
            s = _scores(q_i, _load(k, col, stop, C), seen, index, seeds_j, C, "s", "s_scaled", DTYPE)
            block = row_max(s)
            equal = tl.sum((s == block[:, None]).to(tl.int32), 1)
            if C.sites.sfa_beta is not None:
                below = row_max(tl.where(s < block[:, None], s, float("-inf")))
                other = tl.where(equal > 1, block, below)
                second = maximum(maximum(second, other), tl.minimum(h, block))
            tied = tl.where(block > h, equal, tl.where(block == h, tied + equal, tied))
            h = maximum(h, block)

        top_new = maximum(top, h)
        tied = tl.where(h == top_new, tied, 0)
        tied = tl.where(top_new == float("-inf"), stop - first, tied)
        count = tl.where(top_new > top, tied, count + tied)
        if C.sites.sfa_beta is not None:
            h = _raised(h, second >= h - C.sites.sfa_tolerance, C)
        m_new = rounded(maximum(m, h), C, "m_carry", seeds_j, position)
        base = _finite_or_zero(m_new)

        row_sum = tl.zeros([C.block_rows], DTYPE)
        pv = tl.zeros([C.block_rows, C.padded_dim], DTYPE)
        for left in range(first, end, C.block_columns):
            col = left + tl.arange(0, C.block_columns)
            seen = _seen(row[:, None], row_stop, col[None, :], stop, T, S, C)
            index = position[:, None] * S + col[None, :]
            s = _scores(q_i, _load(k, col, stop, C), seen, index, seeds_j, C, "s", "s_scaled", DTYPE)
            p = tl.exp2(rounded(s - base[:, None], C, "s_minus_m", seeds_j, index) * LOG2_E)
            p_rounded = rounded(p, C, "p_pv", seeds_j, index)
            row_sum += tl.sum(p_rounded if C.sites.sum_rounded_p else p, 1)
            pv = _product(p_rounded, _load(v, col, stop, C), pv, C.native_p)

        alpha = rounded(tl.exp2((m - base) * LOG2_E), C, "alpha", seeds_j, position)
        row_sum = rounded(row_sum, C, "p_sum", seeds_j, position)
        length = rounded(length * alpha + row_sum, C, "l_carry", seeds_j, position)
        pv = rounded(pv, C, "pv", seeds_j, position_o)
        o = rounded(o * alpha[:, None], C, "o_rescaled", seeds_j, position_o)
        o = rounded(o + pv, C, "o_carry", seeds_j, position_o)
        m, top = m_new, top_new

    if C.sites.reciprocal:
        o = o * _divide(tl.full([C.block_rows], 1.0, DTYPE), length)[:, None]
    else:
        o = _divide(o, tl.broadcast_to(length[:, None], o.shape))
    if C.causal:  # queries that see no key
        blind = row < T - S
        o, count = tl.where(blind[:, None], 0.0, o), tl.where(blind, 0, count)
    o = rounded(rounded(o, C, "o_div", seeds, position_o), C, "o_out", seeds, position_o)
    log_sum = rounded(m + tl.log(length), C, "lse", seeds, position)
    _store(out + n * T * C.head_dim, row, row_stop, o, C)
    tl.store(lse + n * T + row, log_sum, mask=row < row_stop)
    tl.store(top_of_row + n * T + row, top, mask=row < row_stop)
    tl.store(ties_of_row + n * T + row, count, mask=row < row_stop)


@triton.jit
def _p(a, b, lse, seen, index, seeds, C: tl.constexpr, DTYPE: tl.constexpr):
    """The probabilities of the backward pass, recomputed from the saved log-sum-exp."""
    s = _scores(a, b, seen, index, seeds, C, "s_bwd", "s_bwd", DTYPE)
    return tl.exp2((s - _finite_or_zero(lse)) * LOG2_E)


@triton.jit
def _dp(x, y, index, seeds, C: tl.constexpr, DTYPE: tl.constexpr):
    dp = _product(x, tl.trans(y), tl.zeros([x.shape[0], y.shape[0]], DTYPE), True)
    return rounded(dp, C, "dp", seeds, index)


@triton.jit(do_not_specialize=_SIZES)
def dq_kernel(
    dout, q, k, v, out, lse, delta_of_row, dq, seeds, everything, T, S, q_tile, k_tile, first_head, C: tl.constexpr
):  # fmt: skip
    n, _, start, row_stop = _owned(T, q_tile, C.block_rows)
    if start >= row_stop:
        return
    DTYPE: tl.constexpr = lse.dtype.element_ty
    k, v, everything = k + n * S * C.head_dim, v + n * S * C.head_dim, tl.load(everything)
    row = start + tl.arange(0, C.block_rows)
    last_row = tl.minimum(start + C.block_rows, row_stop) - 1
    q_i = _load(q + n * T * C.head_dim, row, row_stop, C)
    dout_i = _load(dout + n * T * C.head_dim, row, row_stop, C)
    lse_i = tl.load(lse + n * T + row, mask=row < row_stop, other=0.0)[:, None]
    position = (first_head + n) * T + row
    position_o = position[:, None] * C.head_dim + tl.arange(0, C.padded_dim)[None, :]
    tiles = _tiles_seen(row_stop, T, S, k_tile, C)

    delta = tl.zeros([C.block_rows], DTYPE)
    if C.sites.delta_from == "out":
        o = _load(out + n * T * C.head_dim, row, row_stop, C).to(DTYPE)
    else:
        o = tl.zeros([C.block_rows, C.padded_dim], DTYPE)
        for step in range(tiles):
            j = tiles - 1 - step if C.sites.kv_order == "descending" else step
            seeds_j = seeds + j * SEEDS_PER_TILE
            first, stop, end = _columns(j, last_row, everything, T, S, k_tile, C)
            for left in range(first, end, C.block_columns):
                col = left + tl.arange(0, C.block_columns)
                seen = _seen(row[:, None], row_stop, col[None, :], stop, T, S, C)
                index = position[:, None] * S + col[None, :]
                p = _p(q_i, _load(k, col, stop, C), lse_i, seen, index, seeds_j, C, DTYPE)
                v_j = _load(v, col, stop, C)
                if C.sites.delta_from == "p_dp":
                    p_dp = p * _dp(dout_i, v_j, index, seeds_j, C, DTYPE)
                    delta += tl.sum(rounded(p_dp, C, "delta_product", seeds_j, index), 1)
                else:
                    o = _product(p, v_j, o, False)
    if C.sites.delta_from != "p_dp":
        delta = tl.sum(rounded(dout_i.to(DTYPE) * o, C, "delta_product", seeds, position_o), 1)
    delta = rounded(delta, C, "delta", seeds, position)
    tl.store(delta_of_row + n * T + row, delta, mask=row < row_stop)

    dq_i = tl.zeros([C.block_rows, C.padded_dim], DTYPE)
    for step in range(tiles):
        j = tiles - 1 - step if C.sites.kv_order == "descending" else step
        seeds_j = seeds + j * SEEDS_PER_TILE
        first, stop, end = _columns(j, last_row, everything, T, S, k_tile, C)
        chunk = tl.zeros([C.block_rows, C.padded_dim], DTYPE)
        for left in range(first, end, C.block_columns):
            col = left + tl.arange(0, C.block_columns)
            seen = _seen(row[:, None], row_stop, col[None, :], stop, T, S, C)
            index = position[:, None] * S + col[None, :]
            k_j = _load(k, col, stop, C)
            p = _p(q_i, k_j, lse_i, seen, index, seeds_j, C, DTYPE)
            dp = _dp(dout_i, _load(v, col, stop, C), index, seeds_j, C, DTYPE)
            ds = tl.where(col[None, :] < stop, p * (dp - delta[:, None]), 0.0)  # delta may be infinite
            ds = rounded(ds, C, "ds", seeds_j, index)
            chunk = _product(ds, k_j, chunk, C.native_ds)
        chunk = _scaled_chunk(chunk, C, "dq_chunk", seeds_j, position_o)
        dq_i = rounded(dq_i + chunk, C, "dq", seeds_j, position_o)
    _store(dq + n * T * C.head_dim, row, row_stop, dq_i, C)


@triton.jit(do_not_specialize=_SIZES)
def dkdv_kernel(
    dout, q, k, v, lse, delta_of_row, dk, dv, seeds, row_seeds, everything, T, S, q_tile, k_tile, first_head,
    C: tl.constexpr,
):  # fmt: skip
    n, j, start, col_stop = _owned(S, k_tile, C.block_columns)
    if start >= col_stop:
        return
    DTYPE: tl.constexpr = lse.dtype.element_ty
    q, dout, everything = q + n * T * C.head_dim, dout + n * T * C.head_dim, tl.load(everything)
    col = start + tl.arange(0, C.block_columns)
    k_j = _load(k + n * S * C.head_dim, col, col_stop, C)
    v_j = _load(v + n * S * C.head_dim, col, col_stop, C)
    position = (first_head + n) * T
    position_k = ((first_head + n) * S + col)[:, None] * C.head_dim + tl.arange(0, C.padded_dim)[None, :]
    seeds_j = seeds + j * SEEDS_PER_TILE

    dk_j = tl.zeros([C.block_columns, C.padded_dim], DTYPE)
    dv_j = tl.zeros([C.block_columns, C.padded_dim], DTYPE)
    # the first query tile that sees any key of the whole key tile, and the first row that sees any of this block
    first_tile = tl.maximum(j * k_tile + T - S, 0) // q_tile if C.causal else 0
    first_row = tl.where(everything != 0, 0, start + T - S) if C.causal else 0
    for i in range(first_tile, tl.cdiv(T, q_tile)):
        row_seeds_i = row_seeds + i * SEEDS_PER_TILE
        row_stop = tl.minimum((i + 1) * q_tile, T)
        skipped = tl.maximum(first_row - i * q_tile, 0) // C.block_rows * C.block_rows
        dk_chunk = tl.zeros([C.block_columns, C.padded_dim], DTYPE)
        dv_chunk = tl.zeros([C.block_columns, C.padded_dim], DTYPE)
        for upper in range(i * q_tile + skipped, row_stop, C.block_rows):
            row = upper + tl.arange(0, C.block_rows)
            seen = _seen(row[None, :], row_stop, col[:, None], col_stop, T, S, C)
            index = (position + row)[None, :] * S + col[:, None]
            q_i, dout_i = _load(q, row, row_stop, C), _load(dout, row, row_stop, C)
            lse_i = tl.load(lse + n * T + row, mask=row < row_stop, other=0.0)[None, :]
            delta = tl.load(delta_of_row + n * T + row, mask=row < row_stop, other=0.0)[None, :]
            p = _p(k_j, q_i, lse_i, seen, index, seeds_j, C, DTYPE)
            p_rounded = rounded(p, C, "p_pv", seeds_j, index)
            dv_chunk = _product(p_rounded, dout_i, dv_chunk, C.native_p)
            dp = _dp(v_j, dout_i, index, seeds_j, C, DTYPE)
            ds = rounded(p * (dp - delta), C, "ds", seeds_j, index)
            dk_chunk = _product(ds, q_i, dk_chunk, C.native_ds)
        dk_chunk = _scaled_chunk(dk_chunk, C, "dk_chunk", row_seeds_i, position_k)
        dk_j = rounded(dk_j + dk_chunk, C, "dk", row_seeds_i, position_k)
        dv_chunk = rounded(dv_chunk, C, "dv_chunk", row_seeds_i, position_k)
        dv_j = rounded(dv_j + dv_chunk, C, "dv", row_seeds_i, position_k)
    _store(dk + n * S * C.head_dim, col, col_stop, dk_j, C)
    _store(dv + n * S * C.head_dim, col, col_stop, dv_j, C)
