"""`python -m lightning_qk sweep`: run many arms over many seeds, one process a run.

The experiment's YAML is the configuration of the sweep:

    name: demo
    base: ../base.yaml                        # paths are relative to this file
    sizes:                                    # --size paper; the first is the default
      proxy: {base: ../proxy.yaml}
      paper: {base: [../gpt2_small.yaml, ../hardware/gpu.yaml], overrides: {trainer.devices: 8}}
      # ... and arms, arm_overrides, forks and a grid of its own
    arms: {fp32: ../arms/fp32.yaml, fault: [../arms/fault.yaml]}
    seeds: [0, 1]
    overrides: {trainer.max_steps: 1500}      # given to every run
    arm_overrides: {fault: {some.key: 1}}     # given to one arm
    grid: {model.lr: [0.004, 0.008]}          # every arm at every point, as arms fp32-lr_0.004, ...; an axis may
    # also have named points of several keys: grid: {size: {small: {model.overrides.d_model: 32, ...}, ...}}
    forks: {from: fault, steps: [300], arms: {late_guard: ../guards/logit_60.yaml}}  # see below
    report: {reference: fp32, against: fault} # the healthy twin and a second arm to compare with, or for each
    # {arm or pattern such as "mx_*": the other arm}
    executor: slurm                           # or local, the default: processes that end with the sweep
    slurm: {time: 120, partition: gpu, gpus_per_node: 1, cpus_per_task: 4, array_parallelism: 16}

Every arm's configuration is checked before the first run starts: plugin, callbacks, data module and model are built,
without weights and data; a model or data module of another package is not, its run will tell. A run that is done is not
run again, so the same command goes on where a sweep was stopped. With SLURM it submits what has no job yet and watches
all; Ctrl-C leaves the jobs. A job that is preempted or reaches its time limit goes back into the queue, and on from its
last checkpoint. A job without a GPU has one thread for its numbers, as a local run has, and so the same bits.

A fork, here the arm late_guard-step_300, begins with the checkpoint that the run of ``from`` with the same seed has
kept of that step, under the files of ``from`` and its own. It waits until that run is done. ``before: [100]`` for
``steps`` takes the newest checkpoint at least 100 steps older than that run's collapse or divergence.
"""

from __future__ import annotations

import fcntl
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from jsonargparse import Namespace

from lightning_qk.complaints import complain
from lightning_qk.executors.attempt import is_resumable
from lightning_qk.executors.executor import Executor
from lightning_qk.executors.interrupts import Interrupts
from lightning_qk.executors.job_queue import JobQueue
from lightning_qk.executors.local import LocalPool
from lightning_qk.executors.submitit_executor import SubmititExecutor
from lightning_qk.experiment import Experiment, Run, SweepError, parse_sweep
from lightning_qk.manifest import Manifest
from lightning_qk.sweep_display import Display
from lightning_qk.sweep_status import show_status
from lightning_qk.verdict import DONE, is_done, read_verdict


class Resolved(Protocol):
    """What `lightning_qk.cli.resolve_run` tells of a run without starting it."""

    @property
    def config_hash(self) -> str: ...

    @property
    def run_dir(self) -> Path: ...

    @property
    def gpus(self) -> int: ...

    def is_of(self, config_hash: str) -> bool: ...

    def with_seed(self, seed: int) -> Resolved: ...


def fit_command(run: Run) -> list[str]:
    """The command that trains one run."""
    return [sys.executable, "-m", "lightning_qk", "fit", *run.fit_args]


def resolve_fit(fit_args: list[str]) -> Resolved:
    """Resolve a run's configuration with the CLI that will train it."""
    from lightning_qk.cli import resolve_run

    return resolve_run(fit_args)


class Sweep:
    """Runs what is not done of an experiment.

    Args:
        experiment: What to run.
        root: Directory of all experiments.
        executor: Who trains the runs; by default processes of this one.
        only: Arms to run; all by default.
        resolve: Tells a run's configuration hash from its `fit` arguments without starting it.
        launcher: The command of a run.
        display: Where progress is shown.
    """

    def __init__(
        self,
        experiment: Experiment,
        root: Path,
        executor: Executor | None = None,
        only: Sequence[str] | None = None,
        resolve: Callable[[list[str]], Resolved] = resolve_fit,
        launcher: Callable[[Run], list[str]] = fit_command,
        display: Display | None = None,
    ) -> None:
        self.experiment, self.directory = experiment, root / experiment.name
        self.runs = experiment.runs(root, only)
        self.executor = executor or LocalPool()
        self.manifest, self.queue = Manifest(self.directory), JobQueue(self.directory)
        self.resolve, self.launcher, self.display = resolve, launcher, display or Display(sys.stdout)
        self._resolved: dict[str, Resolved] = {}
        self._obstacles: dict[str, str | None] = {}

    def resolved(self, run: Run) -> Resolved:
        """What a run would be: any mistake in its arm is found here.

        Runs of an arm differ in their seed alone, so that one of them is resolved for all.
        """
        if run.arm not in self._resolved:
            try:
                self._resolved[run.arm] = self.resolve(list(run.fit_args))
            except (ValueError, TypeError, OSError) as error:
                files = ", ".join(str(file) for file in self.experiment.arms[run.arm])
                raise SweepError(f"arm {run.arm} ({files}): {error}") from error
        return self._resolved[run.arm].with_seed(run.seed)

    def hashes(self) -> dict[str, str]:
        """The configuration hash of every run, by run name: any mistake in any arm is found here."""
        return {run.name: self.resolved(run).config_hash for run in self.runs}

    def is_pending(self, run: Run, alive: Collection[str], begun: Mapping[str, str]) -> bool:
        """Whether a run is not done; refuses to mix two configurations in one directory.

        Args:
            run: The run.
            alive: Names of the runs that have a job.
            begun: The hash of the configuration that each run was last started with.
        """
        verdict, now = read_verdict(run.path), self.resolved(run)
        done = verdict is not None and verdict["status"] in DONE
        before = verdict["config_hash"] if done and verdict is not None else begun.get(run.name)
        bound = done or run.name in alive or is_resumable(run.path)
        if bound and before is not None and not now.is_of(before):
            raise SweepError(
                f"{run.path}: holds a {'finished' if done else 'started'} run of another configuration "
                f"(config_hash {before}, now {now.config_hash}); give the experiment another name, "
                "choose another --root, or delete that directory"
            )
        return not done

    def dry_run(self) -> int:
        """Print the command of every run and whether it is done, each as it is found out; start and write nothing."""
        alive, begun = self.queue.alive(), self.manifest.hashes()
        new = []
        for run in self.runs:
            state = "done"
            if self.is_pending(run, alive, begun):
                state = f"job {alive[run.name]}" if run.name in alive else "to run"
            if state == "to run":
                new.append(run)
            self.display.print(f"# {run.name}: {state}")
            self.display.print(shlex.join(self.launcher(run)))
        for line in self.executor.plan(new):
            self.display.print(line)
        return 0

    def run(self, detach: bool = False) -> int:
        """Run what is not done.

        Args:
            detach: Do not wait for the jobs that are submitted.

        Returns:
            0 if every run has a verdict (or a job, with `detach`), 1 if one failed, 130 if the sweep was interrupted.
        """
        if detach and not self.executor.outlives_sweep:
            raise SweepError(f"detach: runs of executor {self.executor.name} end with the sweep; use nohup, or slurm")
        self.display.print(f"checking the configurations of {len({run.arm for run in self.runs})} arms")
        hashes = self.hashes()
        self.directory.mkdir(parents=True, exist_ok=True)
        failed, tried = 0, set[str]()
        with Interrupts() as interrupts:
            while True:  # again for the forks of what is done by then
                with ExitStack() as locked:
                    locked.enter_context(self._lock())
                    todo = self._submit(hashes, tried)
                    if detach:
                        self.display.print("the same command watches them, with --status it tells where they are")
                        return 0
                    if self.executor.outlives_sweep:
                        locked.close()  # watching is free to all
                    with self.display:
                        failures, left = self.executor.wait(todo, self.display, interrupts)
                failed, tried = failed + failures, tried | {run.name for run in todo}
                waiting = [run for run in self.runs if run.name not in tried and not is_done(run.path)]
                if left:
                    left += [run.name for run in waiting]
                    self.display.print(f"interrupted: {len(left)} of {len(self.runs)} runs left ({', '.join(left)})")
                    self.display.print(self.executor.farewell())
                    return 130
                if not any(self._can_begin(run) for run in waiting):
                    break
        never = {run.name: obstacle for run in waiting if (obstacle := self._obstacle(run))}
        for run in waiting:
            why = never.get(run.name) or f"it is a fork of {run.parent}, which is not done; run that too"
            self.display.print(f"{run.name}: not run, {why}")
        return 1 if failed or len(waiting) > len(never) else 0

    def _obstacle(self, run: Run) -> str | None:
        """Why a fork can never begin, though the run that it is a fork of is done."""
        if run.fork is None or run.parent is None or not is_done(self.directory / run.parent):
            return None
        if run.name not in self._obstacles:  # asked for again and again, and all checkpoints are read for it
            self._obstacles[run.name] = run.fork.obstacle(run.path)
        return self._obstacles[run.name]

    def _can_begin(self, run: Run) -> bool:
        """Whether the run that it is a fork of, if it is one, is done and had what it needs."""
        return run.parent is None or (is_done(self.directory / run.parent) and self._obstacle(run) is None)

    def _submit(self, hashes: Mapping[str, str], tried: Collection[str]) -> list[Run]:
        """Hand over the runs that nobody runs yet; returns all that are not done, can begin and were not tried."""
        alive, begun = self.queue.alive(), self.manifest.hashes()
        todo = [run for run in self.runs if self.is_pending(run, alive, begun)]
        todo = [run for run in todo if run.name not in tried and self._can_begin(run)]
        theirs = [run.name for run in todo if run.name in alive]
        if theirs and not self.executor.outlives_sweep:
            raise SweepError(
                f"executor: {self.executor.name}: {len(theirs)} of the runs have jobs ({', '.join(theirs)}); watch "
                f"them with the executor that has them, or end them: {self.queue.cancel_commands()}"
            )
        new = [run for run in todo if run.name not in alive]
        self.manifest.write(self.experiment, self.executor.name, {run.name: self.launcher(run) for run in new}, hashes)
        how = self.executor.submit(new, self.launcher, max(self.resolved(run).gpus for run in self.runs))
        self.display.begin(len(self.runs), sum(is_done(run.path) for run in self.runs), how)
        return todo

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


def make_executor(options: Namespace, queue: JobQueue) -> Executor:
    """The executor that the options of `sweep` ask for."""
    if options.executor == "local":
        return LocalPool(options.jobs)
    at_a_time = {} if options.jobs is None else {"array_parallelism": options.jobs}
    return SubmititExecutor(options.executor, {**options.slurm, **at_a_time}, queue)


def main(args: list[str] | None = None) -> int:
    """Entry point of `python -m lightning_qk sweep`; returns the exit code."""
    try:
        options, experiment = parse_sweep(sys.argv[1:] if args is None else args, __doc__ or "")
        root = Path(options.root)
        if options.status:
            return show_status(experiment, root, options.only)
        executor = make_executor(options, JobQueue(root / experiment.name))
        sweep = Sweep(experiment, root, executor, options.only)
        if options.dry_run:
            return sweep.dry_run()
        code = sweep.run(options.detach)
    except (ValueError, OSError) as error:
        return complain(error, sys.argv[1:] if args is None else args)
    except KeyboardInterrupt:  # before the first run, while configurations are checked
        print("interrupted: no run was started", file=sys.stderr)
        return 130
    if options.detach:
        return code
    if code != 130 and options.report_after:
        from lightning_qk import report

        code = max(code, report.main([str(sweep.directory)]))
    print(f"verdicts: {sweep.directory}/<arm>/seed_<n>/verdict.json")
    print(f"curves:   tensorboard --logdir {shlex.quote(str(sweep.directory))}")
    return code
