"""Lightning's TQDM bar with the quantities that matter here."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from typing_extensions import override


class RunProgressBar(TQDMProgressBar):
    """Shows loss, the largest sigma of W_Q, the largest logit and the state of the guard.

    Args:
        refresh_rate: batches between two refreshes.
    """

    def __init__(self, refresh_rate: int = 10) -> None:
        super().__init__(refresh_rate=refresh_rate)

    @override
    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        fields: dict[str, object] = {}
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if hasattr(callback, "verdict_fields"):
                fields |= callback.verdict_fields()
        shown: dict[str, int | str | float | dict[str, float]] = {}
        loss = trainer.callback_metrics.get("loss/train")
        if loss is not None:
            shown["loss"] = f"{float(loss):.3f}"
        for name, label in (("sigma_q", "sigma_q"), ("max_logit", "logit")):
            if isinstance(value := fields.get(name), float):
                shown[label] = f"{value:.4g}"
        guard, step = fields.get("guard"), fields.get("guard_step")
        if guard is not None:
            shown["guard"] = f"fired@{step}" if guard == "fired" else "dormant"
        return shown
