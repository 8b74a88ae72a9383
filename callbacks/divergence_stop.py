"""The divergence criterion of arXiv 2506.20752, beside the crash rule of :class:`callbacks.CollapseStop`."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from callbacks.step import StepLoss
from lightning_qk.module import logging_is_due


class DivergenceStop(Callback):
    """Notes the first step at which the loss's moving average rises by more than ``rise`` from one step to the next.

    The average is over the last ``window`` optimizer steps and all ranks. With m(t) that average after step t,
    divergence begins at the first t with ``m(t) - m(t - 1) > rise``. The difference is that of ``loss(t)`` and
    ``loss(t - window)`` over ``window``: a loss that has risen by ``rise * window``, 0.8 by the paper's numbers. A loss
    that is not finite diverges. A spike from which the loss comes back counts too; whether a run was lost is for the
    crash rule to say.

    The verdict gets ``divergence_step``. The run's status stays the crash rule's: with ``stop`` a run may be
    ``completed`` before its last step.

    Args:
        rise: largest change of the average from one step to the next that is no divergence.
        window: optimizer steps averaged.
        stop: end training ``patience`` steps after the divergence.
        patience: optimizer steps that ``stop`` waits.

    Raises:
        ValueError: an argument that cannot be.
    """

    def __init__(self, rise: float = 0.008, window: int = 100, stop: bool = False, patience: int = 100) -> None:
        if not rise > 0 or window < 1 or patience < 0:
            raise ValueError(
                f"DivergenceStop: rise={rise} must be positive, window={window} at least 1, patience={patience} at "
                "least 0."
            )
        self.rise, self.window, self.stop, self.patience = rise, window, stop, patience
        self._loss = StepLoss()
        self._losses: deque[float] = deque(maxlen=window + 1)
        self.divergence_step: int | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._loss.start(trainer)
        self._end_if_due(trainer)  # Lightning does not save its own flag

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = self._loss.take(trainer, outputs)
        if loss is None:
            return
        self.judge(loss, trainer.global_step)
        if logging_is_due(trainer) and math.isfinite(self._change()):
            pl_module.log("divergence/change", self._change())
        self._end_if_due(trainer)

    def judge(self, loss: float, step: int) -> None:
        """Takes in the loss of one optimizer step. Usable without a Trainer."""
        self._losses.append(loss)
        if self.divergence_step is None and (not math.isfinite(loss) or self._change() > self.rise):
            self.divergence_step = step

    def _change(self) -> float:
        """Of the moving average, at the last step; -inf before there are two of them."""
        if len(self._losses) <= self.window:
            return -math.inf
        return (self._losses[-1] - self._losses[0]) / self.window

    def _end_if_due(self, trainer: Trainer) -> None:
        if self.stop and self.divergence_step is not None:
            trainer.should_stop |= trainer.global_step - self.divergence_step >= self.patience

    def verdict_fields(self) -> dict[str, Any]:
        """What the run's verdict takes from here."""
        return {"divergence_step": self.divergence_step}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self._losses), "divergence_step": self.divergence_step}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._losses = deque(state_dict["losses"], maxlen=self.window + 1)
        self.divergence_step = state_dict["divergence_step"]
