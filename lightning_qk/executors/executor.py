"""What a sweep asks of whoever trains its runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from lightning_qk.executors.interrupts import Interrupts
from lightning_qk.experiment import Run
from lightning_qk.sweep_display import Display

Launcher = Callable[[Run], list[str]]


class Executor(Protocol):
    """Trains runs. `submit` hands them over, `wait` follows them to their ends."""

    @property
    def name(self) -> str: ...

    @property
    def outlives_sweep(self) -> bool:
        """Whether runs go on when the sweep ends."""

    def plan(self, runs: Sequence[Run]) -> list[str]:
        """What a dry run tells besides the commands."""

    def submit(self, runs: Sequence[Run], launcher: Launcher, gpus: int) -> str:
        """Take runs over, each with so many GPUs at most; says in a few words how they are run."""

    def wait(self, runs: Sequence[Run], display: Display, interrupts: Interrupts) -> tuple[int, list[str]]:
        """Follow runs until they end or the user interrupts; returns how many failed and the names of those left."""

    def farewell(self) -> str:
        """After an interrupt: what becomes of the runs that are left."""
