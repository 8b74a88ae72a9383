"""What a job of submitit does: train one run, and put itself back into the queue when it has to make way."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_qk.executors.attempt import POLL_S, Attempt, is_done, stop

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission


class Job:
    """Trains one run; submitit pickles it and calls it on the machine that SLURM chose.

    SLURM announces the end of the time limit by SIGUSR2 and a preemption by SIGTERM. Either stops the training, which
    goes on from its last checkpoint when the job starts again.

    Args:
        path: The run's directory.
        command: What trains it.
        environment: Variables added to those of the job.
    """

    def __init__(self, path: Path, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.path, self.command, self.environment = path.absolute(), tuple(command), dict(environment)
        self.directory = Path.cwd()  # the paths of the command are relative to it

    def __call__(self) -> None:
        """Train until the run is done.

        Raises:
            RuntimeError: The run failed, or was stopped for good.
        """
        from submitit import JobEnvironment

        os.chdir(self.directory)
        preempt = getattr(signal, "SIG" + os.environ.get("SUBMITIT_PREEMPT_SIGNAL", "USR2"))
        requeue: Any = signal.getsignal(preempt)  # submitit's handler
        received: list[int] = []
        for number in (preempt, signal.SIGTERM):
            signal.signal(number, lambda number, frame: received.append(number))
        job = JobEnvironment()
        attempt = Attempt(
            self.path, self.command, {**self.environment, **_as_one_task(job.num_tasks)}, job.job_id, job.global_rank
        )
        try:
            while (code := attempt.poll()) is None and not received:
                time.sleep(POLL_S)
        finally:  # on an error of our own, too: no run may go on unwatched
            if attempt.process.poll() is None:
                stop([attempt], hurry=lambda: True)  # there may be little time, and a killed run loses nothing by it
        if not received and code != -signal.SIGTERM:
            _, problem = attempt.finish()
            if problem is not None:
                raise RuntimeError(problem)
            return
        # The training was sent the same signal, perhaps before we were, and so were its data workers: what it says of
        # its end, other than that it is done, means nothing.
        attempt.leave("stopped")
        if is_done(self.path):
            return
        if preempt in received or (job.cluster == "slurm" and _is_wanted(job.job_id)):
            attempt.leave("requeued")
            try:
                requeue(preempt, None)  # ends this process if it speaks for the job
            except Exception as error:  # it reached its time limit too often, or SLURM refuses
                attempt.leave("failed", str(error))
                raise
            return
        raise RuntimeError("stopped before the run was done")

    def checkpoint(self) -> DelayedSubmission:
        """What submitit puts back into the queue: the same again, for the training's checkpoints are its own."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def _as_one_task(tasks: int) -> dict[str, str]:
    """Has Lightning start a run's processes itself, as it does without SLURM, unless SLURM has started several."""
    return {"SLURM_JOB_NAME": "interactive"} if tasks == 1 else {}


def _is_wanted(job_id: str) -> bool:
    """Whether SLURM warns of a preemption, not of the end: a job that was cancelled or requeued runs no more."""
    command = ["squeue", "--noheader", "--jobs", job_id, "--format", "%T"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() == "RUNNING"
