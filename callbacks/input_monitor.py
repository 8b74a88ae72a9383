"""What monitors share that read the tokens which projections were given."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from callbacks.early_warning import EarlyWarning
from lightning_qk.routes import attention_sites
from lightning_qk.sites.inputs import ProjectionInputs


class InputMonitor(EarlyWarning):
    """Has in :attr:`tokens` what projections were given in the step's last micro-batch on this rank, at every reading.

    That is in the training pass, the last forward pass before the backward pass: neither a recomputation (activation
    checkpointing) nor the clean pass that a callback asked for replaces it. At a reading the optimizer has stepped:
    weights are new, inputs are from before. Holding them costs the memory of one activation a layer, in these steps.

    Attributes:
        projections: of ``q``, ``k``, ``v`` and ``o``.
        tokens: by layer and name, [tokens, width] in the model's dtype; empty between the steps with a reading.
    """

    projections: tuple[str, ...] = ("q", "k")

    def __init__(
        self,
        every_n_steps: int = 10,
        thresholds: dict[str, float | None] | None = None,
        patience: int = 1,
        first_step: int = 0,
    ) -> None:
        super().__init__(every_n_steps, thresholds, patience, first_step)
        self.tokens: list[dict[str, Tensor]] = []
        self._inputs: ProjectionInputs | None = None

    @override
    def prepare(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._inputs = ProjectionInputs(pl_module, attention_sites(pl_module), self.projections)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._inputs is not None and self.is_due(trainer.global_step + 1):
            self._inputs.keep(True)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._inputs is not None and self.is_due(trainer.global_step + 1):
            self.tokens = self._inputs.tokens()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.tokens = []
        if self._inputs is not None:
            self._inputs.keep(False)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._inputs is not None:
            self._inputs.remove()
            self._inputs = None

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)
