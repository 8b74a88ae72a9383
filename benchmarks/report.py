"""`report` on many long runs, and its reader against TensorBoard's own on the same files.

    python benchmarks/report.py                        # 1,000 runs of 5,000 steps, about two minutes, 500 MB of disk
    python benchmarks/report.py --runs 60 --arms 12 --keep runs/made_up

The runs are made up, but log what a real one of two layers logs, a record a scalar, every ten steps. Writing is slow,
so that a few of them are written by torch's writer and the rest are copies; every run has a verdict of its own. Times
are seconds of this machine; memory is the peak of the whole process.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from lightning_qk.events import read_scalars

EVERY, LAYERS, MODELS = 10, 2, 4
ARMS = (
    *("fp32", "fault", "clean_qk", "clean_mlp", "clean_v", "qk_norm", "guard", "guard_qk_clip", "guard_tighter_clip"),
    *("probe_random_subspace", "error_time_shuffled", "mlp_rank_one"),
)
READINGS = ("tied_rows", "head_sigma_q")


def curves(steps: int, collapse: int | None, seed: int) -> dict[str, np.ndarray]:
    """A run's scalars at every logged step: a loss that falls, and one that climbs again after `collapse`."""
    noise = np.random.default_rng(seed)
    at = np.arange(EVERY, steps + 1, EVERY)
    since = np.maximum(0, at - collapse) if collapse is not None else np.zeros_like(at)
    rise = 2 * (1 - np.exp(-since / (0.04 * steps)))
    loss = 1.9 + 3.6 * np.exp(-at / (0.06 * steps)) + rise + noise.normal(0, 0.05, len(at))
    sigma = 0.4 + 3.5 * (1 - np.exp(-at / (0.2 * steps))) + 20 * rise + noise.normal(0, 0.02, len(at))
    logit = 3 * sigma ** (1 + rise)
    found = {"loss/train": loss, "sigma/q": sigma, "sigma/k": sigma, "logit/max": logit}
    for layer in range(LAYERS):
        found |= {f"{tag}/layer_{layer:02d}": found[tag] for tag in ("sigma/q", "sigma/k", "logit/max")}
    found |= {"grad/norm": 1 + rise, "grad/clip_coef": 1 / (1 + rise), "tokens": at * 2048.0, "epoch": at * 0.0}
    found |= {"collapse/excess": np.maximum(0, loss - np.minimum.accumulate(loss))}
    return found | {f"warning/{reading}": sigma / 60 + noise.normal(0, 0.01, len(at)) for reading in READINGS}


def write_model(directory: Path, steps: int, collapse: int | None, seed: int) -> dict[str, np.ndarray]:
    """Write a run's events as Lightning does."""
    found = curves(steps, collapse, seed)
    with SummaryWriter(str(directory)) as writer:
        for index in range(steps // EVERY):
            for tag, values in found.items():
                writer.add_scalar(tag, values[index], index * EVERY + EVERY - 1)
    return found


def make(root: Path, runs: int, arms: int, steps: int) -> None:
    """An experiment of made-up runs, in which every other arm collapses in some of its seeds."""
    names = [ARMS[index] if index < len(ARMS) else f"arm_{index:02d}" for index in range(arms)]
    onsets = [None, *(int(steps * fraction) for fraction in np.linspace(0.25, 0.8, MODELS))]
    models = [write_model(root / ".models" / str(index), steps, onset, index) for index, onset in enumerate(onsets)]
    for number in range(runs):
        arm, seed = number % arms, number // arms
        draw = random.Random(number)
        kind = draw.randrange(1, len(onsets)) if arm % 2 and draw.random() < 0.3 + 0.6 * arm / arms else 0
        path = root / names[arm] / f"seed_{seed}"
        shutil.copytree(root / ".models" / str(kind), path)
        last = {tag: float(values[-1]) for tag, values in models[kind].items()}
        status = {"schema": 1, "status": "collapsed" if kind else "completed", "step": steps, "max_steps": steps}
        steps_of = {"collapse_step": onsets[kind], "guard_step": steps // 5 if names[arm].startswith("guard") else None}
        values = {"loss": last["loss/train"] + draw.gauss(0, 0.02), "sigma_q": last["sigma/q"], "error": None}
        logits = {"max_logit": last["logit/max"], "max_logit_peak": last["logit/max"]}
        warning = {"threshold": 0.2, "alarm_step": onsets[kind] and onsets[kind] - 40, "last": 0.1, "lead_steps": None}
        verdict = {**status, **steps_of, **values, **logits, "warnings": dict.fromkeys(READINGS, warning)}
        (path / "verdict.json").write_text(json.dumps(verdict))
    shutil.rmtree(root / ".models")
    (root / "experiment.json").write_text(json.dumps({"arms": names, "reference": names[0]}))


@contextmanager
def stopwatch(times: list[float]) -> Iterator[None]:
    started = time.perf_counter()
    yield
    times.append(time.perf_counter() - started)


def compare_readers(paths: list[Path]) -> None:
    """Both readers over the same runs, in turns."""
    ours: list[float] = []
    theirs: list[float] = []
    for path in paths:
        with stopwatch(ours):
            scalars = read_scalars(path)
        with stopwatch(theirs):
            accumulator = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
        for tag in accumulator.Tags()["scalars"]:
            assert scalars[tag].values.tolist() == [event.value for event in accumulator.Scalars(tag)], (path, tag)
    a, b = statistics.median(ours), statistics.median(theirs)
    print(f"all scalars of a run: {a * 1e3:.1f} ms, EventAccumulator {b * 1e3:.0f} ms: {b / a:.0f} times as long")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--arms", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--compared", type=int, default=20, help="runs that both readers read")
    parser.add_argument("--keep", type=Path, default=None, help="make the experiment here, and leave it")
    options = parser.parse_args()
    with TemporaryDirectory() as temporary:
        root = options.keep or Path(temporary) / "made_up"
        make(root, options.runs, options.arms, options.steps)
        size = sum(path.stat().st_size for path in root.rglob("*tfevents*"))
        print(f"{options.runs} runs, {options.arms} arms, {options.steps} steps: {size / 1e6:.0f} MB of events")
        compare_readers(sorted(root.glob("*/seed_*"))[: options.compared])
        times: list[float] = []
        with stopwatch(times):
            subprocess.run(
                [sys.executable, "-m", "lightning_qk", "report", str(root)], check=True, stdout=subprocess.DEVNULL
            )
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024**2
        print(f"report: {times[0]:.1f} s, peak {peak:.2f} GiB")


if __name__ == "__main__":
    main()
