"""The streaming softmax, tile by tile, with every rounding written out: the definition that fast backends must equal.

All tensors are folded over batch and heads, ``N = batch * heads``. Names carry their axes: ``q_NTD`` is [N, T, D];
``i`` and ``j`` mark the current query and key tile. The recurrence and the sites are in :mod:`kernels.sites`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch
from torch import Tensor

from kernels.rounding import Rounding, splitmix64
from kernels.sites import SITE_NAMES, RoundingSites

LOG2_E = math.log2(math.e)
RAISE_LIMIT = 64.0  # nats by which the stabilised softmax may raise a maximum; P >= 2^-93 keeps clear of underflow

_STREAM = {name: index for index, name in enumerate(SITE_NAMES)}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What both passes need to know besides the tensors.

    Args:
        sites: the roundings.
        q_tile: queries per tile. It matters to ``dk``/``dv`` chunks, and to carries that round on every visit: a row
            visits the key tiles that any row of its tile sees.
        k_tile: keys per tile: the length after which the running statistics are rounded.
        q_length: queries, T.
        k_length: keys, S.
        causal: query t sees the keys up to t + S - T; tiles that are masked whole are skipped.
        scale: the factor on q.k.
        seed: base seed of stochastic roundings.
        first_head: index of the first of the N heads at hand among all of them, for stochastic roundings.
    """

    sites: RoundingSites
    q_tile: int
    k_tile: int
    q_length: int
    k_length: int
    causal: bool
    scale: float
    seed: int = 0
    first_head: int = 0

    @property
    def offset(self) -> int:
        """Keys that the first query sees, less one, when causal."""
        return self.k_length - self.q_length

    @property
    def blind_rows(self) -> int:
        """Leading queries that see no key at all."""
        return max(0, -self.offset) if self.causal else 0

    def query_tiles(self) -> list[slice]:
        """Rows of every query tile."""
        return [slice(i, min(i + self.q_tile, self.q_length)) for i in range(0, self.q_length, self.q_tile)]

    def key_tiles(self, rows: slice) -> list[slice]:
        """Columns of every key tile that these rows see any of, in the order of the recurrence."""
        stop = rows.stop + self.offset if self.causal else self.k_length
        tiles = [slice(j, min(j + self.k_tile, self.k_length)) for j in range(0, stop, self.k_tile)]
        return tiles if self.sites.kv_order == "ascending" else tiles[::-1]

    def mask(self, rows: slice, columns: slice, device: torch.device) -> Tensor | None:
        """bool [rows, columns], True where the key comes after the query; None when nothing is masked."""
        if not self.causal or columns.stop - 1 <= rows.start + self.offset:
            return None
        row = torch.arange(rows.start, rows.stop, device=device) + self.offset
        return torch.arange(columns.start, columns.stop, device=device) > row[:, None]

    def site_seed(self, site: str, start: int) -> int:
        """The 64-bit seed of one site in the tile that begins at ``start``; every bit of the run's seed counts."""
        return (splitmix64(self.seed) + (_STREAM[site] << 32) + start) & (2**64 - 1)


def as_operand(x: Tensor, rounding: Rounding) -> Tensor:
    """Stores a rounded operand of a product as bfloat16 if that loses nothing: products of bfloat16 are faster."""
    return x.to(torch.bfloat16) if rounding.fits_bf16 and x.dtype is torch.float32 else x


def product(a: Tensor, b: Tensor, out: Rounding) -> Tensor:
    """Batched product accumulated in float32 (float64 for float64); rounded by ``out`` only if the hardware can.

    Two bfloat16 operands whose product is to be rounded to bfloat16 use the hardware product, which rounds its float32
    accumulator once. Otherwise both are widened, which is exact.
    """
    if a.dtype is torch.bfloat16 and b.dtype is torch.bfloat16 and out.is_bf16_rne:
        return torch.bmm(a, b)
    wide = torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32
    return torch.bmm(a.to(wide), b.to(wide))


def raised(h: Tensor, tied: Tensor, beta: float) -> Tensor:
    """Row maxima ``h`` as the stabilised softmax has them: raised where ``tied``, by less than ``RAISE_LIMIT``."""
    by = torch.where(h > 0, (beta - 1.0) * h, -h).clamp(max=torch.finfo(h.dtype).max)
    fraction, exponent = torch.frexp(by)
    by = torch.where(exponent > 6, fraction * RAISE_LIMIT, by)  # 2^6: halved until it is below the limit
    return torch.where(tied & h.isfinite(), h + by, h)


def finite_or_zero(m: Tensor) -> Tensor:
    """The maximum to subtract: 0 where no key has been seen yet, as -inf less -inf is NaN."""
    return m.masked_fill(m == -torch.inf, 0.0)


class _Tile:
    """Rounds at a named site of one tile.

    A stochastic draw is a function of (seed, site, tile, position in the whole tensor modulo 2^32): of the key tile for
    scores and whatever is kept per query, of the query tile for what is kept per key.
    """

    def __init__(self, plan: Plan, rows: slice, columns: slice) -> None:
        self.plan, self.rows, self.columns = plan, rows, columns

    def __call__(
        self, site: str, x: Tensor, over: Literal["rows", "keys", "scores"] = "rows", stream: str | None = None
    ) -> Tensor:
        rounding: Rounding = getattr(self.plan.sites, site)
        if rounding.mode != "sr":
            return rounding(x)
        start = self.rows.start if over == "keys" else self.columns.start
        return rounding(x, self.plan.site_seed(stream or site, start), self._index(x, over))

    def _index(self, x: Tensor, over: str) -> Tensor:
        """int32 position of every element of ``x`` in its whole tensor, modulo 2^32."""
        length, first = (
            (self.plan.k_length, self.columns.start) if over == "keys" else (self.plan.q_length, self.rows.start)
        )
        width, left = (self.plan.k_length, self.columns.start) if over == "scores" else (x.shape[2], 0)
        n, row, column = (torch.arange(size, device=x.device) for size in x.shape)
        row = (self.plan.first_head + n[:, None]) * length + first + row
        return (row * width + left).to(torch.int32)[..., None] + column.to(torch.int32)

    def scores(self, q_i: Tensor, k_j: Tensor, site: str, scaled_site: str) -> Tensor:
        """Scaled, masked scores of the tile, [N, rows, columns]."""
        raw = product(q_i, k_j.transpose(1, 2), getattr(self.plan.sites, site))
        # the streams of the forward pass: the backward pass must recompute the very scores that were drawn there
        s = self(site, raw, "scores", stream="s") * self.plan.scale
        s = self(scaled_site, s, "scores", stream="s_scaled")
        mask = self.plan.mask(self.rows, self.columns, s.device)
        return s if mask is None else s.masked_fill(mask, -torch.inf)

    def p(self, q_i: Tensor, k_j: Tensor, lse_i: Tensor) -> Tensor:
        """The probabilities of the backward pass, recomputed from the saved log-sum-exp."""
        s = self.scores(q_i, k_j, "s_bwd", "s_bwd")
        return torch.exp2((s - finite_or_zero(lse_i)) * LOG2_E)

    def dp(self, dout_i: Tensor, v_j: Tensor) -> Tensor:
        return self("dp", product(dout_i, v_j.transpose(1, 2), self.plan.sites.dp), "scores")


def forward(q_NTD: Tensor, k_NSD: Tensor, v_NSD: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention output and what the recurrence leaves behind.

    Args:
        q_NTD: queries, float32, bfloat16, float16, or float64 when no site rounds.
        k_NSD: keys.
        v_NSD: values.
        plan: sites and geometry.

    Returns:
        ``out`` [N, T, D] in q's dtype; ``lse`` [N, T], the log of the row sums, ``max_logit`` [N], the largest scaled
        masked score, both in the compute dtype; ``tied_rows`` [N] int32, rows whose maximum is reached more than once.
        Queries that see no key have output 0 and ``lse`` -inf.
    """
    sites = plan.sites
    N, T, _ = q_NTD.shape
    dtype = torch.float64 if q_NTD.dtype is torch.float64 else torch.float32
    out = torch.empty(N, T, v_NSD.shape[2], dtype=dtype, device=q_NTD.device)
    lse = torch.empty(N, T, 1, dtype=dtype, device=q_NTD.device)
    peak = torch.empty_like(lse)
    ties = torch.empty(N, T, 1, dtype=torch.int32, device=q_NTD.device)

    for rows in plan.query_tiles():
        o = torch.zeros_like(out[:, rows])
        length = torch.zeros_like(lse[:, rows])
        m = top = torch.full_like(length, -torch.inf)  # the maximum subtracted, and the true one
        count = torch.zeros_like(ties[:, rows])
        for columns in plan.key_tiles(rows):
            r = _Tile(plan, rows, columns)
            s = r.scores(q_NTD[:, rows], k_NSD[:, columns], "s", "s_scaled")
            h = s.amax(-1, keepdim=True)
            top_new = torch.maximum(top, h)
            tied = (s == top_new).sum(-1, keepdim=True, dtype=torch.int32)
            count = torch.where(top_new > top, tied, count + tied)
            if sites.sfa_beta is not None:
                h = raised(h, (s >= h - sites.sfa_tolerance).sum(-1, keepdim=True) > 1, sites.sfa_beta)
            m_new = r("m_carry", torch.maximum(m, h))
            p = torch.exp2(r("s_minus_m", s - finite_or_zero(m_new), "scores") * LOG2_E)
            alpha = r("alpha", torch.exp2((m - finite_or_zero(m_new)) * LOG2_E))
            p_rounded = r("p_pv", p, "scores")
            row_sum = r("p_sum", (p_rounded if sites.sum_rounded_p else p).sum(-1, keepdim=True))
            length = r("l_carry", length * alpha + row_sum)
            pv = r("pv", product(as_operand(p_rounded, sites.p_pv), v_NSD[:, columns], sites.pv))
            o = r("o_carry", r("o_rescaled", o * alpha) + pv)
            m, top = m_new, top_new
        r = _Tile(plan, rows, slice(0, 0))
        quotient = o * length.reciprocal() if sites.reciprocal else o / length
        out[:, rows] = r("o_out", r("o_div", quotient))
        lse[:, rows] = r("lse", m + length.log())
        peak[:, rows], ties[:, rows] = top, count

    blind = slice(0, plan.blind_rows)
    out[:, blind], lse[:, blind], ties[:, blind] = 0.0, -torch.inf, 0
    return out.to(q_NTD.dtype), lse.squeeze(-1), peak.amax((1, 2)), (ties > 1).sum((1, 2), dtype=torch.int32)


def _delta(
    dout_i: Tensor, q_i: Tensor, k: Tensor, v: Tensor, out_i: Tensor, lse_i: Tensor, plan: Plan, rows: slice
) -> Tensor:
    """The row constant of the softmax's gradient, [N, rows, 1], by the formula that ``delta_from`` names."""
    whole = _Tile(plan, rows, slice(0, 0))
    delta, out = torch.zeros_like(lse_i), out_i.to(lse_i.dtype)
    if plan.sites.delta_from == "p_dp":
        for columns in plan.key_tiles(rows):
            r = _Tile(plan, rows, columns)
            product_ij = r.p(q_i, k[:, columns], lse_i) * r.dp(dout_i, v[:, columns])
            delta = delta + r("delta_product", product_ij, "scores").sum(-1, keepdim=True)
        return whole("delta", delta)
    if plan.sites.delta_from == "out_fp32":
        out = torch.zeros_like(out)
        for columns in plan.key_tiles(rows):
            p = _Tile(plan, rows, columns).p(q_i, k[:, columns], lse_i)
            out = out + torch.bmm(p, v[:, columns].to(p.dtype))
    return whole("delta", whole("delta_product", dout_i.to(out.dtype) * out).sum(-1, keepdim=True))


def backward(
    dout_NTD: Tensor, q_NTD: Tensor, k_NSD: Tensor, v_NSD: Tensor, out_NTD: Tensor, lse_NT: Tensor, plan: Plan
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from the saved output and log-sum-exp, in the dtypes of q, k and v."""
    sites = plan.sites
    dtype = torch.float64 if q_NTD.dtype is torch.float64 else torch.float32
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q_NTD, k_NSD, v_NSD))
    for rows in plan.query_tiles():
        q_i, dout_i, lse_i = q_NTD[:, rows], dout_NTD[:, rows], lse_NT[:, rows, None]
        delta = _delta(dout_i, q_i, k_NSD, v_NSD, out_NTD[:, rows], lse_i, plan, rows)
        for columns in plan.key_tiles(rows):
            r = _Tile(plan, rows, columns)
            k_j, v_j = k_NSD[:, columns], v_NSD[:, columns]
            p = r.p(q_i, k_j, lse_i)
            ds = as_operand(r("ds", p * (r.dp(dout_i, v_j) - delta), "scores"), sites.ds)
            p_operand = as_operand(r("p_pv", p, "scores"), sites.p_pv)
            dq_chunk = r("dq_chunk", product(ds, k_j, sites.dq_chunk) * plan.scale)
            dk_chunk = r("dk_chunk", product(ds.transpose(1, 2), q_i, sites.dk_chunk) * plan.scale, "keys")
            dv_chunk = r("dv_chunk", product(p_operand.transpose(1, 2), dout_i, sites.dv_chunk), "keys")
            dq[:, rows] = r("dq", dq[:, rows] + dq_chunk)
            dk[:, columns] = r("dk", dk[:, columns] + dk_chunk, "keys")
            dv[:, columns] = r("dv", dv[:, columns] + dv_chunk, "keys")
    return dq.to(q_NTD.dtype), dk.to(k_NSD.dtype), dv.to(v_NSD.dtype)
