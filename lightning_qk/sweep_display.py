"""What a sweep shows while it runs: live lines on a terminal, a few plain ones in a log."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TextIO

from lightning_qk.executors.attempt import read_attempt
from lightning_qk.experiment import Run
from lightning_qk.verdict import as_float, in_words, number

REFRESH_S = 0.5


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its verdict, and what went wrong if anything did."""

    run: Run
    verdict: Mapping[str, Any] | None
    problem: str | None

    @property
    def ok(self) -> bool:
        return self.problem is None


class Display:
    """Shows a sweep on `stream`.

    On a terminal one line an active run is redrawn in place, about twice a second. Elsewhere a run gets a line at its
    start, at every quarter and at its end.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.live = stream, stream.isatty()
        self.total = self.done = self.failed = 0
        self._drawn = 0
        self._next = 0.0
        self._quarter: dict[str, int] = {}

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._erase()

    def print(self, text: str) -> None:
        """A lasting line, above the live ones."""
        self._erase()
        print(text, file=self.stream, flush=True)

    def begin(self, total: int, done: int, how: str) -> None:
        self.total, self.done = total, done
        self.print(f"{total} runs, {done} done already, {how}")

    def started(self, run: Run) -> None:
        # A resumed run still has the progress of its last attempt: quarters it has passed are not news.
        self._quarter[run.name] = _quarter(read_progress(run))
        attempt = read_attempt(run.path)
        number, resumed = attempt.get("number", 1), attempt.get("resumed")
        again = (
            f" again (attempt {number}), from {'its last checkpoint' if resumed else 'step 0: it has no checkpoint'}"
        )
        if number > 1 or not self.live:
            self.print(f"{run.name}: started{again if number > 1 else ''}, {run.path / 'log.txt'}")

    def update(self, active: Sequence[Run], waiting: int) -> None:
        """Show where the active runs are; called as often as one likes."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + REFRESH_S
        states = [(run, read_progress(run)) for run in active]
        if self.live:
            lines = [progress_line(run, state) for run, state in states]
            failed = f", {self.failed} failed" if self.failed else ""
            self._draw([*lines, f"{self.done}/{self.total} done{failed}, {len(active)} running, {waiting} waiting"])
            return
        for run, state in states:
            quarter = _quarter(state)
            if self._quarter[run.name] < quarter < 4:
                self._quarter[run.name] = quarter
                self.print(progress_line(run, state))

    def finished(self, outcome: Outcome) -> None:
        """The verdict of a run, or what went wrong and the end of its log."""
        if outcome.ok:
            self.done += 1
            self.print(verdict_line(outcome.run, outcome.verdict or {}))
            return
        self.failed += 1
        log = outcome.run.path / "log.txt"
        if not log.exists():
            self.print(f"{outcome.run.name}: FAILED, {outcome.problem}; it has no log")
            return
        self.print(f"{outcome.run.name}: FAILED, {outcome.problem}; the end of {log}:")
        for line in log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()[-15:]:
            self.print(f"    {line}")

    def _draw(self, lines: Sequence[str]) -> None:
        width = shutil.get_terminal_size().columns - 1  # a wrapped line would break the count
        self._erase()
        self.stream.write("".join(f"{line[:width]}\n" for line in lines))
        self.stream.flush()
        self._drawn = len(lines)

    def _erase(self) -> None:
        if self._drawn:
            self.stream.write(f"\x1b[{self._drawn}F\x1b[J")  # up to the first live line, and clear below
            self._drawn = 0


def read_progress(run: Run) -> Mapping[str, Any]:
    """What the run last said of itself; `phase` says so where it has said nothing, or nothing that can be read."""
    try:
        state = json.loads((run.path / "progress.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"phase": "starting"}
    except ValueError as error:
        return {"phase": f"progress.json is broken: {error}"}
    return dict(state)


def _quarter(state: Mapping[str, Any]) -> int:
    return 4 * int(state.get("step", 0)) // max(1, int(state.get("max_steps", 1)))


def progress_line(run: Run, state: Mapping[str, Any]) -> str:
    """A run in one line: bar, loss, sigma_q, logit, guard, speed and the time that is left."""
    head = f"{run.arm:<20} seed {run.seed:<3}"
    step, last, speed = state.get("step"), state.get("max_steps"), as_float(state.get("steps_per_s"))
    if state["phase"] != "training" or step is None or not last:
        return f"{head} {state['phase']}"
    filled = 16 * min(step, last) // last
    line = f"{head} [{'#' * filled}{'-' * (16 - filled)}] {step:>6}/{last}"
    for label, key in (("loss", "loss"), ("sigma_q", "sigma_q"), ("logit", "max_logit")):
        line += f"  {label} {number(state.get(key))}"
    if state.get("guard", "off") != "off":
        line += f"  guard {state['guard']}"
    if speed is not None and speed > 0:
        line += f"  {speed:.1f} it/s  ETA {duration((last - step) / speed)}"
    return line


def duration(seconds: float) -> str:
    """E.g. 0:25, 12:07 or 3:00:00."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def verdict_line(run: Run, verdict: Mapping[str, Any]) -> str:
    """A finished run in one line."""
    return f"{run.name}: {in_words(verdict)}"
