"""Streaming-softmax attention with a chosen rounding at every site: one function, several backends.

The operator is a ``torch.library`` custom op, so eager, ``torch.compile`` and autocast give the same bits: no compiler
looks inside, and casts never depend on the autocast state of the caller. Products of ``reference`` and ``cpu`` are
PyTorch's own, so leave ``torch.set_float32_matmul_precision`` at "highest", its default.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels import cpu, reference, triton_attention
from kernels.reference import Plan
from kernels.sites import RoundingSites

BACKENDS: dict[str, Any] = {"reference": reference, "cpu": cpu, "triton": triton_attention}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
Settings = tuple[str, int, int, bool, float, int, str]  # sites, q_tile, k_tile, causal, scale, seed, backend
# Elements of a score tile over all heads worked on at once: small enough for the cache, large enough to hide overheads.
_TILE_ELEMENTS = 1 << 19


class StreamingOutput(NamedTuple):
    """What attention returns, and what its recurrence knows for free.

    Attributes:
        out: [B, H, T, D], q's dtype.
        lse: float32 [B, H, T], natural log of the row sums of exp(logit); not differentiable. Like ``max_logit`` it is
            float64 for float64 inputs.
        max_logit: float32 [B, H], the largest scaled, signed, masked logit; NaN if any is.
        tied_rows: int32 [B, H], rows whose maximum is reached by more than one key.
    """

    out: Tensor
    lse: Tensor
    max_logit: Tensor
    tied_rows: Tensor


def _plans(q: Tensor, k: Tensor, settings: Settings) -> Iterator[tuple[slice, Plan]]:
    """Chunks of the folded heads and the plan of each: on a CPU those whose score tiles fit the cache together."""
    sites, q_tile, k_tile, causal, scale, seed, _ = settings
    heads, T, S = q.shape[0] * q.shape[1], q.shape[2], k.shape[2]
    step = max(1, _TILE_ELEMENTS // (min(q_tile, T) * min(k_tile, S))) if q.device.type == "cpu" else heads
    for first in range(0, heads, step):
        plan = Plan(RoundingSites.decode(sites), q_tile, k_tile, T, S, causal, scale, seed, first)
        yield slice(first, first + step), plan


def _fold(x: Tensor, heads: int) -> Tensor:
    """[B * heads, time, dim]; key and value heads are repeated for the query heads that share them."""
    return (x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)).flatten(0, 1)


def _unfold(x: Tensor, shape: torch.Size) -> Tensor:
    """[B, heads, time, dim] from folded query heads; those of one group are summed in float32 and rounded once."""
    x = x.view(shape[0], shape[1], -1, *shape[2:])
    if x.shape[2] == 1:
        return x.squeeze(2)
    return x.sum(2, dtype=torch.float64 if x.dtype is torch.float64 else torch.float32).to(x.dtype)


@torch.library.custom_op("lightning_qk::streaming_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, sites: str, q_tile: int, k_tile: int, causal: bool, scale: float, seed: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    B, H, T, _ = q.shape
    plans = _plans(q, k, (sites, q_tile, k_tile, causal, scale, seed, backend))
    q_NTD, k_NSD, v_NSD = (_fold(x, H) for x in (q, k, v))
    with torch.autocast(q.device.type, enabled=False):
        parts = [BACKENDS[backend].forward(q_NTD[c], k_NSD[c], v_NSD[c], plan) for c, plan in plans]
    out, lse, max_logit, tied = (torch.cat(x) if len(parts) > 1 else x[0] for x in zip(*parts, strict=True))
    return out.view(q.shape), lse.view(B, H, T), max_logit.view(B, H), tied.view(B, H)


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
    plans = _plans(q, k, (sites, q_tile, k_tile, causal, scale, seed, backend))
    dout_NTD, q_NTD, k_NSD, v_NSD, out_NTD = (_fold(x, q.shape[1]) for x in (dout, q, k, v, out))
    lse_NT = lse.flatten(0, 1)
    with torch.autocast(q.device.type, enabled=False):
        parts = [
            BACKENDS[backend].backward(dout_NTD[c], q_NTD[c], k_NSD[c], v_NSD[c], out_NTD[c], lse_NT[c], plan)
            for c, plan in plans
        ]
    dq, dk, dv = (torch.cat(x) if len(parts) > 1 else x[0] for x in zip(*parts, strict=True))
    return _unfold(dq, q.shape), _unfold(dk, k.shape), _unfold(dv, v.shape)


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


def _check(q: Tensor, k: Tensor, v: Tensor, sites: RoundingSites) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"streaming_attention: {name} has shape {tuple(x.shape)}; give [batch, heads, time, dim].")
        if x.dtype is not q.dtype or x.device != q.device:
            raise ValueError(
                f"streaming_attention: {name} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}; "
                "give all three one dtype and device."
            )
    if q.dtype not in _DTYPES:
        raise ValueError(f"streaming_attention: q is {q.dtype}; give float32, bfloat16 or float16.")
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"streaming_attention: shapes q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} differ: "
            "k and v need one shape, with q's batch and dim."
        )
    if 0 in q.shape or 0 in k.shape:
        raise ValueError(f"streaming_attention: empty input, q {tuple(q.shape)}, k {tuple(k.shape)}.")
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"streaming_attention: {q.shape[1]} query heads cannot share {k.shape[1]} key heads; "
            "give a divisor of the query heads."
        )
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
        k: [B, G, S, D], q's dtype and device; query heads h * H / G to (h + 1) * H / G - 1 share key head h.
        v: [B, G, S, D].
        sites: the roundings, or the name of a preset.
        tile: keys after which the running statistics are rounded, or (queries, keys). It is part of the fault, not a
            performance knob: a bias that needs two tied keys in one tile fades when they fall into different tiles.
        causal: query t sees the keys up to t + S - T, so that the last query sees all of them. With T > S the first
            T - S queries see none: their output is 0, their ``lse`` -inf.
        scale: factor on the logits; None is 1/sqrt(D).
        seed: seed of the sites whose mode is ``sr``; change it every step.
        backend: ``reference`` (readable; any device), ``cpu`` (fast), ``triton`` (CUDA), or ``auto``: ``triton`` for
            CUDA tensors, ``cpu`` for CPU tensors, else ``reference``. ``cpu`` gives the bits of ``reference``
            (stochastic sites and float64 run on the reference itself); ``triton`` sums in another order and has the
            GPU's exp2, so it gives them in most elements. A backend that cannot do what is asked says so.

    Returns:
        A :class:`StreamingOutput`; only ``out`` is differentiable.

    Raises:
        ValueError: for a wrong shape, dtype, preset, tile or backend.
    """
    if isinstance(sites, str):
        sites = RoundingSites.preset(sites)
    if not isinstance(sites, RoundingSites):
        raise ValueError(f"streaming_attention: sites={sites!r}: give a preset's name or RoundingSites.build(...).")
    _check(q, k, v, sites)
    tiles = tile if isinstance(tile, (tuple, list)) else (tile, tile)
    if len(tiles) != 2 or any(type(size) is not int or size < 1 for size in tiles):
        raise ValueError(f"streaming_attention: tile={tile}: give a positive int, or two: (queries, keys).")
    q_tile, k_tile = tiles
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    if not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise ValueError(f"streaming_attention: scale={scale!r}: give a finite number, or None for 1/sqrt(dim).")
    if type(seed) is not int:
        raise ValueError(f"streaming_attention: seed={seed!r}: give an int.")
    seed = (seed + 2**63) % 2**64 - 2**63  # an operator takes signed 64-bit integers
    if backend == "auto":
        backend = {"cpu": "cpu", "cuda": "triton"}.get(q.device.type, "reference")
    if backend not in BACKENDS:
        raise ValueError(f"streaming_attention: backend={backend!r} is not one of auto, {', '.join(BACKENDS)}.")
    wanted = {"cpu": "cpu", "triton": "cuda"}.get(backend, q.device.type)
    if wanted != q.device.type and not (backend == "triton" and triton_attention.interpreting()):
        raise ValueError(
            f"streaming_attention: backend={backend!r} got tensors on {q.device}; use 'auto' or 'reference'."
        )
    return StreamingOutput(*_forward(q, k, v, sites.encode(), q_tile, k_tile, causal, float(scale), seed, backend))
