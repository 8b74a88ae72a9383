"""The recurrence of :mod:`kernels.reference` at the speed of a CPU, with the same bits.

Same tiles, same matrix products of the same shapes; what differs is the work between them. It is done in place on the
score tile while that is in the cache, each step by the cheapest operation that gives the same value:

* bfloat16 is rounded by the hardware: in the product, in a cast, or in a sum of bfloat16 tensors, which PyTorch adds in
  float32 and rounds once;
* a scale that is a power of two goes into ``q``, since it commutes with every rounding (unless scores are so small that
  float32 itself rounds them: below 2^-126 the bits may differ from the reference's);
* ``tril_`` and an addition mask, float32 counts: bool and integer kernels are up to ten times slower.

Nothing is compiled. Stochastic sites and float64 run on the reference itself.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels import reference
from kernels.reference import LOG2_E, Plan, as_operand, finite_or_zero, product, raised
from kernels.rounding import MANTISSA_FP32, Rounding
from kernels.sites import SITE_NAMES


class _Mask:
    """Hides the keys after the query in a tile's scores, NaN included."""

    def __init__(self, hidden: Tensor, diagonal: int) -> None:
        self.diagonal = diagonal
        self.bias = torch.where(hidden, -torch.inf, -0.0)  # adding -0.0 changes no value, not even a zero's sign

    def __call__(self, s: Tensor) -> Tensor:
        return s.tril_(self.diagonal).add_(self.bias)


class _Masks:
    """The masks of a plan's tiles; tiles of one shape on the same diagonal share one."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.made = plan, dict[tuple[int, int, int], _Mask | None]()

    def __getitem__(self, tile: tuple[slice, slice]) -> _Mask | None:
        rows, columns = tile
        diagonal = rows.start + self.plan.offset - columns.start
        key = rows.stop - rows.start, columns.stop - columns.start, diagonal
        if key not in self.made:
            hidden = self.plan.mask(rows, columns, torch.device("cpu"))
            self.made[key] = None if hidden is None else _Mask(hidden, diagonal)
        return self.made[key]


def _split(x: Tensor, tile: int) -> list[Tensor]:
    return [part.contiguous() for part in x.split(tile, dim=1)]


def _scaled(q: Tensor, plan: Plan) -> tuple[Tensor, float]:
    """``q`` times the scale if that is exact and commutes with every rounding, and the scale that is left to apply."""
    wide_exponents = q.dtype is not torch.float16 and all(
        getattr(plan.sites, name).exponent_bits == 8 for name in SITE_NAMES
    )
    # above 1 it could lift a subnormal, which the hardware's product may take for 0
    shrinks = math.frexp(plan.scale)[0] == 0.5 and plan.scale <= 1.0
    if not (wide_exponents and shrinks):
        return q, plan.scale
    scaled = q * plan.scale
    exact = torch.equal(scaled / plan.scale, q) or not bool(q.isfinite().all())  # NaN and inf commute too
    return (scaled, 1.0) if exact else (q, plan.scale)


def _round_(x: Tensor, rounding: Rounding) -> Tensor:
    """Rounds a float32 tensor in place."""
    if rounding.is_identity:
        return x
    if rounding.is_bf16_rne:
        return x.copy_(x.to(torch.bfloat16))
    if rounding.exponent_bits != 8 or not math.isfinite(x.sum().item()):  # NaN needs care, and is rare
        return x.copy_(rounding(x))
    drop = MANTISSA_FP32 - rounding.mantissa_bits
    bits = x.view(torch.int32)
    if rounding.mode == "rne":
        bits.add_(torch.bitwise_right_shift(bits, drop).bitwise_and_(1).add_((1 << (drop - 1)) - 1))
    bits.bitwise_and_(-1 << drop)
    return x


def _rounded_product(a: Tensor, b: Tensor, rounding: Rounding) -> Tensor:
    """A new float32 product, rounded by the product itself where the hardware does it."""
    x = product(a, b, rounding)
    return x.float() if x.dtype is torch.bfloat16 else _round_(x, rounding)


def _operand(x: Tensor, rounding: Rounding) -> Tensor:
    """``x`` rounded as an operand of a product; may overwrite ``x``."""
    return x.to(torch.bfloat16) if rounding.is_bf16_rne else as_operand(_round_(x, rounding), rounding)


def _scores(q_i: Tensor, k_j: Tensor, mask: _Mask | None, scale: float, first: Rounding, second: Rounding) -> Tensor:
    """Scaled, masked scores of a tile."""
    s = _rounded_product(q_i, k_j.transpose(1, 2), first)
    if scale != 1.0:
        s.mul_(scale)
    if scale != 1.0 or second.mantissa_bits < first.mantissa_bits or second.exponent_bits < first.exponent_bits:
        _round_(s, second)
    return s if mask is None else mask(s)


def _sum_dtype(inputs: torch.dtype, operand: Rounding, *roundings: Rounding) -> torch.dtype:
    """bfloat16 for a running sum that is only ever rounded to it, of products that come rounded to it."""
    native = inputs is torch.bfloat16 and operand.fits_bf16 and all(rounding.is_bf16_rne for rounding in roundings)
    return torch.bfloat16 if native else torch.float32


def _add_(total: Tensor, a: Tensor, b: Tensor, scale: float, chunk: Rounding, carry: Rounding) -> None:
    """Adds ``scale * a b`` to a running sum."""
    x = product(a, b, chunk)
    if total.dtype is torch.bfloat16:
        total.add_(x, alpha=scale)
    else:
        x = x.float() if scale == 1.0 else x.float().mul_(scale)
        _round_(total.add_(_round_(x, chunk)), carry)


def forward(q_NTD: Tensor, k_NSD: Tensor, v_NSD: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`kernels.reference.forward`, bit for bit."""
    sites = plan.sites
    if sites.is_stochastic or q_NTD.dtype is torch.float64:
        return reference.forward(q_NTD, k_NSD, v_NSD, plan)
    N, T, _ = q_NTD.shape
    q_NTD, scale = _scaled(q_NTD, plan)
    k, v, masks = _split(k_NSD, plan.k_tile), _split(v_NSD, plan.k_tile), _Masks(plan)
    o_dtype = _sum_dtype(v_NSD.dtype, sites.p_pv, sites.pv, sites.o_rescaled, sites.o_carry)
    out, lse = torch.empty(q_NTD.shape, dtype=q_NTD.dtype), torch.empty(N, T, 1)
    peak, ties = torch.full((N, T, 1), -torch.inf), torch.zeros(N, T, 1)
    for rows in plan.query_tiles():
        q_i = q_NTD[:, rows].contiguous()
        o = torch.zeros(q_i.shape, dtype=o_dtype)
        m = torch.full((N, q_i.shape[1], 1), -torch.inf)
        length, top, count = torch.zeros_like(m), m, torch.zeros_like(m)
        for columns in plan.key_tiles(rows):
            j = columns.start // plan.k_tile
            s = _scores(q_i, k[j], masks[rows, columns], scale, sites.s, sites.s_scaled)
            h = s.amax(-1, keepdim=True)
            top_new = torch.maximum(top, h)
            tied = torch.eq(s, top_new, out=torch.empty_like(s)).sum(-1, keepdim=True)  # exact below 2^24 keys
            count = torch.where(top_new > top, tied, count + tied)
            if sites.sfa_beta is not None:
                h = raised(h, (s >= h - sites.sfa_tolerance).sum(-1, keepdim=True) > 1, sites.sfa_beta)
            m_new = _round_(torch.maximum(m, h), sites.m_carry)
            shift = finite_or_zero(m_new)
            alpha = _round_((m - shift).mul_(LOG2_E).exp2_(), sites.alpha)
            p = _round_(s.sub_(shift), sites.s_minus_m).mul_(LOG2_E).exp2_()
            row_sum = p.sum(-1, keepdim=True) if not sites.sum_rounded_p else None
            p = _operand(p, sites.p_pv)
            row_sum = p.float().sum(-1, keepdim=True) if row_sum is None else row_sum
            _round_(length.mul_(alpha).add_(_round_(row_sum, sites.p_sum)), sites.l_carry)
            o = o.float().mul_(alpha)
            o = o.to(o_dtype) if o_dtype is torch.bfloat16 else _round_(o, sites.o_rescaled)
            _add_(o, p, v[j], 1.0, sites.pv, sites.o_carry)
            m, top = m_new, top_new
        quotient = o * length.reciprocal() if sites.reciprocal else o / length
        out[:, rows] = _round_(_round_(quotient, sites.o_div), sites.o_out)
        lse[:, rows] = _round_(length.log_().add_(m), sites.lse)
        peak[:, rows], ties[:, rows] = top, count
    blind = slice(0, plan.blind_rows)
    out[:, blind], lse[:, blind], ties[:, blind] = 0.0, -torch.inf, 0.0
    return out, lse.squeeze(-1), peak.amax((1, 2)), (ties > 1).sum((1, 2), dtype=torch.int32)


class _Tiles:
    """The tiles of the backward pass: P and dP of one, recomputed from the saved log-sum-exp."""

    def __init__(self, q_NTD: Tensor, scale: float, k: list[Tensor], v: list[Tensor], plan: Plan) -> None:
        self.q_NTD, self.scale, self.k, self.v, self.plan, self.masks = q_NTD, scale, k, v, plan, _Masks(plan)

    def p(self, q_i: Tensor, lse_i: Tensor, rows: slice, columns: slice) -> Tensor:
        mask, sites = self.masks[rows, columns], self.plan.sites
        s = _scores(q_i, self.k[columns.start // self.plan.k_tile], mask, self.scale, sites.s_bwd, sites.s_bwd)
        return s.sub_(lse_i).mul_(LOG2_E).exp2_()

    def dp(self, dout_i: Tensor, columns: slice) -> Tensor:
        v_j = self.v[columns.start // self.plan.k_tile]
        return _rounded_product(dout_i, v_j.transpose(1, 2), self.plan.sites.dp)

    def delta(self, q_i: Tensor, dout_i: Tensor, out_i: Tensor, lse_i: Tensor, rows: slice) -> Tensor:
        """As ``reference._delta``."""
        sites, tiles = self.plan.sites, self.plan.key_tiles(rows)
        if sites.delta_from == "p_dp":
            delta = torch.zeros_like(lse_i)
            for columns in tiles:
                product_ij = self.p(q_i, lse_i, rows, columns).mul_(self.dp(dout_i, columns))
                delta += _round_(product_ij, sites.delta_product).sum(-1, keepdim=True)
            return _round_(delta, sites.delta)
        out = out_i.float()
        if sites.delta_from == "out_fp32":
            out = torch.zeros_like(out)
            for columns in tiles:
                v_j = self.v[columns.start // self.plan.k_tile]
                out += torch.bmm(self.p(q_i, lse_i, rows, columns), v_j.float())
        return _round_(_round_(dout_i.float() * out, sites.delta_product).sum(-1, keepdim=True), sites.delta)


def backward(
    dout_NTD: Tensor, q_NTD: Tensor, k_NSD: Tensor, v_NSD: Tensor, out_NTD: Tensor, lse_NT: Tensor, plan: Plan
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`kernels.reference.backward`, bit for bit."""
    sites = plan.sites
    if sites.is_stochastic or q_NTD.dtype is torch.float64:
        return reference.backward(dout_NTD, q_NTD, k_NSD, v_NSD, out_NTD, lse_NT, plan)
    q_NTD, scale = _scaled(q_NTD, plan)
    tiles = _Tiles(q_NTD, scale, _split(k_NSD, plan.k_tile), _split(v_NSD, plan.k_tile), plan)
    inputs = q_NTD.dtype if scale == 1.0 else torch.float32  # a scale of its own makes chunks round twice
    dq = torch.empty(q_NTD.shape, dtype=q_NTD.dtype)
    dq_dtype = _sum_dtype(inputs, sites.ds, sites.dq_chunk, sites.dq)
    dk_dtype = _sum_dtype(inputs, sites.ds, sites.dk_chunk, sites.dk)
    dv_dtype = _sum_dtype(inputs, sites.p_pv, sites.dv_chunk, sites.dv)
    dk, dv = ([torch.zeros(x.shape, dtype=dtype) for x in tiles.k] for dtype in (dk_dtype, dv_dtype))
    for rows in plan.query_tiles():
        q_i, dout_i = q_NTD[:, rows].contiguous(), dout_NTD[:, rows].contiguous()
        lse_i = finite_or_zero(lse_NT[:, rows, None])
        delta = tiles.delta(q_i, dout_i, out_NTD[:, rows], lse_i, rows)
        dq_i = torch.zeros(q_i.shape, dtype=dq_dtype)
        for columns in plan.key_tiles(rows):
            j = columns.start // plan.k_tile
            p = tiles.p(q_i, lse_i, rows, columns)
            ds = tiles.dp(dout_i, columns).sub_(delta).mul_(p)
            ds, p = _operand(ds, sites.ds), _operand(p, sites.p_pv)
            _add_(dq_i, ds, tiles.k[j], plan.scale, sites.dq_chunk, sites.dq)
            _add_(dk[j], ds.transpose(1, 2), q_i, scale, sites.dk_chunk, sites.dk)
            _add_(dv[j], p.transpose(1, 2), dout_i, 1.0, sites.dv_chunk, sites.dv)
        dq[:, rows] = dq_i
    return dq, torch.cat(dk, 1).to(k_NSD.dtype), torch.cat(dv, 1).to(v_NSD.dtype)
