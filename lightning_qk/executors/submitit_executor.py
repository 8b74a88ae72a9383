"""Runs as jobs of SLURM, or of submitit's stand-in for it on this machine."""

from __future__ import annotations

import difflib
import json
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_qk.executors.attempt import ONE_THREAD, note_attempt
from lightning_qk.executors.executor import Launcher
from lightning_qk.executors.interrupts import Interrupts
from lightning_qk.executors.job import Job
from lightning_qk.executors.job_queue import JobQueue
from lightning_qk.executors.watch import Watch
from lightning_qk.experiment import Run, SweepError
from lightning_qk.sweep_display import Display

MAX_TIMEOUTS = 20
WEEK = 7 * 24 * 60


class SubmititExecutor:
    """Jobs that go on without the sweep: all runs are one array.

    Args:
        name: `slurm`, or `submitit_local` for processes of this machine, all at once.
        parameters: Parameters of submitit's SlurmExecutor, and `max_num_timeout`, how often a job may reach its time
            limit and go on. The local jobs take only what has a meaning for them.
        queue: Where the experiment's jobs are kept.
    """

    outlives_sweep = True

    def __init__(self, name: str, parameters: Mapping[str, Any], queue: JobQueue) -> None:
        try:
            from submitit.slurm.slurm import SlurmExecutor
        except ImportError as error:
            raise SweepError(f"executor: {name} needs submitit: pip install 'lightning-qk[slurm]'") from error
        if name == "submitit_local" and sys.platform != "linux":
            raise SweepError("executor: submitit_local finds its jobs in /proc, which only Linux has; use local")
        self.name, self.queue, self.parameters = name, queue, dict(parameters)
        self.max_timeouts = int(self.parameters.pop("max_num_timeout", MAX_TIMEOUTS))
        valid = sorted(SlurmExecutor._valid_parameters() - {"job_name"} | {"max_num_timeout"})
        for key in self.parameters:
            if key not in valid:
                close = difflib.get_close_matches(key, valid, 1)
                hint = f"did you mean {close[0]}?" if close else "sbatch's other options go into additional_parameters;"
                raise SweepError(f"slurm.{key}: not a parameter of submitit; {hint} it has {', '.join(valid)}")
        if name == "slurm" and "time" not in self.parameters:
            raise SweepError("slurm.time: missing; the time limit of a job in minutes, or 2-12:00:00")
        self.parameters["time"] = _minutes(self.parameters.get("time", WEEK))
        # some clusters put no job back into the queue that does not ask for it
        self.parameters["additional_parameters"] = {"requeue": True, **self.parameters.get("additional_parameters", {})}

    def plan(self, runs: Sequence[Run]) -> list[str]:
        if not runs:
            return []
        if self.name != "slurm":
            return [f"# as local jobs of submitit: {json.dumps(self.parameters)}"]
        from submitit.slurm.slurm import _make_sbatch_string

        folder, count = self.queue.folder(f"{self.queue.directory.name}-ID"), len(runs) if len(runs) > 1 else None
        text = _make_sbatch_string("", folder, f"{self.queue.directory.name}-ID", map_count=count, **self.parameters)
        return [line for line in text.splitlines() if line.startswith("#SBATCH")] + self.parameters.get("setup", [])

    def submit(self, runs: Sequence[Run], launcher: Launcher, gpus: int) -> str:
        alive = self.queue.alive()
        if not runs:
            return f"{len(alive)} queued or running already"
        threads = {} if asks_for_gpu(self.parameters) else ONE_THREAD
        jobs = [Job(run.path, launcher(run), threads) for run in runs]
        for run in runs:
            note_attempt(run.path, state="queued", executor=self.name)
        name = self.queue.add(self.name, [run.name for run in runs], alive)
        try:
            ids = self._submit_slurm(name, jobs) if self.name == "slurm" else self._submit_local(name, jobs)
        except (RuntimeError, OSError) as error:
            for run in runs:
                note_attempt(run.path, state="failed", problem=f"not submitted: {error}")
            raise SweepError(f"executor: {self.name}: {error}") from error
        self.queue.record(name, ids[0].partition("_")[0])
        return f"{len(runs)} submitted as {self.name} job {ids[0].partition('_')[0]}, {len(alive)} queued or running"

    def _submit_slurm(self, name: str, jobs: Sequence[Job]) -> list[str]:
        from submitit import SlurmExecutor

        executor = SlurmExecutor(self.queue.folder(name), max_num_timeout=self.max_timeouts)
        executor.update_parameters(**self.parameters, job_name=name)
        return [job.job_id for job in executor.submit_array(jobs)]

    def _submit_local(self, name: str, jobs: Sequence[Job]) -> list[str]:
        from submitit import LocalExecutor

        settings = {"timeout_min": self.parameters["time"]}
        for key in ("setup", "signal_delay_s", "gpus_per_node"):
            if key in self.parameters:
                settings[key] = self.parameters[key]
        ids = []
        for index, job in enumerate(jobs):
            executor = LocalExecutor(self.queue.folder(name) / str(index), max_num_timeout=self.max_timeouts)
            executor.update_parameters(**settings)
            with _ignored(signal.SIGINT, signal.SIGHUP):  # as the job does then: Ctrl-C is not meant for it
                ids.append(executor.submit(job).job_id)
        return ids

    def wait(self, runs: Sequence[Run], display: Display, interrupts: Interrupts) -> tuple[int, list[str]]:
        return Watch(runs, self.queue, display).follow(interrupts)

    def farewell(self) -> str:
        return f"their jobs go on; to end them: {self.queue.cancel_commands()}; the same command watches them again"


def asks_for_gpu(parameters: Mapping[str, Any]) -> bool:
    """Whether jobs have a GPU, by what they ask for: this machine may have none, and a partition is but a name."""
    asked = {**parameters, **parameters.get("additional_parameters", {})}
    counts = [value for key, value in asked.items() if "gpu" in key]  # gpus_per_node and so on
    lists = [str(value) for key, value in asked.items() if "gres" in key or "tres" in key]
    return any(counts) or any("gpu" in text for text in lists)


@contextmanager
def _ignored(*numbers: signal.Signals) -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _minutes(value: Any) -> int:
    """SLURM's ways to write a time, as the minutes that submitit counts in."""
    text = str(value)
    if isinstance(value, int) and 0 < value < 3600:
        return value
    if match := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return (days * 24 + hours) * 60 + minutes + (seconds > 0)
    raise SweepError(
        f"slurm.time: {value!r} must be minutes, up to 3599, or text such as 0-12:00:00 (12:00:00 alone is "
        "read as 43200, in quotes or not)"
    )
