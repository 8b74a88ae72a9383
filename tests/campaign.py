"""An experiment of real, tiny trainings: its YAML, and what its runs leave behind."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from runs import CHECKPOINT, FAULT, outcome, write_tokens
from tiny import SIZE


class Pause(Callback):
    """Waits at a step of its first attempt for the file `go` in $PAUSE, so that a test can interrupt it right there.

    Args:
        step: The step. Without $PAUSE nothing happens, and the numbers are the same in any case.
    """

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != self.step or "PAUSE" not in os.environ:
            return
        run = Path(trainer.default_root_dir)
        mark = Path(os.environ["PAUSE"]) / f"{run.parent.name}-{run.name}"
        if mark.exists():  # it has been here
            return
        mark.touch()
        deadline = time.monotonic() + 300
        while not (mark.parent / "go").exists():
            if time.monotonic() > deadline:
                raise TimeoutError("waited in vain")
            time.sleep(0.05)


def write_campaign(directory: Path, tokens: Path, steps: int, pause: int = -1, **options: Any) -> Path:
    """Two arms of two seeds, a checkpoint every three steps; returns the experiment's YAML."""
    directory.mkdir(exist_ok=True)
    base = {
        "model": {"overrides": SIZE, "lr": 0.01, "warmup_steps": 2},
        "data": write_tokens(tokens),
        "trainer": {
            **{"accelerator": "cpu", "devices": 1, "max_epochs": -1, "max_steps": steps, "log_every_n_steps": 1},
            **{"gradient_clip_val": 1.0, "num_sanity_val_steps": 0, "check_val_every_n_epoch": None},
            **{"val_check_interval": 3, "use_distributed_sampler": False, "enable_progress_bar": False},
            "enable_model_summary": False,
            "callbacks": [
                json.loads(CHECKPOINT),
                {"class_path": "campaign.Pause", "init_args": {"step": pause}},
                {"class_path": "SpectralMonitor", "init_args": {"every_n_steps": 2}},
            ],
        },
    }
    files = {
        "base": base,
        "fp32": {},
        "fault": {"trainer": {"plugins": json.loads(FAULT)}},
        "campaign": {
            **{"name": "campaign", "base": "base.yaml", "arms": {"fp32": "fp32.yaml", "fault": "fault.yaml"}},
            **{"seeds": [0, 1], **options},
        },
    }
    for name, content in files.items():
        (directory / f"{name}.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return directory / "campaign.yaml"


def finished(root: Path) -> dict[str, dict[str, Any]]:
    """Verdict and curves of the runs that have a verdict."""
    files = sorted((root / "campaign").glob("*/seed_*/verdict.json"))
    return {f"{file.parent.parent.name}/{file.parent.name}": outcome(file.parent) for file in files}
