"""Writes what a run does (``progress.json``) and how it ended (``verdict.json``) into its directory, and says how."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_qk.verdict import (
    SCHEMA,
    VERDICT_FILE,
    in_words,
    is_done,
    versions,
    write_json_atomic,
    write_sealed,
)

_FIELDS = ("collapse_step", "guard_step", "loss", "min_loss", "sigma_q", "sigma_k", "max_logit", "max_logit_peak")
_FINITE = ("loss", "val_loss", "sigma_q", "sigma_k", "max_logit", "max_logit_peak", "guard_logit")


class RunRecorder(Callback):
    """Collects ``verdict_fields()`` from the precision plugin and every callback that have them.

    The CLI fills in the arguments; the files go to ``trainer.default_root_dir``. Only rank zero writes.

    Args:
        experiment: name of the experiment.
        arm: name of the arm.
        seed: the run's seed.
        config_hash: hash of the configuration, to tell whether a finished run is the one that is asked for.
        resume_hash: hash of what must agree between a checkpoint and the run that goes on from it.
        refresh_s: seconds between two writes of ``progress.json``.
        fork: of which arm, step and checkpoint the run is a fork, if it begins as one now; goes into the verdict.
    """

    def __init__(
        self,
        experiment: str = "run",
        arm: str = "base",
        seed: int = 0,
        config_hash: str = "",
        resume_hash: str = "",
        refresh_s: float = 1.0,
        fork: dict[str, Any] | None = None,
    ) -> None:
        self.experiment, self.arm, self.seed = experiment, arm, seed
        self.config_hash, self.resume_hash = config_hash, resume_hash
        self.refresh_s, self.fork = refresh_s, fork
        self._seconds = 0.0
        self._started = self._written = time.monotonic()
        self._first_step, self._begun = 0, False
        self._data: dict[str, Any] = {}
        self._val_loss: float | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started, self._first_step = time.monotonic(), trainer.global_step
        self._data = trainer.datamodule.describe() if hasattr(trainer.datamodule, "describe") else {}  # type: ignore[attr-defined]
        for logger in trainer.loggers:
            logger.log_hyperparams({f"data/{key}": value for key, value in self._data.items()})
        self._progress(trainer, "starting")

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._begun and trainer.is_global_zero:
            _drop_failure(Path(trainer.default_root_dir))
        self._begun = True

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.is_global_zero and time.monotonic() - self._written >= self.refresh_s:
            self._progress(trainer, "training")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        val_loss = trainer.callback_metrics.get("loss/val")
        bad = self._val_loss is not None and not math.isfinite(self._val_loss)  # and stays
        if val_loss is not None and not trainer.sanity_checking and not bad:
            self._val_loss = float(val_loss)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._progress(trainer, "finished")
        self._verdict(trainer, None)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt | SystemExit):  # is not failed: it can go on from its checkpoint
            if trainer.is_global_zero:
                directory = trainer.default_root_dir
                print(f"interrupted at step {trainer.global_step}, --ckpt_path last goes on with it: {directory}")
            return
        self._verdict(trainer, f"{type(exception).__name__}: {exception}")

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # a killed run goes on from there and does not log again what came before, nor the step itself, whose metrics
        # Lightning logs only after this; twice is once, for the last value of a step counts
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        if trainer.training and progress.processed > progress.completed:  # at the end of a batch
            trainer._logger_connector.update_train_step_metrics()
        for logger in trainer.loggers:
            flush = getattr(getattr(logger, "experiment", None), "flush", None)
            if flush is not None:
                flush()

    @override
    def state_dict(self) -> dict[str, Any]:
        seconds = self._seconds + time.monotonic() - self._started
        return {"seconds": seconds, "val_loss": self._val_loss, "resume_hash": self.resume_hash, "fork": self.fork}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.fork is not None:
            return  # that state is the other run's
        self._seconds, self._val_loss = state_dict["seconds"], state_dict["val_loss"]
        self.fork = state_dict.get("fork")

    def _fields(self, trainer: Trainer) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        warnings: dict[str, dict[str, Any]] = {}
        for part in (trainer.precision_plugin, *trainer.callbacks):  # type: ignore[attr-defined]
            if hasattr(part, "verdict_fields"):
                fields |= part.verdict_fields()
                warnings |= fields.pop("warnings", {})  # of several monitors
        return fields | {"warnings": _with_lead(warnings, fields.get("collapse_step"))} if warnings else fields

    def _progress(self, trainer: Trainer, phase: str) -> None:
        if not trainer.is_global_zero:
            return
        self._written = time.monotonic()
        fields, elapsed = self._fields(trainer), self._written - self._started
        steps = trainer.global_step - self._first_step
        loss = trainer.callback_metrics.get("loss/train")
        write_json_atomic(
            Path(trainer.default_root_dir) / "progress.json",
            {
                "step": trainer.global_step,
                "max_steps": trainer.max_steps,
                "loss": None if loss is None else float(loss),
                "sigma_q": fields.get("sigma_q"),
                "max_logit": fields.get("max_logit"),
                "guard": fields.get("guard", "off"),
                "steps_per_s": steps / elapsed if elapsed > 0 and steps else None,
                "phase": phase,
            },
        )

    def _verdict(self, trainer: Trainer, error: str | None) -> None:
        directory = Path(trainer.default_root_dir)
        if not trainer.is_global_zero or (not self._begun and is_done(directory)):
            return  # what fails before it goes on with a finished run takes nothing from it
        fields = _without_silence({**self._fields(trainer), "val_loss": self._val_loss}, trainer.global_step)
        verdict = {
            "schema": SCHEMA,
            "status": "failed" if error else fields.pop("status"),
            "experiment": self.experiment,
            "arm": self.arm,
            "seed": self.seed,
            "step": trainer.global_step if self._begun else _step_before(directory),
            "max_steps": trainer.max_steps,
            **{name: fields.pop(name, None) for name in _FIELDS},
            **{name: value for name, value in fields.items() if name != "status"},
            "seconds": self._seconds + time.monotonic() - self._started,
            "data": self._data,
            "versions": versions(),
            "threads": torch.get_num_threads(),
            "config_hash": self.config_hash,
            "error": error,
            **({} if self.fork is None else {"fork": self.fork}),
        }
        write_sealed(directory / VERDICT_FILE, verdict)
        print(f"{in_words(verdict)}: {directory}")


def _drop_failure(directory: Path) -> None:
    """The verdict of a failure that is being made up for; a kill from now on is no failure."""
    if not is_done(directory):
        (directory / VERDICT_FILE).unlink(missing_ok=True)


def _step_before(directory: Path) -> int:
    """Where the run was that could not go on."""
    path = directory / "progress.json"
    return int(json.loads(path.read_text())["step"]) if path.exists() else 0


def _without_silence(fields: dict[str, Any], step: int) -> dict[str, Any]:
    """Turns ``completed`` into ``nonfinite`` where a reading is not finite.

    That of a loss or a gradient in training is CollapseStop's; left over is what comes after the last step (weights,
    validation), and what the loss does not show.
    """
    status = fields.get("status", "completed")
    readings = [value for name in _FINITE if (value := fields.get(name)) is not None]
    if status == "completed" and not all(map(math.isfinite, readings)):
        return {**fields, "status": "nonfinite", "collapse_step": fields.get("nonfinite_step", step)}
    return {**fields, "status": status}


def _with_lead(warnings: dict[str, dict[str, Any]], collapse_step: int | None) -> dict[str, dict[str, Any]]:
    """Adds the steps from each alarm to the collapse, None where either is missing."""

    def lead(alarm_step: int | None) -> int | None:
        return None if alarm_step is None or collapse_step is None else collapse_step - alarm_step

    return {name: {**warning, "lead_steps": lead(warning["alarm_step"])} for name, warning in warnings.items()}
