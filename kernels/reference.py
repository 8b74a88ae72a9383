"""The streaming softmax, tile by tile, with every rounding written out: the definition that fast backends must equal.

All tensors are folded over batch and heads, ``N = batch * heads``. Names carry their axes: ``q_NTD`` is [N, T, D];
``i`` and ``j`` mark the current query and key tile. The recurrence and the sites are in :mod:`kernels.sites`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.rounding import Rounding
from kernels.sites import SITE_NAMES, RoundingSites

LOG2_E = math.log2(math.e)

_STREAM = {name: index for index, name in enumerate(SITE_NAMES)}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What both passes need to know besides the tensors.

    Args:
        sites: the roundings.
        q_tile: queries per tile. It matters only to ``dk``/``dv`` chunks.
        k_tile: keys per tile: the length after which the running statistics are rounded.
        causal: mask keys after the query; tiles that are masked whole are skipped.
        scale: the factor on q.k.
        seed: base seed of stochastic roundings.
    """

    sites: RoundingSites
    q_tile: int
    k_tile: int
    causal: bool
    scale: float
    seed: int = 0

    def tiles(self, q_length: int, k_length: int) -> Iterator[tuple[slice, slice]]:
        """(query rows, key columns) of every tile that is not masked whole, keys innermost."""
        for q_start in range(0, q_length, self.q_tile):
            rows = slice(q_start, min(q_start + self.q_tile, q_length))
            for k_start in range(0, k_length, self.k_tile):
                if self.causal and k_start >= rows.stop:
                    break
                yield rows, slice(k_start, min(k_start + self.k_tile, k_length))

    def mask(self, rows: slice, columns: slice, device: torch.device) -> Tensor | None:
        """bool [rows, columns], True where the key comes after the query; None when nothing is masked."""
        if not self.causal or columns.stop - 1 <= rows.start:
            return None
        row = torch.arange(rows.start, rows.stop, device=device)
        return torch.arange(columns.start, columns.stop, device=device) > row[:, None]

    def site_seed(self, site: str, rows: slice, columns: slice) -> int:
        """A 64-bit seed for one site in one tile (a splitmix64 step over the packed key)."""
        key = (self.seed * 64 + _STREAM[site]) * (1 << 40) + rows.start * (1 << 20) + columns.start
        z = (key + 0x9E3779B97F4A7C15) & (2**64 - 1)
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        return z ^ (z >> 31)


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


class _Tile:
    """Rounds at a named site of one tile."""

    def __init__(self, plan: Plan, rows: slice, columns: slice) -> None:
        self.plan, self.rows, self.columns = plan, rows, columns

    def __call__(self, site: str, x: Tensor, stream: str | None = None) -> Tensor:
        rounding: Rounding = getattr(self.plan.sites, site)
        seed = self.plan.site_seed(stream or site, self.rows, self.columns) if rounding.mode == "sr" else 0
        return rounding(x, seed)

    def scores(self, q_i: Tensor, k_j: Tensor, site: str, scaled_site: str) -> Tensor:
        """Scaled, masked scores of the tile, [N, rows, columns]."""
        raw = product(q_i, k_j.transpose(1, 2), getattr(self.plan.sites, site))
        # the streams of the forward pass: the backward pass must recompute the very scores that were drawn there
        s = self(scaled_site, self(site, raw, stream="s") * self.plan.scale, stream="s_scaled")
        mask = self.plan.mask(self.rows, self.columns, s.device)
        return s if mask is None else s.masked_fill(mask, -torch.inf)


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
    """
    sites = plan.sites
    N, T, _ = q_NTD.shape
    dtype = torch.float64 if q_NTD.dtype is torch.float64 else torch.float32
    out = torch.empty(N, T, v_NSD.shape[2], dtype=dtype, device=q_NTD.device)
    lse = torch.empty(N, T, dtype=dtype, device=q_NTD.device)
    m = torch.full((N, T, 1), -torch.inf, dtype=dtype, device=q_NTD.device)
    length = torch.zeros_like(m)
    o = torch.zeros_like(out)
    ties = torch.zeros(N, T, 1, dtype=torch.int32, device=q_NTD.device)

    for rows, columns in plan.tiles(T, k_NSD.shape[1]):
        r = _Tile(plan, rows, columns)
        m_old = m[:, rows]
        s = r.scores(q_NTD[:, rows], k_NSD[:, columns], "s", "s_scaled")
        m_new = r("m_carry", torch.maximum(m_old, s.amax(-1, keepdim=True)))
        p = torch.exp2(r("s_minus_m", s - m_new) * LOG2_E)
        alpha = r("alpha", torch.exp2((m_old - m_new) * LOG2_E))
        p_rounded = r("p_pv", p)
        row_sum = r("p_sum", (p_rounded if sites.sum_rounded_p else p).sum(-1, keepdim=True))
        length[:, rows] = r("l_carry", length[:, rows] * alpha + row_sum)
        pv = r("pv", product(as_operand(p_rounded, sites.p_pv), v_NSD[:, columns], sites.pv))
        o[:, rows] = r("o_carry", r("o_rescaled", o[:, rows] * alpha) + pv)
        tied = (s == m_new).sum(-1, keepdim=True, dtype=torch.int32)
        ties[:, rows] = torch.where(m_new > m_old, tied, ties[:, rows] + tied)
        m[:, rows] = m_new

    r = _Tile(plan, slice(0, T), slice(0, 0))
    out = r("o_out", r("o_div", o / length))
    lse = r("lse", m + length.log()).squeeze(-1)
    return out.to(q_NTD.dtype), lse, m.amax((1, 2)), (ties > 1).sum((1, 2), dtype=torch.int32)


def backward(
    dout_NTD: Tensor, q_NTD: Tensor, k_NSD: Tensor, v_NSD: Tensor, out_NTD: Tensor, lse_NT: Tensor, plan: Plan
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from the saved output and log-sum-exp, in the dtypes of q, k and v."""
    sites = plan.sites
    T = q_NTD.shape[1]
    dtype = torch.float64 if q_NTD.dtype is torch.float64 else torch.float32
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q_NTD, k_NSD, v_NSD))
    whole = _Tile(plan, slice(0, T), slice(0, 0))
    delta_product = whole("delta_product", dout_NTD.to(dtype) * out_NTD.to(dtype))
    delta = whole("delta", delta_product.sum(-1, keepdim=True))
    lse = lse_NT.unsqueeze(-1)

    for rows, columns in plan.tiles(T, k_NSD.shape[1]):
        r = _Tile(plan, rows, columns)
        q_i, k_j, v_j, dout_i = q_NTD[:, rows], k_NSD[:, columns], v_NSD[:, columns], dout_NTD[:, rows]
        s = r.scores(q_i, k_j, "s_bwd", "s_bwd")
        p = torch.exp2((s - lse[:, rows]) * LOG2_E)
        dp = r("dp", product(dout_i, v_j.transpose(1, 2), sites.dp))
        ds = as_operand(r("ds", p * (dp - delta[:, rows])), sites.ds)
        p_operand = as_operand(r("p_pv", p), sites.p_pv)
        dq_chunk = r("dq_chunk", product(ds, k_j, sites.dq_chunk) * plan.scale)
        dk_chunk = r("dk_chunk", product(ds.transpose(1, 2), q_i, sites.dk_chunk) * plan.scale)
        dv_chunk = r("dv_chunk", product(p_operand.transpose(1, 2), dout_i, sites.dv_chunk))
        dq[:, rows] = r("dq", dq[:, rows] + dq_chunk)
        dk[:, columns] = r("dk", dk[:, columns] + dk_chunk)
        dv[:, columns] = r("dv", dv[:, columns] + dv_chunk)
    return dq.to(q_NTD.dtype), dk.to(k_NSD.dtype), dv.to(v_NSD.dtype)
