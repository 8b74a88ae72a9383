"""Runs with early-warning monitors: what they logged, and what oracles need to check it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from test_adapters_training import Mine, batches, model
from tiny import fault, fit, module, trainer
from torch import Tensor

from callbacks import EarlyWarning
from lightning_qk.events import read_scalars
from lightning_qk.routes import attention_sites

NORMS = {"own": "attention_norm", "gpt2-sdpa": "ln_1", "llama-sdpa": "input_layernorm", "encoder": "norm1"}


class Snapshots(Callback):
    """float64 copies: weights and biases after every optimizer step, by layer, and the inputs of every micro-batch."""

    def __init__(self, norm: str = NORMS["own"]) -> None:
        self.norm = norm
        self.weights: list[list[dict[str, Tensor]]] = []  # the first are those before training
        self.biases: list[list[dict[str, Tensor | None]]] = []
        self.tokens: list[list[Tensor]] = []
        self.sites: list[Any] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.sites = attention_sites(pl_module)
        self._take()
        for name, norm in pl_module.named_modules():
            if name.endswith(self.norm):
                norm.register_forward_hook(lambda _, __, x: self.tokens[-1].append(x.detach().flatten(0, 1).double()))

    def on_train_batch_start(self, *_: Any) -> None:
        self.tokens.append([])

    def on_train_batch_end(self, *_: Any) -> None:
        self._take()

    def _take(self) -> None:
        self.weights.append([{name: s.weight(name).detach().double().clone() for name in "qkv"} for s in self.sites])
        self.biases.append([{name: _copy(s.bias(name)) for name in "qk"} for s in self.sites])

    def heads(self, step: int, layer: int, name: str) -> Tensor:
        """[H, d, n], keys repeated where they are grouped."""
        site = self.sites[layer]
        weight = self.weights[step][layer][name].unflatten(0, (-1, site.head_dim))
        return weight.repeat_interleave(site.n_heads // len(weight), 0)


def _copy(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().double().clone()


def run(
    root: Path, monitors: EarlyWarning | Sequence[Callback], name: str = "own", steps: int = 4, **settings: Any
) -> tuple[Snapshots, dict[str, Any]]:
    """What was logged under ``warning/``, by name: scalars with steps counted from 0."""
    snapshots = Snapshots(NORMS[name])
    callbacks = [*([monitors] if isinstance(monitors, EarlyWarning) else monitors), snapshots]
    logger = TensorBoardLogger(root, name="arm", version="seed_0", default_hp_metric=False)
    settings = {"logger": logger, "max_steps": steps, **settings}
    if name == "own":
        fit(root, callbacks, settings.pop("plugin", fault()), settings.pop("model", None), **settings)
    else:
        trainer(root, callbacks, **settings).fit(Mine(model(name)), batches())
    found = read_scalars(root / "arm" / "seed_0")
    return snapshots, {key.removeprefix("warning/"): value for key, value in found.items() if "warning/" in key}


class Explode(Callback):
    """Puts a number that is none into a weight before the second step."""

    def __init__(self, value: float = math.nan, name: str = "q") -> None:
        self.value, self.name = value, name

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            with torch.no_grad():
                attention_sites(pl_module)[1].weight(self.name)[0, 0] = self.value


def assert_resumes(root: Path, make: Any, fields: dict[str, Any] | None = None) -> None:
    """Three steps and three more leave the state of six, bit for bit, and a state that is safe to load."""
    whole, first, rest = make(), make(), make()
    fit(root, [whole], fault(), module(fields), max_steps=6)
    save = ModelCheckpoint(root, filename="last", every_n_train_steps=3)
    fit(root, [first, save], fault(), module(fields), max_steps=3, enable_checkpointing=True)
    torch.load(root / "last.ckpt", weights_only=True)
    fit(root, [rest], fault(), module(fields), max_steps=6, ckpt_path=root / "last.ckpt")
    assert_equal(rest.state_dict(), whole.state_dict())
    assert rest.verdict_fields() == whole.verdict_fields()


def assert_equal(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key, value in left.items():
            assert_equal(value, right[key])
    elif isinstance(left, tuple | list):
        for one, other in zip(left, right, strict=True):
            assert_equal(one, other)
    else:
        assert left == right
