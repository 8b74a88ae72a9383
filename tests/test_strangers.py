"""MXGradient, CollapseStop and, on two ranks, QKGuard in strangers' LightningModules, around models of their own."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from ranks import ddp, on_two_ranks
from test_adapters_training import Mine, Watch, batches, model
from tiny import assert_same, fault, gradients, trainer, weights
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from callbacks import (
    BiasMonitor,
    CollapseStop,
    DeltaSpectrumMonitor,
    DirectionProbe,
    ErrorShaping,
    LogitBoundMonitor,
    QKGuard,
    RouteSplice,
    SpectralMonitor,
)
from kernels import mx_quantize
from lightning_qk.precision import MXGradient
from lightning_qk.routes import ROUTES, route_parameters

MODELS = ["gpt2-sdpa", "llama-sdpa", "qwen2-sdpa", "encoder", "transformer"]


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
    # on the same route: a route of attention adopts it, and that sums in another order
    clean = run(tmp_path, Mine(model(name)), MXGradient(route, base="fp32", error_gain=0.0))
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


class FSDPOnCPU(FSDPStrategy):
    """Lightning lets a subclass onto the CPU."""


class NoDeepSpeed(DeepSpeedStrategy):
    """Without the package."""

    def __init__(self) -> None:
        DDPStrategy.__init__(self)


SPLIT = pytest.mark.parametrize("strategy", [FSDPOnCPU, NoDeepSpeed])
WATCHERS = [
    *(QKGuard, SpectralMonitor, RouteSplice, ErrorShaping, BiasMonitor, DirectionProbe),
    *(LogitBoundMonitor, DeltaSpectrumMonitor),
]


@SPLIT
@pytest.mark.parametrize("watcher", WATCHERS)
def test_strategies_that_split_the_weights_are_refused(
    strategy: type[DDPStrategy], watcher: Callable[[], Callback]
) -> None:
    """Before anything is sharded or adopted; what works is named."""
    mine = Mine(model("llama-sdpa"))
    split = Trainer(accelerator="cpu", devices=1, strategy=strategy(), logger=False, enable_checkpointing=False)
    with pytest.raises(MisconfigurationException, match=rf"{strategy.__name__} .*DDPStrategy.*ModelParallelStrategy"):
        watcher().setup(split, mine, "fit")
    assert not [name for name, _ in mine.named_buffers() if "lightning_qk" in name]


def test_faults_refuse_them_too() -> None:
    settings: dict[str, Any] = dict(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    split = Trainer(strategy=NoDeepSpeed(), plugins=[fault()], **settings)
    mine = Mine(model("llama-sdpa"))
    mine.trainer = split
    with pytest.raises(MisconfigurationException, match=r"DDPStrategy.*ModelParallelStrategy"):
        split.strategy.precision_plugin.convert_module(mine)
    with pytest.raises(TypeError, match="can only work with the `FSDPPrecision` plugin"):  # Lightning's own
        Trainer(strategy=FSDPOnCPU(), plugins=[fault()], **settings)


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


def of_this_rank(
    root: Path, limit: float, steps: int, ckpt: Path | None = None, *callbacks: Callback
) -> dict[str, Any]:
    """What one rank sees of a Llama that it trains on tokens of its own, with a guard."""
    draw = torch.Generator().manual_seed(int(os.environ["LOCAL_RANK"]))
    mine, guard, watch = Mine(model("llama-sdpa")), QKGuard(limit), Watch()
    tokens = DataLoader([torch.randint(0, 32, (4, 13), generator=draw)], batch_size=None)  # type: ignore[arg-type]
    two = trainer(
        root,
        [guard, watch, *callbacks],
        max_steps=steps,
        devices=2,
        strategy=ddp(),
        enable_checkpointing=bool(callbacks),
    )
    two.fit(mine, tokens, ckpt_path=ckpt)
    return {"logits": watch.logits, "losses": watch.losses, "guard": guard.history, "weights": weights(mine)}


def stopped_and_resumed(root: Path, limit: float, steps: int) -> dict[str, Any]:
    of_this_rank(root, limit, steps - 1, None, ModelCheckpoint(root, filename="last", every_n_train_steps=1))
    return of_this_rank(root, limit, steps, root / "last.ckpt")


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_the_guard_of_a_llama_fires_on_both_ranks_and_survives_resume(tmp_path: Path) -> None:
    steps = 6
    work = {"plain": partial(of_this_rank, tmp_path, 1e9, steps, None)}
    plain = [rank["logits"] for rank in on_two_ranks(tmp_path, work)["plain"]]
    assert plain[0] != plain[1]
    largest = [max(pair) for pair in zip(*plain, strict=True)]
    step = next(i for i in range(1, steps - 2) if largest[i] > 1.001 * max(largest[:i]))
    limit = (max(largest[:step]) + largest[step]) / 2  # which one rank alone may exceed
    whole, resumed = on_two_ranks(
        tmp_path,
        {
            "whole": partial(of_this_rank, tmp_path, limit, steps, None),
            "resumed": partial(stopped_and_resumed, tmp_path / "resumed", limit, steps),
        },
    ).values()
    for rank in range(2):
        fired = {"step": step + 1, "layers": [0, 1], "logit": pytest.approx(largest[step])}
        assert whole[rank]["guard"] == resumed[rank]["guard"] == [fired]
        assert max(whole[rank]["logits"][step + 1 :]) <= math.sqrt(8) * (1 + 1e-5)
        assert resumed[rank]["losses"] == whole[rank]["losses"][-1:]
        assert_same(resumed[rank]["weights"], whole[rank]["weights"])
    assert_same(whole[0]["weights"], whole[1]["weights"])
