"""Watches the largest singular value of every head's part of W_Q and W_K.

That of the whole projection is at least as large and says nothing of where it is: a head that runs away alone shows
here first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from callbacks.early_warning import EarlyWarning, Limit
from callbacks.head_weights import head_weights
from kernels import TopSingular
from lightning_qk.routes import attention_sites


class HeadSpectrumMonitor(EarlyWarning):
    """Reads ``head_sigma_q`` and ``head_sigma_k`` after the step, each as the maximum over layers and heads.

    A head's part of a weight is [d, n]; of grouped keys there are fewer. Heads of less than 384 are decomposed in full,
    larger ones followed by :class:`kernels.TopSingular`. A weight that is not finite reads NaN.

    Args:
        every_n_steps: see :class:`EarlyWarning`, as the next three.
        thresholds: limits by reading's name; there are none without.
        patience: consecutive readings beyond a limit that make an alarm.
        first_step: no alarm before this optimizer step.
        per_head: also log every head (``warning/head_sigma_q/layer_00/head_00``).

    Raises:
        ValueError: an argument that cannot be.
    """

    limits: ClassVar[Mapping[str, Limit]] = {"head_sigma_q": Limit(), "head_sigma_k": Limit()}

    def __init__(
        self,
        every_n_steps: int = 10,
        thresholds: dict[str, float | None] | None = None,
        patience: int = 1,
        first_step: int = 0,
        per_head: bool = False,
    ) -> None:
        super().__init__(every_n_steps, thresholds, patience, first_step)
        self.per_head = per_head
        self._top = TopSingular(k=1)

    @override
    def read(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        sites = attention_sites(pl_module)
        weights = head_weights(sites)
        split = self._top(torch.cat(weights)).s[:, 0].split([len(weight) for weight in weights])
        sigma = dict(zip(self.limits, split, strict=True))
        if self.per_head:
            for name, sigma_N in sigma.items():
                rows = enumerate(sigma_N.view(len(sites), -1).tolist())
                heads = {(layer, head): value for layer, row in rows for head, value in enumerate(row)}
                tags = {f"{name}/layer_{layer:02d}/head_{head:02d}": value for (layer, head), value in heads.items()}
                self.write(trainer, tags)
        return {name: float(sigma_N.max()) for name, sigma_N in sigma.items()}  # NaN propagates

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "trial_NnB": self._top.trial_NnB}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._top.trial_NnB = state_dict["trial_NnB"]
