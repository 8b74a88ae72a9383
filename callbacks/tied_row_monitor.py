"""Counts attention rows whose maximum logit is reached by several keys.

Two keys at the maximum are two probabilities of exactly 1 before the softmax is normalised: with values of one sign
their sum rounds one way, and the error is there at every step (Qiu and Yao 2025, arXiv 2510.04212, who see the number
of such rows rise before the loss does).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from callbacks.early_warning import EarlyWarning, Limit
from lightning_qk.routes import attention_sites


class TiedRowMonitor(EarlyWarning):
    """Reads ``tied_rows``: the fraction of a head's attention rows with a tied maximum, in the worst head of any layer.

    Counted by the streaming core in the last micro-batch of the step, of the rows with more than one key; over ranks
    the largest. Logits of few bits tie without a fault too: their healthy level is the model's own. Arguments as
    :class:`EarlyWarning`.

    Raises:
        ValueError: an argument that cannot be; at the start of training, a core that does not count.
    """

    limits: ClassVar[Mapping[str, Limit]] = {"tied_rows": Limit(0.5)}

    @override
    def prepare(self, trainer: Trainer, pl_module: LightningModule) -> None:
        blind = [site.core for site in attention_sites(pl_module) if not hasattr(type(site.core), "tied_fraction_H")]
        if blind:
            raise ValueError(
                f"TiedRowMonitor: tied rows are counted by a streaming core, got {type(blind[0]).__name__}; leave the "
                "monitor out, or set core: streaming in the plugin."
            )

    @override
    def read(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        sites = attention_sites(pl_module)
        worst = torch.stack([site.core.tied_fraction_H.amax() for site in sites]).amax()  # type: ignore[attr-defined]
        return {"tied_rows": float(trainer.strategy.reduce(worst, reduce_op="max"))}
