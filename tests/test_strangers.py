"""MXGradient and CollapseStop in a LightningModule that anyone might have written, around models of another library."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from test_adapters_training import Mine, batches, model
from tiny import assert_same, gradients, trainer
from torch import Tensor
from torch.optim import Optimizer

from callbacks import CollapseStop
from kernels import mx_quantize
from lightning_qk.precision import MXGradient
from lightning_qk.routes import ROUTES, route_parameters

MODELS = ["gpt2-sdpa", "llama-sdpa", "qwen2-sdpa", "encoder"]


class Kept(Callback):
    """The gradients of the first step, as callbacks see them."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}
        self.losses: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self.gradients = self.gradients or gradients(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))


def run(root: Path, mine: Mine, plugin: Any = None, *callbacks: Callback, steps: int = 3) -> Kept:
    kept = Kept()
    trainer(root, [*callbacks, kept], plugin, max_steps=steps).fit(mine, batches())
    return kept


@pytest.mark.parametrize("route", ["mlp", "o"])
@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_fault_is_on_its_route_and_nowhere_else(tmp_path: Path, name: str, route: str) -> None:
    clean = run(tmp_path, Mine(model(name)), MXGradient("mlp", base="fp32", error_gain=0.0))
    mine = Mine(model(name))
    faulty = run(tmp_path, mine, MXGradient(route, base="fp32", block=8))
    on_route = route_parameters(mine, route).keys()
    assert on_route
    expected = {
        key: mx_quantize(gradient, "mxfp4_e2m1", -1, 8) if key in on_route else gradient
        for key, gradient in clean.gradients.items()
    }
    assert_same(faulty.gradients, expected)
    assert all(not torch.equal(clean.gradients[key], faulty.gradients[key]) for key in on_route)
    assert faulty.losses[0] == clean.losses[0] and faulty.losses[2] != clean.losses[2]


@pytest.mark.parametrize("name", ["gpt2-sdpa", "encoder"])
def test_a_route_that_shares_its_matrix_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        ValueError, match=r"no route for q alone: .* keeps k/v in the same parameter"
    ):  # one matrix makes q, k and v
        run(tmp_path, Mine(model(name)), MXGradient("q", base="fp32"))
    assert "attention" in ROUTES
    run(tmp_path, Mine(model(name)), MXGradient("attention", base="fp32"), steps=1)


class Diverging(Mine):
    """Its loss is another from the fifth batch on."""

    def __init__(self, name: str, later: float) -> None:
        super().__init__(model(name))
        self.later, self.seen = later, 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += 1
        return super().training_step(batch, batch_idx) + (self.later if self.seen > 4 else 0.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_a_collapse_is_judged_and_ends_training(tmp_path: Path, name: str) -> None:
    for later, status, step, end in (
        (3.0, "collapsed", 5, 7),
        (math.nan, "nonfinite", 5, 5),
        (0.0, "completed", None, 9),
    ):
        stop = CollapseStop(window=1, patience=2)
        kept = run(tmp_path, Diverging(name, later), None, stop, steps=9)
        fields = stop.verdict_fields()
        assert (fields["status"], fields["collapse_step"], len(kept.losses)) == (status, step, end)
        finite = [loss for loss in kept.losses if math.isfinite(loss)]
        assert fields["loss"] == pytest.approx(sum(finite) / len(finite))
