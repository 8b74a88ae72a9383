"""Runs as processes of the sweep itself, a bounded number at a time."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_qk.cores import usable_cores
from lightning_qk.executors.attempt import ONE_THREAD, POLL_S, Attempt, note_attempt, stop
from lightning_qk.executors.executor import Launcher
from lightning_qk.executors.interrupts import Interrupts
from lightning_qk.experiment import Run, SweepError
from lightning_qk.sweep_display import Display, Outcome


@dataclass(frozen=True)
class _Child:
    run: Run
    attempt: Attempt
    slot: int


class LocalPool:
    """Runs that end with the sweep.

    Args:
        jobs: Runs at a time; by default as many as there are GPUs for, or one a CPU core where no run uses one.
    """

    name = "local"
    outlives_sweep = False

    def __init__(self, jobs: int | None = None) -> None:
        if jobs is not None and jobs < 1:
            raise SweepError(f"jobs: {jobs} must be at least 1")
        self.jobs = jobs or 0
        self.gpus: list[str] = []  # of one run at a time each
        self._launcher: Launcher = lambda run: []

    def plan(self, runs: Sequence[Run]) -> list[str]:
        return []

    def submit(self, runs: Sequence[Run], launcher: Launcher, gpus: int) -> str:
        self._launcher = launcher
        there = _gpus() if gpus else []  # a run on the CPU needs no GPU's turn
        if gpus > len(there):
            raise SweepError(
                f"trainer.devices: {gpus}, but this machine has {len(there)} GPUs; lower it, or use executor: slurm"
            )
        groups = len(there) // gpus if gpus else 0
        self.gpus = [",".join(there[gpus * group : gpus * (group + 1)]) for group in range(groups)]
        self.jobs = self.jobs or len(self.gpus) or usable_cores()
        for run in runs:
            note_attempt(run.path, state="queued", executor=self.name)
        return f"{self.jobs} at a time"

    def wait(self, runs: Sequence[Run], display: Display, interrupts: Interrupts) -> tuple[int, list[str]]:
        waiting, active = deque(runs), list[_Child]()
        failed = 0
        try:
            while (waiting or active) and not interrupts.count:
                while waiting and len(active) < self.jobs:
                    active.append(self._launch(waiting.popleft(), {child.slot for child in active}))
                    display.started(active[-1].run)
                for child in [child for child in active if child.attempt.poll() is not None]:
                    active.remove(child)
                    outcome = Outcome(child.run, *child.attempt.finish())
                    display.finished(outcome)
                    failed += not outcome.ok
                display.update([child.run for child in active], len(waiting))
                time.sleep(POLL_S)
        finally:  # after an error of our own, too: no run may go on unwatched
            asked = interrupts.count
            stop([child.attempt for child in active], hurry=lambda: interrupts.count > asked)
        return failed, [run.name for run in (*(child.run for child in active), *waiting)]

    def _launch(self, run: Run, used_slots: set[int]) -> _Child:
        slot = next(slot for slot in range(self.jobs) if slot not in used_slots)
        gpu = {"CUDA_VISIBLE_DEVICES": self.gpus[slot % len(self.gpus)]} if self.gpus else {}
        return _Child(run, Attempt(run.path, self._launcher(run), gpu or ONE_THREAD), slot)

    def farewell(self) -> str:
        return "the same command goes on from here"


def _gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    if not torch.cuda.is_available():
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
