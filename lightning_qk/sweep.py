"""`python -m lightning_qk sweep`: run many arms over many seeds, one process a run.

The experiment's YAML is the configuration of the sweep:

    name: demo
    base: ../base.yaml                        # paths are relative to this file
    sizes:                                    # --size paper; the first is the default
      proxy: {base: ../proxy.yaml}
      paper: {base: [../gpt2_small.yaml, ../hardware/gpu.yaml], overrides: {trainer.devices: 8}}
    arms: {fp32: ../arms/fp32.yaml, fault: [../arms/fault.yaml]}
    seeds: [0, 1]
    overrides: {trainer.max_steps: 1500}      # given to every run
    arm_overrides: {fault: {some.key: 1}}     # given to one arm
    grid: {model.lr: [0.004, 0.008]}          # every arm at every point, as arms fp32-lr_0.004, ...
    report: {reference: fp32}                 # the healthy twin

Every configuration is checked before the first run starts. A run that is done is not run again, so the same command
goes on where a sweep was stopped.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, Protocol

from lightning_qk.experiment import Experiment, Run, SweepError, parse_sweep
from lightning_qk.sweep_display import Display, Outcome
from lightning_qk.verdict import read_verdict, write_json_atomic

DONE = ("completed", "collapsed", "nonfinite")
POLL_S, GRACE_S = 0.1, 10.0


class Resolved(Protocol):
    """What `lightning_qk.cli.resolve_run` tells of a run without starting it."""

    @property
    def config_hash(self) -> str: ...

    @property
    def run_dir(self) -> Path: ...

    @property
    def uses_gpu(self) -> bool: ...


@dataclass
class Child:
    """A run in progress."""

    run: Run
    process: subprocess.Popen[bytes]
    slot: int
    log: IO[bytes]

    def signal(self, number: signal.Signals) -> None:
        """Signal the run and all that it started."""
        with suppress(ProcessLookupError):  # the whole group may have ended by itself
            os.killpg(self.process.pid, number)


def fit_command(run: Run) -> list[str]:
    """The command that trains one run."""
    return [sys.executable, "-m", "lightning_qk", "fit", *run.fit_args]


def resolve_fit(fit_args: list[str]) -> Resolved:
    """Resolve a run's configuration with the CLI that will train it."""
    from lightning_qk.cli import resolve_run

    return resolve_run(fit_args)


class Sweep:
    """Runs an experiment with a bounded number of processes.

    Args:
        experiment: What to run.
        root: Directory of all experiments.
        jobs: Runs at a time; by default one a GPU, or one a CPU core where there is none.
        only: Arms to run; all by default.
        resolve: Tells a run's configuration hash from its `fit` arguments without starting it.
        launcher: The command of a run.
        display: Where progress is shown.
    """

    def __init__(
        self,
        experiment: Experiment,
        root: Path,
        jobs: int | None = None,
        only: Sequence[str] | None = None,
        resolve: Callable[[list[str]], Resolved] = resolve_fit,
        launcher: Callable[[Run], list[str]] = fit_command,
        display: Display | None = None,
    ) -> None:
        unknown = [arm for arm in only or () if arm not in experiment.arms]
        if unknown:
            raise SweepError(f"only: {', '.join(unknown)}: not an arm; the arms are {', '.join(experiment.arms)}")
        if jobs is not None and jobs < 1:
            raise SweepError(f"jobs: {jobs} must be at least 1")
        self.experiment, self.directory = experiment, root / experiment.name
        self.runs = [run for run in experiment.runs(root) if only is None or run.arm in only]
        self.gpus: list[str] = []  # known when the configurations are: a run on the CPU needs no GPU's turn
        self.jobs = jobs or _cores()
        self._jobs_given = jobs is not None
        self.resolve, self.launcher, self.display = resolve, launcher, display or Display(sys.stdout)
        self.interrupts = 0

    def hashes(self) -> dict[str, str]:
        """The configuration hash of every run, by run name: any mistake in any arm is found here."""
        found = {}
        for run in self.runs:
            try:
                resolved = self.resolve(list(run.fit_args))
                found[run.name] = resolved.config_hash
                if resolved.uses_gpu and not self.gpus:
                    self.gpus = _gpus()
                    self.jobs = self.jobs if self._jobs_given else len(self.gpus)
            except (ValueError, TypeError, OSError) as error:
                files = ", ".join(str(file) for file in self.experiment.arms[run.arm])
                raise SweepError(f"arm {run.arm} ({files}), seed {run.seed}: {error}") from error
        return found

    def pending(self, hashes: Mapping[str, str]) -> list[Run]:
        """The runs that are not done; refuses to mix two configurations in one directory."""
        begun = self._read_state().get("config_hashes", {})
        todo = []
        for run in self.runs:
            verdict = read_verdict(run.path)
            done = verdict is not None and verdict["status"] in DONE
            resumable = any((run.path / "checkpoints").glob("*.ckpt"))
            before = verdict["config_hash"] if done and verdict is not None else begun.get(run.name)
            if (done or resumable) and before is not None and before != hashes[run.name]:
                raise SweepError(
                    f"{run.path}: holds a {'finished' if done else 'started'} run of another configuration "
                    f"(config_hash {before}, now {hashes[run.name]}); give the experiment another name, "
                    "choose another --root, or delete that directory"
                )
            if not done:
                todo.append(run)
        return todo

    def _read_state(self) -> dict[str, Any]:
        path = self.directory / "experiment.json"
        if not path.exists():
            return {}
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise SweepError(f"{path}: broken ({error}); delete it and run the sweep again") from error

    def _write_state(self, hashes: Mapping[str, str]) -> None:
        """Tell the report the order of the arms, and the next sweep what each run was started with."""
        before = self._read_state()
        state = {
            "name": self.experiment.name,
            "arms": list(self.experiment.arms),
            "seeds": sorted({*before.get("seeds", []), *self.experiment.seeds}),
            "reference": self.experiment.reference,
            "config_hashes": {**before.get("config_hashes", {}), **hashes},
        }
        write_json_atomic(self.directory / "experiment.json", state)

    def dry_run(self) -> int:
        """Print the command of every run and whether it is done; start and write nothing."""
        todo = self.pending(self.hashes())
        for run in self.runs:
            self.display.print(f"# {run.name}: {'to run' if run in todo else 'done'}")
            self.display.print(shlex.join(self.launcher(run)))
        return 0

    def run(self) -> int:
        """Run what is not done.

        Returns:
            0 if every run has a verdict, 1 if one failed, 130 if the sweep was interrupted.
        """
        hashes = self.hashes()
        self.directory.mkdir(parents=True, exist_ok=True)
        with self._lock():
            waiting = deque(self.pending(hashes))
            self._write_state(hashes)
            self.display.begin(total=len(self.runs), done=len(self.runs) - len(waiting), jobs=self.jobs)
            with self._handle_signals(), self.display:
                failed, left = self._work(waiting)
        if left:
            self.display.print(f"interrupted: {len(left)} of {len(self.runs)} runs left ({', '.join(left)})")
            self.display.print("the same command goes on from here")
            return 130
        return 1 if failed else 0

    def _work(self, waiting: deque[Run]) -> tuple[int, list[str]]:
        """Keep `jobs` runs going; returns how many failed and the names of those that an interrupt left undone."""
        active: list[Child] = []
        failed = 0
        try:
            while (waiting or active) and not self.interrupts:
                while waiting and len(active) < self.jobs:
                    active.append(self._launch(waiting.popleft(), {child.slot for child in active}))
                for child in [child for child in active if child.process.poll() is not None]:
                    active.remove(child)
                    outcome = self._finish(child)
                    failed += not outcome.ok
                self.display.update([child.run for child in active], len(waiting))
                time.sleep(POLL_S)
        finally:
            self._stop(active)  # after an error of our own, too: no run may go on unwatched
        return failed, [run.name for run in (*(child.run for child in active), *waiting)]

    def _launch(self, run: Run, used_slots: set[int]) -> Child:
        run.path.mkdir(parents=True, exist_ok=True)
        slot = next(slot for slot in range(self.jobs) if slot not in used_slots)
        command = self.launcher(run)
        log = (run.path / "log.txt").open("ab")
        log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {shlex.join(command)}\n".encode())
        log.flush()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **self._environment(slot)},
            start_new_session=True,  # Ctrl-C reaches the sweep alone, which then stops its runs in order
            preexec_fn=_die_with_parent() if sys.platform == "linux" else None,
        )
        self.display.started(run)
        return Child(run, process, slot, log)

    def _environment(self, slot: int) -> dict[str, str]:
        if self.gpus:
            return {"CUDA_VISIBLE_DEVICES": self.gpus[slot % len(self.gpus)]}
        # One thread a run: sums do not depend on how many runs share the machine, nor do runs fight for cores.
        return {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "LIGHTNING_QK_THREADS": "1"}

    def _finish(self, child: Child) -> Outcome:
        """Judge a run by its exit status and its verdict."""
        child.log.close()
        code, problem = child.process.returncode, None
        try:
            verdict = read_verdict(child.run.path)
        except ValueError as error:
            verdict, problem = None, str(error)
        if code != 0:
            problem = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        elif problem is None and (verdict is None or verdict["status"] not in DONE):
            problem = "left no verdict" if verdict is None else f"verdict: {verdict['status']}"
        outcome = Outcome(child.run, verdict, problem)
        self.display.finished(outcome)
        return outcome

    def _stop(self, active: Sequence[Child]) -> None:
        """End the runs in progress: ask, wait up to ten seconds or for a second interrupt, then kill."""
        for child in active:
            child.signal(signal.SIGTERM)
        asked, deadline = self.interrupts, time.monotonic() + GRACE_S
        while any(child.process.poll() is None for child in active):
            if time.monotonic() > deadline or self.interrupts > asked:
                break
            time.sleep(POLL_S)
        for child in active:
            child.signal(signal.SIGKILL)
            child.process.wait()
            child.log.close()

    @contextmanager
    def _handle_signals(self) -> Iterator[None]:
        """Note interrupts instead of raising them: a run is never half started or half judged."""

        def note(number: int, frame: FrameType | None) -> None:
            self.interrupts += 1

        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # leave nohup its meaning
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """One sweep at a time on an experiment; the kernel frees the lock however the sweep ends."""
        path = self.directory / ".lock"
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise SweepError(f"{path}: another sweep runs this experiment; wait for it or stop it") from error
            yield


def _die_with_parent() -> Callable[[], None]:
    """A hook for the child that has Linux kill it when the sweep dies, even by SIGKILL."""
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()  # looked up here: the forked child should do little

    def hook() -> None:
        prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)

    return hook


def _gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    if not torch.cuda.is_available():
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main(args: list[str] | None = None) -> int:
    """Entry point of `python -m lightning_qk sweep`; returns the exit code."""
    try:
        options, experiment = parse_sweep(sys.argv[1:] if args is None else args, __doc__ or "")
        sweep = Sweep(experiment, Path(options.root), options.jobs, options.only)
        if options.dry_run:
            return sweep.dry_run()
        code = sweep.run()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before the first run, while configurations are checked
        print("interrupted: no run was started", file=sys.stderr)
        return 130
    if code != 130 and options.report_after:
        from lightning_qk import report

        code = max(code, report.main([str(sweep.directory)]))
    print(f"verdicts: {sweep.directory}/<arm>/seed_<n>/verdict.json")
    print(f"curves:   tensorboard --logdir {shlex.quote(str(sweep.directory))}")
    return code
