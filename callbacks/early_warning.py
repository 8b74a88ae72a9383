"""What early-warning monitors share: a reading every few steps, a limit, and the step at which it was first crossed."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from callbacks.step import OptimizerStepClock
from lightning_qk.guarded import refuse_unguarded
from lightning_qk.sites import adopt_attention
from lightning_qk.strategies import refuse_strategy


class Limit(NamedTuple):
    """Where a reading is an alarm.

    Attributes:
        value: the threshold; None where no number holds for every model, so that one must be given.
        below: the alarm is for values under it, not over it.
    """

    value: float | None = None
    below: bool = False

    def crossed(self, reading: float) -> bool:
        """Whether a reading is on the wrong side; one that is not a number is."""
        if self.value is None:
            return False
        return not (reading >= self.value if self.below else reading <= self.value)


class EarlyWarning(Callback):
    """Reads some quantities every ``every_n_steps`` optimizer steps and notes when each first stays over its limit.

    Subclasses say what they read in :attr:`limits` and :meth:`read`. Every reading is logged as ``warning/<label>``.
    The verdict gets, for every reading under ``warnings``: its threshold, ``alarm_step`` (the first of ``patience``
    readings in a row beyond it; None if there was no alarm), its last value, and ``lead_steps``, the steps from the
    alarm to the collapse (negative: it came after; None where either is missing). A reading without a threshold is only
    logged. Whether an alarm means anything is for healthy runs to say: an alarm there is a false one.

    Args:
        every_n_steps: optimizer steps between two readings.
        thresholds: limits of this model by reading's name, in place of the monitor's own; null switches an alarm off.
        patience: consecutive readings beyond the limit that make an alarm.
        first_step: readings before this optimizer step are logged but raise no alarm (warm-up).

    Raises:
        ValueError: an argument that cannot be.
    """

    limits: ClassVar[Mapping[str, Limit]] = {}

    def __init__(
        self,
        every_n_steps: int = 10,
        thresholds: dict[str, float | None] | None = None,
        patience: int = 1,
        first_step: int = 0,
    ) -> None:
        name = type(self).__name__
        if every_n_steps < 1 or patience < 1 or first_step < 0:
            raise ValueError(
                f"{name}: every_n_steps={every_n_steps} and patience={patience} must be at least 1, "
                f"first_step={first_step} not negative."
            )
        unknown = sorted(set(thresholds or {}) - set(self.limits))
        if unknown:
            raise ValueError(f"{name}: thresholds has no reading {unknown[0]!r}; it reads {', '.join(self.limits)}.")
        for key, value in (thresholds or {}).items():
            if value is not None and math.isnan(value):
                raise ValueError(f"{name}: thresholds.{key}={value} must be a number; null switches the alarm off.")
        self.every_n_steps, self.patience, self.first_step = every_n_steps, patience, first_step
        self._limits = {
            key: limit._replace(value=(thresholds or {}).get(key, limit.value)) for key, limit in self.limits.items()
        }
        self._clock = OptimizerStepClock()
        self._last: dict[str, float] = {}
        self._streak = dict.fromkeys(self.limits, 0)
        self._begun: dict[str, int] = {}  # where the streak under way began
        self._alarms: dict[str, int] = {}

    @abstractmethod
    def read(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        """The readings after an optimizer step, by name; the same on every rank. One that is not due is left out."""

    def prepare(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before training: turns on what will be read.

        Raises:
            ValueError: the model or its attention cores cannot tell.
        """

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        refuse_strategy(trainer)
        adopt_attention(pl_module)  # before weights are restored; some read other models

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        refuse_unguarded(trainer, checkpoint)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock.start(trainer)
        self.prepare(trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._clock.stepped(trainer) and self.is_due(trainer.global_step):
            readings = self.read(trainer, pl_module)
            self.note(readings, trainer.global_step)
            self.write(trainer, {self.label(name): value for name, value in readings.items()})

    @staticmethod
    def write(trainer: Trainer, values: Mapping[str, float]) -> None:
        """Logs values as ``warning/<name>``, at the optimizer step that has just been taken."""
        if values:
            tagged = {f"warning/{name}": value for name, value in values.items()}
            for logger in trainer.loggers:  # not through `log`, which would repeat a reading until the next
                logger.log_metrics(tagged, step=trainer.global_step - 1)

    def label(self, name: str) -> str:
        """What a reading is called in logs and in the verdict, where two monitors of a class must not share a name."""
        return name

    def is_due(self, step: int) -> bool:
        """Whether there is a reading after this optimizer step, counted from 1."""
        return step % self.every_n_steps == 0

    def note(self, readings: Mapping[str, float], step: int) -> None:
        """Takes in the readings after one optimizer step. Usable without a Trainer."""
        self._last |= readings
        for name, value in readings.items():
            crossed = step >= self.first_step and self._limits[name].crossed(value)
            self._streak[name] = self._streak[name] + 1 if crossed else 0
            if self._streak[name] == 1:
                self._begun[name] = step
            if self._streak[name] == self.patience:
                self._alarms.setdefault(name, self._begun[name])

    @property
    def alarms(self) -> dict[str, int | None]:
        """The step of the first alarm so far, None before it, of every reading that has a threshold, by label."""
        return {
            self.label(name): self._alarms.get(name) for name, limit in self._limits.items() if limit.value is not None
        }

    def verdict_fields(self) -> dict[str, Any]:
        """What the run's verdict takes from here."""
        return {
            "warnings": {
                self.label(name): {
                    "threshold": limit.value,
                    "below": limit.below,
                    "first_step": self.first_step,
                    "alarm_step": self._alarms.get(name),
                    "last": self._last.get(name),
                }
                for name, limit in self._limits.items()
            }
        }

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "last": dict(self._last),
            "streak": dict(self._streak),
            "begun": dict(self._begun),
            "alarms": dict(self._alarms),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._last, self._streak = dict(state_dict["last"]), dict(state_dict["streak"])
        self._begun, self._alarms = dict(state_dict["begun"]), dict(state_dict["alarms"])
