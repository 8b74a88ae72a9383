"""MomentumSigns: the optimizer's own recursion with the signs changed, on the route and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tiny import assert_same, fault, fit, module, weights
from torch import Tensor

from callbacks import MomentumSigns
from lightning_qk.routes import route_parameters

ON_ROUTE = set(route_parameters(module(), "qk", [1]))


class Momenta(Callback):
    """Before a step's gradient goes: that gradient and the momentum that the step left."""

    def __init__(self) -> None:
        self.steps: list[dict[str, tuple[Tensor, Tensor]]] = []
        self.group: dict[str, Any] = {}

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.group = optimizer.param_groups[0]
        kept = {}
        for name, p in pl_module.named_parameters():
            state = optimizer.state.get(p, {})
            momentum = state.get("exp_avg", state.get("momentum_buffer"))
            if momentum is not None and p.grad is not None:
                kept[name] = (p.grad.clone(), momentum.clone())
        if kept:
            self.steps.append(kept)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("mode", ["reversed", "random"])
def test_momentum_goes_on_from_other_signs(mode: Any, optimizer: str, tmp_path: Path) -> None:
    watch = Momenta()
    callbacks = [MomentumSigns(mode, layers=[1], seed=3), watch]
    fit(tmp_path, callbacks, fault(), module(optimizer=optimizer), max_steps=4)
    assert len(watch.steps) == 3 and set(watch.steps[0]) > ON_ROUTE
    decay = watch.group["betas"][0] if optimizer == "adamw" else watch.group["momentum"]
    share = 1 - decay if optimizer == "adamw" else 1.0
    for before, after in zip(watch.steps[:-1], watch.steps[1:], strict=True):
        for name, (gradient, momentum) in after.items():
            carried, expected = momentum - share * gradient, decay * before[name][1]
            if name in ON_ROUTE and mode == "reversed":
                torch.testing.assert_close(carried, -expected, rtol=1e-4, atol=1e-7)
            elif name in ON_ROUTE:
                torch.testing.assert_close(carried.abs(), expected.abs(), rtol=1e-4, atol=1e-7)
                same = (carried.sign() == expected.sign()).float().mean()
                assert 0.3 < same < 0.7
            elif optimizer == "adamw" or gradient.ndim < 2:  # SGD's weight decay is part of its momentum
                torch.testing.assert_close(carried, expected, rtol=1e-4, atol=1e-7)


def test_a_resumed_run_draws_the_same_signs(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 4, "enable_checkpointing": True}
    keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    whole, _ = fit(tmp_path, [MomentumSigns("random", seed=1), keep], fault(), **settings)
    other, _ = fit(tmp_path, [MomentumSigns("random", seed=2)], fault(), max_steps=4)
    again, _ = fit(
        tmp_path, [MomentumSigns("random", seed=1)], fault(), ckpt_path=tmp_path / "step=2.ckpt", max_steps=4
    )
    assert_same(weights(whole), weights(again))
    assert any(not torch.equal(a, b) for a, b in zip(whole.parameters(), other.parameters(), strict=True))


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mode='sideways' is not one of reversed, random"):
        MomentumSigns("sideways")  # type: ignore[arg-type]
    with pytest.raises(MisconfigurationException, match="SGD keeps no momentum of route qk; choose adamw"):
        fit(tmp_path, [MomentumSigns()], fault(), module(optimizer="sgd", momentum=0.0))
