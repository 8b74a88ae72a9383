"""What makes a guard fire: a number for every head, read after training passes, that crosses a threshold.

Numbers are severities: larger is worse for all of them, and MAX is the reduction over micro-batches and ranks. The
entropy is read with its sign turned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from kernels import TopSingular
from lightning_qk.module import full
from lightning_qk.sites import AttentionSite


class Trigger(ABC):
    """What is read, and how.

    Attributes:
        quantity: what it is called in a guard's history.
        threshold: the default, None where no number is known that would do.
        sign: 1 where large values are bad, -1 where small ones are.
        per_head: whether heads of a layer are told apart.
        per_step: read once, after an optimizer step, and not for every micro-batch.
    """

    quantity: str
    threshold: float | None = None
    sign: int = 1
    per_head: bool = True
    per_step: bool = False

    def prepare(self, sites: Sequence[AttentionSite]) -> None:
        """Before training: turns on what will be read.

        Raises:
            ValueError: the attention cores cannot tell.
        """
        for site in sites:
            site.core.observed = True

    @abstractmethod
    def read(self, sites: Sequence[AttentionSite], limit: float) -> Tensor:
        """Severities of all heads of all layers, float32, one after the other.

        Where a head is not above ``limit``, an upper bound that is not above it either will do.
        """

    def state_dict(self) -> dict[str, Any]:
        """Nothing, unless reading has a memory."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restores :meth:`state_dict`."""


class MaxLogit(Trigger):
    """The exact maximum of the scaled, signed, masked logits; 30 is the threshold of arXiv 2608.02091."""

    quantity = "logit"
    threshold = 30.0

    @override
    def read(self, sites: Sequence[AttentionSite], limit: float) -> Tensor:
        return torch.cat([site.core.max_logit_H for site in sites]).float()


class LogitBound(MaxLogit):
    """The same decision, from an upper bound (Cauchy-Schwarz where the maximum costs a product) where that will do.

    In a layer whose bound is over the threshold the exact maximum is taken, at every look.
    """

    @override
    def read(self, sites: Sequence[AttentionSite], limit: float) -> Tensor:
        bounds = [site.core.logit_bound_H.float() for site in sites]
        below = torch.stack([(bound <= limit).all() for bound in bounds]).tolist()  # a NaN is not below it either
        return torch.cat(
            [
                bound if fine else site.core.max_logit_H.float()
                for site, bound, fine in zip(sites, bounds, below, strict=True)
            ]
        )


class SigmaQ(Trigger):
    """The largest singular value of every layer's query projection after the step."""

    quantity = "sigma_q"
    per_head = False
    per_step = True

    def __init__(self) -> None:
        self._top = TopSingular(k=1)

    @override
    def prepare(self, sites: Sequence[AttentionSite]) -> None:
        pass

    @override
    def read(self, sites: Sequence[AttentionSite], limit: float) -> Tensor:
        sigma_L = self._top(torch.stack([full(site.q_weight.detach()) for site in sites])).s[:, 0]
        heads = torch.tensor([site.n_heads for site in sites], device=sigma_L.device)
        return sigma_L.repeat_interleave(heads)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self._top.trial_NnB is None else {"trial_NnB": self._top.trial_NnB}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._top.trial_NnB = state.get("trial_NnB")


class TiedRows(Trigger):
    """Rows of one micro-batch on one rank whose maximum logit is reached by several keys (arXiv 2510.04212)."""

    quantity = "tied_rows"

    @override
    def prepare(self, sites: Sequence[AttentionSite]) -> None:
        super().prepare(sites)
        blind = [site for site in sites if not hasattr(type(site.core), "tied_rows_H")]
        if blind:
            raise ValueError(
                f"trigger='tied_rows' needs a streaming core, got {type(blind[0].core).__name__}; use another trigger, "
                "or core: streaming in the plugin, of MXTraining in its attention."
            )

    @override
    def read(self, sites: Sequence[AttentionSite], limit: float) -> Tensor:
        return torch.cat([site.core.tied_rows_H for site in sites]).float()  # type: ignore[attr-defined]


class Entropy(Trigger):
    """The mean entropy of a head's attention rows in nats; fires below the threshold (collapse: arXiv 2303.06296)."""

    quantity = "entropy"
    sign = -1

    @override
    def prepare(self, sites: Sequence[AttentionSite]) -> None:
        for site in sites:
            site.core.keep_qk = True

    @override
    def read(self, sites: Sequence[AttentionSite], limit: float) -> Tensor:
        return -torch.cat([site.core.entropy_H for site in sites]).float()


TRIGGERS: dict[str, type[Trigger]] = {
    "logit_bound": LogitBound,
    "max_logit": MaxLogit,
    "sigma_q": SigmaQ,
    "tied_rows": TiedRows,
    "entropy": Entropy,
}
