"""A run that begins with a checkpoint of another arm's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
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

    def obstacle(self, run_dir: Path) -> str | None:
        """Why the run in ``run_dir`` can never begin though the other one is done; None if nothing is in its way."""
        if self.before is None:
            return None
        parent = self._parent(run_dir)
        if (onset := _onset(parent)) is None:
            return f"{parent} neither collapsed nor diverged, so that there is no `before`"
        first = min(_kept(parent), default=None)
        if first is None or first <= onset - self.before:
            return None
        return f"{parent} had its onset at step {onset}, its first checkpoint {onset - first} before, not {self.before}"

    def _parent(self, run_dir: Path) -> Path:
        return run_dir.parent.parent / self.arm / run_dir.name

    def checkpoint(self, run_dir: Path) -> tuple[Path, int]:
        """The checkpoint that the run in ``run_dir`` begins with, and its step.

        Raises:
            FileNotFoundError: the other run has kept none, or had no onset, or too early a one.
        """
        parent = self._parent(run_dir)
        if (obstacle := self.obstacle(run_dir)) is not None:
            raise FileNotFoundError(f"run.fork: {obstacle}; give a step.")
        kept = _kept(parent)
        if self.before is None:
            wanted, step = f"of step {self.step}", self.step
        else:
            last = (_onset(parent) or 0) - self.before
            wanted, step = f"of step {last} or before", max((one for one in kept if one <= last), default=None)
        if step is None or step not in kept:
            there = ", ".join(map(str, sorted(kept))) or "none"
            raise FileNotFoundError(
                f"run.fork: {parent} has no checkpoint {wanted} (steps kept: {there}). Its ModelCheckpoint must save "
                "there (every_n_train_steps) and keep it (save_top_k, -1 for all)."
            )
        return kept[step], step


def _kept(run_dir: Path) -> Mapping[int, Path]:
    """Whole checkpoints of a run, by step; all of them are read."""
    # here: a sweep reads its YAML without torch
    from lightning_qk.checkpoints import global_step, whole_checkpoints

    return {global_step(path): path for path in whole_checkpoints(run_dir)}


def _onset(run_dir: Path) -> int | None:
    verdict = read_verdict(run_dir) or {}
    steps = [verdict[key] for key in ("collapse_step", "divergence_step") if verdict.get(key) is not None]
    return int(min(steps)) if steps else None
