"""A run's checkpoints on disk: the one to go on from, and the one of another run to begin with."""

from __future__ import annotations

import dataclasses
import zipfile
from collections.abc import Iterator
from pathlib import Path

from lightning_qk.verdict import read_verdict


@dataclasses.dataclass(frozen=True)
class Fork:
    """Where a run begins: not at step 0, but as another arm's run of the same seed was. Give ``step`` or ``before``.

    Args:
        arm: that arm, of the same experiment.
        step: optimizer step of the checkpoint.
        before: the newest checkpoint that is at least so many steps older than the other run's onset: its collapse, or
            its divergence by :class:`callbacks.DivergenceStop` if that came first.

    Raises:
        ValueError: there can be no such checkpoint.
    """

    arm: str
    step: int | None = None
    before: int | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.step, self.before) if value is not None]
        if not self.arm or len(given) != 1 or given[0] < 1:
            raise ValueError(
                f"fork: arm={self.arm!r} must be a name, and one of step={self.step} and before={self.before} a number "
                "of at least 1."
            )

    @property
    def label(self) -> str:
        """For names."""
        return f"step_{self.step}" if self.step is not None else f"before_{self.before}"

    def checkpoint(self, run_dir: Path) -> tuple[Path, int]:
        """The checkpoint that the run in ``run_dir`` begins with, and its step.

        Raises:
            FileNotFoundError: the other run has kept none, or had no onset.
        """
        parent = run_dir.parent.parent / self.arm / run_dir.name
        kept = {global_step(path): path for path in _whole(parent)}
        if self.before is None:
            wanted, step = f"of step {self.step}", self.step
        else:
            last = _onset(parent) - self.before
            wanted, step = f"of step {last} or before", max((one for one in kept if one <= last), default=None)
        if step is None or step not in kept:
            there = ", ".join(map(str, sorted(kept))) or "none"
            raise FileNotFoundError(
                f"run.fork: {parent} has no checkpoint {wanted} (steps kept: {there}). Its ModelCheckpoint must save "
                "there (every_n_train_steps) and keep it (save_top_k, -1 for all)."
            )
        return kept[step], step


def _onset(run_dir: Path) -> int:
    verdict = read_verdict(run_dir) or {}
    steps = [verdict[key] for key in ("collapse_step", "divergence_step") if verdict.get(key) is not None]
    if not steps:
        raise FileNotFoundError(
            f"run.fork: {run_dir} neither collapsed nor diverged: there is no `before`; give a step."
        )
    return int(min(steps))


def last_checkpoint(run_dir: Path, max_steps: int = -1) -> str | None:
    """The newest ``last*.ckpt`` that is whole, else the newest other one: a kill can leave a part of a file.

    (Lightning writes to the temporary directory and moves, which is a copy if that is another file system.)

    Args:
        run_dir: the run's directory.
        max_steps: where the run that is to go on ends; a checkpoint of that very step is passed over, for Lightning
            would end at once and what follows the last step, such as its validation, would be lost. -1 takes any.
    """
    last_first = sorted(_whole(run_dir), key=lambda path: not path.name.startswith("last"))
    return next((str(path) for path in last_first if max_steps < 0 or global_step(path) < max_steps), None)


def global_step(checkpoint: Path | str) -> int:
    """The optimizer step of a checkpoint."""
    import torch  # here: a sweep reads its YAML without

    return torch.load(_state_file(checkpoint), map_location="cpu", mmap=True, weights_only=True)["global_step"]


def _whole(run_dir: Path) -> Iterator[Path]:
    """The checkpoints that are not parts of files, the newest first."""
    newest_first = sorted((run_dir / "checkpoints").glob("*.ckpt"), key=lambda path: -path.stat().st_mtime_ns)
    return (path for path in newest_first if zipfile.is_zipfile(_state_file(path)))


def _state_file(checkpoint: Path | str) -> Path:
    """Where the trainer's state is; of a sharded checkpoint, a directory, it is the file that is written last."""
    path = Path(checkpoint)
    return path / "meta.pt" if path.is_dir() else path
