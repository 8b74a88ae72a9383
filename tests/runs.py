"""Real runs of the command line at a tiny size: their arguments, and what they leave behind."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback
from tiny import SIZE, numbers

from lightning_qk.cli import main
from lightning_qk.events import read_scalars

CHECKPOINT = json.dumps(
    {
        "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
        "init_args": {
            "filename": "step_{step}",
            "auto_insert_metric_name": False,
            "every_n_train_steps": 3,
            "save_top_k": 1,
            "save_last": True,
        },
    }
)
FAULT = json.dumps(
    {
        "class_path": "BF16CarryAttention",
        "init_args": {"sites": "bf16_carry", "carry": 2, "tile": 8, "backend": "reference"},
    }
)


def callback(class_path: str, **init_args: Any) -> str:
    return json.dumps({"class_path": class_path, "init_args": init_args})


def write_tokens(directory: Path) -> dict[str, Any]:
    """Two token files, as ``data`` of a configuration."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, n, seed in (("train", 4000, 0), ("val", 1000, 1)):
        numbers(n, seed).astype(np.uint16).tofile(directory / f"{name}.bin")
    files = {name: str(directory / f"{name}.bin") for name in ("train", "val")}
    return {"class_path": "TokenFile", "init_args": {**files, "vocab_size": 32, "batch_size": 4, "val_batches": 2}}


def run_args(root: Path, data: dict[str, Any], *callbacks: str, steps: int = 6, **fields: Any) -> list[str]:
    """Arguments of ``fit`` for ``<root>/exp/arm/seed_3``; without ``-c``, so every key is here."""
    args = [
        *("--seed_everything", "3", "--run.root", str(root), "--run.experiment", "exp", "--run.arm", "arm"),
        f"--model.overrides={json.dumps({**SIZE, **fields})}",
        *("--model.lr", "0.01", "--model.warmup_steps", "2"),
        f"--data={json.dumps(data)}",
        *("--trainer.accelerator", "cpu", "--trainer.devices", "1", "--trainer.max_epochs", "-1"),
        *(f"--trainer.max_steps={steps}", "--trainer.log_every_n_steps=1", "--trainer.gradient_clip_val=1.0"),
        *("--trainer.num_sanity_val_steps=0", "--trainer.check_val_every_n_epoch=null"),
        *("--trainer.val_check_interval=3", "--trainer.use_distributed_sampler=false"),
        *("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"),
        f"--trainer.plugins={FAULT}",
        f"--trainer.callbacks+={CHECKPOINT}",
        *(f"--trainer.callbacks+={one}" for one in callbacks),
    ]
    return args


def run_dir(root: Path) -> Path:
    return root / "exp" / "arm" / "seed_3"


def start(args: list[str], cwd: Path, **environment: str) -> subprocess.Popen[str]:
    """``python -m lightning_qk ...`` as a process of its own."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent), **environment}
    command = [sys.executable, "-m", "lightning_qk", *args]
    return subprocess.Popen(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output
    return output


def outcome(directory: Path) -> dict[str, Any]:
    """All a run says of itself, less what depends on the clock."""
    verdict = json.loads((directory / "verdict.json").read_text())
    del verdict["seconds"]
    verdict.pop("checksum", None)  # of the seconds too
    curves = {
        tag: (series.steps.tolist(), [repr(value) for value in series.values.tolist()])
        for tag, series in read_scalars(directory).items()
    }
    return {"verdict": verdict, "curves": curves}


class Kill(Callback):
    """Kills its own process without notice, as a scheduler or an out-of-memory killer does.

    Args:
        hook: the hook in which it happens.
        call: which call of the hook.
        number: the signal.
        rank: the rank that it happens to.
    """

    def __init__(self, hook: str, call: int, number: int = int(signal.SIGKILL), rank: int = 0) -> None:
        self.calls, self.number, self.rank = 0, number, rank
        setattr(self, hook, self._hook(getattr(self, hook), call))

    def _hook(self, original: Any, call: int) -> Any:
        def hook(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == call and args[0].global_rank == self.rank:
                os.kill(os.getpid(), self.number)
            return original(*args, **kwargs)

        return hook


def killed(args: list[str], code: int = -signal.SIGKILL) -> None:
    """Runs the command line in a child of this process, which spares the imports, and sees it killed."""

    def run() -> None:
        sys.exit(main(args))

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join(120)
    assert child.exitcode == code
