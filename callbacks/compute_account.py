"""What a run has cost, for scaling laws: parameters, tokens, floating-point operations."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class ComputeAccount(Callback):
    """Adds ``parameters`` (N, all that are trained, tied ones once), ``tokens`` (D, over all ranks) and ``flops`` to
    the verdict, the last by the usual count of ``6 N D``.
    """

    def __init__(self) -> None:
        self.parameters = self.tokens = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.parameters = sum(p.numel() for p in pl_module.parameters() if p.requires_grad)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        batches = trainer.fit_loop.total_batch_idx + 1  # over all epochs, and restored by a resume
        self.tokens = batch[0].numel() * trainer.world_size * batches

    def verdict_fields(self) -> dict[str, Any]:
        """What the run's verdict takes from here."""
        return {"parameters": self.parameters, "tokens": self.tokens, "flops": 6 * self.parameters * self.tokens}
