"""Attention cores: objects with one call, ``core(q, k, v) -> out``, that a precision plugin swaps in place.

A core leaves what it knows of its logits behind, detached, for sensors to read: ``max_logit_H`` is exact;
``logit_bound_H`` never lies below it and may be cheaper. Shapes: q, k, v and out are ``[B, H, T, D]``, sensors ``[H]``;
keys and values may have fewer heads G, S positions, where the model's own attention does.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels import RoundingSites, streaming_attention
from kernels.logit_bound import logit_cauchy_schwarz_bound

_QUERY_BLOCK = 256  # rows of the score matrix held at once while its exact maximum is taken


class Pass(NamedTuple):
    """The part of a forward pass that its logits depend on.

    Attributes:
        q: [B, H, T, D].
        k: [B, G, S, D], G divides H.
        scale: factor on ``q . k``; None is ``1 / sqrt(D)``.
        causal: query t sees the keys 0 to t.
        mask: broadcastable to [B, H, T, S], True where a query sees a key, or added to the logits.
        softcap_H: c of the soft cap ``c tanh(S / c)``, inf for none; None is none in any head.
    """

    q: Tensor
    k: Tensor
    scale: float | None = None
    causal: bool = True
    mask: Tensor | None = None
    softcap_H: Tensor | None = None

    def detached(self) -> Pass:
        """For sensors: the graph may go."""
        return self._replace(q=self.q.detach(), k=self.k.detach())

    def scores(self, start: int = 0, stop: int | None = None) -> Tensor:
        """What the softmax of the queries ``start`` to ``stop`` takes, in float32; -inf where masked."""
        H, T, D = self.q.shape[1:]
        G, S = self.k.shape[1:3]
        stop = T if stop is None else min(stop, T)
        keys = min(stop, S) if self.causal else S
        k = self.k[:, :, :keys].float()
        k = k if G == H else k.repeat_interleave(H // G, 1)
        # in place: these are the largest tensors of an attention layer
        scores = (self.q[:, :, start:stop].float() @ k.mT).mul_(D**-0.5 if self.scale is None else self.scale)
        if self.softcap_H is not None:
            scores = soft_capped(scores, self.softcap_H)
        if self.causal:
            row = torch.arange(start, stop, device=scores.device)
            scores.masked_fill_(torch.arange(keys, device=scores.device) > row[:, None], -torch.inf)
        if self.mask is None:
            return scores
        mask = self.mask.expand(*self.mask.shape[:-2], T, S)[..., start:stop, :keys]
        if mask.dtype is torch.bool:
            return scores.masked_fill(~mask, -torch.inf)
        # a large finite number is as good as -inf to whoever made the mask, and not to be taken for a logit
        return torch.where(mask < torch.finfo(mask.dtype).min / 2, -torch.inf, scores + mask.float())

    def blocks(self) -> Iterator[Tensor]:
        """:meth:`scores`, some queries at a time."""
        for start in range(0, self.q.shape[2], _QUERY_BLOCK):
            yield self.scores(start, start + _QUERY_BLOCK)

    @torch.no_grad()
    def max_logit_H(self) -> Tensor:
        """The exact maximum of the scores per head, float32 [H]; NaN where any score is NaN."""
        return torch.stack([scores.flatten(2).amax(-1).amax(0) for scores in self.blocks()]).amax(0)

    @torch.no_grad()
    def logit_bound_H(self) -> Tensor:
        """Cauchy-Schwarz over the queries and keys of each head, and what a mask adds, float32 [H]."""
        bound_H = logit_cauchy_schwarz_bound(self.q, self.k, self.scale)
        if self.softcap_H is not None:
            bound_H = soft_capped(bound_H[:, None, None], self.softcap_H)[:, 0, 0]
        if self.mask is None or self.mask.dtype is torch.bool:
            return bound_H
        return bound_H + self.mask.amax().float().clamp_min(0.0)

    @torch.no_grad()
    def entropy_H(self) -> Tensor:
        """Mean over batch and queries of ``-sum p log p`` per head, float32 [H], in nats; rows of no key count as 0."""
        total = torch.zeros(self.q.shape[1], device=self.q.device)
        for scores in self.blocks():
            seen = (scores > -torch.inf).any(-1) | scores.isnan().any(-1)
            total += torch.special.entr(scores.softmax(-1)).sum(-1).where(seen, 0.0).sum((0, 2))
        return total / (self.q.shape[0] * self.q.shape[2])


def soft_capped(scores_BHTS: Tensor, cap_H: Tensor) -> Tensor:
    """``c tanh(S / c)`` (Gemma 2, arXiv 2408.00118) with a cap for every head, inf for none."""
    cap = cap_H.to(scores_BHTS.dtype)[:, None, None]
    finite = cap.clamp(max=torch.finfo(cap.dtype).max)  # inf * tanh(0) would be NaN, in the backward pass too
    return torch.where(cap.isinf(), scores_BHTS, finite * torch.tanh(scores_BHTS / finite))


def explicit_attention(logits: Pass, v: Tensor, dropout: float = 0.0) -> tuple[Tensor, Tensor]:
    """Attention with every score materialised in float32: for what fused kernels lack.

    Returns:
        The output [B, H, T, D] in v's dtype, and the weights float32 [B, H, T, S] after dropout.
    """
    with torch.autocast(v.device.type, enabled=False):
        scores = logits.scores()
        weights = F.dropout(F.pad(scores.softmax(-1), (0, v.shape[2] - scores.shape[-1])), dropout)
        out = weights @ v.float().repeat_interleave(weights.shape[1] // v.shape[1], 1)
        return out.to(v.dtype), weights


@dataclasses.dataclass
class FaultSwitch:
    """Shared by a plugin and what it converts: whether faults are on, whether sensors record, and the pass's seed."""

    on: bool = True
    recording: bool = True
    seed: int = 0


class AttentionCore(ABC):
    """Causal attention with sensors.

    Attributes:
        switch: of the plugin that has converted the model, which keeps sensors as they are in passes of its own.
        observed: set by whoever will read ``max_logit_H`` or ``logit_bound_H``.
        keep_qk: set by whoever will read ``entropy_H``, for which q and k of the last forward pass must be kept.
        clean_heads: heads kept clear of any fault, whatever the plugin says; set by the attention site.
        has_softcap: whether :meth:`soft_capped` is there.
    """

    switch: FaultSwitch = FaultSwitch()
    observed: bool = False
    keep_qk: bool = False
    clean_heads: tuple[int, ...] = ()
    has_softcap: bool = False
    _pass: Pass | None = None

    @abstractmethod
    def __call__(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        """Causal softmax attention with scale 1/sqrt(D)."""

    def soft_capped(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, cap_H: Tensor) -> Tensor:
        """The same with soft-capped logits."""
        raise NotImplementedError(f"{type(self).__name__} has no soft cap; see has_softcap.")

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
        return self._kept().entropy_H()

    def _kept(self) -> Pass:
        if self._pass is None:
            raise self._unread()
        return self._pass

    def _unread(self) -> RuntimeError:
        return RuntimeError(
            f"{type(self).__name__}: nothing to read yet. Set `core.observed = True` (logits) or `core.keep_qk = True` "
            "(entropy) before a training forward pass."
        )


class SDPACore(AttentionCore):
    """``torch.nn.functional.scaled_dot_product_attention``: the stock control.

    The fused kernel does not report its maximum, so an observed core keeps q and k and computes it when it is read.
    """

    has_softcap = True

    def __call__(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        self.keep(Pass(q_BHTD, k_BHTD))
        return F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)

    def soft_capped(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, cap_H: Tensor) -> Tensor:
        """The same with soft-capped logits: no fused kernel, every score in float32."""
        logits = Pass(q_BHTD, k_BHTD, softcap_H=cap_H)
        self.keep(logits)
        return explicit_attention(logits, v_BHTD)[0]

    def keep(self, logits: Pass) -> None:
        """Keeps what sensors need of a training pass, if any will read."""
        if (self.observed or self.keep_qk) and self.switch.recording and torch.is_grad_enabled():
            self._pass = logits.detached()

    @property
    def max_logit_H(self) -> Tensor:
        return self._kept().max_logit_H()

    @property
    def logit_bound_H(self) -> Tensor:
        return self._kept().logit_bound_H()


class FlashCore(SDPACore):
    """SDPA by PyTorch's FlashAttention and nothing else: what cannot run on it is an error, not a slower kernel."""

    def __call__(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return super().__call__(q_BHTD, k_BHTD, v_BHTD)


class ModelCore(SDPACore):
    """Sensors of a model that calls its own attention function."""


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
        self._rows = 0  # of that pass that see more than one key

    def __call__(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        H = q_BHTD.shape[1]
        faulty = [h for h in (range(H) if self.heads is None else self.heads) if h not in self.clean_heads]
        if not self.switch.on or len(faulty) in (0, H):
            sites = self.sites if self.switch.on and faulty else self.clean_sites
            out, max_logit, tied_rows = self._attend(q_BHTD, k_BHTD, v_BHTD, sites)
        else:
            clean = [h for h in range(H) if h not in faulty]
            parts = [
                self._attend(q_BHTD[:, heads], k_BHTD[:, heads], v_BHTD[:, heads], sites)
                for heads, sites in ((faulty, self.sites), (clean, self.clean_sites))
            ]
            order = torch.tensor(faulty + clean, device=q_BHTD.device).argsort()
            out = torch.cat([part[0] for part in parts], 1).index_select(1, order)
            max_logit, tied_rows = (torch.cat([part[i] for part in parts])[order] for i in (1, 2))
        if self.switch.recording and torch.is_grad_enabled():
            self._max_logit_H, self._tied_rows_H = max_logit, tied_rows
            self._rows = q_BHTD.shape[0] * (q_BHTD.shape[2] - 1)
            if self.keep_qk:
                self._pass = Pass(q_BHTD, k_BHTD).detached()
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

    @property
    def tied_fraction_H(self) -> Tensor:
        """float32 [H]: ``tied_rows_H`` over the rows that can tie, which are all but the first of each sequence."""
        return self.tied_rows_H / max(1, self._rows)
