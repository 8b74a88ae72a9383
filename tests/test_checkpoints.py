"""Checkpoints survive what happens to files: a full disk, a kill, a part that is missing, a byte that is another."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import module, trainer

from lightning_qk.checkpoints import WholeCheckpointIO, global_step, is_whole, last_checkpoint


def content(step: int) -> dict[str, Any]:
    return {"global_step": step, "state_dict": {"weight": torch.full((100,), float(step))}}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's directory with checkpoints of steps 1, 2 and, the last, 3."""
    for step, name in enumerate(("step_1", "step_2", "last"), start=1):
        path = tmp_path / "checkpoints" / f"{name}.ckpt"
        WholeCheckpointIO().save_checkpoint(content(step), path)
        os.utime(path, ns=(step, step))
    return tmp_path


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change(path: Path) -> None:
    """One byte of the weights: the file still opens, and PyTorch would load it."""
    data = bytearray(path.read_bytes())
    data[data.index(torch.full((100,), float(global_step(path))).numpy().tobytes()) + 200] ^= 1
    path.write_bytes(data)
    assert torch.load(path, weights_only=True)["global_step"]


def empty(path: Path) -> None:
    path.write_bytes(b"")


def test_the_last_one_is_taken(run: Path) -> None:
    assert last_checkpoint(run) == str(run / "checkpoints" / "last.ckpt")
    assert last_checkpoint(run, max_steps=3) == str(run / "checkpoints" / "step_2.ckpt")
    assert last_checkpoint(run, max_steps=1) is None
    assert last_checkpoint(run / "nowhere") is None


@pytest.mark.parametrize("harm", [cut, change, empty])
def test_the_last_good_one_is_found_and_the_bad_ones_named(run: Path, harm: Any) -> None:
    bad = [run / "checkpoints" / "last.ckpt", run / "checkpoints" / "step_2.ckpt"]
    for path in bad:
        harm(path)
        assert not is_whole(path)
    with pytest.warns(UserWarning, match="is damaged or cut short and is passed over") as warnings:
        assert last_checkpoint(run) == str(run / "checkpoints" / "step_1.ckpt")
    said = [str(warning.message) for warning in warnings]
    assert [any(str(path) in one for one in said) for path in bad] == [True, True]


def test_a_flipped_bit_is_found_or_does_no_harm(tmp_path: Path) -> None:
    """Every bit of the archive's own records, where zipfile reports damage in many ways, and some of the rest."""
    path = tmp_path / "last.ckpt"
    WholeCheckpointIO().save_checkpoint(content(3), path)
    whole, draw = path.read_bytes(), random.Random(0)
    with zipfile.ZipFile(path) as archive:
        heads = [offset for one in archive.infolist() for offset in range(one.header_offset, one.header_offset + 30)]
        records = [*heads, *range(archive.start_dir, len(whole))]
    flips = [8 * offset + bit for offset in draw.sample(records, 60) for bit in range(8)]
    found = 0
    for flip in [*flips, *(draw.randrange(8 * len(whole)) for _ in range(100))]:
        data = bytearray(whole)
        data[flip // 8] ^= 1 << flip % 8
        path.write_bytes(data)
        if is_whole(path):
            loaded = WholeCheckpointIO().load_checkpoint(path)
            assert loaded["global_step"] == 3 and torch.equal(
                loaded["state_dict"]["weight"], content(3)["state_dict"]["weight"]
            )
        else:
            found += 1
    assert found > 200


def test_a_full_disk_leaves_the_old_one(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run / "checkpoints" / "last.ckpt"
    real = torch.save

    def full(value: Any, file: Any) -> None:
        real(value, file)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        WholeCheckpointIO().save_checkpoint(content(9), path)
    assert global_step(path) == 3
    assert sorted(p.name for p in path.parent.iterdir()) == ["last.ckpt", "step_1.ckpt", "step_2.ckpt"]


def test_what_a_killed_process_left_goes_with_the_next_one(run: Path) -> None:
    directory = run / "checkpoints"
    (directory / ".step_9.ckpt.tmp").write_bytes(b"half of a file")
    assert last_checkpoint(run) == str(directory / "last.ckpt")
    WholeCheckpointIO().save_checkpoint(content(10), directory / "step_10.ckpt")
    assert not list(directory.glob(".*.tmp")) and global_step(directory / "step_10.ckpt") == 10


def test_more_than_plain_values_is_never_unpickled(tmp_path: Path) -> None:
    class Surprise:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"global_step": 1, "surprise": Surprise()}, tmp_path / "bad.ckpt")
    for load in (WholeCheckpointIO().load_checkpoint, global_step):
        with pytest.raises(ValueError, match=r"bad\.ckpt is no checkpoint that can be read.*--ckpt_path last"):
            load(tmp_path / "bad.ckpt")
    with pytest.raises(ValueError, match=r"bad\.ckpt"):  # whoever asks for it
        WholeCheckpointIO().load_checkpoint(tmp_path / "bad.ckpt", weights_only=False)
    assert not (tmp_path / "ran").exists()


def test_it_is_lightnings_in_all_else(tmp_path: Path) -> None:
    fitted = trainer(tmp_path, max_steps=1)
    fitted.strategy.checkpoint_io = WholeCheckpointIO()
    fitted.strategy.connect(module())
    fitted.save_checkpoint(tmp_path / "deep" / "new.ckpt")
    loaded = fitted.strategy.load_checkpoint(tmp_path / "deep" / "new.ckpt", weights_only=True)
    assert loaded["global_step"] == 0 and loaded["state_dict"]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        fitted.strategy.load_checkpoint(tmp_path / "nowhere.ckpt")


def save_for_ever(path: Path) -> None:
    step = global_step(path)
    while True:
        step += 1
        WholeCheckpointIO().save_checkpoint({"global_step": step, "weight": torch.zeros(1 << 18)}, path)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_kill_at_any_moment_leaves_a_whole_one(tmp_path: Path) -> None:
    path, draw = tmp_path / "last.ckpt", random.Random(0)
    WholeCheckpointIO().save_checkpoint(content(0), path)
    for _ in range(30):
        child = multiprocessing.get_context("fork").Process(target=save_for_ever, args=(path,))
        before = global_step(path)
        child.start()
        while global_step(path) == before:  # it has begun
            time.sleep(0.001)
        time.sleep(0.02 * draw.random())
        child.kill()
        child.join()
        assert is_whole(path) and global_step(path) > before
    assert {p.name for p in tmp_path.iterdir()} <= {"last.ckpt", ".last.ckpt.tmp"}
