"""Actions that leave the query-key channel alone: at the learning rate, the gradient and the optimizer.

They are controls for a guard: same trigger, other place. Each reaches the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from callbacks.guard_actions import GuardAction, Scene
from lightning_qk.module import full

_LR_KEYS = ("lr", "initial_lr", "max_lr", "min_lr")
_SCHEDULE_KEYS = ("base_lrs", "max_lrs", "min_lrs", "eta_min", "_last_lr")
_TINY = 1e-6


class LRCut(GuardAction):
    """Multiplies the learning rate, now and for the rest of its schedule.

    The schedulers' base rates are multiplied too: most recompute the rate from them at every step. Optimizer and
    schedulers carry both through checkpoints.

    Args:
        factor: by which the rate is multiplied.
    """

    def __init__(self, factor: float = 0.1) -> None:
        if not 0 < factor < 1:
            raise ValueError(f"QKGuard: action_args.factor={factor} must be between 0 and 1.")
        self.factor = factor

    @override
    def apply(self, scene: Scene) -> None:
        _scale_rates(scene, self.factor)

    @override
    def release(self, scene: Scene) -> None:
        _scale_rates(scene, 1 / self.factor)


def _scale_rates(scene: Scene, factor: float) -> None:
    for optimizer in scene.trainer.optimizers:
        for group in optimizer.param_groups:
            for key in _LR_KEYS:
                if key in group:
                    group[key] = group[key] * factor
    for config in scene.trainer.lr_scheduler_configs:
        _scale_schedule(config.scheduler, factor)


def _scale_schedule(scheduler: Any, factor: float) -> None:
    for key in _SCHEDULE_KEYS:
        value = getattr(scheduler, key, None)
        if value is not None:
            setattr(scheduler, key, [rate * factor for rate in value] if isinstance(value, list) else value * factor)
    for part in getattr(scheduler, "_schedulers", ()):
        _scale_schedule(part, factor)


class TighterClip(GuardAction):
    """Clips the global norm of the gradient, before the clipping that is always on.

    Args:
        max_norm: the norm.
    """

    def __init__(self, max_norm: float = 0.1) -> None:
        if not max_norm > 0:
            raise ValueError(f"QKGuard: action_args.max_norm={max_norm} must be positive.")
        self.max_norm = max_norm

    @override
    def before_optimizer_step(self, scene: Scene, optimizer: Optimizer) -> None:
        nn.utils.clip_grad_norm_(scene.module.parameters(), self.max_norm)


def _clear_moments(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor):
                value.zero_()
            elif isinstance(value, int | float):
                state[key] = type(value)(0)


class OptimizerReset(GuardAction):
    """Clears the optimizers' moments and step counts, once."""

    @override
    @torch.no_grad()
    def apply(self, scene: Scene) -> None:
        for optimizer in scene.trainer.optimizers:
            _clear_moments(optimizer)


class SPAM(GuardAction):
    """Spike-aware Adam with momentum reset (arXiv 2501.06842), from now on.

    Elements of the gradient with ``g^2 > threshold * v``, v Adam's second moment, become ``sign(g) sqrt(threshold v)``.
    Moments are cleared at once and every ``interval`` steps; after that the learning rate warms up by a cosine, and
    elements are left alone for the first ``grace`` steps, while v fills.

    Args:
        threshold: of a spike.
        interval: steps between two resets.
        warmup: steps of the warm-up.
        grace: steps without spike clipping after a reset.
    """

    def __init__(self, threshold: float = 5000.0, interval: int = 500, warmup: int = 150, grace: int = 20) -> None:
        if not threshold > 0 or interval < 1 or warmup < 0 or grace < 1:
            raise ValueError(
                f"QKGuard: action_args: threshold={threshold} > 0, interval={interval} >= 1, warmup={warmup} >= 0, "
                f"grace={grace} >= 1."
            )
        self.threshold, self.interval, self.warmup, self.grace = threshold, interval, warmup, grace
        self._steps = 0
        self._restore: tuple[RemovableHandle, Optimizer, list[Any]] | None = None

    @override
    def check(self, scene: Scene) -> None:
        for optimizer in scene.trainer.optimizers:
            if "betas" not in optimizer.defaults:
                raise self._needs_adam(optimizer)

    @staticmethod
    def _needs_adam(optimizer: Optimizer) -> ValueError:
        return ValueError(
            f"QKGuard: action='spam' needs Adam's moments, {type(optimizer).__name__} has none; use Adam or AdamW, or "
            "choose another action."
        )

    @override
    @torch.no_grad()
    def before_optimizer_step(self, scene: Scene, optimizer: Optimizer) -> None:
        self._restore_rates()
        since = self._steps % self.interval
        self._steps += 1
        if since == 0:
            _clear_moments(optimizer)
        if since >= self.grace:
            for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
                if "exp_avg_sq" not in optimizer.state[p]:
                    raise self._needs_adam(optimizer)
                limit = (self.threshold * optimizer.state[p]["exp_avg_sq"]).sqrt()
                p.grad.copy_(torch.where(p.grad.abs() > limit, p.grad.sign() * limit, p.grad))
        if since < self.warmup:
            factor = 0.5 * (1 - math.cos(math.pi * (since + 1) / (self.warmup + 1)))
            rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor
            # for this step only: schedulers that go by the current rate must not see it
            handle = optimizer.register_step_post_hook(lambda *_: self._restore_rates())
            self._restore = handle, optimizer, rates

    def _restore_rates(self) -> None:
        if self._restore is None:
            return
        handle, optimizer, rates = self._restore
        self._restore = None
        handle.remove()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]


class ZClip(GuardAction):
    """ZClip (arXiv 2504.02507), from now on: clips the global norm where it is an outlier of its own recent past.

    A norm whose z-score is above ``z`` is clipped to ``mean + z^2 / score * std``; mean and variance are exponential
    averages of the clipped norms that start from the first ``warmup`` norms, of which none is clipped.

    Args:
        z: score of an outlier.
        decay: of the averages.
        warmup: norms that they start from.
    """

    def __init__(self, z: float = 2.5, decay: float = 0.97, warmup: int = 25) -> None:
        if not z > 0 or not 0 < decay < 1 or warmup < 2:
            raise ValueError(f"QKGuard: action_args: z={z} > 0, 0 < decay={decay} < 1, warmup={warmup} >= 2.")
        self.z, self.decay, self.warmup = z, decay, warmup
        self._first: list[float] = []
        self._mean = self._var = 0.0

    @override
    @torch.no_grad()
    def before_optimizer_step(self, scene: Scene, optimizer: Optimizer) -> None:
        gradients = [p.grad for _, p in _with_gradient(scene) if p.grad is not None]
        norm = float(full(nn.utils.get_total_norm(gradients)))
        if not math.isfinite(norm):
            return
        if len(self._first) < self.warmup:
            self._first.append(norm)
            if len(self._first) == self.warmup:
                self._mean = sum(self._first) / self.warmup
                self._var = sum((x - self._mean) ** 2 for x in self._first) / self.warmup
            return
        std = math.sqrt(self._var) + _TINY
        score = (norm - self._mean) / std
        if score > self.z:
            clipped = self._mean + self.z**2 / score * std
            torch._foreach_mul_(gradients, clipped / norm)
            norm = clipped
        self._mean = self.decay * self._mean + (1 - self.decay) * norm
        self._var = self.decay * self._var + (1 - self.decay) * (norm - self._mean) ** 2

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"first": list(self._first), "mean": self._mean, "var": self._var}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._first, self._mean, self._var = list(state["first"]), state["mean"], state["var"]


class AdaGC(GuardAction):
    """AdaGC (arXiv 2502.11034), from now on: clips the gradient of every tensor by an average of its own past norms.

    For ``warmup`` steps the global norm is clipped to ``absolute`` and every tensor's least norm becomes its average;
    then a tensor's norm is clipped to ``relative`` times its exponential average, which takes up the clipped norm.

    Args:
        relative: factor on the average.
        decay: of the average.
        warmup: steps.
        absolute: global norm of the warm-up.
    """

    def __init__(self, relative: float = 1.05, decay: float = 0.98, warmup: int = 100, absolute: float = 1.0) -> None:
        if not relative > 0 or not 0 < decay < 1 or warmup < 1 or not absolute > 0:
            raise ValueError(
                f"QKGuard: action_args: relative={relative} > 0, 0 < decay={decay} < 1, warmup={warmup} >= 1, "
                f"absolute={absolute} > 0."
            )
        self.relative, self.decay, self.warmup, self.absolute = relative, decay, warmup, absolute
        self._steps = 0
        self._average: dict[str, float] = {}

    @override
    @torch.no_grad()
    def before_optimizer_step(self, scene: Scene, optimizer: Optimizer) -> None:
        named = dict(_with_gradient(scene))
        warming = self._steps < self.warmup
        self._steps += 1
        if warming:
            nn.utils.clip_grad_norm_(list(named.values()), self.absolute)
        norms = torch.stack([full(p.grad.norm()) for p in named.values() if p.grad is not None]).tolist()
        for (name, p), norm in zip(named.items(), norms, strict=True):
            if p.grad is None or not math.isfinite(norm) or norm == 0:  # an average of 0 would stay 0
                continue
            average = self._average.get(name, norm)
            if warming:
                self._average[name] = min(average, norm)
                continue
            clipped = min(norm, self.relative * average)
            if clipped < norm:
                p.grad.mul_(clipped / norm)
            self._average[name] = self.decay * average + (1 - self.decay) * clipped

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "average": dict(self._average)}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps, self._average = state["steps"], dict(state["average"])


def _with_gradient(scene: Scene) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in scene.module.named_parameters() if p.grad is not None)
