"""Streaming-softmax attention with a chosen rounding at every site: one function, several backends.

The operator is a ``torch.library`` custom op, so eager, ``torch.compile`` and autocast give the same bits: no compiler
looks inside, and casts never depend on the autocast state of the caller.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels import cpu, reference
from kernels.reference import Plan
from kernels.sites import RoundingSites

BACKENDS = {"reference": reference, "cpu": cpu}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Elements of a score tile over all heads worked on at once: small enough for the cache, large enough to hide overheads.
_TILE_ELEMENTS = 1 << 19


class StreamingOutput(NamedTuple):
    """What attention returns, and what its recurrence knows for free.

    Attributes:
        out: [B, H, T, D], q's dtype.
        lse: float32 [B, H, T], natural log of the row sums of exp(logit); not differentiable.
        max_logit: float32 [B, H], the largest scaled, signed, masked logit; NaN if any is.
        tied_rows: int32 [B, H], rows whose maximum is reached by more than one key.
    """

    out: Tensor
    lse: Tensor
    max_logit: Tensor
    tied_rows: Tensor


def _chunks(n: int, plan: Plan, q_length: int, k_length: int) -> list[slice]:
    tile = min(plan.q_tile, q_length) * min(plan.k_tile, k_length)
    step = max(1, _TILE_ELEMENTS // tile)
    return [slice(start, start + step) for start in range(0, n, step)]


def _plan(sites: str, q_tile: int, k_tile: int, causal: bool, scale: float, seed: int, first_head: int) -> Plan:
    return Plan(RoundingSites.decode(sites), q_tile, k_tile, causal, scale, seed + first_head)


@torch.library.custom_op("lightning_qk::streaming_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, sites: str, q_tile: int, k_tile: int, causal: bool, scale: float, seed: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    B, H, T, D = q.shape
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    plan = _plan(sites, q_tile, k_tile, causal, scale, seed, 0)
    with torch.autocast(q.device.type, enabled=False):
        parts = [
            BACKENDS[backend].forward(q[c], k[c], v[c], _plan(sites, q_tile, k_tile, causal, scale, seed, c.start))
            for c in _chunks(B * H, plan, T, k.shape[1])
        ]
    out, lse, max_logit, tied = (torch.cat(x) if len(parts) > 1 else x[0] for x in zip(*parts, strict=True))
    return out.view(B, H, T, D), lse.view(B, H, T), max_logit.view(B, H), tied.view(B, H)


@_forward.register_fake
def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, sites: str, q_tile: int, k_tile: int, causal: bool, scale: float, seed: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    B, H, T, _ = q.shape
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    return (
        q.new_empty(q.shape),
        q.new_empty((B, H, T), dtype=dtype),
        q.new_empty((B, H), dtype=dtype),
        q.new_empty((B, H), dtype=torch.int32),
    )


@torch.library.custom_op("lightning_qk::streaming_attention_backward", mutates_args=())
def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sites: str, q_tile: int, k_tile: int,
    causal: bool, scale: float, seed: int, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    shape = q.shape, k.shape, v.shape
    dout, q, k, v, out, lse = (x.flatten(0, 1) for x in (dout, q, k, v, out, lse))
    plan = _plan(sites, q_tile, k_tile, causal, scale, seed, 0)
    with torch.autocast(q.device.type, enabled=False):
        parts = [
            BACKENDS[backend].backward(
                dout[c], q[c], k[c], v[c], out[c], lse[c],
                _plan(sites, q_tile, k_tile, causal, scale, seed, c.start),
            )
            for c in _chunks(q.shape[0], plan, q.shape[1], k.shape[1])
        ]  # fmt: skip
    dq, dk, dv = (torch.cat(x) if len(parts) > 1 else x[0] for x in zip(*parts, strict=True))
    return dq.view(shape[0]), dk.view(shape[1]), dv.view(shape[2])


@_backward.register_fake
def _backward_fake(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sites: str, q_tile: int, k_tile: int,
    causal: bool, scale: float, seed: int, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, *ctx.settings = inputs
    out, lse, max_logit, tied = output
    ctx.mark_non_differentiable(lse, max_logit, tied)
    ctx.save_for_backward(q, k, v, out, lse)


def _autograd(ctx: Any, dout: Tensor, *_: Any) -> tuple[Any, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    return *_backward(dout.contiguous(), q, k, v, out, lse, *ctx.settings), *([None] * len(ctx.settings))


_forward.register_autograd(_autograd, setup_context=_setup_context)


def _check(q: Tensor, k: Tensor, v: Tensor, sites: RoundingSites, causal: bool) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"streaming_attention: {name} has shape {tuple(x.shape)}; give [batch, heads, time, dim].")
        if x.dtype is not q.dtype or x.device != q.device:
            raise ValueError(f"streaming_attention: {name} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}.")
    if q.dtype not in _DTYPES:
        raise ValueError(f"streaming_attention: q is {q.dtype}; give float32, bfloat16 or float16.")
    if k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"streaming_attention: shapes q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} differ."
        )
    if 0 in q.shape or 0 in k.shape:
        raise ValueError(f"streaming_attention: empty input, q {tuple(q.shape)}, k {tuple(k.shape)}.")
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(f"streaming_attention: causal needs equal lengths, got {q.shape[2]} and {k.shape[2]}.")
    if q.dtype is torch.float64 and not sites.is_exact:
        raise ValueError("streaming_attention: float64 inputs are for the fp32 preset only (no site may round).")


def streaming_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sites: RoundingSites | str = "fp32",
    tile: int | tuple[int, int] = 512,
    causal: bool = True,
    scale: float | None = None,
    seed: int = 0,
    backend: str = "auto",
) -> StreamingOutput:
    """softmax(scale * q k') v by the streaming recurrence, rounding where ``sites`` says, forward and backward.

    Args:
        q: [B, H, T, D], float32, bfloat16 or float16 (float64 when no site rounds).
        k: [B, H, S, D], q's dtype and device.
        v: [B, H, S, D].
        sites: the roundings, or the name of a preset.
        tile: keys after which the running statistics are rounded, or (queries, keys). It is part of the fault, not a
            performance knob: a bias that needs two tied keys in one tile fades when they fall into different tiles.
        causal: query t sees keys 0..t. Needs T = S.
        scale: factor on the logits; None is 1/sqrt(D).
        seed: seed of the sites whose mode is ``sr``; change it every step.
        backend: ``reference`` (readable; any device), ``cpu`` (fast) or ``auto``: ``cpu`` for CPU tensors, else
            ``reference``. Both give the same bits; stochastic sites and float64 run on the reference in either.

    Returns:
        A :class:`StreamingOutput`; only ``out`` is differentiable.

    Raises:
        ValueError: for a wrong shape, dtype, preset, tile or backend.
    """
    if isinstance(sites, str):
        sites = RoundingSites.preset(sites)
    _check(q, k, v, sites, causal)
    q_tile, k_tile = (tile, tile) if isinstance(tile, int) else tile
    if q_tile < 1 or k_tile < 1:
        raise ValueError(f"streaming_attention: tile={tile} must be at least 1.")
    if backend == "auto":
        backend = "cpu" if q.device.type == "cpu" else "reference"
    if backend not in BACKENDS:
        raise ValueError(f"streaming_attention: backend={backend!r} is not one of auto, {', '.join(BACKENDS)}.")
    if backend == "cpu" and q.device.type != "cpu":
        raise ValueError(f"streaming_attention: backend='cpu' got tensors on {q.device}; use 'auto' or 'reference'.")
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    return StreamingOutput(*_forward(q, k, v, sites.encode(), q_tile, k_tile, causal, scale, seed, backend))
