"""The recurrence of :mod:`kernels.reference` at the speed of a CPU, with the same bits.

Same tiles, same matrix products of the same shapes; what differs is the work between them. It is done in place on the
score tile while that is in the cache, each step by the cheapest operation that gives the same value:

* bfloat16 is rounded by the hardware: in the product, in a cast, or in a sum of bfloat16 tensors, which PyTorch adds in
  float32 and rounds once;
* a scale that is a power of two goes into ``q``, since it commutes with every rounding;
* ``tril_`` and an addition mask, float32 counts: bool and integer kernels are up to ten times slower.

Nothing is compiled. Stochastic sites and float64 run on the reference itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kernels import reference
from kernels.reference import LOG2_E, Plan, as_operand, product
from kernels.rounding import MANTISSA_FP32, Rounding
from kernels.sites import SITE_NAMES


class _Mask:
    """Hides the keys after the query in a tile's scores, NaN included."""

    def __init__(self, hidden: Tensor, diagonal: int) -> None:
        self.diagonal = diagonal
        self.bias = torch.where(hidden, -torch.inf, -0.0)  # adding -0.0 changes no value, not even a zero's sign

    def __call__(self, s: Tensor) -> Tensor:
        return s.tril_(self.diagonal).add_(self.bias)


def _rows(plan: Plan, q_length: int, k_length: int) -> Iterator[tuple[int, slice, list[tuple[int, _Mask | None]]]]:
    """Every query tile: its index, its rows, and the index and mask of every key tile it sees."""
    masks: dict[tuple[int, int, int], _Mask | None] = {}
    for rows, tiles in itertools.groupby(plan.tiles(q_length, k_length), key=lambda tile: tile[0]):
        seen = []
        for _, columns in tiles:
            key = rows.stop - rows.start, columns.stop - columns.start, rows.start - columns.start
            if key not in masks:
                hidden = plan.mask(rows, columns, torch.device("cpu"))
                masks[key] = None if hidden is None else _Mask(hidden, diagonal=key[2])
            seen.append((columns.start // plan.k_tile, masks[key]))
        yield rows.start // plan.q_tile, rows, seen


def _split(x: Tensor, tile: int) -> list[Tensor]:
    return [part.contiguous() for part in x.split(tile, dim=1)]


def _scaled(q: Tensor, plan: Plan) -> tuple[Tensor, float]:
    """``q`` times the scale if that is exact and commutes with every rounding, and the scale that is left to apply."""
    wide_exponents = q.dtype is not torch.float16 and all(
        getattr(plan.sites, name).exponent_bits == 8 for name in SITE_NAMES
    )
    power_of_two = math.frexp(plan.scale)[0] == 0.5
    return (q * plan.scale, 1.0) if wide_exponents and power_of_two else (q, plan.scale)


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
    q, k, v = _split(q_NTD, plan.q_tile), _split(k_NSD, plan.k_tile), _split(v_NSD, plan.k_tile)
    o_dtype = _sum_dtype(v_NSD.dtype, sites.p_pv, sites.pv, sites.o_rescaled, sites.o_carry)
    out, lse = torch.empty(q_NTD.shape, dtype=q_NTD.dtype), torch.empty(N, T, 1)
    max_logit, tied_rows = torch.full((N,), -torch.inf), torch.zeros(N, dtype=torch.int32)
    for i, rows, seen in _rows(plan, T, k_NSD.shape[1]):
        o = torch.zeros(q[i].shape, dtype=o_dtype)
        m = torch.full((N, q[i].shape[1], 1), -torch.inf)
        length, ties = torch.zeros_like(m), torch.zeros_like(m)
        for j, mask in seen:
            s = _scores(q[i], k[j], mask, scale, sites.s, sites.s_scaled)
            m_new = _round_(torch.maximum(m, s.amax(-1, keepdim=True)), sites.m_carry)
            alpha = _round_((m - m_new).mul_(LOG2_E).exp2_(), sites.alpha)
            tied = torch.eq(s, m_new, out=torch.empty_like(s)).sum(-1, keepdim=True)  # exact below 2^24 keys
            p = _round_(s.sub_(m_new), sites.s_minus_m).mul_(LOG2_E).exp2_()
            row_sum = p.sum(-1, keepdim=True) if not sites.sum_rounded_p else None
            p = _operand(p, sites.p_pv)
            row_sum = p.float().sum(-1, keepdim=True) if row_sum is None else row_sum
            _round_(length.mul_(alpha).add_(_round_(row_sum, sites.p_sum)), sites.l_carry)
            o = o.float().mul_(alpha)
            o = o.to(o_dtype) if o_dtype is torch.bfloat16 else _round_(o, sites.o_rescaled)
            _add_(o, p, v[j], 1.0, sites.pv, sites.o_carry)
            ties = torch.where(m_new > m, tied, ties + tied)
            m = m_new
        out[:, rows] = _round_(_round_(o / length, sites.o_div), sites.o_out)
        lse[:, rows] = _round_(length.log_().add_(m), sites.lse)
        max_logit = torch.maximum(max_logit, m.amax((1, 2)))
        tied_rows += (ties > 1).sum((1, 2), dtype=torch.int32)
    return out, lse.squeeze(-1), max_logit, tied_rows


def backward(
    dout_NTD: Tensor, q_NTD: Tensor, k_NSD: Tensor, v_NSD: Tensor, out_NTD: Tensor, lse_NT: Tensor, plan: Plan
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`kernels.reference.backward`, bit for bit."""
    sites = plan.sites
    if sites.is_stochastic or q_NTD.dtype is torch.float64:
        return reference.backward(dout_NTD, q_NTD, k_NSD, v_NSD, out_NTD, lse_NT, plan)
    q_NTD, scale = _scaled(q_NTD, plan)
    q, dout, out = (_split(x, plan.q_tile) for x in (q_NTD, dout_NTD, out_NTD))
    k, v = _split(k_NSD, plan.k_tile), _split(v_NSD, plan.k_tile)
    inputs = q_NTD.dtype if scale == 1.0 else torch.float32  # a scale of its own makes chunks round twice
    dq = torch.empty(q_NTD.shape, dtype=q_NTD.dtype)
    dq_dtype = _sum_dtype(inputs, sites.ds, sites.dq_chunk, sites.dq)
    dk_dtype = _sum_dtype(inputs, sites.ds, sites.dk_chunk, sites.dk)
    dv_dtype = _sum_dtype(inputs, sites.p_pv, sites.dv_chunk, sites.dv)
    dk, dv = ([torch.zeros(x.shape, dtype=dtype) for x in k] for dtype in (dk_dtype, dv_dtype))
    for i, rows, seen in _rows(plan, q_NTD.shape[1], k_NSD.shape[1]):
        delta = _round_(dout[i].float() * out[i].float(), sites.delta_product).sum(-1, keepdim=True)
        delta, lse = _round_(delta, sites.delta), lse_NT[:, rows].unsqueeze(-1)
        dq_i = torch.zeros(q[i].shape, dtype=dq_dtype)
        for j, mask in seen:
            p = _scores(q[i], k[j], mask, scale, sites.s_bwd, sites.s_bwd).sub_(lse).mul_(LOG2_E).exp2_()
            ds = _rounded_product(dout[i], v[j].transpose(1, 2), sites.dp).sub_(delta).mul_(p)
            ds, p = _operand(ds, sites.ds), _operand(p, sites.p_pv)
            _add_(dq_i, ds, k[j], plan.scale, sites.dq_chunk, sites.dq)
            _add_(dk[j], ds.transpose(1, 2), q[i], scale, sites.dk_chunk, sites.dk)
            _add_(dv[j], p.transpose(1, 2), dout[i], 1.0, sites.dv_chunk, sites.dv)
        dq[:, rows] = dq_i
    return dq, torch.cat(dk, 1).to(k_NSD.dtype), torch.cat(dv, 1).to(v_NSD.dtype)
