"""Attempts at a run, each a process of its own, and what befalls them: real signals, full disks, clocks that jump.

Starting Python and importing torch takes ten times as long as the attempt itself, so an attempt is forked from a
process that has imported both and has no thread yet; from there on it is ``python -m lightning_qk fit`` with its
arguments.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from lightning_qk.cli import main, resolve_run

CHECKPOINT, VERDICT, OTHER = b"c", b"v", b"o"
HUNG_S = 180.0  # without any file operation


@dataclasses.dataclass(frozen=True)
class Fault:
    """What befalls an attempt. Its moments are counted in the run's file operations: no machine is too slow for them.

    Attributes:
        kill: the signal that it gets; None lets it be.
        among: the kinds of operation that are counted, of ``CHECKPOINT``, ``VERDICT`` and ``OTHER``.
        at: the signal is sent at this one of them, from 1; 0 is the start of the process.
        delay_s: and so much later.
        file_bytes: no file may grow beyond, as if the disk were full; None is no limit.
        memory_bytes: the process may not grow by more; None is no limit.
        clock_s: seconds by which the wall clock jumps,
        clock_at: when this operation, of any kind, has begun.
    """

    kill: signal.Signals | None = None
    among: bytes = CHECKPOINT + VERDICT + OTHER
    at: int = 0
    delay_s: float = 0.0
    file_bytes: int | None = None
    memory_bytes: int | None = None
    clock_s: float = 0.0
    clock_at: int = 0


@dataclasses.dataclass(frozen=True)
class Ending:
    """How an attempt ended.

    Attributes:
        code: its exit status, or less the signal that ended it.
        sent: whether it was sent its signal.
        hung: it did nothing for long and had to be killed.
        operations: how many file operations it began, by kind, in their order.
        seconds: how long it took.
    """

    code: int
    sent: bool
    hung: bool
    operations: bytes
    seconds: float


def prepare(args: list[str]) -> None:
    """Does once, for all attempts, what the first would otherwise do: imports and the parsers' caches."""
    import tensorboard.summary.writer.event_file_writer  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401

    resolve_run(args)


def attempt(args: list[str], directory: Path, log: Path, fault: Fault = Fault()) -> Ending:
    """Trains the run in ``directory`` in a child of this process, under ``fault``.

    Args:
        args: of ``fit``.
        directory: the run's.
        log: where what it prints is appended.
        fault: what befalls it.

    Raises:
        RuntimeError: this process has threads, which a fork would lose in the middle of whatever they do.
    """
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("attempts can only be forked from a process without threads")
    started = time.monotonic()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _train(args, directory, log, fault, writing)
    os.close(writing)
    seen, sent, hung = b"", False, False
    while not hung:
        if fault.kill is not None and not sent and sum(one in fault.among for one in seen) >= fault.at:
            time.sleep(fault.delay_s)
            os.kill(child, fault.kill)
            sent = True
        if select.select([reading], [], [], HUNG_S)[0]:
            new = os.read(reading, 1)
            if not new:
                break
            seen += new
        else:
            hung = True
            os.kill(child, signal.SIGKILL)
    os.close(reading)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if fault.clock_s:
        _shift_times(directory, time.time() - (time.monotonic() - started), fault.clock_s)
    return Ending(code, sent, hung, seen, time.monotonic() - started)


def _train(args: list[str], directory: Path, log: Path, fault: Fault, pipe: int) -> NoReturn:
    """The child's whole life."""
    code = 70
    try:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        real, clock = time.time, _Clock(fault)
        time.time = lambda: real() + clock.error
        _tell(directory, pipe, clock)
        if fault.file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (fault.file_bytes, resource.RLIM_INFINITY))
        if fault.memory_bytes is not None:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + fault.memory_bytes
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        code = main(["fit", *args])
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class _Clock:
    """How wrong the wall clock is, once enough operations have begun."""

    def __init__(self, fault: Fault) -> None:
        self.left, self._jump = fault.clock_at, fault.clock_s

    @property
    def error(self) -> float:
        return 0.0 if self.left > 0 else self._jump


def _tell(directory: Path, pipe: int, clock: _Clock) -> None:
    """Has the interpreter tell of every file of the run that is about to be opened, renamed or removed."""
    root = str(directory)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename", "os.remove") and str(arguments[0]).startswith(root):
            name = os.path.basename(str(arguments[0]))
            kind = CHECKPOINT if ".ckpt" in name else VERDICT if name.startswith(".verdict") else OTHER
            clock.left -= 1
            os.write(pipe, kind)

    sys.addaudithook(hook)


def _shift_times(directory: Path, since: float, seconds: float) -> None:
    """Gives files written since then the times that a clock off by ``seconds`` would have given them."""
    for path in directory.rglob("*"):
        stat = path.stat()
        if path.is_file() and stat.st_mtime >= since - 0.01:
            os.utime(path, (stat.st_atime, stat.st_mtime + seconds))
