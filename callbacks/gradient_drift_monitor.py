"""Whether the gradient's norm has turned and grows: what precedes a divergence in arXiv 2506.20752."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from callbacks.early_warning import EarlyWarning, Limit
from lightning_qk.module import full


class GradientDriftMonitor(EarlyWarning):
    """Reads ``grad_norm_drift``, the mean norm of the last ``window`` gradients over the least such mean so far.

    A gradient that shrinks as training goes reads 1; one that has begun to grow, more. The norm is that of all
    gradients before clipping, as ``grad/norm``; one that is not finite reads NaN, which crosses every threshold, until
    it has left the window.

    Args:
        window: optimizer steps averaged; there is no reading before as many.
        every_n_steps: see :class:`EarlyWarning`, as the next three.
        thresholds: the limit, by the reading's name; none holds for every model.
        patience: consecutive readings beyond it that make an alarm.
        first_step: no alarm before this optimizer step.

    Raises:
        ValueError: an argument that cannot be.
    """

    limits: ClassVar[Mapping[str, Limit]] = {"grad_norm_drift": Limit()}

    def __init__(
        self,
        window: int = 50,
        every_n_steps: int = 10,
        thresholds: dict[str, float | None] | None = None,
        patience: int = 1,
        first_step: int = 0,
    ) -> None:
        super().__init__(every_n_steps, thresholds, patience, first_step)
        if window < 1:
            raise ValueError(f"GradientDriftMonitor: window={window} must be at least 1.")
        self.window = window
        self._norms: deque[float] = deque(maxlen=window)
        self._least = math.inf

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        self._norms.append(float(full(nn.utils.get_total_norm(gradients))))
        if len(self._norms) == self.window and math.isfinite(self._mean()):
            self._least = min(self._least, self._mean())

    def _mean(self) -> float:
        return sum(self._norms) / len(self._norms)

    @override
    def read(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        if len(self._norms) < self.window:
            return {}
        mean = self._mean()
        return {"grad_norm_drift": mean / self._least if math.isfinite(mean) else math.nan}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "norms": list(self._norms), "least": self._least}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._norms, self._least = deque(state_dict["norms"], maxlen=self.window), state_dict["least"]
