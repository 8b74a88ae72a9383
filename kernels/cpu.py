"""The recurrence of :mod:`kernels.reference` at the speed of a CPU, with the same bits.

Same tiles, same matrix products of the same shapes; what differs is the work between them. Every tile needs two
elementwise passes forward and two backward; each is written once below and, when a C++ compiler is there, fused by
Inductor (which keeps integer arithmetic as written, so the roundings survive). Roundings that cannot change a value are
left out. Sums whose order a compiler may choose stay outside. ``exp2`` is the same vector routine in eager and in
Inductor as long as a row fills whole vectors; ragged tiles therefore run eagerly.

Inductor's vector code is slow where bfloat16 loads or stores meet integer arithmetic in one loop (measured: 10 times),
so a pass that rounds by integers sees float32 only and its operands are cast outside.

Stochastic sites and float64 run on the reference itself.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import shutil
from collections.abc import Callable

import torch
from torch import Tensor

from kernels import reference
from kernels.reference import LOG2_E, Plan, as_operand, product
from kernels.rounding import Rounding
from kernels.sites import RoundingSites

Fused = Callable[..., tuple[Tensor, ...]]
_VECTOR = 16  # float32 lanes of the widest vector unit

# "auto" compiles when a compiler is found; False never does. Set through `set_compile`.
_compile_mode: bool | str = "auto"


def set_compile(mode: bool | str) -> None:
    """Chooses how elementwise passes run: ``True`` (compiled), ``False`` (eager) or ``"auto"``. The bits are the same.

    Raises:
        ValueError: for another value, or for ``True`` without a C++ compiler on the PATH.
    """
    global _compile_mode
    if mode not in (True, False, "auto"):
        raise ValueError(f"set_compile: mode={mode!r} is not True, False or 'auto'.")
    if mode is True and not _has_compiler():
        raise ValueError("set_compile(True): no C++ compiler (g++ or clang++) on the PATH; install one or use 'auto'.")
    _compile_mode = mode


@functools.lru_cache(maxsize=1)
def _has_compiler() -> bool:
    return any(shutil.which(name) for name in ("g++", "clang++"))


@dataclasses.dataclass(frozen=True)
class _Passes:
    """The elementwise passes for one setting of the sites.

    Args:
        sites: the roundings.
        scale: factor on the scores.
        narrow: inputs are bfloat16, so products that round to bfloat16 come from the hardware already rounded.
        native: run eagerly, rounding to bfloat16 by the hardware's own cast.
    """

    sites: RoundingSites
    scale: float
    narrow: bool
    native: bool

    def _round(self, rounding: Rounding, x: Tensor) -> Tensor:
        if self.native and rounding.is_bf16_rne:
            return x.to(torch.bfloat16).float()
        return rounding(x)

    def _operand(self, x: Tensor, rounding: Rounding, inside: bool) -> Tensor:
        """Rounds an operand of a product; the cast that stores it is its rounding when that is bfloat16's own."""
        return x.to(torch.bfloat16) if rounding.is_bf16_rne and inside else self._round(rounding, x)

    def _scores(self, raw: Tensor, keep: Tensor, first: Rounding, second: Rounding) -> Tensor:
        s = raw.float() if self.narrow and first.is_bf16_rne else self._round(first, raw)
        s = s * self.scale
        if not _scaling_is_exact(self.scale, first, second):
            s = self._round(second, s)
        return torch.where(keep > 0, s, -torch.inf) if keep.numel() > 1 else s

    def softmax(self, raw: Tensor, m: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
        """Probabilities of a tile: as operand, as summand; the new maximum, the rescaling, the number of maxima."""
        sites = self.sites
        s = self._scores(raw, keep, sites.s, sites.s_scaled)
        m_new = self._round(sites.m_carry, torch.maximum(m, s.amax(-1, keepdim=True)))
        p = torch.exp2(self._round(sites.s_minus_m, s - m_new) * LOG2_E)
        alpha = self._round(sites.alpha, torch.exp2((m - m_new) * LOG2_E))
        tied = torch.where(s == m_new, 1.0, 0.0).sum(-1, keepdim=True)  # exact in float32 below 2^24 keys
        return self._operand(p, sites.p_pv, not self._softmax_needs_integers()), p, m_new, alpha, tied

    def carry(
        self, o: Tensor, length: Tensor, ties: Tensor, alpha: Tensor, row_sum: Tensor, pv: Tensor, tied: Tensor,
        m: Tensor, m_new: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """The running output, sum and tie count after a tile; every input is float32."""
        sites, r = self.sites, self._round
        o = r(sites.o_carry, r(sites.o_rescaled, o * alpha) + r(sites.pv, pv))
        length = r(sites.l_carry, length * alpha + r(sites.p_sum, row_sum))
        return o, length, torch.where(m_new > m, tied, ties + tied)

    def score_gradient(
        self, raw: Tensor, dp: Tensor, lse: Tensor, delta: Tensor, keep: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Recomputed probabilities and the gradient of the scores, both as operands."""
        sites = self.sites
        s = self._scores(raw, keep, sites.s_bwd, sites.s_bwd)
        p = torch.exp2((s - lse) * LOG2_E)
        dp = dp.float() if self.narrow and sites.dp.is_bf16_rne else self._round(sites.dp, dp)
        inside = not self._gradient_needs_integers()
        ds = self._operand(p * (dp - delta), sites.ds, inside)
        return self._operand(p, sites.p_pv, inside), ds

    def accumulate(
        self, dq: Tensor, dk: Tensor, dv: Tensor, dq_chunk: Tensor, dk_chunk: Tensor, dv_chunk: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The three gradient accumulators after a tile; chunks are float32."""
        sites, r = self.sites, self._round
        dq = r(sites.dq, dq + r(sites.dq_chunk, dq_chunk * self.scale))
        dk = r(sites.dk, dk + r(sites.dk_chunk, dk_chunk * self.scale))
        return dq, dk, r(sites.dv, dv + r(sites.dv_chunk, dv_chunk))

    def _scores_need_integers(self, first: Rounding, second: Rounding) -> bool:
        rounded = not first.is_identity and not (self.narrow and first.is_bf16_rne)
        return rounded or not (second.is_identity or _scaling_is_exact(self.scale, first, second))

    def _softmax_needs_integers(self) -> bool:
        sites = self.sites
        operand = sites.p_pv.is_identity or sites.p_pv.is_bf16_rne
        others = all(site.is_identity for site in (sites.m_carry, sites.s_minus_m, sites.alpha))
        return self._scores_need_integers(sites.s, sites.s_scaled) or not operand or not others

    def _gradient_needs_integers(self) -> bool:
        sites = self.sites
        operands = all(site.is_identity or site.is_bf16_rne for site in (sites.p_pv, sites.ds))
        dp = sites.dp.is_identity or (self.narrow and sites.dp.is_bf16_rne)
        return self._scores_need_integers(sites.s_bwd, sites.s_bwd) or not operands or not dp


def _scaling_is_exact(scale: float, first: Rounding, second: Rounding) -> bool:
    """Whether the second rounding of a score leaves it alone: a power of two moves the exponent only."""
    return math.frexp(scale)[0] == 0.5 and second.mantissa_bits >= first.mantissa_bits and second.exponent_bits == 8


@functools.lru_cache(maxsize=4096)
def _fused(passes: _Passes, name: str, shapes: tuple[tuple[torch.Size, torch.dtype], ...]) -> Fused:
    """One pass compiled for one set of shapes; guards and recompiles of Dynamo are not needed, nor paid for."""
    from torch._inductor import compile as inductor_compile
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with torch.no_grad(), FakeTensorMode(shape_env=ShapeEnv()):  # fake inputs: needed for Inductor's cache on disk
        examples = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
        graph = make_fx(lambda *tensors: getattr(passes, name)(*tensors))(*examples)
    with torch.no_grad():
        return inductor_compile(graph, examples)


def _run(passes: _Passes, name: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    if passes.native:
        return getattr(passes, name)(*tensors)
    return _fused(passes, name, tuple((x.shape, x.dtype) for x in tensors))(*tensors)


class _Work:
    """The tiles of one call: which passes run on them, and their masks."""

    def __init__(self, plan: Plan, q_length: int, k_length: int, dtype: torch.dtype) -> None:
        self.plan = plan
        self.tiles = [
            (rows.start // plan.q_tile, columns.start // plan.k_tile, rows, columns)
            for rows, columns in plan.tiles(q_length, k_length)
        ]
        compiled = _has_compiler() if _compile_mode == "auto" else _compile_mode is True
        narrow = dtype is torch.bfloat16
        self._whole = _Passes(plan.sites, plan.scale, narrow, native=not compiled)
        self._ragged = _Passes(plan.sites, plan.scale, narrow, native=True)
        self._nothing = torch.ones(1, 1)
        self._masks: dict[tuple[int, int, int], Tensor] = {}

    def passes(self, rows: slice, columns: slice) -> _Passes:
        sizes = rows.stop - rows.start, columns.stop - columns.start
        return self._ragged if sizes[0] % _VECTOR or sizes[1] % _VECTOR else self._whole

    def keep(self, rows: slice, columns: slice) -> Tensor:
        """float32, 1 where a key may be seen (a bool mask would not be vectorised)."""
        key = rows.stop - rows.start, columns.stop - columns.start, rows.start - columns.start
        if key not in self._masks:
            mask = self.plan.mask(rows, columns, torch.device("cpu"))
            self._masks[key] = self._nothing if mask is None else (~mask).float()
        return self._masks[key]


def _split(x: Tensor, tile: int) -> list[Tensor]:
    return [part.contiguous() for part in x.split(tile, dim=1)]


def forward(q_NTD: Tensor, k_NSD: Tensor, v_NSD: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`kernels.reference.forward`, bit for bit."""
    sites = plan.sites
    if sites.is_stochastic or q_NTD.dtype is torch.float64:
        return reference.forward(q_NTD, k_NSD, v_NSD, plan)
    N, T, D = q_NTD.shape
    q, k, v = _split(q_NTD, plan.q_tile), _split(k_NSD, plan.k_tile), _split(v_NSD, plan.k_tile)
    o = [torch.zeros(N, x.shape[1], D) for x in q]
    m = [torch.full((N, x.shape[1], 1), -torch.inf) for x in q]
    length, ties = [torch.zeros_like(x) for x in m], [torch.zeros_like(x) for x in m]
    work = _Work(plan, T, k_NSD.shape[1], q_NTD.dtype)
    for i, j, rows, columns in work.tiles:
        passes = work.passes(rows, columns)
        raw = product(q[i], k[j].transpose(1, 2), sites.s)
        p, summand, m_new, alpha, tied = _run(passes, "softmax", raw, m[i], work.keep(rows, columns))
        p = as_operand(p, sites.p_pv)
        pv = product(p, v[j], sites.pv).float()
        row_sum = (p.float() if sites.sum_rounded_p else summand).sum(-1, keepdim=True)
        o[i], length[i], ties[i] = _run(
            passes, "carry", o[i], length[i], ties[i], alpha, row_sum, pv, tied, m[i], m_new
        )
        m[i] = m_new
    m_all, length_all = torch.cat(m, 1), torch.cat(length, 1)
    out = sites.o_out(sites.o_div(torch.cat(o, 1) / length_all))
    lse = sites.lse(m_all + length_all.log()).squeeze(-1)
    tied_rows = (torch.cat(ties, 1) > 1).sum((1, 2), dtype=torch.int32)
    return out.to(q_NTD.dtype), lse, m_all.amax((1, 2)), tied_rows


def backward(
    dout_NTD: Tensor, q_NTD: Tensor, k_NSD: Tensor, v_NSD: Tensor, out_NTD: Tensor, lse_NT: Tensor, plan: Plan
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`kernels.reference.backward`, bit for bit."""
    sites = plan.sites
    if sites.is_stochastic or q_NTD.dtype is torch.float64:
        return reference.backward(dout_NTD, q_NTD, k_NSD, v_NSD, out_NTD, lse_NT, plan)
    delta_NT = sites.delta(sites.delta_product(dout_NTD.float() * out_NTD.float()).sum(-1, keepdim=True))
    q, dout, lse, delta = (_split(x, plan.q_tile) for x in (q_NTD, dout_NTD, lse_NT.unsqueeze(-1), delta_NT))
    k, v = _split(k_NSD, plan.k_tile), _split(v_NSD, plan.k_tile)
    dq, dk, dv = ([torch.zeros(x.shape) for x in tiles] for tiles in (q, k, v))
    work = _Work(plan, q_NTD.shape[1], k_NSD.shape[1], q_NTD.dtype)
    for i, j, rows, columns in work.tiles:
        passes = work.passes(rows, columns)
        raw = product(q[i], k[j].transpose(1, 2), sites.s_bwd)
        dp = product(dout[i], v[j].transpose(1, 2), sites.dp)
        p, ds = _run(passes, "score_gradient", raw, dp, lse[i], delta[i], work.keep(rows, columns))
        p, ds = as_operand(p, sites.p_pv), as_operand(ds, sites.ds)
        chunks = (
            product(ds, k[j], sites.dq_chunk).float(),
            product(ds.transpose(1, 2), q[i], sites.dk_chunk).float(),
            product(p.transpose(1, 2), dout[i], sites.dv_chunk).float(),
        )
        dq[i], dk[j], dv[j] = _run(passes, "accumulate", dq[i], dk[j], dv[j], *chunks)
    return tuple(torch.cat(x, 1).to(like.dtype) for x, like in ((dq, q_NTD), (dk, k_NSD), (dv, v_NSD)))  # type: ignore[return-value]
