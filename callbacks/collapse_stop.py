"""Judges whether training has collapsed, and stops it when told to."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch.distributed.tensor import DTensor
from typing_extensions import override

from callbacks.step import StepLoss
from lightning_qk.collapse_rule import CollapseRule
from lightning_qk.module import logging_is_due


class CollapseStop(CollapseRule, Callback):
    """:class:`lightning_qk.collapse_rule.CollapseRule` in a Trainer; the loss is the mean over all ranks.

    A collapse ends training unless ``stop`` is false; a loss that is not finite always does, and so does a gradient
    that the optimizer was given (after callbacks and clipping). Either is told by Lightning's logger. Arguments are
    those of the rule.
    """

    def __init__(
        self, excess: float = 1.5, margin: float = 0.75, window: int = 10, patience: int = 100, stop: bool = True
    ) -> None:
        super().__init__(excess, margin, window, patience, stop)
        self._loss = StepLoss()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._loss.start(trainer)
        if self.over:
            trainer.should_stop = True  # Lightning does not save its own flag

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = self._loss.take(trainer, outputs)
        if loss is None:
            return
        self.judge(loss, trainer.global_step, _finite_gradient(trainer, pl_module))
        if self.current_excess is not None and logging_is_due(trainer):
            pl_module.log("collapse/excess", self.current_excess)
        if self.over:
            trainer.should_stop = True
            began = self.verdict_fields()["collapse_step"]
            rank_zero_info(f"CollapseStop: {self.status} at step {began}; training ends at step {trainer.global_step}.")


def _finite_gradient(trainer: Trainer, pl_module: LightningModule) -> bool:
    """Whether every gradient of the step is, on all ranks; they are there until the next backward pass."""
    sums = []
    for p in pl_module.parameters():
        if p.grad is not None:
            mine = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            # NaN and infinity outlive a sum; a norm would overflow where its squares do
            sums.append(mine.sum(dtype=torch.float32).to(pl_module.device))
    if not sums:
        return True
    total = torch.stack(sums).sum()
    if trainer.world_size > 1:
        total = trainer.strategy.reduce(total, reduce_op="sum")
    return bool(total.isfinite())
