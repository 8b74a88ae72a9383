"""Settings of the Trainer with which nothing would be trained, something left out unsaid, or divided by zero."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from runs import run_args, run_dir, write_tokens

from lightning_qk.cli import main as cli
from lightning_qk.cli import resolve_run


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


INTERVAL = "must be a number of batches from 1, a part of an epoch above 0.0, or a time above zero (DD:HH:MM:SS or a"
TIME = "must be a time above zero (DD:HH:MM:SS or a mapping such as {hours: 2}), or null for no limit"
LIMIT = "must be at least 1, or -1 for no limit"
PART = "must be a number of batches from 1, or a part of an epoch above 0.0; leave it out for all"
CLIP = "must be positive and finite, or 0 for no clipping"
REFUSED: list[tuple[str, str, str]] = [
    ("accelerator", "abacus", "'abacus' is no accelerator; give auto, cpu or gpu"),
    ("devices", "0", "'0' must be a number from 1, a list of indices, or auto"),
    ("devices", "[]", "[] must be a number from 1, a list of indices, or auto"),
    ("strategy", "warp", "'warp' is no strategy; give auto or ddp, or a class as configs/hardware/fsdp2.yaml does"),
    ("accumulate_grad_batches", "0", "0 must be at least 1, the micro-batches of a step"),
    ("accumulate_grad_batches", "-2", "-2 must be at least 1, the micro-batches of a step"),
    ("gradient_clip_val", "-1", f"-1 {CLIP}"),
    ("gradient_clip_val", ".nan", f"nan {CLIP}"),
    ("gradient_clip_val", ".inf", f"inf {CLIP}"),
    ("log_every_n_steps", "0", "0 must be at least 1, or null for every 50 steps"),
    ("check_val_every_n_epoch", "0", "0 must be at least 1, or null to count steps over epochs"),
    ("val_check_interval", "0", f"0 {INTERVAL}"),
    ("val_check_interval", "0.0", f"0.0 {INTERVAL}"),
    ("val_check_interval", "1.5", f"1.5 {INTERVAL}"),
    ("val_check_interval", "00:00:00:00", f"'00:00:00:00' {INTERVAL}"),
    (
        "val_check_interval",
        "{hour: 1}",
        "mapping such as {hours: 2}); for no validation set trainer.limit_val_batches to 0",
    ),
    ("max_steps", "0", f"0 {LIMIT}"),
    ("max_steps", "-2", f"-2 {LIMIT}"),
    ("max_epochs", "0", f"0 {LIMIT}"),
    ("max_time", "00:00:00:00", f"'00:00:00:00' {TIME}"),
    ("max_time", "{seconds: 0}", f"{{'seconds': 0}} {TIME}"),
    ("max_time", "{hour: 1}", f"{{'hour': 1}} {TIME}"),
    ("max_time", "soon", f"'soon' {TIME}"),
    ("limit_train_batches", "0", f"0 {PART}"),
    ("limit_train_batches", "0.0", f"0.0 {PART}"),
    ("limit_train_batches", ".nan", f"nan {PART}"),
]


@pytest.mark.parametrize(("key", "value", "said"), REFUSED, ids=[f"{key}={value}" for key, value, _ in REFUSED])
def test_it_is_refused(tmp_path: Path, tokens: dict[str, Any], complaint: Any, key: str, value: str, said: str) -> None:
    args = [*run_args(tmp_path, tokens, steps=1), f"--trainer.{key}={value}"]
    line = complaint(cli, ["fit", *args])
    assert line.startswith(f"error: trainer.{key}=") and said in line
    with pytest.raises(ValueError, match=re.escape(said)):  # and so a sweep is told
        resolve_run(args)
    assert not run_dir(tmp_path).exists()


TAKEN: dict[str, list[str]] = {
    "gradient_clip_val": ["0", "null", "0.5"],
    "val_check_interval": ["1", "0.25", "1.0", "500.0", "00:00:30:00", "{minutes: 30}"],
    "max_epochs": ["null", "2"],
    "max_time": ["00:01:00:00", "{hours: 1}"],
    "limit_train_batches": ["1", "0.5", "3.0"],
    "devices": ["-1", "auto", "[0]", "2"],
    "log_every_n_steps": ["null"],
    "check_val_every_n_epoch": ["null", "1"],
    "strategy": ["ddp", "{class_path: ModelParallelStrategy}"],
    "accelerator": ["gpu", "auto"],
    "max_steps": ["-1"],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in TAKEN.items() for value in values])
def test_what_lightning_takes_is_not(tmp_path: Path, tokens: dict[str, Any], key: str, value: str) -> None:
    assert resolve_run([*run_args(tmp_path, tokens), f"--trainer.{key}={value}"]).run_dir == run_dir(tmp_path)


def test_an_evaluation_may_have_a_training_of_no_steps(tmp_path: Path, tokens: dict[str, Any]) -> None:
    args = run_args(tmp_path, tokens, steps=3)
    assert cli(["fit", *args]) == 0
    nothing = ("--trainer.max_steps=0", "--trainer.max_epochs=0", "--trainer.limit_train_batches=0")
    assert cli(["validate", *args, *nothing]) == 0


def test_a_finished_run_may_be_resumed(
    tmp_path: Path, tokens: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["fit", *run_args(tmp_path, tokens, steps=3), "--ckpt_path", "last"]
    assert cli(args) == cli(args) == 0
    assert "is finished (completed at step 3): nothing to do" in capsys.readouterr().out
