"""Read the scalars of one run back from its TensorBoard event files."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    """One scalar over optimizer steps, ascending and without duplicates."""

    steps: FloatArray
    values: FloatArray

    def __len__(self) -> int:
        return len(self.steps)

    def at(self, step: float) -> float:
        """Value at `step`, interpolated between the logged steps and held at both ends."""
        return float(np.interp(step, self.steps, self.values))

    def finite(self) -> Series:
        """The series without its infinite and undefined values."""
        keep = np.isfinite(self.values)
        return Series(self.steps[keep], self.values[keep])


def read_scalars(run_dir: Path, tags: Collection[str] | None = None) -> dict[str, Series]:
    """Read the scalars that a run logged, as one history over all its resumes.

    The files of a resumed run overlap. The last value written at a step wins, and a session that announces its first
    step (`SessionLog.START`, which `SummaryWriter(purge_step=...)` writes) drops everything at that step and after it.
    A record cut short by a killed process ends its file: what comes before it is kept.

    Args:
        run_dir: Directory with the `events.out.tfevents.*` files; its subdirectories are not read.
        tags: Tags to keep; all scalars by default.

    Returns:
        A series for each tag that was found.
    """
    history: dict[str, dict[int, float]] = {}
    for path in _event_files(run_dir):
        for event in _load(path):
            if event.HasField("session_log") and event.session_log.status == event.session_log.START:
                for points in history.values():
                    for step in [step for step in points if step >= event.step]:
                        del points[step]
            for value in event.summary.value:
                if (tags is None or value.tag in tags) and (number := _scalar(value)) is not None:
                    history.setdefault(value.tag, {})[event.step] = number
    return {tag: _series(points) for tag, points in history.items() if points}


def _series(points: dict[int, float]) -> Series:
    steps = sorted(points)
    return Series(np.array(steps, dtype=np.float64), np.array([points[step] for step in steps], dtype=np.float64))


def _event_files(run_dir: Path) -> list[Path]:
    """Event files in the order they were begun: by the time of their first record, since names only hold seconds."""
    started = []
    for path in sorted(run_dir.glob("events.out.tfevents.*")):
        first = next(_load(path), None)
        if first is not None:  # a run killed before its first flush leaves an empty file
            started.append((first.wall_time, path))
    return [path for _, path in sorted(started)]


def _load(path: Path) -> Iterator[Any]:
    """Events of one file; the loader stops without an error at a truncated record."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    return LegacyEventFileLoader(str(path)).Load()


def _scalar(value: Any) -> float | None:
    """The number in a summary value: `simple_value` as torch writes it, or a scalar tensor as TensorFlow 2 does."""
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return float(value.simple_value)
    if kind == "tensor" and value.metadata.plugin_data.plugin_name == "scalars":
        from tensorboard.util.tensor_util import make_ndarray

        return float(make_ndarray(value.tensor).item())
    return None
