"""The LightningModule: loss, optimizer, schedule and clipping of a GPT. It knows of no fault and no guard."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torchmetrics import MeanMetric
from typing_extensions import override

from lightning_qk.model import GPT, GPTConfig
from lightning_qk.optimizers import make_optimizer
from lightning_qk.routes import route_parameters
from lightning_qk.sites import switches_in


class GPTModule(LightningModule):
    """Trains a :class:`~lightning_qk.model.GPT` on ``(tokens, targets)`` batches.

    Args:
        preset: ``proxy``, ``gpt2-small`` or ``gpt2-medium``.
        overrides: fields of :class:`~lightning_qk.model.GPTConfig` that differ from the preset.
        optimizer: ``adamw``; ``sgd`` with momentum; ``muon`` for the matrices of attention and MLP, AdamW for the rest.
        lr: peak learning rate.
        betas: AdamW's moment decays.
        eps: AdamW's epsilon.
        momentum: SGD's and Muon's momentum; None is 0.9 and 0.95.
        weight_decay: decoupled (AdamW, Muon) or L2 (SGD), on matrices only.
        warmup_steps: linear warm-up from 0 to ``lr``.
        schedule: ``constant`` or ``cosine`` after the warm-up, the latter over ``trainer.max_steps``.
        min_lr_ratio: where the cosine ends, as a fraction of ``lr``.
        activation_checkpointing: recompute blocks in the backward pass.
        compile: compile every block in place.

    Raises:
        ValueError: naming the argument that cannot be.
    """

    def __init__(
        self,
        preset: str = "proxy",
        overrides: dict[str, Any] | None = None,
        optimizer: Literal["adamw", "sgd", "muon"] = "adamw",
        lr: float = 4e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        momentum: float | None = None,
        weight_decay: float = 0.0,
        warmup_steps: int = 100,
        schedule: Literal["constant", "cosine"] = "constant",
        min_lr_ratio: float = 0.1,
        activation_checkpointing: bool = False,
        compile: bool = False,
    ) -> None:
        super().__init__()
        if lr <= 0 or warmup_steps < 0 or not 0 <= min_lr_ratio <= 1:
            raise ValueError(
                f"GPTModule: lr={lr} > 0, warmup_steps={warmup_steps} >= 0, 0 <= min_lr_ratio={min_lr_ratio} <= 1."
            )
        overrides = dict(overrides or {})
        self.config = GPTConfig.preset(preset, **overrides)
        betas = (float(betas[0]), float(betas[1]))
        momentum = (0.95 if optimizer == "muon" else 0.9) if momentum is None else momentum
        self.save_hyperparameters()
        self.model = GPT(self.config, activation_checkpointing)
        self.val_loss = MeanMetric()
        if compile:
            for block in self.model.blocks:
                block.compile()

    @property
    def context(self) -> int:
        """Tokens per sequence, for the data module."""
        return self.config.context

    @override
    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """The loss itself, so that a second pass can go through whatever wraps this module (DDP, FSDP2)."""
        return self.model.loss(tokens_BT, targets_BT)

    @override
    def setup(self, stage: str) -> None:
        datamodule = getattr(self.trainer, "datamodule", None)
        vocab_size = getattr(datamodule, "vocab_size", None)
        if vocab_size is not None and vocab_size > self.config.vocab_size:
            raise ValueError(
                f"The data has tokens up to {vocab_size - 1} but the model's vocab_size is {self.config.vocab_size}: "
                f"set model.overrides.vocab_size to at least {vocab_size}."
            )

    @override
    def configure_model(self) -> None:
        """Shards the model, block by block, under ``ModelParallelStrategy`` (FSDP2); does nothing under any other."""
        if self.device_mesh is None or isinstance(self.model, FSDPModule):
            return
        ranks = self.device_mesh["tensor_parallel"].size()
        if ranks > 1:  # Lightning's default, under which gradients would not be reduced
            raise ValueError(
                f"trainer.strategy: tensor_parallel_size={ranks} is not supported; set it to 1 and data_parallel_size "
                "to the number of devices."
            )
        for part in (*self.model.blocks, self.model):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])

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
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not logging_is_due(self.trainer):
            return
        batches = self.trainer.fit_loop.total_batch_idx + 1  # over all epochs; batch_idx begins anew in each
        self.log("tokens", float(batch[0].numel() * self.trainer.world_size * batches))

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
    def configure_optimizers(self) -> Any:
        h: Any = self.hparams
        parameters = [p for p in self.parameters() if p.requires_grad]
        hidden = route_parameters(self, "all").values() if h.optimizer == "muon" else ()
        optimizer = make_optimizer(h.optimizer, parameters, hidden, h)
        # max_steps, not estimated_stepping_batches: the latter drops the loader's state on resume (lightning#20550)
        max_steps = self.trainer.max_steps
        if h.schedule == "cosine" and max_steps <= 0:
            raise ValueError("model.schedule=cosine needs trainer.max_steps.")

        def factor(step: int) -> float:
            if step < h.warmup_steps:
                return (step + 1) / h.warmup_steps
            if h.schedule == "constant":
                return 1.0
            progress = min(1.0, (step - h.warmup_steps) / max(1, max_steps - h.warmup_steps))
            return h.min_lr_ratio + (1 - h.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._refuse_other_hyperparameters(checkpoint.get(self.CHECKPOINT_HYPER_PARAMS_KEY, {}))
        if self._trainer is None or not self.trainer.training:
            return
        fired = switches_in(checkpoint.get("state_dict") or self.state_dict())  # FSDP2 has loaded the weights itself
        states = checkpoint.get("callbacks", {}).items()
        fired += [key for key, state in states if key.startswith("QKGuard") and state.get("fired_step") is not None]
        owners = [c for c in self.trainer.callbacks if getattr(c, "controls_qk_norm", False)]  # type: ignore[attr-defined]
        if fired and not owners:
            raise ValueError(
                f"The checkpoint has a guard that fired ({fired[0]} and {len(fired) - 1} more) but no QKGuard is "
                "among trainer.callbacks. Resume with the arm's own YAML, or add a QKGuard."
            )

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
    step = trainer.fit_loop.total_batch_idx // trainer.accumulate_grad_batches + 1
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
