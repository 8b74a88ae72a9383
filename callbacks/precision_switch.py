"""Changes the arithmetic of a run while it goes: at a step, at a monitor's alarm, or when attention logits say so."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from callbacks.early_warning import EarlyWarning
from callbacks.guard_triggers import TRIGGERS
from callbacks.step import OptimizerStepClock
from lightning_qk.module import logging_is_due
from lightning_qk.mx_policy import CHANGES
from lightning_qk.precision import FaultPrecision
from lightning_qk.precision.matmul_formats import MatmulFormats
from lightning_qk.routes import attention_sites
from lightning_qk.sites import adopt_attention


class PrecisionSwitch(Callback):
    """Changes the MX policy once, from the next step on, and for good: an intervention of arXiv 2506.20752.

    It needs an ``MXTraining`` plugin. Data, optimizer and random state go on as they are, so a switch by ``none``, the
    control, is the run without one. One of ``step``, ``warning`` and ``trigger`` says when; the decision falls between
    two steps, when all callbacks have seen the last one, and is the same on every rank. The plugin saves what has been
    changed, so a resumed run goes on with it. A change that the run's first policy or the layers cannot have, or that
    makes no difference to it, is refused before the first step; what another switch has undone by then is not.

    Example (YAML), a switch at the first alarm of a monitor::

        - class_path: LastBinMonitor
          init_args: {thresholds: {last_bin_gains: 0.3}}
        - class_path: PrecisionSwitch
          init_args: {changes: [bf16_activations], warning: last_bin_gains}

    Args:
        changes: what to do to the policy, in order: ``fp32``, ``bump``, ``ln_fp32``, ``activation_fp32``,
            ``bf16_activations``, ``bf16_activations_and_gradients``, ``forward_only``, ``bf16_weights`` or ``none``.
        step: optimizer step after which it switches; 0 is before the first.
        warning: label of a reading of a monitor among the callbacks, as in the verdict (``zeta/mlp``,
            ``last_bin_gains``, ``grad_norm_drift``): it switches at that reading's alarm. Threshold, patience and
            interval are the monitor's.
        trigger: a trigger of :class:`callbacks.QKGuard`: it switches when a head of any layer exceeds ``threshold``.
        threshold: of ``trigger``; None is the trigger's own.

    Raises:
        ValueError: naming the argument.
    """

    def __init__(
        self,
        changes: list[str],
        step: int | None = None,
        warning: str | None = None,
        trigger: str | None = None,
        threshold: float | None = None,
    ) -> None:
        unknown = [change for change in changes if change not in CHANGES]
        if unknown or not changes:
            raise ValueError(f"PrecisionSwitch: changes={changes} must be some of {', '.join(CHANGES)}.")
        if sum(choice is not None for choice in (step, warning, trigger)) != 1:
            raise ValueError(f"PrecisionSwitch: give one of step={step}, warning={warning!r} and trigger={trigger!r}.")
        if step is not None and step < 0:
            raise ValueError(f"PrecisionSwitch: step={step} must not be negative.")
        if trigger is not None and trigger not in TRIGGERS:
            raise ValueError(f"PrecisionSwitch: trigger={trigger!r} is not one of {', '.join(TRIGGERS)}.")
        self._trigger = None if trigger is None else TRIGGERS[trigger]()
        if self._trigger is None and threshold is not None:
            raise ValueError(f"PrecisionSwitch: threshold={threshold} goes with trigger; a warning's is its monitor's.")
        self.threshold = self._trigger.threshold if self._trigger is not None and threshold is None else threshold
        if self._trigger is not None and self.threshold is None:
            raise ValueError(f"PrecisionSwitch: trigger={trigger!r} has no threshold of its own; set threshold.")
        self.changes, self.step, self.warning, self.trigger = list(changes), step, warning, trigger
        self.switched_step: int | None = None
        self._clock = OptimizerStepClock()
        self._exceeded = False
        self._between_steps = True  # not within an accumulation

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._trigger is not None:
            adopt_attention(pl_module)  # before weights are restored
        if stage == "fit" and trainer.global_step == 0:
            self.switched_step, self._exceeded = None, False  # as the plugin's policy, those of an earlier run are over
        formats = self._formats(trainer)
        formats.check(pl_module, formats.initial.after(self.changes))  # complains here, not in mid-run

    @staticmethod
    def _formats(trainer: Trainer) -> MatmulFormats:
        plugin: Any = trainer.precision_plugin
        if not isinstance(plugin, FaultPrecision) or plugin.matmul is None:
            raise MisconfigurationException(
                f"PrecisionSwitch needs MXTraining, got {type(plugin).__name__}: set trainer.plugins to MXTraining."
            )
        return plugin.matmul

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock.start(trainer)
        if self._trigger is not None:
            self._trigger.prepare(attention_sites(pl_module))
        if self.warning is not None:
            self._alarm(trainer)

    def _alarm(self, trainer: Trainer) -> int | None:
        """Step of the warning's alarm, if there was one.

        Raises:
            ValueError: no monitor has the reading, or it has no threshold.
        """
        monitors: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        alarms = [monitor.alarms for monitor in monitors if isinstance(monitor, EarlyWarning)]
        known = {label: step for one in alarms for label, step in one.items()}
        if self.warning not in known:
            raise ValueError(
                f"PrecisionSwitch: warning={self.warning!r} is no reading with a threshold; there are "
                f"{', '.join(known) or 'none'}. Add its monitor to trainer.callbacks, and thresholds to the monitor."
            )
        return known[self.warning]

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._between_steps = stepped = self._clock.stepped(trainer)
        if self._trigger is not None and self.switched_step is None and (stepped or not self._trigger.per_step):
            self._sense(trainer, pl_module)
        if stepped and logging_is_due(trainer):
            pl_module.log("precision/switched", float(self.switched_step is not None))

    def _sense(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._trigger is not None and self.threshold is not None
        limit = self._trigger.sign * self.threshold
        severity = self._trigger.read(attention_sites(pl_module), limit)
        # a NaN is not below the threshold either
        exceeded = torch.tensor(not bool((severity <= limit).all()), device=severity.device)
        self._exceeded |= trainer.strategy.reduce_boolean_decision(bool(exceeded), all=False)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.switched_step is None and self._between_steps and self._is_time(trainer):
            self.switched_step = trainer.global_step
            self._formats(trainer).change(self.changes)
            rank_zero_info(f"PrecisionSwitch: {', '.join(self.changes)} after step {self.switched_step}")

    def _is_time(self, trainer: Trainer) -> bool:
        if self.step is not None:
            return trainer.global_step >= self.step
        return self._exceeded if self.warning is None else self._alarm(trainer) is not None

    def verdict_fields(self) -> dict[str, Any]:
        """What the run's verdict takes from here."""
        return {"precision_switch": ", ".join(self.changes), "precision_switch_step": self.switched_step}

    @property
    @override
    def state_key(self) -> str:
        identity = {"step": self.step, "warning": self.warning, "trigger": self.trigger}
        return self._generate_state_key(changes=self.changes, **identity)

    @override
    def state_dict(self) -> dict[str, Any]:
        trigger = {} if self._trigger is None else self._trigger.state_dict()
        return {"switched_step": self.switched_step, "exceeded": self._exceeded, "trigger": trigger}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.switched_step, self._exceeded = state_dict["switched_step"], state_dict["exceeded"]
        if self._trigger is not None:
            self._trigger.load_state_dict(state_dict["trigger"])
