"""What may be wrong with the files that a command reads and the error that it gives, as in test_bad_input.py."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_up_runs import write_run
from runs import run_args, run_dir, write_tokens

from lightning_qk.cli import main as cli
from lightning_qk.report import main as report


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


# data files


def _odd(path: Path) -> None:
    path.write_bytes(b"\x01" * 2001)


def _npy(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.arange(2000, dtype=np.uint16))


def _large_tokens(path: Path) -> None:
    np.full(2000, 40, dtype=np.uint16).tofile(path)


def _short(path: Path) -> None:
    np.arange(16, dtype=np.uint16).tofile(path)


def _directory(path: Path) -> None:
    path.mkdir()


def _sidecar(path: Path) -> None:
    np.zeros(2000, dtype=np.uint16).tofile(path)
    path.with_name(path.name + ".json").write_text("{}")


DATA: list[tuple[Callable[[Path], Any], str]] = [
    (lambda path: None, "train='{path}' does not exist"),
    (Path.touch, "train='{path}' is empty. Make it again"),
    (_directory, "train='{path}' is a directory. Name the file in it"),
    (_odd, "train='{path}' is truncated mid-token"),
    (_npy, "train='{path}' is an .npy file"),
    (_large_tokens, "is not below vocab_size=32. Set vocab_size"),
    (_short, "has 16 tokens, fewer than one window: context=16"),
    (_sidecar, "{path}.json is not the sidecar of a token file"),
]


@pytest.mark.parametrize(("make", "said"), DATA, ids=[said[:40] for _, said in DATA])
def test_data(tmp_path: Path, tokens: dict[str, Any], complaint: Any, make: Callable[[Path], Any], said: str) -> None:
    path = tmp_path / "train.bin"
    make(path)
    args = [*run_args(tmp_path / "runs", tokens, steps=1), "--data.init_args.train", str(path)]
    assert said.format(path=path) in complaint(cli, ["fit", *args])


# checkpoints


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tokens: dict[str, Any]) -> Path:
    root = tmp_path_factory.mktemp("finished")
    assert cli(["fit", *run_args(root, tokens, steps=3)]) == 0
    return root


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-500])


def _text(path: Path) -> None:
    path.write_text("not a checkpoint")


def _object(path: Path) -> None:
    content = torch.load(path, weights_only=True)
    torch.save({**content, "surprise": Path("/")}, path)


def _other_model(path: Path) -> None:
    content = torch.load(path, weights_only=True)
    content["hyper_parameters"]["lr"] = 0.5
    torch.save(content, path)


def _other_configuration(path: Path) -> None:
    content = torch.load(path, weights_only=True)
    content["callbacks"]["RunRecorder"]["resume_hash"] = "0123"
    torch.save(content, path)


def _stateless(path: Path) -> None:
    torch.save({"weights": torch.zeros(2)}, path)


CHECKPOINTS: list[tuple[Callable[[Path], Any], str]] = [
    (Path.unlink, "ckpt_path='{path}' does not exist. Name a checkpoint; --ckpt_path last is the newest of the run"),
    (_cut, "{path} is no checkpoint that can be read: it is cut short or damaged"),
    (_text, "{path} is no checkpoint that can be read"),
    (_object, "{path} is no checkpoint that can be read: it is cut short or damaged, or holds more than plain values"),
    (_stateless, "{path} is no checkpoint that can be read"),
    (_other_model, "model.lr=0.01 but the checkpoint was trained with 0.5"),
    (_other_configuration, "trained with another configuration: hash 0123, now "),
]


@pytest.mark.parametrize(("harm", "said"), CHECKPOINTS, ids=[harm.__name__ for harm, _ in CHECKPOINTS])
def test_checkpoints(
    tmp_path: Path, tokens: dict[str, Any], finished: Path, complaint: Any, harm: Callable[[Path], Any], said: str
) -> None:
    root = tmp_path / "runs"
    shutil.copytree(finished, root)
    path = run_dir(root) / "checkpoints" / "last.ckpt"
    harm(path)
    args = [*run_args(root, tokens, steps=6), "--ckpt_path", str(path)]
    assert said.format(path=path) in complaint(cli, ["fit", *args])


def test_evaluation_without_a_checkpoint(tmp_path: Path, tokens: dict[str, Any], complaint: Any) -> None:
    line = complaint(cli, ["validate", *run_args(tmp_path, tokens)])
    assert f"{run_dir(tmp_path)} has no checkpoint; name the run by run.*" in line


def test_directories(tmp_path: Path, tokens: dict[str, Any], finished: Path, complaint: Any) -> None:
    file = tmp_path / "file"
    file.touch()
    assert str(file) in complaint(cli, ["fit", *run_args(file, tokens, steps=1)])
    line = complaint(cli, ["fit", *run_args(finished, tokens, steps=1)])
    assert "holds a run already (completed). Go on with it by --ckpt_path last" in line


# run directories of a report


def test_reports(tmp_path: Path, complaint: Any) -> None:
    assert f"{tmp_path}/none: no such directory" in complaint(report, [f"{tmp_path}/none"])
    assert "holds no runs" in complaint(report, [str(tmp_path)])
    run = write_run(tmp_path / "exp", "fp32", 0)
    verdict = run / "verdict.json"
    assert "--reference none: give one of the arms fp32" in complaint(report, [str(tmp_path), "--reference", "none"])
    for text, said in (
        ('{"schema": 1, "sta', f"{verdict} is not valid JSON"),
        ('{"schema": 9, "status": "completed"}', f"{verdict} is not a verdict of schema"),
        ('{"schema": 1, "status": "fine"}', f"{verdict} is not a verdict of schema"),
    ):
        verdict.write_text(text)
        assert said in complaint(report, [str(tmp_path)])
