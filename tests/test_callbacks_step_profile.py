"""StepProfile: time by phase, each its own, without changing a bit of the training."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler
from tiny import SIZE, assert_same, fault, fit, module, trainer, weights
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from callbacks import DirectionProbe, RouteSplice, SpectralMonitor, StepProfile
from callbacks.step_profile import _PhaseClock
from lightning_qk.precision import GradientFault

PHASES = {
    *("forward", "backward", "fault", "splice", "probe", "sensors", "optimizer", "data", "validation", "checkpoint"),
    "other",
}


class Kept(Logger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.readings: list[tuple[int, dict[str, float]]] = []

    name, version = "kept", 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "time/step" in metrics:
            assert step is not None
            self.readings.append((step, metrics))

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...


def others(root: Path) -> list[Any]:
    checkpoint = ModelCheckpoint(root, every_n_train_steps=2)
    return [RouteSplice("v"), DirectionProbe(k=2), SpectralMonitor(1), checkpoint]


def run(root: Path, *profile: StepProfile, **settings: Any) -> tuple[Any, Any, Kept]:
    logger = Kept()
    plugin = fault(gradient=GradientFault("mlp", block=8))
    settings = dict(max_steps=4, logger=logger, val_check_interval=2, limit_val_batches=2, **settings)
    model, recording = fit(root, [*profile, *others(root)], plugin, enable_checkpointing=True, **settings)
    return model, recording, logger


def test_every_phase_is_there_and_nothing_else_changes(tmp_path: Path) -> None:
    model, recording, logger = run(tmp_path / "with", StepProfile(2, peak_flops=1e9))
    plain, plain_recording, _ = run(tmp_path / "without")
    assert recording.losses == plain_recording.losses
    assert_same(weights(model), weights(plain))
    assert isinstance(model.trainer.profiler, PassThroughProfiler)  # back to where it was
    assert [step for step, _ in logger.readings] == [1, 3]
    for _, values in logger.readings:
        times = {tag.removeprefix("time/"): value for tag, value in values.items() if tag.startswith("time/")}
        total = times.pop("step")
        assert PHASES - {"validation", "checkpoint"} <= set(times) <= PHASES and min(times.values()) > 0
        assert total == pytest.approx(sum(times.values()))
        paused = times.get("validation", 0.0) + times.get("checkpoint", 0.0)
        tokens = 4 * SIZE["context"] / (total - paused)  # a step is a batch of four sequences
        assert values["speed/tokens_per_s"] == pytest.approx(tokens)
        assert values["speed/mfu"] == pytest.approx(tokens * model.flops_per_token / 1e9)
        assert 0.01 < values["memory/peak_gib"] < 1000
    assert {"time/validation", "time/checkpoint"} <= logger.readings[1][1].keys()


def test_accumulated_batches_belong_to_one_step(tmp_path: Path) -> None:
    _, _, logger = run(tmp_path, StepProfile(2), accumulate_grad_batches=3)
    assert [step for step, _ in logger.readings] == [1, 3]
    assert all("speed/mfu" not in values for _, values in logger.readings)  # no peak of a CPU is known


def test_a_phase_is_charged_without_the_phases_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = _PhaseClock({"Probe{k: 2}": "probe"}, torch.device("cpu"))
    clock.stop("an action that began before")
    for seconds, call, action in (
        (1.0, clock.start, "[LightningModule]GPTModule.optimizer_step"),
        (2.0, clock.start, "[Strategy]DDPStrategy.training_step"),
        (4.0, clock.start, "[LightningModule]GPTModule.unknown"),
        (8.0, clock.stop, "[LightningModule]GPTModule.unknown"),
        (16.0, clock.stop, "[Strategy]DDPStrategy.training_step"),
        (32.0, clock.start, "[Callback]Probe{k: 2}.step_post_hook"),
        (64.0, clock.stop, "[Callback]Probe{k: 2}.step_post_hook"),
        (128.0, clock.stop, "[LightningModule]GPTModule.optimizer_step"),
    ):
        now += seconds
        call(action)
    assert clock.take() == {"other": 1.0, "optimizer": 162.0, "forward": 28.0, "probe": 64.0}
    now += 1.0
    assert clock.take() == {"other": 1.0}


def test_flops_are_those_that_pytorch_counts() -> None:
    model = module()
    x = torch.zeros(3, SIZE["context"], dtype=torch.long)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(x, x)
    assert model.flops_per_token == 3 * counter.get_total_flops() / x.numel()  # backward is twice the forward pass


def test_what_can_not_be_is_refused(tmp_path: Path) -> None:
    for arguments, said in (({"every_n_steps": 0}, "every_n_steps=0"), ({"peak_flops": 0.0}, "peak_flops=0.0")):
        with pytest.raises(ValueError, match=said):
            StepProfile(**arguments)
    profiled = trainer(tmp_path, [StepProfile()], profiler=SimpleProfiler())
    with pytest.raises(ValueError, match="profiler is a SimpleProfiler, and there is room for one"):
        profiled.fit(module(), torch.utils.data.DataLoader([]))
