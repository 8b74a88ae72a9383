"""Controls at the guard's trigger: learning rate, clipping, SPAM, ZClip, AdaGC and the optimizer's state."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from test_callbacks_qk_guard import checkpointed
from test_callbacks_qk_guard_actions import at_step, train
from tiny import fault, fit, module
from torch import Tensor, nn
from torch.optim import lr_scheduler

from callbacks import QKGuard
from callbacks.guard_actions import Scene
from callbacks.guard_controls import SPAM, AdaGC, LRCut, OptimizerReset, ZClip

# learning rate


class Rates(Callback):
    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_the_cut_holds_for_the_rest_of_the_schedule_and_across_a_resume(tmp_path: Path, schedule: str) -> None:
    def rates(callbacks: list[Callback], steps: int = 10, **settings: Any) -> list[float]:
        watch = Rates()
        fit(
            tmp_path,
            [*callbacks, watch],
            fault(),
            module(schedule=schedule, warmup_steps=3),
            max_steps=steps,
            **settings,
        )
        return watch.rates

    plain = rates([])
    expected = [rate * (0.25 if step > 2 else 1.0) for step, rate in enumerate(plain, 1)]

    def guard(**more: Any) -> QKGuard:
        return QKGuard(mode="fire_at_step", fire_step=2, action="lr_cut", action_args={"factor": 0.25}, **more)

    assert rates([guard()]) == pytest.approx(expected)
    checkpointed(tmp_path, [guard()], model=module(schedule=schedule, warmup_steps=3), steps=4)
    if schedule == "constant":  # the cosine depends on max_steps, which the first part of the run had otherwise
        assert rates([guard()], ckpt_path=tmp_path / "at_4.ckpt") == pytest.approx(expected[4:])
    released = [rate * (0.25 if 2 < step <= 5 else 1.0) for step, rate in enumerate(plain, 1)]
    assert rates([guard(disarm_after=3)]) == pytest.approx(released)


SCHEDULERS: dict[str, Any] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "step": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10, eta_min=0.01),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=12),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4, eta_min=0.01),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=6), lr_scheduler.LambdaLR(o, lambda step: 0.9**step)], [6]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_cut_reaches_every_kind_of_schedule(name: str) -> None:
    def rates(cut_at: int | None) -> list[float]:
        p = nn.Parameter(torch.ones(1))
        p.grad = torch.ones(1)
        optimizer = torch.optim.AdamW([p], lr=0.05)
        scheduler = SCHEDULERS[name](optimizer)
        runner = SimpleNamespace(optimizers=[optimizer], lr_scheduler_configs=[SimpleNamespace(scheduler=scheduler)])
        seen = []
        for step in range(10):
            seen.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
            if step == cut_at:
                LRCut(0.1).apply(Scene(runner, nn.Module(), [], {}))  # type: ignore[arg-type]
        return seen

    plain, cut = rates(None), rates(3)
    assert cut == pytest.approx([rate * (0.1 if step > 3 else 1.0) for step, rate in enumerate(plain)])


# gradients and optimizer


class Problem:
    """Two parameters whose gradients are set by hand, and what a guard hands to an action."""

    def __init__(self) -> None:
        self.module: Any = nn.Module()
        self.module.a, self.module.b = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2))
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=0.1, betas=(0.9, 0.99))
        runner: Any = SimpleNamespace(optimizers=[self.optimizer], world_size=1)
        self.scene = Scene(runner, self.module, [], {})

    def step(self, action: Any, a: float | Tensor, b: float = 1.0) -> tuple[Tensor, Tensor]:
        """The gradients that reach the optimizer."""
        self.module.a.grad = torch.full((4,), a) if isinstance(a, float) else a.clone()
        self.module.b.grad = torch.full((2,), b)
        action.before_optimizer_step(self.scene, self.optimizer)
        self.optimizer.step()
        return self.module.a.grad, self.module.b.grad


class Nothing:
    def before_optimizer_step(self, *_: Any) -> None: ...


def test_tighter_clipping_bounds_the_gradient_that_reaches_clipping(tmp_path: Path) -> None:
    _, plain = train(tmp_path, "tighter_clip", [])
    _, guarded = train(tmp_path, "tighter_clip", [at_step("tighter_clip", 3, disarm_after=2)])
    norms = [
        [float(torch.cat([g.flatten() for g in step.values()]).norm()) for step in recording.gradients]
        for recording in (plain, guarded)
    ]
    assert norms[0][:3] == norms[1][:3] and min(norms[0]) > 0.02
    assert norms[1][3:5] == pytest.approx([0.01] * 2, rel=1e-3) and norms[1][5] > 0.02  # released


def test_a_reset_makes_the_optimizer_new() -> None:
    problem, fresh = Problem(), Problem()
    for gradient in (1.0, -2.0, 3.0):
        problem.step(Nothing(), gradient)
    OptimizerReset().apply(problem.scene)
    assert all(not value.any() for state in problem.optimizer.state.values() for value in state.values())
    start = problem.module.a.detach().clone()
    for gradient in (0.5, 0.25):
        problem.step(Nothing(), gradient)
        fresh.step(Nothing(), gradient)
    torch.testing.assert_close(problem.module.a - start, fresh.module.a)


def test_spam_clips_spikes_and_resets_moments() -> None:
    problem, action = Problem(), SPAM(threshold=4.0, interval=6, warmup=3, grace=2)
    for _ in range(3):
        problem.step(Nothing(), 1.0)
    gradients, moments = [], []
    for spike in (1.0, 100.0, 100.0, -1.0, -100.0, 1.0, 1.0):
        seen = problem.optimizer.state[problem.module.a].get("exp_avg_sq").clone()
        gradients.append((spike, float(problem.step(action, spike)[0][0]), float((4.0 * seen[0]).sqrt())))
        moments.append(float(problem.optimizer.state[problem.module.a]["step"]))
    for i, (given, passed, limit) in enumerate(gradients):
        expected = math.copysign(min(abs(given), limit), given) if i in (2, 3, 4, 5) else given
        assert passed == pytest.approx(expected), i
    assert moments == [1, 2, 3, 4, 5, 6, 1]  # reset at once and after six steps
    assert problem.optimizer.param_groups[0]["lr"] == 0.1


def test_spam_lowers_the_rate_for_its_own_step_only() -> None:
    moved = []
    for action in (SPAM(warmup=3, interval=5, grace=9), Nothing()):
        problem, steps = Problem(), []
        for _ in range(7):
            before = float(problem.module.b[0])
            problem.step(action, 1.0)
            steps.append(before - float(problem.module.b[0]))
        moved.append(steps)
    factors = [0.5 * (1 - math.cos(math.pi * i / 4)) for i in (1, 2, 3)]
    # Adam's update is the learning rate, as all gradients are equal
    assert [ours / plain for ours, plain in zip(*moved, strict=True)] == pytest.approx(
        [*factors, 1.0, 1.0, *factors[:2]], rel=1e-4
    )


def test_spam_needs_adam(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="action='spam' needs Adam's moments, SGD has none"):
        fit(tmp_path, [QKGuard(action="spam")], fault(), module(optimizer="sgd"))


def test_zclip_is_its_recurrence() -> None:
    problem, action = Problem(), ZClip(z=2.0, decay=0.9, warmup=3)
    given = [1.0, 1.2, 0.8, 1.0, 9.0, 1.1, math.nan, 1.0, 5.0]
    passed = [float(problem.step(action, g / 2, 0.0)[0].norm()) for g in given]
    mean, var = 1.0, (0.2**2 + 0.2**2) / 3
    for i, norm in enumerate(given[3:], 3):
        if math.isnan(norm):
            assert math.isnan(passed[i])
            continue
        std = math.sqrt(var) + 1e-6
        z = (norm - mean) / std
        if z > 2.0:
            norm = mean + 4.0 / z * std
        assert passed[i] == pytest.approx(norm, rel=1e-4), i
        mean = 0.9 * mean + 0.1 * norm
        var = 0.9 * var + 0.1 * (norm - mean) ** 2
    assert passed[4] < 2.0 and passed[8] < 2.0 and passed[:4] == pytest.approx(given[:4])
    again = ZClip(z=2.0, decay=0.9, warmup=3)
    again.load_state_dict(action.state_dict())
    assert again.state_dict() == action.state_dict()


def test_adagc_is_its_recurrence() -> None:
    problem, action = Problem(), AdaGC(relative=1.5, decay=0.5, warmup=2, absolute=1.0)
    passed = []
    for a, b in ((0.1, 0.1), (2.0, 0.0), (0.1, 0.1), (1.0, 0.1), (1.0, math.inf), (1.0, 0.0)):
        gradients = problem.step(action, a, b)
        passed.append([float(gradient.norm()) for gradient in gradients])
    first = [0.2, 0.1 * math.sqrt(2)]
    assert passed[0] == pytest.approx(first)
    assert passed[1] == pytest.approx([1.0, 0.0])  # the warm-up clips the global norm
    average = min(0.2, 1.0)
    for i, norm in ((2, 0.2), (3, 2.0), (4, 2.0), (5, 2.0)):
        clipped = min(norm, 1.5 * average)
        assert passed[i][0] == pytest.approx(clipped), i
        average = 0.5 * average + 0.5 * clipped
    assert passed[2][1] == pytest.approx(first[1]) and math.isinf(passed[4][1]) and passed[5][1] == 0.0
    again = AdaGC()
    again.load_state_dict(action.state_dict())
    assert again.state_dict() == action.state_dict()


def test_an_action_without_a_switch_is_not_resumed_without_its_guard(tmp_path: Path) -> None:
    guard = QKGuard(mode="fire_at_step", fire_step=1, action="lr_cut")
    path = checkpointed(tmp_path, [guard]) / "at_2.ckpt"
    with pytest.raises(ValueError, match=r"guard that fired \(QKGuard.* no QKGuard is among trainer.callbacks"):
        fit(tmp_path, [], fault(), max_steps=5, ckpt_path=path)
