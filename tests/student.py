"""A student-teacher run small enough to be a unit test."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from tiny import Recording, trainer

from lightning_qk.gaussian_data import GaussianData
from lightning_qk.precision import MXTraining
from lightning_qk.student_teacher import StudentTeacher


def student(seed: int = 0, **arguments: Any) -> StudentTeacher:
    torch.manual_seed(seed)
    return StudentTeacher(**{"depth": 2, "width": 32, "lr": 1e-2, **arguments})


def mx(preset: str = "mxfp4", **settings: Any) -> MXTraining:
    """Large errors at this size; ``mx("fp32")`` is the control."""
    return MXTraining(preset, **{"route": "mlp", "base": "fp32", **settings})


def fit_student(
    root: Path,
    callbacks: Iterable[Callback] = (),
    plugin: Any = None,
    model: StudentTeacher | None = None,
    ckpt_path: Path | None = None,
    **settings: Any,
) -> tuple[StudentTeacher, Recording]:
    """One training run: the trained module and what was recorded on the way."""
    recording = Recording()
    model = student() if model is None else model
    settings = {"gradient_clip_val": None, **settings}
    trainer(root, [*callbacks, recording], plugin, **settings).fit(
        model, GaussianData(batch_size=64, seed=0, val_batches=2), ckpt_path=ckpt_path
    )
    return model, recording
