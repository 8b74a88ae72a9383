"""A GPT, its data and its Trainer, small enough that a training run is a unit test."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_qk.data import TokenData
from lightning_qk.model import GPT, GPTConfig
from lightning_qk.module import GPTModule
from lightning_qk.precision import BF16CarryAttention

SIZE: dict[str, Any] = dict(n_layers=2, n_heads=2, d_model=16, context=16, vocab_size=32)


def numbers(n: int, seed: int = 0) -> np.ndarray:
    """Tokens with something to learn: mostly the successor of the one before."""
    draw = np.random.default_rng(seed)
    jumps = np.where(draw.random(n) < 0.2, draw.integers(0, 32, n), 1)
    return (np.cumsum(jumps) % 32).astype(np.uint16)


class TinyData(TokenData):
    """Made-up tokens; a batch depends on the seed and its index only."""

    vocab_size = 32

    def load(self) -> None:
        self.train_tokens, self.val_tokens = numbers(4000), numbers(1000, seed=1)
        self.fingerprint = {"source": "numbers", "sha256": "0" * 64}


def data(batch_size: int = 4, **settings: Any) -> TinyData:
    return TinyData(**{"seed": 0, "val_batches": 2, "batch_size": batch_size, **settings})


def batch(size: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and their successors, at random."""
    tokens = torch.randint(0, 32, (size, 17), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def gpt(activation_checkpointing: bool = False, seed: int = 0, **fields: Any) -> GPT:
    torch.manual_seed(seed)
    return GPT(GPTConfig(**{**SIZE, **fields}), activation_checkpointing)


def module(fields: dict[str, Any] | None = None, seed: int = 0, **arguments: Any) -> GPTModule:
    torch.manual_seed(seed)
    return GPTModule(**{"overrides": {**SIZE, **(fields or {})}, "lr": 1e-2, "warmup_steps": 2, **arguments})


def fault(sites: str = "bf16_carry", carry: int | str | None = 2, **settings: Any) -> BF16CarryAttention:
    """A fault that is large at this size; ``fault("fp32", None)`` is its healthy control."""
    return BF16CarryAttention(**{"sites": sites, "carry": carry, "tile": 8, "base": "fp32", **settings})


def trainer(
    root: Path,
    callbacks: Iterable[Callback] = (),
    plugin: Any = None,
    max_steps: int = 3,
    **settings: Any,
) -> Trainer:
    defaults: dict[str, Any] = dict(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=None,
        limit_val_batches=0,
        log_every_n_steps=1,
        gradient_clip_val=1.0,
        use_distributed_sampler=False,
    )
    return Trainer(
        default_root_dir=str(root),
        callbacks=list(callbacks),
        plugins=plugin,
        max_steps=max_steps,
        **{**defaults, **settings},
    )


class Recording(Callback):
    """Keeps the loss of every micro-batch, the gradients that reach clipping, and every logged number."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.logged: list[dict[str, float]] = []
        self._first = True
        self._pending = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not self._first:
            return
        self._first = False
        clip = pl_module.configure_gradient_clipping

        def clip_and_keep(*args: Any, **kwargs: Any) -> None:
            self.gradients.append(gradients(pl_module))
            clip(*args, **kwargs)

        pl_module.configure_gradient_clipping = clip_and_keep  # type: ignore[method-assign]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)
        self._pending = True

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._take(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._take(trainer)

    def _take(self, trainer: Trainer) -> None:
        # what a batch logged is there once its hooks are over
        if self._pending:
            self._pending = False
            self.logged.append({key: float(value) for key, value in trainer.callback_metrics.items()})


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in copy.copy(model).state_dict().items()}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Bit for bit, NaN included, and not vacuously."""
    assert left and left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(
            value, right[name], rtol=0, atol=0, equal_nan=True, msg=partial("{}: {}".format, name)
        )


def fit(
    root: Path,
    callbacks: Iterable[Callback] = (),
    plugin: Any = None,
    model: GPTModule | None = None,
    datamodule: TinyData | None = None,
    ckpt_path: Path | None = None,
    **settings: Any,
) -> tuple[GPTModule, Recording]:
    """One training run: the trained module and what was recorded on the way."""
    recording = Recording()
    model = module() if model is None else model
    torch.manual_seed(1234)  # dropout
    trainer(root, [*callbacks, recording], plugin, **settings).fit(
        model, data() if datamodule is None else datamodule, ckpt_path=ckpt_path
    )
    return model, recording
