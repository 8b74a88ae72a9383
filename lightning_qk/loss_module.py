"""What LightningModules share whose forward pass is the loss: steps, logging, clipping, and what resuming refuses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torchmetrics import MeanMetric
from typing_extensions import override


class LossModule(LightningModule):
    """Trains on batches ``(x, y)`` for which ``self(x, y)`` is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.val_loss = MeanMetric(nan_strategy=math.nan)  # its default leaves NaN out

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self(*batch)
        self.log("loss/train", loss.detach(), prog_bar=True, sync_dist=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.val_loss(self(*batch))
        self.log("loss/val", self.val_loss, on_epoch=True, prog_bar=True)

    @override
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.val_loss(self(*batch))
        self.log("loss/test", self.val_loss, on_epoch=True)

    @override
    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if gradient_clip_algorithm not in (None, "norm"):
            raise ValueError("trainer.gradient_clip_algorithm: only 'norm' is supported.")
        # as Lightning has it, 0 is no clipping; clip_grad_norm_ would take it at its word
        limit = float(gradient_clip_val) if gradient_clip_val is not None and gradient_clip_val > 0 else math.inf
        norm = full(nn.utils.clip_grad_norm_(self.parameters(), limit))
        if logging_is_due(self.trainer):
            self.log_dict({"grad/norm": norm, "grad/clip_coef": (limit / (norm + 1e-6)).clamp(max=1.0)})

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._refuse_other_hyperparameters(checkpoint.get(self.CHECKPOINT_HYPER_PARAMS_KEY, {}))

    def _refuse_other_hyperparameters(self, saved: Mapping[str, Any]) -> None:
        for key, value in saved.items():
            mine = self.hparams.get(key, value)
            if key in self.hparams and _plain(mine) != _plain(value):
                raise ValueError(
                    f"model.{key}={mine!r} but the checkpoint was trained with {value!r}. Give the checkpoint's value, "
                    "or start a new run without --ckpt_path."
                )


def logging_is_due(trainer: Trainer) -> bool:
    """Whether loggers write at the optimizer step under way: ``log`` costs half a millisecond, used or not."""
    # Lightning's own count, which its loggers go by: the same before and after the step, and restored by resume
    step = trainer.fit_loop.epoch_loop._batches_that_stepped + 1
    return step % trainer.log_every_n_steps == 0  # type: ignore[attr-defined]


def full(x: Tensor) -> Tensor:
    """The whole of a tensor that FSDP2 may have sharded."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


@torch.no_grad()
def write_full(target: Tensor, value: Tensor) -> None:
    """Writes a whole tensor in place (DDP may view a gradient in a bucket), sharded again where FSDP2 has it so."""
    if isinstance(target, DTensor):
        value = distribute_tensor(value, target.device_mesh, target.placements)
    target.copy_(value)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value
