"""A sweep whose `fit` is played by a small script."""

from __future__ import annotations

import io
import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_qk.executors.local import LocalPool
from lightning_qk.experiment import Experiment, Run
from lightning_qk.sweep import Sweep
from lightning_qk.sweep_display import Display

FAKE_FIT = textwrap.dedent(
    """
    import json, os, signal, subprocess, sys, time
    from pathlib import Path

    run, how = Path(sys.argv[1]), sys.argv[2]
    board = run.parents[1] / "board"  # what the test reads
    board.mkdir(exist_ok=True)
    name = f"{run.parent.name}-{run.name}"

    def write(path, text):
        path.with_suffix(".part").write_text(text)
        path.with_suffix(".part").rename(path)

    def wait_for(condition):
        deadline = time.monotonic() + 300
        while not condition():
            if time.monotonic() > deadline:
                sys.exit("the fake fit waited in vain")
            time.sleep(0.02)

    print("training", name, flush=True)
    with (board / "launched").open("a") as file:
        file.write(name + "\\n")
    if how == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        write(board / f"{name}.pids", f"{os.getpid()} {worker.pid}")
        time.sleep(600)
    if how == "pair":  # go on only once two runs are alive at the same time
        (board / f"{name}.alive").touch()
        alive = len(list(board.glob("*.alive")))
        wait_for(lambda: len((board / "launched").read_text().split()) >= 2)
        with (board / "counts").open("a") as file:
            file.write(f"{alive} ")
        (board / f"{name}.alive").unlink()
    if how == "crash":
        print("RuntimeError: out of memory")
        sys.exit(3)
    if how == "silent":
        sys.exit(0)
    if how == "env":
        keys = ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "LIGHTNING_QK_THREADS", "CUDA_VISIBLE_DEVICES"]
        write(board / f"{name}.env", json.dumps({key: os.environ.get(key) for key in keys}))
    loss = 2.0
    if how in ("train", "pause"):  # goes on from its checkpoint; the loss tells whether every step was made once
        checkpoint = run / "checkpoints" / "last.ckpt"
        checkpoint.parent.mkdir(exist_ok=True)
        step, loss = json.loads(checkpoint.read_text()) if checkpoint.exists() else (0, int(run.name[5:]))
        resumed = step > 0
        while step < 20:
            time.sleep(0.02)
            step, loss = step + 1, (loss * 1103515245 + step) % 2**31
            if step % 5 == 0:
                write(checkpoint, json.dumps([step, loss]))
                write(run / "progress.json", json.dumps({"phase": "training", "step": step, "max_steps": 20}))
            if how == "pause" and step == 12 and not resumed:  # so that whoever tests can interrupt it here
                (board / f"{name}.paused").touch()
                wait_for(lambda: (board / "go").exists())
    status = how if how in ("failed", "collapsed") else "completed"
    write(run / "verdict.json", json.dumps({
        "schema": 1, "status": status, "experiment": "demo", "arm": run.parent.name, "seed": int(run.name[5:]),
        "step": 10, "max_steps": 20, "collapse_step": 7 if status == "collapsed" else None, "guard_step": None,
        "loss": loss, "min_loss": 1.0, "val_loss": None, "sigma_q": 4.0, "sigma_k": 4.0, "max_logit": 30.0,
        "max_logit_peak": 40.0, "seconds": 1.0, "versions": {}, "config_hash": "hash", "error": None}))
    """
)


@dataclass(frozen=True)
class Resolved:
    config_hash: str = "hash"
    run_dir: Path = Path()
    gpus: int = 0
    by_seed: Mapping[int, str] = field(default_factory=dict)

    def is_of(self, config_hash: str) -> bool:
        return config_hash == self.config_hash

    def with_seed(self, seed: int) -> Resolved:
        return replace(self, config_hash=self.by_seed.get(seed, self.config_hash))


@dataclass
class Lab:
    """An experiment of two arms whose `fit` is the script above."""

    root: Path
    how: dict[str, str] = field(default_factory=dict)
    out: io.StringIO = field(default_factory=io.StringIO)

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self.fake = self.root / "fake_fit.py"
        self.fake.write_text(FAKE_FIT)

    def experiment(self, seeds: tuple[int, ...] = (0, 1), **changes: Any) -> Experiment:
        base, arm = self.root / "base.yaml", self.root / "arm.yaml"
        base.touch()
        arm.touch()
        values = {"name": "demo", "base": (base,), "arms": {"fp32": (arm,), "fault": (arm,)}, "seeds": seeds}
        return Experiment(**{**values, **changes})

    def sweep(self, resolve: Callable[[list[str]], Any] = lambda args: Resolved(), **options: Any) -> Sweep:
        experiment = options.pop("experiment", None) or self.experiment()
        executor = options.pop("executor", None) or LocalPool(options.pop("jobs", None))

        def command(run: Run) -> list[str]:
            return [sys.executable, "-I", "-S", str(self.fake), str(run.path), self.how.get(run.name, "ok")]

        return Sweep(
            experiment,
            self.root / "runs",
            executor,
            resolve=resolve,
            launcher=command,
            display=Display(self.out),
            **options,
        )

    def path(self, name: str) -> Path:
        return self.root / "runs" / "demo" / name

    def launched(self) -> list[str]:
        file = self.path("board/launched")
        return file.read_text().split() if file.exists() else []

    def verdicts(self) -> dict[str, Mapping[str, Any]]:
        files = sorted(self.path("").glob("*/seed_*/verdict.json"))
        return {f"{file.parent.parent.name}/{file.parent.name}": json.loads(file.read_text()) for file in files}


def verdict(lab: Lab, name: str) -> Mapping[str, Any]:
    return lab.verdicts()[name]


def wait_until(condition: Callable[[], bool], seconds: float = 200.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process still runs; one that has ended and that nobody has waited for is a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")
