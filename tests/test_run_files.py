"""The files of a run's directory are whole at any moment, and what a killed process left of one goes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import run_args, run_dir, write_tokens

from lightning_qk import run_files
from lightning_qk.cli import main
from lightning_qk.run_files import RunLogger


def written_in_place(args: list[str], directory: Path) -> list[str]:
    """Which files a `fit` opens for writing under their own name; in a child, for an audit hook stays for ever."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open" and str(arguments[0]).startswith(str(directory)):
                name, mode, flags = Path(arguments[0]).name, arguments[1] or "", arguments[2]
                if not name.startswith(".") and (set(mode) & set("wax+") or flags & (os.O_WRONLY | os.O_RDWR)):
                    os.write(writing, f"{name}\n".encode())

        sys.addaudithook(hook)
        os._exit(main(args))
    os.close(writing)
    with os.fdopen(reading) as file:
        names = file.read().split()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return names


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_no_file_is_written_under_its_own_name(tmp_path: Path) -> None:
    directory, tokens = run_dir(tmp_path), write_tokens(tmp_path / "tokens")
    directory.mkdir(parents=True)
    remains = [f".{name}.x1y2" for name in ("config.yaml", "progress.json", "verdict.json", "hparams.yaml")]
    for name in (*remains, ".attempt.json.x1y2"):
        (directory / name).touch()
    assert written_in_place(["fit", *run_args(tmp_path, tokens)], directory) == []
    names = {path.name for path in directory.iterdir()}
    assert {"config.yaml", "hparams.yaml", "progress.json", "verdict.json", "checkpoints"} <= names
    # the sweep's own may be in the making
    assert [name for name in names if name.startswith(".")] == [".attempt.json.x1y2"]


def test_hyperparameters_that_were_cut_short_are_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = RunLogger(tmp_path, name="", version="")
    logger.log_hyperparams({"lr": 0.5})

    def cut(path: Path, values: Any) -> None:
        Path(path).write_text("lr: 0")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(run_files, "save_hparams_to_yaml", cut)
        with pytest.raises(OSError, match="No space left"):
            logger.save()
    assert not (tmp_path / "hparams.yaml").exists()
    logger.save()
    assert yaml.safe_load((tmp_path / "hparams.yaml").read_text()) == {"lr": 0.5}
