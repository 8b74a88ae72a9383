"""Read the scalars of one run back from its TensorBoard event files."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lightning_qk.event_file import EventFile, read_event_file

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


_SESSION = ".session_"
Scalars = Mapping[Path, Mapping[str, Series]]
"""What each run logged, by run directory and tag."""


def read_scalars(run_dir: Path, tags: Collection[str] | None = None) -> dict[str, Series]:
    """The first half of `read_history`."""
    return read_history(run_dir, tags)[0]


def read_history(run_dir: Path, tags: Collection[str] | None = None) -> tuple[dict[str, Series], list[str]]:
    """Read the scalars that a run logged, as one history over all its resumes.

    The files of a resumed run overlap. The last value written at a step wins, and a session that announces its first
    step (`SessionLog.START`, which `SummaryWriter(purge_step=...)` writes) drops everything at that step and after it.
    A record cut short by a killed process ends its file: what comes before it is kept.

    Args:
        run_dir: Directory with the `events.out.tfevents.*` files; its subdirectories are not read.
        tags: Tags to keep; all scalars by default.

    Returns:
        A series for each tag that was found, and what was wrong with the files.
    """
    found = [(read_event_file(path, tags), path) for path in sorted(run_dir.glob("events.out.tfevents.*"))]
    # a clock can have jumped between two sessions; where they have no number, by the time of their first record
    files = sorted(
        ((file, path) for file, path in found if file is not None),
        key=lambda pair: (session_of(pair[1]), pair[0].wall_time),
    )
    problems = [f"{path.name} has {file.problem}; what comes before was read" for file, path in files if file.problem]
    names = dict.fromkeys(tag for file, _ in files for tag in file.points)
    history = {tag: _join([file for file, _ in files], tag) for tag in names}
    return {tag: series for tag, series in history.items() if len(series)}, problems


def session_suffix(run_dir: Path) -> str:
    """How the name of the next event file of a run is to end, so that its sessions can be told apart in their order."""
    return f"{_SESSION}{len(list(run_dir.glob('events.out.tfevents.*')))}"


def session_of(path: Path) -> int:
    """Which of a run's sessions wrote an event file; -1 if its name does not say."""
    _, _, number = path.name.rpartition(_SESSION)
    return int(number) if _SESSION in path.name and number.isdecimal() else -1


def _join(files: Sequence[EventFile], tag: str) -> Series:
    """One tag over all files, each of which begins where the one before it ended."""
    none = np.empty(0, dtype=np.int64)
    steps, values = none, np.empty(0)
    for file in files:
        number, step, value = file.points.get(tag, (none, none, np.empty(0)))
        number = np.concatenate([np.full(len(steps), -1), number])  # what came before this file
        steps, values = np.concatenate([steps, step]), np.concatenate([values, value])
        for begun, first_step in file.starts:
            keep = (number > begun) | (steps < first_step)
            number, steps, values = number[keep], steps[keep], values[keep]
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order], values[order]
    last = np.append(steps[1:] != steps[:-1], True)[: len(steps)]
    return Series(steps[last].astype(np.float64), values[last])
