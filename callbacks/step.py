"""Lightning has no hook after an optimizer step (lightning#11688); this tells whether the batch that ended took one."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor


class OptimizerStepClock:
    """Answers, once per ``on_train_batch_end``, whether ``trainer.global_step`` has moved since it was last asked."""

    def __init__(self) -> None:
        self._seen = 0

    def start(self, trainer: Trainer) -> None:
        """Call in ``on_train_start``: resumed steps are not new ones."""
        self._seen = trainer.global_step

    def stepped(self, trainer: Trainer) -> bool:
        """Whether this batch completed an optimizer step."""
        moved = trainer.global_step > self._seen
        self._seen = trainer.global_step
        return moved


class StepLoss:
    """The loss of every optimizer step, the mean over its micro-batches and over all ranks."""

    def __init__(self) -> None:
        self._clock = OptimizerStepClock()
        self._micro: list[Tensor] = []

    def start(self, trainer: Trainer) -> None:
        """Call in ``on_train_start``."""
        self._clock.start(trainer)

    def take(self, trainer: Trainer, outputs: Any) -> float | None:
        """Takes what ``on_train_batch_end`` is given; the loss of the step, or None while it is not complete."""
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self._micro.append(loss.detach().float() * trainer.accumulate_grad_batches)  # Lightning divided it
        if not self._clock.stepped(trainer):
            return None
        value = torch.stack(self._micro).mean()
        self._micro.clear()
        return float(trainer.strategy.reduce(value, reduce_op="mean") if trainer.world_size > 1 else value)
