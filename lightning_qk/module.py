"""The LightningModule: loss, optimizer, schedule and clipping of a GPT. It knows of no fault and no guard."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from typing_extensions import override

from lightning_qk.guarded import refuse_unguarded
from lightning_qk.loss_module import LossModule, full, logging_is_due, write_full
from lightning_qk.model import GPT, GPTConfig
from lightning_qk.optimizers import check_settings, make_optimizer
from lightning_qk.routes import route_parameters

__all__ = ["GPTModule", "full", "logging_is_due", "write_full"]


class GPTModule(LossModule):
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
        check_settings("GPTModule", lr, betas, eps, momentum, weight_decay)
        if warmup_steps < 0 or not 0 <= min_lr_ratio <= 1:
            raise ValueError(f"GPTModule: warmup_steps={warmup_steps} >= 0, 0 <= min_lr_ratio={min_lr_ratio} <= 1.")
        overrides = dict(overrides or {})
        try:
            self.config = GPTConfig.preset(preset, **overrides)
        except ValueError as error:  # by the name that the fields have here
            raise ValueError(str(error).replace("GPTConfig", "overrides")) from error
        betas = (float(betas[0]), float(betas[1]))
        momentum = (0.95 if optimizer == "muon" else 0.9) if momentum is None else momentum
        self.save_hyperparameters()
        self.model = GPT(self.config, activation_checkpointing)
        if compile:
            for block in self.model.blocks:
                block.compile()

    @property
    def flops_per_token(self) -> float:
        """Floating-point operations of a training step for a token: 6 a weight of a product, and 12 T d a layer.

        As in PaLM (arXiv 2204.02311, appendix B): nothing is taken off for the causal mask, nothing added for
        recomputation.
        """
        c = self.config
        weights = sum(p.numel() for p in route_parameters(self, "all").values()) + c.vocab_size * c.d_model
        return 6.0 * weights + 12.0 * c.n_layers * c.context * c.d_model

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
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # not at its end: that comes after a checkpoint of the step
        if not logging_is_due(self.trainer):
            return
        batches = self.trainer.fit_loop.total_batch_idx + 1  # over all epochs; batch_idx begins anew in each
        self.log("tokens", float(batch[0].numel() * self.trainer.world_size * batches))

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
        super().on_load_checkpoint(checkpoint)
        if self._trainer is not None:
            refuse_unguarded(self.trainer, checkpoint, self.state_dict())  # FSDP2 has loaded the weights itself
