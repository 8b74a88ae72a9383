"""Follows jobs from outside, by what their runs write and by what the queue says."""

from __future__ import annotations

import time
from collections.abc import Sequence

from lightning_qk.executors.attempt import is_running, judge, read_attempt
from lightning_qk.executors.interrupts import Interrupts
from lightning_qk.executors.job_queue import JobQueue
from lightning_qk.experiment import Run, SweepError
from lightning_qk.sweep_display import Display, Outcome

POLL_S, ASK_S = 1.0, 10.0  # files are read often, the scheduler is asked seldom


class Watch:
    """Only looks: any number of sweeps may watch the same jobs."""

    def __init__(self, runs: Sequence[Run], queue: JobQueue, display: Display) -> None:
        self.left = list(runs)
        self.queue, self.display = queue, display
        self._seen: dict[str, int] = {}
        self._gone: set[str] = set()
        self._next = 0.0
        self._trouble = ""

    def follow(self, interrupts: Interrupts) -> tuple[int, list[str]]:
        """Show the runs until they have ended; returns how many failed and the names of those left by an interrupt."""
        failed = 0
        while self.left and not interrupts.count:
            alive = self._ask()
            for run in list(self.left):
                outcome = self._outcome(run, alive)
                if outcome is not None:
                    self.left.remove(run)
                    self.display.finished(outcome)
                    failed += not outcome.ok
            active = [run for run in self.left if is_running(run.path)]
            for run in active:
                number = read_attempt(run.path)["number"]
                if self._seen.get(run.name) != number:
                    self._seen[run.name] = number
                    self.display.started(run)
            self.display.update(active, len(self.left) - len(active))
            time.sleep(POLL_S)
        return failed, [run.name for run in self.left]

    def _ask(self) -> dict[str, str] | None:
        """The runs that have a job; None between two questions, and where there is no answer."""
        if time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + ASK_S
        try:
            alive = self.queue.alive()
        except SweepError as error:  # the scheduler is down now and then
            if str(error) != self._trouble:
                self.display.print(f"{error}; asking again")
            self._trouble = str(error)
            return None
        self._trouble = ""
        return alive

    def _outcome(self, run: Run, alive: dict[str, str] | None) -> Outcome | None:
        verdict, problem = judge(run.path, 0)
        if problem is None:
            return Outcome(run, verdict, None)
        if alive is None:
            return None
        if run.name in alive:
            self._gone.discard(run.name)
            return None
        if run.name not in self._gone:  # the files of another machine can be late: look again
            self._gone.add(run.name)
            return None
        attempt = read_attempt(run.path)
        stopped = f"its job ended without a verdict (the run was {attempt.get('state')})"
        return Outcome(run, verdict, attempt.get("problem") or stopped)
