"""Checkpoints: written whole or not at all, read as plain values only, and the last good one found."""

from __future__ import annotations

import os
import pickle
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_qk.sharded import read_index, shards_are_whole


class WholeCheckpointIO(TorchCheckpointIO):
    """Writes to a temporary name in the same directory, syncs and renames; never unpickles more than plain values.

    Lightning's own writes elsewhere and moves, which on another file system is a copy that a kill can cut short. A
    remote path (``s3://...``) is left to it.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        for stale in path.parent.glob(".*.tmp"):  # of a process that was killed; a run's directory has one writer
            stale.unlink()
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            with temporary.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable | None = lambda storage, loc: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        try:
            return super().load_checkpoint(path, map_location, weights_only=True)
        except UNREADABLE as error:
            raise unreadable(path, error) from error


UNREADABLE = (RuntimeError, pickle.UnpicklingError, EOFError, KeyError, zipfile.BadZipFile)
"""What ``torch.load`` raises for a file that is cut short, damaged, no checkpoint, or more than plain values."""


def unreadable(path: str | Path, error: Exception) -> ValueError:
    """The error that names the file."""
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    return ValueError(
        f"{path} is no checkpoint that can be read: it is cut short or damaged, or holds more than plain values, which "
        f"are never unpickled ({said}). --ckpt_path last takes the newest one of the run that is whole."
    )


def refuse_code(checkpoint: Path | str) -> None:
    """Refuses a sharded checkpoint whose index, which PyTorch unpickles, holds more than an index does.

    A checkpoint that is one file is looked at when it is loaded.

    Raises:
        ValueError: the message has its path.
    """
    if Path(checkpoint).is_dir():
        try:
            read_index(Path(checkpoint))
        except (pickle.UnpicklingError, OSError) as error:
            raise unreadable(checkpoint, error) from error


def global_step(checkpoint: Path | str) -> int:
    """Optimizer steps that a checkpoint has behind it.

    Raises:
        ValueError: it can not be read; the message has its path.
    """
    try:
        return int(_state(checkpoint)["global_step"])
    except (*UNREADABLE, TypeError) as error:
        raise unreadable(checkpoint, error) from error


def callback_state(checkpoint: Path | str, name: str) -> dict[str, Any]:
    """The state of a callback in a checkpoint; empty if it has none.

    Raises:
        ValueError: it can not be read; the message has its path.
    """
    try:
        return dict(_state(checkpoint).get("callbacks", {}).get(name, {}))
    except (*UNREADABLE, TypeError, AttributeError) as error:
        raise unreadable(checkpoint, error) from error


def _state(checkpoint: Path | str) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(state_file(checkpoint), map_location="cpu", mmap=True, weights_only=True)
    return content


def last_checkpoint(run_dir: Path, max_steps: int = -1) -> str | None:
    """The newest ``last*.ckpt`` that is whole, else the newest other one; a damaged one is named in a warning.

    Args:
        run_dir: the run's directory.
        max_steps: where the run that is to go on ends; a checkpoint of that very step is passed over, for Lightning
            would end at once and what follows the last step, such as its validation, would be lost. -1 takes any.
    """
    candidates = whole_checkpoints(run_dir, last_first=True)
    return next((str(path) for path in candidates if max_steps < 0 or global_step(path) < max_steps), None)


def whole_checkpoints(run_dir: Path, last_first: bool = False) -> Iterator[Path]:
    """A run's checkpoints, the newest first; a damaged one is named in a warning instead.

    Args:
        run_dir: the run's directory.
        last_first: ``last*.ckpt`` before all others.
    """
    newest_first = sorted((run_dir / "checkpoints").glob("*.ckpt"), key=lambda path: -path.stat().st_mtime_ns)
    for path in sorted(newest_first, key=lambda path: last_first and not path.name.startswith("last")):
        if is_whole(path):
            yield path
        else:
            rank_zero_warn(f"{path} is damaged or cut short and is passed over; looking for an older checkpoint.")


def is_whole(checkpoint: Path | str) -> bool:
    """Whether what a checkpoint holds is as it was written, by the checksums in it; PyTorch itself checks none.

    Damage to an archive's own records, which have no checksum, is found by opening it. A sharded checkpoint is a
    directory: all of its shards are read.
    """
    if Path(checkpoint).is_dir() and not shards_are_whole(Path(checkpoint)):
        return False
    try:
        with zipfile.ZipFile(state_file(checkpoint)) as archive:
            return archive.testzip() is None and global_step(checkpoint) >= 0
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError):  # what zipfile raises
        return False


def state_file(checkpoint: Path | str) -> Path:
    """Where the trainer's state is; of a sharded checkpoint, a directory, it is the file that is written last."""
    path = Path(checkpoint)
    return path / "meta.pt" if path.is_dir() else path
