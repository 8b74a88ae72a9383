"""A sharded checkpoint: its index is read without running what it may hold, and damage to any shard is found."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from runs import run_args, write_tokens

from lightning_qk.checkpoints import is_whole, last_checkpoint, refuse_code
from lightning_qk.cli import main
from lightning_qk.sharded import INDEX, read_index

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """As Lightning writes one: shards, their index, and the trainer's state in a file of its own."""
    path = tmp_path / "checkpoints" / "last.ckpt"
    weights = {"a": torch.randn(9, 5), "b": torch.ones(3, dtype=torch.bfloat16), "on": torch.tensor(True)}
    dcp.save({"state_dict": weights, "optimizer_0": {"step": 3, "lr": 0.5}}, checkpoint_id=path)
    torch.save({"global_step": 7}, path / "meta.pt")
    return path


def test_a_whole_one_is_taken(tmp_path: Path, checkpoint: Path) -> None:
    refuse_code(checkpoint)
    assert is_whole(checkpoint) and last_checkpoint(tmp_path) == str(checkpoint)
    assert {"state_dict.a", "state_dict.b"} <= set(read_index(checkpoint).state_dict_metadata)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def change(path: Path) -> None:
    """One bit of the weights."""
    data = bytearray(path.read_bytes())
    data[data.index(torch.ones(3, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes())] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        *(("__0_0.distcp", harm) for harm in (cut, change, Path.unlink)),
        *((INDEX, cut), (INDEX, Path.unlink), ("meta.pt", cut)),
    ],
)
def test_a_damaged_one_is_passed_over(tmp_path: Path, checkpoint: Path, name: str, harm: Callable[[Path], Any]) -> None:
    older = checkpoint.with_name("step_1.ckpt")
    shutil.copytree(checkpoint, older)
    harm(checkpoint / name)
    with pytest.warns(UserWarning, match=r"last\.ckpt is damaged or cut short and is passed over"):
        assert last_checkpoint(tmp_path) == str(older)


def test_an_index_that_is_code_is_never_run(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Surprise:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    (checkpoint / INDEX).write_bytes(pickle.dumps(Surprise()))
    assert not is_whole(checkpoint)
    with pytest.raises(ValueError, match=r"last\.ckpt is no checkpoint .*has no place in the index"):
        refuse_code(checkpoint)
    args = run_args(tmp_path / "runs", write_tokens(tmp_path / "tokens"), steps=1)
    assert main(["fit", *args, "--ckpt_path", str(checkpoint)]) == 2
    assert f"{checkpoint} is no checkpoint that can be read" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
