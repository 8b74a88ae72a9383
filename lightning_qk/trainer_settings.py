"""Settings with which Lightning trains nothing, leaves something out unsaid, or divides by zero."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_qk.complaints import in_file

Rule = tuple[Callable[[Any], bool], str]


def _is_duration(value: Any) -> bool:
    try:
        seconds = Timer(value).time_remaining()
    except (MisconfigurationException, TypeError):  # no such format, no such unit
        return False
    return seconds is not None and seconds > 0


def _is_part_or_count(value: float) -> bool:
    return 0 < value <= 1 or (value > 1 and value % 1 == 0)


def _is_interval(value: Any) -> bool:
    return _is_part_or_count(value) if isinstance(value, int | float) else _is_duration(value)


def _is_limit(value: int) -> bool:
    return value >= 1 or value == -1


_DURATION = "DD:HH:MM:SS or a mapping such as {hours: 2}"
_RULES: dict[str, Rule] = {
    "accelerator": (
        lambda name: not isinstance(name, str) or name in ("auto", "gpu", *AcceleratorRegistry),
        "is no accelerator; give auto, cpu or gpu",
    ),
    "devices": (lambda given: given not in (0, "0", [], ""), "must be a number from 1, a list of indices, or auto"),
    "strategy": (
        lambda name: not isinstance(name, str) or name in ("auto", *StrategyRegistry),
        "is no strategy; give auto or ddp, or a class as configs/hardware/fsdp2.yaml does",
    ),
    "accumulate_grad_batches": (lambda n: n >= 1, "must be at least 1, the micro-batches of a step"),
    "gradient_clip_val": (lambda norm: 0 <= norm < math.inf, "must be positive and finite, or 0 for no clipping"),
    "log_every_n_steps": (lambda n: n >= 1, "must be at least 1, or null for every 50 steps"),
    "check_val_every_n_epoch": (lambda n: n >= 1, "must be at least 1, or null to count steps over epochs"),
    "val_check_interval": (
        _is_interval,
        f"must be a number of batches from 1, a part of an epoch above 0.0, or a time above zero ({_DURATION}); for no "
        "validation set trainer.limit_val_batches to 0",
    ),
}
_TRAINING_RULES: dict[str, Rule] = {
    "max_steps": (_is_limit, "must be at least 1, or -1 for no limit"),
    "max_epochs": (_is_limit, "must be at least 1, or -1 for no limit"),
    "max_time": (_is_duration, f"must be a time above zero ({_DURATION}), or null for no limit"),
    "limit_train_batches": (
        _is_part_or_count,
        "must be a number of batches from 1, or a part of an epoch above 0.0; leave it out for all",
    ),
}


def refuse_settings(trainer: Namespace, trains: bool, args: Sequence[str]) -> None:
    """Checks those of ``trainer.*`` that Lightning would take at their word, or refuse without a remedy.

    Args:
        trainer: the parsed arguments of the Trainer.
        trains: whether it is to train; an evaluation may have a training of no steps.
        args: what was parsed, to tell the file of a mistake.

    Raises:
        ValueError: a value that cannot be meant; the message names the key, what it takes and the file.
    """
    for key, (fits, remedy) in (_RULES | (_TRAINING_RULES if trains else {})).items():
        value = trainer.get(key)
        if value is not None and not fits(value):
            raise ValueError(f"trainer.{key}={value!r} {remedy}.{in_file(f'trainer.{key}', args)}")
