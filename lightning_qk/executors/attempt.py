"""One attempt at a run: the process of its `fit`, its log, and `attempt.json`, which tells others how it goes."""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lightning_qk.verdict import DONE, is_done, read_verdict, write_json_atomic

POLL_S, GRACE_S = 0.1, 10.0
BEAT_S, STALE_S = 5.0, 60.0  # a running attempt touches its file; one that no longer does was killed
# One thread a run: sums do not depend on how many runs share the machine, nor do runs fight for cores.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "LIGHTNING_QK_THREADS": "1"}


class Attempt:
    """A process that trains a run, and all that it starts.

    Args:
        path: The run's directory.
        command: What trains it.
        environment: Variables added to those of this process.
        job: The scheduler's name of it, if there is one.
        rank: Of several processes that train the run together; the first alone writes `attempt.json`.
    """

    def __init__(
        self,
        path: Path,
        command: Sequence[str],
        environment: Mapping[str, str],
        job: str | None = None,
        rank: int = 0,
    ) -> None:
        self.path, self.rank = path, rank
        path.mkdir(parents=True, exist_ok=True)
        number, resumed = read_attempt(path).get("number", 0) + 1, is_resumable(path)
        self._note(
            state="running", number=number, resumed=resumed, job=job, problem=None, started=now(),
            host=socket.gethostname(), watcher=os.getpid(), command=list(command),
        )  # fmt: skip
        self._log = (path / ("log.txt" if rank == 0 else f"log_{rank}.txt")).open("ab")
        start = f"attempt {number}, {'from the last checkpoint' if resumed else 'from step 0'}"
        where = f"job {job} on {socket.gethostname()}: " if job else ""
        self._log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {start}: {where}{shlex.join(command)}\n".encode())
        self._log.flush()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,  # Ctrl-C reaches the sweep alone, which then stops its runs in order
            preexec_fn=_child_setup(),
        )
        self._beat = time.monotonic()

    def _note(self, **changes: Any) -> None:
        if self.rank == 0:
            note_attempt(self.path, **changes)

    def poll(self) -> int | None:
        """The exit status, None while it runs; to be called often, for it tells others that the run is alive."""
        code = self.process.poll()
        if code is None and self.rank == 0 and time.monotonic() - self._beat > BEAT_S:
            self._beat = time.monotonic()
            os.utime(self.path / "attempt.json")
        return code

    def finish(self) -> tuple[Mapping[str, Any] | None, str | None]:
        """Judge the run that has ended: its verdict, and what went wrong if anything did."""
        self._log.close()
        code = self.process.returncode
        verdict, problem = judge(self.path, code) if self.rank == 0 else (None, _exit_problem(code))
        self._note(state="failed" if problem else "ended", problem=problem)
        return verdict, problem

    def leave(self, state: str, problem: str | None = None) -> None:
        """Say what becomes of a run whose process was stopped."""
        self._log.close()
        self._note(state="ended" if is_done(self.path) else state, problem=problem)

    def signal(self, number: signal.Signals) -> None:
        """Signal the run and all that it started."""
        with suppress(ProcessLookupError):  # the whole group may have ended by itself
            os.killpg(self.process.pid, number)


def stop(attempts: Sequence[Attempt], hurry: Callable[[], bool] = lambda: False) -> None:
    """End attempts that go on from their checkpoints later: ask, wait ten seconds or for a second interrupt, kill."""
    for attempt in attempts:
        attempt.signal(signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while any(attempt.poll() is None for attempt in attempts) and time.monotonic() < deadline and not hurry():
        time.sleep(POLL_S)
    for attempt in attempts:
        attempt.signal(signal.SIGKILL)
        attempt.process.wait()
        attempt.leave("stopped")


def judge(path: Path, code: int) -> tuple[Mapping[str, Any] | None, str | None]:
    """The verdict in a run's directory, and what is wrong with a run that ended so."""
    problem = None
    try:
        verdict = read_verdict(path)
    except ValueError as error:
        verdict, problem = None, str(error)
    if code != 0:
        problem = _exit_problem(code)
    elif problem is None and (verdict is None or verdict["status"] not in DONE):
        problem = "left no verdict" if verdict is None else f"verdict: {verdict['status']}"
    return verdict, problem


def _exit_problem(code: int) -> str | None:
    return None if code == 0 else f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def read_attempt(path: Path) -> dict[str, Any]:
    """What the last attempt at a run says of itself; empty where there was none."""
    file = path / "attempt.json"
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: broken ({error}); delete it") from error


def note_attempt(path: Path, **changes: Any) -> None:
    """Change what `attempt.json` says."""
    write_json_atomic(path / "attempt.json", {**read_attempt(path), **changes})


def is_running(path: Path) -> bool:
    """Whether somebody trains the run now, on whatever machine: its `attempt.json` says so and is fresh."""
    if read_attempt(path).get("state") != "running":
        return False
    return time.time() - (path / "attempt.json").stat().st_mtime < STALE_S


def is_resumable(path: Path) -> bool:
    return any((path / "checkpoints").glob("*.ckpt"))


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _child_setup() -> Callable[[], None]:
    """A hook for the child that has Linux kill it when whoever watches it dies, even by SIGKILL."""
    # looked up here: the forked child should do little
    prctl, parent = ctypes.CDLL(None).prctl if sys.platform == "linux" else None, os.getpid()

    def hook() -> None:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # SLURM warns every process of a job; the watching one acts
        if prctl is not None:
            prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            if os.getppid() != parent:  # it died before we asked
                os._exit(1)

    return hook
