"""Attention cores: objects with one call, ``core(q, k, v) -> out``, that a precision plugin swaps in place.

A core leaves what it knows of its logits behind, detached, for sensors to read: ``max_logit_H`` is exact;
``logit_bound_H`` never lies below it and may be cheaper. Shapes: q, k, v and out are ``[B, H, T, D]``, sensors ``[H]``.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import RoundingSites, streaming_attention

_QUERY_BLOCK = 256  # rows of the score matrix held at once while its exact maximum is taken


class AttentionCore(ABC):
    """Causal attention with sensors.

    Attributes:
        observed: set by whoever will read ``max_logit_H`` or ``logit_bound_H``.
        keep_qk: set by whoever will read ``entropy_H``, for which q and k of the last forward pass must be kept.
    """

    observed: bool = False
    keep_qk: bool = False
    _qk: tuple[Tensor, Tensor] | None = None

    @abstractmethod
    def __call__(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        """Causal softmax attention with scale 1/sqrt(D)."""

    @property
    @abstractmethod
    def max_logit_H(self) -> Tensor:
        """float32 [H]: the largest scaled, signed, masked logit of the last observed training forward pass."""

    @property
    def logit_bound_H(self) -> Tensor:
        """float32 [H]: an upper bound on ``max_logit_H``, equal to it where that is as cheap."""
        return self.max_logit_H

    @property
    def entropy_H(self) -> Tensor:
        """float32 [H]: entropy of the attention rows of that pass in nats, averaged over batch and queries."""
        return attention_entropy(*self._kept_qk())

    def _kept_qk(self) -> tuple[Tensor, Tensor]:
        if self._qk is None:
            raise self._unread()
        return self._qk

    def _unread(self) -> RuntimeError:
        return RuntimeError(
            f"{type(self).__name__}: nothing to read yet. Set `core.observed = True` (logits) or `core.keep_qk = True` "
            "(entropy) before a training forward pass."
        )


class SDPACore(AttentionCore):
    """``torch.nn.functional.scaled_dot_product_attention``: the stock control.

    The fused kernel does not report its maximum, so an observed core keeps q and k and computes it when it is read.
    """

    def __call__(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        if (self.observed or self.keep_qk) and torch.is_grad_enabled():
            self._qk = (q_BHTD.detach(), k_BHTD.detach())
        return F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)

    @property
    def max_logit_H(self) -> Tensor:
        return max_causal_logit(*self._kept_qk())

    @property
    def logit_bound_H(self) -> Tensor:
        q, k = self._kept_qk()
        longest_q, longest_k = (x.float().norm(dim=-1).amax((0, 2)) for x in (q, k))
        # Cauchy-Schwarz; the margin covers float32 rounding of the norms and of the exact product
        return longest_q * longest_k * (1.0 + 1e-5) / math.sqrt(q.shape[-1])


def _causal_scores(q_BHTD: Tensor, k_BHTD: Tensor) -> Iterator[Tensor]:
    """Scaled, masked scores in float32, a block of queries at a time."""
    T, D = q_BHTD.shape[-2:]
    for start in range(0, T, _QUERY_BLOCK):
        stop = min(start + _QUERY_BLOCK, T)
        q, k = q_BHTD[:, :, start:stop].float(), k_BHTD[:, :, :stop].float()
        scores = q @ k.transpose(-1, -2) / math.sqrt(D)
        row = torch.arange(start, stop, device=q_BHTD.device)
        future = torch.arange(stop, device=q_BHTD.device) > row[:, None]
        yield scores.masked_fill(future, -torch.inf)


@torch.no_grad()
def max_causal_logit(q_BHTD: Tensor, k_BHTD: Tensor) -> Tensor:
    """The exact maximum of the scaled causal scores per head, float32 [H]; NaN where any score is NaN."""
    return torch.stack([scores.amax((0, 2, 3)) for scores in _causal_scores(q_BHTD, k_BHTD)]).amax(0)


@torch.no_grad()
def attention_entropy(q_BHTD: Tensor, k_BHTD: Tensor) -> Tensor:
    """Mean over batch and queries of ``-sum p log p`` per head, float32 [H], in nats."""
    total = torch.zeros(q_BHTD.shape[1], device=q_BHTD.device)
    for scores in _causal_scores(q_BHTD, k_BHTD):
        total += torch.special.entr(scores.softmax(-1)).sum((0, 2, 3))
    return total / (q_BHTD.shape[0] * q_BHTD.shape[2])


@dataclasses.dataclass
class FaultSwitch:
    """Shared by a plugin and its cores: whether the fault is on, whether sensors record, and the pass's seed."""

    on: bool = True
    recording: bool = True
    seed: int = 0


class StreamingCore(AttentionCore):
    """The streaming softmax of :func:`kernels.streaming_attention`, faulty or clean by a switch.

    Args:
        sites: roundings while the switch is on.
        clean_sites: roundings while it is off: the reference pass, and validation unless told otherwise.
        tile: keys (or (queries, keys)) per tile.
        backend: see :func:`kernels.streaming_attention`.
        heads: heads that carry the fault; None is all of them.
        switch: shared with the plugin.
        layer: index that keeps the random streams of layers apart.
    """

    def __init__(
        self,
        sites: RoundingSites,
        clean_sites: RoundingSites,
        tile: int | tuple[int, int],
        switch: FaultSwitch,
        backend: str = "auto",
        heads: tuple[int, ...] | None = None,
        layer: int = 0,
    ) -> None:
        self.sites, self.clean_sites, self.tile, self.switch = sites, clean_sites, tile, switch
        self.backend, self.heads, self.layer = backend, heads, layer
        self._max_logit_H: Tensor | None = None
        self._tied_rows_H: Tensor | None = None

    def __call__(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        if not self.switch.on:
            out, max_logit, tied_rows = self._attend(q_BHTD, k_BHTD, v_BHTD, self.clean_sites)
        elif self.heads is None:
            out, max_logit, tied_rows = self._attend(q_BHTD, k_BHTD, v_BHTD, self.sites)
        else:
            H = q_BHTD.shape[1]
            faulty, clean = list(self.heads), [h for h in range(H) if h not in self.heads]
            parts = [
                self._attend(q_BHTD[:, heads], k_BHTD[:, heads], v_BHTD[:, heads], sites)
                for heads, sites in ((faulty, self.sites), (clean, self.clean_sites))
                if heads
            ]
            order = torch.tensor(faulty + clean, device=q_BHTD.device).argsort()
            out = torch.cat([part[0] for part in parts], 1).index_select(1, order)
            max_logit, tied_rows = (torch.cat([part[i] for part in parts])[order] for i in (1, 2))
        if self.switch.recording and torch.is_grad_enabled():
            self._max_logit_H, self._tied_rows_H = max_logit, tied_rows
            if self.keep_qk:
                self._qk = (q_BHTD.detach(), k_BHTD.detach())
        return out

    @torch.compiler.disable  # the seed is new at every step: a graph guarded on it would be compiled anew each time
    def _attend(self, q: Tensor, k: Tensor, v: Tensor, sites: RoundingSites) -> tuple[Tensor, Tensor, Tensor]:
        seed = (self.switch.seed * 1_000_003 + self.layer) % (1 << 40)
        result = streaming_attention(q, k, v, sites, self.tile, seed=seed, backend=self.backend)
        return result.out, result.max_logit.detach().amax(0), result.tied_rows.detach().sum(0)

    @property
    def max_logit_H(self) -> Tensor:
        if self._max_logit_H is None:
            raise self._unread()
        return self._max_logit_H

    @property
    def tied_rows_H(self) -> Tensor:
        """int [H]: rows of the last training batch whose maximum logit is reached by several keys."""
        if self._tied_rows_H is None:
            raise self._unread()
        return self._tied_rows_H
