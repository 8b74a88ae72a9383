"""Run directories, read back: which runs there are, what they came to, and the arms that they make up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_qk.verdict import read_verdict

COUNTED = ("completed", "collapsed", "nonfinite")


@dataclass(frozen=True)
class Run:
    """One run directory, `<experiment>/<arm>/seed_<n>`."""

    path: Path
    arm: str
    seed: int
    verdict: Mapping[str, Any] | None

    @property
    def state(self) -> str:
        """The verdict's status, or `unfinished` where there is no verdict."""
        return str(self.verdict["status"]) if self.verdict is not None else "unfinished"

    @property
    def counted(self) -> bool:
        return self.state in COUNTED

    @property
    def collapsed(self) -> bool:
        """A loss that is not finite is a collapse."""
        return self.state in ("collapsed", "nonfinite")

    @property
    def warnings(self) -> Mapping[str, Mapping[str, Any]]:
        """What the early-warning monitors left in the verdict, by reading."""
        return {} if self.verdict is None else self.verdict.get("warnings", {})

    def number(self, key: str) -> float | None:
        """A number of the verdict; `float` reads back the "nan" and "inf" that JSON has no number for."""
        value = self.verdict.get(key) if self.verdict is not None else None
        return None if value is None else float(value)


@dataclass(frozen=True)
class Arm:
    """All runs of one arm and their statistics."""

    name: str
    runs: tuple[Run, ...]

    @property
    def counted(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.counted)

    @property
    def n(self) -> int:
        return len(self.counted)

    @property
    def k(self) -> int:
        return sum(run.collapsed for run in self.counted)

    @property
    def nonfinite(self) -> int:
        return sum(run.state == "nonfinite" for run in self.runs)

    def values(self, key: str) -> list[float]:
        """The verdict's `key` over the counted runs that have it."""
        return [value for run in self.counted if (value := run.number(key)) is not None]


def find_runs(directories: Sequence[Path]) -> list[Run]:
    """All run directories at or under the given ones, each once.

    Raises:
        ValueError: if a directory is missing or holds no run, or if a `verdict.json` is broken.
    """
    found: dict[Path, Run] = {}
    for directory in directories:
        root = directory.resolve()
        if not root.is_dir():
            raise ValueError(f"{directory}: no such directory; give an experiment directory such as runs/demo")
        candidates = [path for path in (root, *sorted(root.rglob("seed_*"))) if path.is_dir()]
        paths = [path for path in candidates if path.name.startswith("seed_") and path.name[5:].isdigit()]
        if not paths:
            raise ValueError(f"{directory}: holds no runs (no <arm>/seed_<n> directory); run `fit` or `sweep` first")
        for path in paths:
            found[path] = Run(path, path.parent.name, int(path.name[5:]), read_verdict(path))
    return list(found.values())


def read_experiment(directory: Path) -> dict[str, Any]:
    """What the sweep wrote to `experiment.json`; empty for runs that were started one by one."""
    path = directory / "experiment.json"
    if not path.exists():
        return {}
    try:
        experiment = json.loads(path.read_text(encoding="utf-8"))
        return {"arms": list(experiment["arms"]), "reference": experiment.get("reference")}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: broken ({error!r}); delete it or run the sweep again") from error


def group_arms(runs: Sequence[Run]) -> list[Arm]:
    """Group runs by arm: experiments as given, arms in the order of the sweep, then by name, seeds ascending."""
    experiments = list(dict.fromkeys(run.path.parent.parent for run in runs))
    arms = []
    for experiment in experiments:
        mine = sorted((run for run in runs if run.path.parent.parent == experiment), key=lambda run: run.seed)
        names = {run.arm for run in mine}
        planned = [name for name in read_experiment(experiment).get("arms", []) if name in names]
        for name in [*planned, *sorted(names - set(planned))]:
            label = name if len(experiments) == 1 else f"{experiment.name}/{name}"
            arms.append(Arm(label, tuple(run for run in mine if run.arm == name)))
    return arms


def pick_reference(arms: Sequence[Arm], name: str | None) -> Arm | None:
    """The arm that the others are compared with: the one asked for, else the one that the sweep named."""
    experiments = {run.path.parent.parent for arm in arms for run in arm.runs}
    if name is None:
        planned = read_experiment(experiments.pop()).get("reference") if len(experiments) == 1 else None
        return next((arm for arm in arms if arm.name == planned), None)
    matches = [arm for arm in arms if name == arm.name] or [arm for arm in arms if name == arm.runs[0].arm]
    if len(matches) != 1:
        raise ValueError(f"--reference {name}: give one of the arms {', '.join(arm.name for arm in arms)}")
    return matches[0]
