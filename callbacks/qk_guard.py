"""QK-Guard (arXiv 2608.02091): dormant until attention logits saturate, then switches QK normalisation on for good."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from callbacks.guard_actions import (
    FP32Carry,
    GuardAction,
    Heads,
    MLPNorm,
    QKClip,
    QKNorm,
    Scene,
    Softcap,
    VNorm,
    switches_on,
)
from callbacks.guard_controls import SPAM, AdaGC, LRCut, OptimizerReset, TighterClip, ZClip
from callbacks.guard_triggers import TRIGGERS, Trigger
from callbacks.step import OptimizerStepClock
from lightning_qk.arguments import check_arguments
from lightning_qk.module import logging_is_due
from lightning_qk.routes import attention_sites
from lightning_qk.sites import AttentionSite
from lightning_qk.strategies import refuse_strategy

ACTIONS: dict[str, type[GuardAction]] = {
    "qk_norm": QKNorm,
    "qk_clip": QKClip,
    "softcap": Softcap,
    "fp32_carry": FP32Carry,
    "v_norm": VNorm,
    "mlp_norm": MLPNorm,
    "lr_cut": LRCut,
    "tighter_clip": TighterClip,
    "optimizer_reset": OptimizerReset,
    "spam": SPAM,
    "zclip": ZClip,
    "adagc": AdaGC,
}
MODES = ("logit", "fire_at_step", "always_on")
SCOPES = ("all", "layer", "head")


class QKGuard(Callback):
    """Watches the maximum attention logit and, once it exceeds ``threshold``, turns on parameter-free QK-norm.

    The decision falls after an optimizer step, is the same on every rank (a MAX reduction) and acts from the next
    step on. Other triggers and other actions, as controls, can take the place of either. What changes the function that
    the model computes is a persistent switch of the model, so it survives checkpoints, validation and export; the
    history of the decision, and the memory of actions that need one, are this callback's state. Works on the attention
    modules that :func:`lightning_qk.routes.attention_sites` knows, in any LightningModule that has them in ``setup``.

    Args:
        threshold: value of the trigger above which (entropy: below which) the guard fires; None is the trigger's own.
            30 for logits, scaled, signed and masked, is the paper's; small proxies are healthy above it and state their
            own, and so must the other triggers.
        mode: ``logit`` (the guard: fires on its trigger), ``fire_at_step`` (a control: fires at ``fire_step`` whatever
            is read) or ``always_on`` (the twin: the action from the first step).
        fire_step: optimizer step after which ``fire_at_step`` fires.
        scope: ``all`` layers act when one fires, or only the firing ``layer``, or the firing ``head`` (with the heads
            that share its keys).
        every_n_steps: optimizer steps between two looks; what happens between them goes unseen.
        trigger: ``logit_bound`` (an upper bound on the logits, and the maximum only when the bound exceeds the
            threshold), ``max_logit`` (the same decision from the maximum at every look), ``sigma_q`` (of a layer),
            ``tied_rows`` or ``entropy``; see :mod:`callbacks.guard_triggers`.
        patience: consecutive looks over the threshold that it takes.
        window: looks of which the worst counts.
        action: ``qk_norm``, ``qk_clip``, ``softcap`` or ``fp32_carry``, or a control: ``v_norm``, ``mlp_norm``,
            ``lr_cut``, ``tighter_clip``, ``optimizer_reset``, ``spam``, ``zclip``, ``adagc``; see
            :mod:`callbacks.guard_actions` and :mod:`callbacks.guard_controls`.
        action_args: arguments of the action's class by name.
        disarm_after: optimizer steps after which the action is taken back for good; None is never.

    Raises:
        ValueError: an argument that cannot be, a model that cannot take the action, or a checkpoint whose switches
            disagree with the guard's history.
    """

    owns_switches = True  # without such a callback, a model with a switch on is not resumed

    def __init__(
        self,
        threshold: float | None = None,
        mode: Literal["logit", "fire_at_step", "always_on"] = "logit",
        fire_step: int | None = None,
        scope: Literal["all", "layer", "head"] = "all",
        every_n_steps: int = 1,
        trigger: str = "logit_bound",
        patience: int = 1,
        window: int = 1,
        action: str = "qk_norm",
        action_args: dict[str, Any] | None = None,
        disarm_after: int | None = None,
    ) -> None:
        self.mode, self.fire_step, self.scope, self.every_n_steps = mode, fire_step, scope, every_n_steps
        self.patience, self.window, self.disarm_after = patience, window, disarm_after
        self.trigger, self.action = trigger, action
        self._trigger, self._action = _trigger(trigger), _action(action, action_args)
        self.threshold = self._trigger.threshold if threshold is None else threshold
        self._check_arguments()
        self._clock = OptimizerStepClock()
        self._sites: list[AttentionSite] = []
        self._cells: list[tuple[int, int]] = []  # (layer, head), in the order of a trigger's readings
        self._dormant: set[int] = set()  # cells that may still fire
        self._acted: Heads = {}
        self._seen: Tensor | None = None
        self._looks: list[list[float]] = []  # the last ones, as far as the window goes
        self._streak: list[int] = []  # looks over the threshold, up to the last one
        self.fired_step: int | None = None
        self.released_step: int | None = None
        self.history: list[dict[str, Any]] = []

    def _check_arguments(self) -> None:
        mode, scope, fire_step, threshold = self.mode, self.scope, self.fire_step, self.threshold
        for name, value, there in (("mode", mode, MODES), ("scope", scope, SCOPES)):
            if value not in there:
                raise ValueError(f"QKGuard: {name}={value!r} is not one of {', '.join(there)}.")
        if (mode == "fire_at_step") != (fire_step is not None):
            raise ValueError(f"QKGuard: fire_step={fire_step} goes with mode='fire_at_step', got mode={mode!r}.")
        if mode != "logit" and scope != "all":
            raise ValueError(f"QKGuard: mode={mode!r} has no firing {scope}; use scope='all'.")
        if scope == "head" and not self._trigger.per_head:
            raise ValueError(f"QKGuard: trigger={self.trigger!r} has no firing head; use scope='layer'.")
        if scope not in self._action.scopes:
            raise ValueError(
                f"QKGuard: action={self.action!r} cannot be confined to the firing {scope}; use scope="
                f"{' or '.join(map(repr, self._action.scopes))}."
            )
        if mode == "logit" and threshold is None:
            raise ValueError(f"QKGuard: trigger={self.trigger!r} has no threshold of its own; set threshold.")
        for name in ("fire_step", "every_n_steps", "patience", "window", "disarm_after"):
            if (steps := getattr(self, name)) is not None and steps < 1:
                raise ValueError(f"QKGuard: {name}={steps} must be at least 1.")
        if threshold is not None and not 0 < threshold < math.inf:
            raise ValueError(f"QKGuard: threshold={threshold} must be positive and finite.")

    @property
    def fired(self) -> bool:
        """Whether this guard has acted, be it that it has been released since."""
        return self.fired_step is not None

    @property
    def edits_gradient(self) -> bool:
        """Whether the action works on the gradient: then whoever writes gradients anew must come before the guard."""
        return type(self._action).before_optimizer_step is not GuardAction.before_optimizer_step

    @property
    def _acting(self) -> bool:
        return self.fired and self.released_step is None

    def _scene(self, trainer: Trainer, pl_module: LightningModule, targets: Heads | None = None) -> Scene:
        return Scene(trainer, pl_module, self._sites, self._acted if targets is None else targets)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        refuse_strategy(trainer)
        # before weights are restored: in models of other libraries this is where the switches come from
        attention_sites(pl_module)
        self._action.attach(pl_module)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock.start(trainer)
        self._sites = attention_sites(pl_module)
        self._cells = [(layer, head) for layer, site in enumerate(self._sites) for head in range(site.n_heads)]
        if self.mode == "logit":
            self._trigger.prepare(self._sites)
        self._action.check(self._scene(trainer, pl_module))
        self._acted = self._recorded()
        self._count_dormant()
        self._compare_switches(pl_module)
        if self.mode == "always_on" and not self.fired:
            self._fire(trainer, pl_module, self._all_heads(), step=0)

    def _recorded(self) -> Heads:
        """What the history says is acted on."""
        acted: Heads = {}
        for event in self.history:
            for i, layer in enumerate(event.get("layers", ())):
                acted[layer] = tuple(event["heads"][i]) if "heads" in event else self._all_heads()[layer]
        return acted

    def _all_heads(self) -> Heads:
        return {layer: tuple(range(site.n_heads)) for layer, site in enumerate(self._sites)}

    def _count_dormant(self) -> None:
        acted = {(layer, head) for layer, heads in self._acted.items() for head in heads}
        spent = self.released_step is not None
        self._dormant = set() if spent else {i for i, cell in enumerate(self._cells) if cell not in acted}

    def _compare_switches(self, pl_module: LightningModule) -> None:
        found = switches_on(pl_module, self._sites)
        switch = self._action.switch
        recorded = {switch: self._action.switched(self._acted)} if switch and self._acting else {}
        for name in found.keys() | recorded.keys():
            on, expected = found.get(name, {}), recorded.get(name, {})
            if on != expected:
                # heads only where the layers alone do not tell
                shown: list[Any] = [sorted(on), sorted(expected)] if on.keys() != expected.keys() else [on, expected]
                raise ValueError(
                    f"QKGuard: the model's {name} is on in layers {shown[0]} but the guard's history says {shown[1]}. "
                    "Resume from the checkpoint of a run that had this callback, with the same action."
                )

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._acting:
            self._action.before_optimizer_step(self._scene(trainer, pl_module), optimizer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        stepped = self._clock.stepped(trainer)
        step = trainer.global_step + (0 if stepped else 1)  # the step that this micro-batch belongs to
        if self._acting:
            self._action.after_micro_batch(self._scene(trainer, pl_module), stepped)
        looking = self.mode == "logit" and bool(self._dormant) and step % self.every_n_steps == 0
        if looking and (stepped or not self._trigger.per_step):
            self._sense(self._sites)
        if not stepped:
            return
        if logging_is_due(trainer):
            pl_module.log("guard/fired", float(self._acting))
        if looking:
            self._decide(trainer, pl_module, step)
        elif self._dormant and self.fire_step is not None and step >= self.fire_step:
            self._fire(trainer, pl_module, self._all_heads(), step)
        if self._acting and self.disarm_after is not None and step >= self.fired_step + self.disarm_after:  # type: ignore[operator]
            self._release(trainer, pl_module, step)

    @property
    def _limit(self) -> float:
        assert self.threshold is not None
        return self._trigger.sign * self.threshold

    def _sense(self, sites: list[AttentionSite]) -> None:
        """Keeps the worst reading per head over the micro-batches of a step."""
        seen = self._trigger.read(sites, self._limit)
        self._seen = seen if self._seen is None else torch.maximum(self._seen, seen)

    def _decide(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        assert self._seen is not None
        # what is not a number is over every threshold; MAX reductions disagree on what becomes of it
        seen, self._seen = self._seen.nan_to_num(torch.inf, torch.inf, -torch.inf), None
        if trainer.world_size > 1:
            torch.distributed.all_reduce(seen, op=torch.distributed.ReduceOp.MAX)
        looks = [*self._looks, seen.tolist()][-self.window :]
        worst = [max(values) for values in zip(*looks, strict=True)]
        streak = self._streak or [0] * len(worst)
        streak = [count + 1 if value > self._limit else 0 for count, value in zip(streak, worst, strict=True)]
        self._looks, self._streak = looks[1 - self.window :] if self.window > 1 else [], streak
        firing = [i for i in sorted(self._dormant) if streak[i] >= self.patience]
        if firing:
            value = max(worst[i] for i in firing) * self._trigger.sign
            self._fire(trainer, pl_module, self._within_scope(firing), step, value)

    def _within_scope(self, firing: list[int]) -> Heads:
        """The heads to act on when these cells fire: dormant ones only."""
        everything = self._all_heads()
        if self.scope == "all":
            layers = {self._cells[i][0] for i in self._dormant}
            return {layer: everything[layer] for layer in sorted(layers)}
        targets: Heads = {}
        for layer, head in (self._cells[i] for i in firing):
            heads = everything[layer] if self.scope == "layer" else self._sites[layer].whole_groups([head])
            targets[layer] = tuple(sorted({*targets.get(layer, ()), *heads}))
        return targets

    def _fire(
        self, trainer: Trainer, pl_module: LightningModule, targets: Heads, step: int, value: float | None = None
    ) -> None:
        self._action.apply(self._scene(trainer, pl_module, targets))
        for layer, heads in targets.items():
            self._acted[layer] = tuple(sorted({*self._acted.get(layer, ()), *heads}))
        self._count_dormant()
        self.fired_step = step if self.fired_step is None else self.fired_step
        event: dict[str, Any] = {"step": step, "layers": list(targets), self._trigger.quantity: value}
        if self.scope == "head":
            event["heads"] = [list(heads) for heads in targets.values()]
        self.history.append(event)
        if self.mode != "always_on":
            rank_zero_info(
                f"QKGuard fired after step {step}: {self.action} in layers {list(targets)}, "
                f"{self._trigger.quantity} {value}"
            )

    def _release(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        self._action.release(self._scene(trainer, pl_module))
        self.released_step = step
        self.history.append({"step": step, "released": sorted(self._acted)})
        self._count_dormant()
        rank_zero_info(f"QKGuard released after step {step}: {self.action} taken back in layers {sorted(self._acted)}")

    def verdict_fields(self) -> dict[str, Any]:
        """What the run's verdict takes from here."""
        released = {} if self.released_step is None else {"guard_released_step": self.released_step}
        if self.mode == "always_on":
            return {"guard": "always on", "guard_step": None} | released
        reading = self.history[0].get("logit") if self.history else None
        fired = "fired" if self.fired else "dormant"
        return {"guard": fired, "guard_step": self.fired_step, "guard_logit": reading} | released

    @override
    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"fired_step": self.fired_step, "history": [dict(event) for event in self.history]}
        optional = {
            "released_step": self.released_step,
            "action": None if self.action == "qk_norm" else self.action,
            "action_state": self._action.state_dict(),
            "trigger_state": self._trigger.state_dict(),
            "looks": [list(look) for look in self._looks],
            "streak": list(self._streak) if self.patience > 1 else [],
        }
        return state | {key: value for key, value in optional.items() if value}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict.get("action", "qk_norm")
        if saved != self.action:
            raise ValueError(
                f"QKGuard: action={self.action!r} but the checkpoint's guard had {saved!r}. Resume with the run's own "
                "YAML."
            )
        self.fired_step = state_dict["fired_step"]
        self.history = [dict(event) for event in state_dict["history"]]
        self.released_step = state_dict.get("released_step")
        self._looks, self._streak = list(state_dict.get("looks", [])), list(state_dict.get("streak", []))
        if "trigger_state" in state_dict:
            self._trigger.load_state_dict(state_dict["trigger_state"])
        if "action_state" in state_dict:
            self._action.load_state_dict(state_dict["action_state"])


def _trigger(name: str) -> Trigger:
    if name not in TRIGGERS:
        raise ValueError(f"QKGuard: trigger={name!r} is not one of {', '.join(TRIGGERS)}.")
    return TRIGGERS[name]()


def _action(name: str, arguments: dict[str, Any] | None) -> GuardAction:
    if name not in ACTIONS:
        raise ValueError(f"QKGuard: action={name!r} is not one of {', '.join(ACTIONS)}.")
    check_arguments(f"QKGuard: action={name!r}: action_args", ACTIONS[name], arguments or {})
    return ACTIONS[name](**(arguments or {}))
