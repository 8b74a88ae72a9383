"""Where the time of a training step goes, how fast it is for what the machine could do, and how much memory it took."""

from __future__ import annotations

import resource
import sys
import time
from collections import defaultdict
from typing import Any

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from typing_extensions import override

from callbacks.clean_gradient import CleanGradientCallback
from callbacks.direction_probe import DirectionProbe

PHASES = {  # Lightning's name of an action, after the class that it is of
    "training_step": "forward",
    "backward": "backward",
    "optimizer_step": "optimizer",
    "fault": "fault",
    "train_dataloader_next": "data",
    "validation_step": "validation",
    "val_next": "validation",
    "save_checkpoint": "checkpoint",
}
PAUSES = ("validation", "checkpoint")  # no part of a training step


class StepProfile(Callback):
    """Logs ``time/<phase>`` (seconds an optimizer step), ``speed/tokens_per_s``, ``speed/mfu``, ``memory/peak_gib``.

    A phase's time is its own, without the phases inside it: ``forward`` and ``backward`` (an attention fault is part of
    both), ``fault`` (of the finished gradient), ``splice`` (clean passes and what uses them: RouteSplice, ErrorShaping,
    BiasMonitor), ``probe``, ``sensors`` (all other callbacks), ``optimizer`` (with clipping), ``data``, ``validation``,
    ``checkpoint`` and ``other``, which is the rest; ``time/step`` is all of it.

    Tokens a second leave out validation and checkpoints. MFU is the model's ``flops_per_token`` times tokens a second
    and process, over the peak of the device in the plugin's dtype; it is logged only where both are known. Memory is
    PyTorch's peak on a GPU, and the process's largest resident size on a CPU.

    On a GPU the phases end with a synchronisation, so that a step is somewhat slower than without this callback. A run
    that does not have it pays nothing: it reads the marks that Lightning sets for profilers.

    Args:
        every_n_steps: optimizer steps between two readings, each a mean over them.
        peak_flops: of the device, a second; None looks it up, which Lightning can for most GPUs and no CPU.

    Raises:
        ValueError: ``every_n_steps`` below 1, ``peak_flops`` not positive, or another profiler in the Trainer.
    """

    def __init__(self, every_n_steps: int = 50, peak_flops: float | None = None) -> None:
        if every_n_steps < 1:
            raise ValueError(f"StepProfile: every_n_steps={every_n_steps} must be at least 1.")
        if peak_flops is not None and not peak_flops > 0:
            raise ValueError(f"StepProfile: peak_flops={peak_flops} must be positive, or null to look it up.")
        self.every_n_steps, self.peak_flops = every_n_steps, peak_flops
        self._clock: _PhaseClock | None = None
        self._tokens = 0
        self._first_step = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        profiler = trainer.profiler  # type: ignore[attr-defined]
        if not isinstance(profiler, PassThroughProfiler | _PhaseClock):
            raise ValueError(
                f"StepProfile: trainer.profiler is a {type(profiler).__name__}, and there is room for one; "
                "leave out one of the two."
            )
        if self.peak_flops is None:
            self.peak_flops = get_available_flops(trainer.strategy.root_device, _dtype(trainer))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        phases = {callback.state_key: _phase(callback) for callback in trainer.callbacks}  # type: ignore[attr-defined]
        self._clock = _PhaseClock(phases, trainer.strategy.root_device)
        trainer.profiler = self._clock  # type: ignore[attr-defined]
        self._tokens, self._first_step = 0, trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._clock is not None
        self._tokens += _count(batch)
        steps = trainer.global_step - self._first_step
        if steps < self.every_n_steps:
            return
        seconds = self._clock.take()
        values = {f"time/{phase}": spent / steps for phase, spent in seconds.items()}
        values["time/step"] = sum(values.values())
        training = sum(spent for phase, spent in seconds.items() if phase not in PAUSES)
        rate = self._tokens / training  # of this process
        values["speed/tokens_per_s"] = rate * trainer.world_size
        flops = getattr(pl_module, "flops_per_token", None)
        if flops is not None and self.peak_flops is not None:
            values["speed/mfu"] = rate * flops / self.peak_flops
        values["memory/peak_gib"] = _peak_bytes(trainer.strategy.root_device) / 2**30
        for logger in trainer.loggers:  # writes on rank zero only
            logger.log_metrics(values, step=trainer.global_step - 1)
        self._tokens, self._first_step = 0, trainer.global_step

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._clock is not None:
            trainer.profiler, self._clock = PassThroughProfiler(), None  # type: ignore[attr-defined]

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)


class _PhaseClock(Profiler):
    """Charges the time between two marks to the innermost phase that is open."""

    def __init__(self, phases: dict[str, str], device: torch.device) -> None:
        super().__init__()
        self._phases, self._device = phases, device
        self._open = ["other"]
        self._seconds: dict[str, float] = defaultdict(float)
        self._since = time.perf_counter()

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        self._charge()
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds

    def _charge(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        self._seconds[self._open[-1]] += now - self._since
        self._since = now

    def _phase(self, action: str) -> str:
        """Of an action such as ``[Strategy]DDPStrategy.backward``; one that has none is part of the phase around it."""
        owner, _, name = action.rpartition(".")
        if owner.startswith("[Callback]"):
            return self._phases.get(owner.removeprefix("[Callback]"), "sensors")
        return PHASES.get(name or action, self._open[-1])

    @override
    def start(self, action_name: str) -> None:
        self._charge()
        self._open.append(self._phase(action_name))

    @override
    def stop(self, action_name: str) -> None:
        if len(self._open) > 1:  # the first stop may be of an action that began before this clock
            self._charge()
            self._open.pop()

    @override
    def summary(self) -> str:
        return ""


def _phase(callback: Callback) -> str:
    if isinstance(callback, CleanGradientCallback):
        return "splice"
    if isinstance(callback, DirectionProbe):
        return "probe"
    return "checkpoint" if isinstance(callback, Checkpoint) else "sensors"


def _count(batch: Any) -> int:
    """Elements of the first tensor of a batch: token ids, as language models are given them."""
    if isinstance(batch, dict):
        batch = list(batch.values())
    return batch.numel() if isinstance(batch, torch.Tensor) else _count(batch[0])


def _dtype(trainer: Trainer) -> torch.dtype:
    return torch.bfloat16 if getattr(trainer.precision_plugin, "base", None) == "bf16" else torch.float32


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024  # bytes there, KiB elsewhere
