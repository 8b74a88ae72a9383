"""Judges whether training has collapsed, and stops it when told to."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from callbacks.step import StepLoss
from lightning_qk.module import logging_is_due


class CollapseStop(Callback):
    """The sustained-divergence rule of arXiv 2608.02091, and the rule for a loss that is not finite.

    The loss (mean of the last ``window`` optimizer steps, over all ranks) collapses when it exceeds its running minimum
    by ``excess`` nat and does not come back to within ``margin`` of it; the collapse step is where that excess began. A
    loss that is not finite is *nonfinite* and always ends training.

    Args:
        excess: nats over the running minimum that begin a collapse.
        margin: nats over it that count as recovered.
        window: optimizer steps averaged.
        stop: end training when a divergence has lasted ``patience`` steps; otherwise go on, and judge at the end.
        patience: optimizer steps that ``stop`` waits for a recovery.

    Raises:
        ValueError: an argument that cannot be.
    """

    def __init__(
        self, excess: float = 1.5, margin: float = 0.75, window: int = 10, patience: int = 100, stop: bool = True
    ) -> None:
        if not 0 <= margin < excess:
            raise ValueError(f"CollapseStop: margin={margin} must be at least 0 and below excess={excess}.")
        if window < 1 or patience < 0:
            raise ValueError(f"CollapseStop: window={window} must be at least 1 and patience={patience} at least 0.")
        self.excess, self.margin, self.window, self.patience, self.stop = excess, margin, window, patience, stop
        self._loss = StepLoss()
        self._recent: deque[float] = deque(maxlen=window)
        self._tail: deque[float] = deque(maxlen=50)  # what the verdict calls the final loss
        self._minimum = math.inf
        self._onset: int | None = None
        self._nonfinite = self._ended = False
        self._recovered = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._loss.start(trainer)
        if self._over:
            trainer.should_stop = True  # Lightning does not save its own flag

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = self._loss.take(trainer, outputs)
        if loss is None:
            return
        self.judge(loss, trainer.global_step)
        if self._recent and logging_is_due(trainer):
            pl_module.log("collapse/excess", max(0.0, self._mean() - self._minimum))
        if self._over:
            trainer.should_stop = True

    def judge(self, loss: float, step: int) -> None:
        """Takes in the loss of one optimizer step. Usable without a Trainer."""
        if self._nonfinite:
            return
        if not math.isfinite(loss):
            self._nonfinite = self._ended = True
            self._onset = step if self._onset is None else self._onset
            return
        self._recent.append(loss)
        self._tail.append(loss)
        mean = self._mean()
        if len(self._recent) == self.window:
            self._minimum = min(self._minimum, mean)
        if self._onset is None and mean > self._minimum + self.excess:
            self._onset = step
        elif self._onset is not None and mean <= self._minimum + self.margin:
            self._onset, self._recovered = None, self._recovered + 1
        if self.stop and self._onset is not None and step - self._onset >= self.patience:
            self._ended = True

    @property
    def _over(self) -> bool:
        return self._nonfinite or (self.stop and self._ended)

    @property
    def status(self) -> str:
        """The verdict if training ended here: ``completed``, ``collapsed`` or ``nonfinite``."""
        return "nonfinite" if self._nonfinite else "completed" if self._onset is None else "collapsed"

    def _mean(self) -> float:
        return sum(self._recent) / len(self._recent)

    def verdict_fields(self) -> dict[str, Any]:
        """What the run's verdict takes from here."""
        return {
            "status": self.status,
            "collapse_step": self._onset,
            "loss": sum(self._tail) / len(self._tail) if self._tail else None,
            "min_loss": self._minimum if math.isfinite(self._minimum) else None,
            "recovered_spikes": self._recovered,
        }

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "recent": list(self._recent),
            "tail": list(self._tail),
            "minimum": self._minimum,
            "onset": self._onset,
            "nonfinite": self._nonfinite,
            "ended": self._ended,
            "recovered": self._recovered,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._recent = deque(state_dict["recent"], maxlen=self.window)
        self._tail = deque(state_dict["tail"], maxlen=50)
        self._minimum, self._onset = state_dict["minimum"], state_dict["onset"]
        self._nonfinite, self._ended = state_dict["nonfinite"], state_dict["ended"]
        self._recovered = state_dict["recovered"]
