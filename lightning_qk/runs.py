"""Run directories, read back: which runs there are, what they came to, the arms that they make up, and their twins."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_qk.executors.attempt import read_attempt
from lightning_qk.statistics import Lifetimes
from lightning_qk.verdict import DONE, VERDICT_FILE, read_verdict, unsealed

AGGREGATE = "aggregate"
"""The report's own directory in an experiment: what is under it is no run."""


@dataclass(frozen=True)
class Run:
    """One run directory, `<experiment>/<arm>/seed_<n>`."""

    path: Path
    arm: str
    seed: int
    verdict: Mapping[str, Any] | None
    moot: bool = False
    """A fork of a run that did not collapse: it has nothing to avert, and would only lengthen its arm's survival."""

    @property
    def state(self) -> str:
        """The verdict's status; without one `failed` where a sweep says so of its last attempt, else `unfinished`."""
        if self.verdict is not None:
            return str(self.verdict["status"])
        return "failed" if read_attempt(self.path).get("state") == "failed" else "unfinished"

    @property
    def problem(self) -> str:
        """Why it failed, the last line of it; empty if it did not or nothing was said."""
        said = (self.verdict or {}).get("error") or (self.state == "failed" and read_attempt(self.path).get("problem"))
        return str(said or "").strip().rpartition("\n")[2]

    @property
    def done(self) -> bool:
        return self.state in DONE

    @property
    def counted(self) -> bool:
        return self.done and not self.moot

    @property
    def collapsed(self) -> bool:
        """A loss that is not finite is a collapse."""
        return self.state in ("collapsed", "nonfinite")

    @property
    def ended_early(self) -> bool:
        """Stopped before its last step, so that nobody knows what it would have done."""
        return (self.number("step") or 0) < (self.number("max_steps") or 0)

    @property
    def end(self) -> float:
        """The step of the collapse, or the last step where there was none or its step is missing."""
        step = self.number("collapse_step") if self.collapsed else None
        return step if step is not None else self.number("step") or 0.0

    @property
    def begun_as(self) -> str:
        """The arm whose checkpoint it began with; empty for a run that began at step 0."""
        return str(((self.verdict or {}).get("fork") or {}).get("arm", ""))

    @property
    def parent(self) -> Path:
        """The directory of the run that it began as."""
        return self.path.parent.parent / self.begun_as / self.path.name

    @property
    def begin(self) -> float:
        """The step it began with."""
        return float(((self.verdict or {}).get("fork") or {}).get("step", 0))

    @property
    def warnings(self) -> Mapping[str, Mapping[str, Any]]:
        """What the early-warning monitors left in the verdict, by reading."""
        return {} if self.verdict is None else self.verdict.get("warnings", {})

    def number(self, key: str) -> float | None:
        """A number of the verdict, None if it has none.

        Raises:
            ValueError: the verdict has something else there.
        """
        value = self.verdict.get(key) if self.verdict is not None else None
        if value is not None and not isinstance(value, int | float):
            raise ValueError(f"{self.path / VERDICT_FILE}: {key} is {value!r}, not a number; delete it and run again")
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

    @property
    def lifetimes(self) -> Lifetimes:
        """Steps from where a counted run began to its collapse, or to its last step, where it is censored."""
        collapsed: list[float] = []
        censored: list[float] = []
        for run in self.counted:
            (collapsed if run.collapsed else censored).append(run.end - run.begin)
        return Lifetimes(collapsed, censored)

    def values(self, key: str) -> list[float]:
        """The verdict's `key` over the counted runs that have it."""
        return [value for run in self.counted if (value := run.number(key)) is not None]


def find_runs(directories: Sequence[Path]) -> list[Run]:
    """All run directories at or under the given ones, each once; the report's own `aggregate/` holds none.

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
        paths = [path for path in paths if not any(is_aggregate(parent) for parent in path.parents)]
        if not paths:
            raise ValueError(f"{directory}: holds no runs (no <arm>/seed_<n> directory); run `fit` or `sweep` first")
        for path in paths:
            found[path] = Run(path, path.parent.name, int(path.name[5:]), read_verdict(path))
    return [dataclasses.replace(run, moot=_is_moot(run, found)) for run in found.values()]


def _is_moot(run: Run, runs: Mapping[Path, Run]) -> bool:
    parent = runs.get(run.parent)
    return bool(run.begun_as) and parent is not None and not parent.collapsed


def is_aggregate(path: Path) -> bool:
    """Whether a directory is one that the report wrote, by the mark in it; an arm may be called `aggregate` too."""
    return (path / f"{AGGREGATE}.json").is_file()


def read_experiment(directory: Path) -> dict[str, Any]:
    """What the sweep wrote to `experiment.json`; empty for runs that were started one by one."""
    path = directory / "experiment.json"
    if not path.exists():
        return {}
    try:
        experiment = unsealed(json.loads(path.read_text(encoding="utf-8")), path)
        reference = experiment.get("reference")
        pairs = {key: dict(experiment.get(key) or {}) for key in ("twins", "against")}
        grid = {key: experiment.get(key) for key in ("bases", "points", "extrapolate", "scaling_law")}
        return {"arms": list(experiment["arms"]), "reference": reference, **pairs, **grid}
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
            chosen = tuple(run for run in mine if run.arm == name)
            label = name if len(experiments) == 1 else f"{experiment.name}/{name}"
            arms.append(Arm(label + _amplified(chosen), chosen))
    return arms


def _amplified(runs: Sequence[Run]) -> str:
    """What every table has to say of an arm whose gradient error is not its real size."""

    def sizes(*prefixes: str) -> set[float]:
        found = {run.number(key) for run in runs for key in run.verdict or {} if key.startswith(prefixes)}
        return {size for size in found if size is not None}

    gains, shares = sizes("error_gain", "error_magnitude"), sizes("error_relative_magnitude")
    notes = [f"error x {gain:g}" for gain in sorted(gains - {1.0})]
    notes += [f"error {share:g} x gradient" for share in sorted(shares)]
    return f" ({', '.join(notes)})" if notes else ""


@dataclass(frozen=True)
class Opponents:
    """What each arm is compared with.

    Attributes:
        arms: Name of an arm to the other arm; one that others are compared with is its own.
        missing: Name of an arm to that of the other, where that has no runs.
    """

    arms: Mapping[str, Arm]
    missing: Mapping[str, str]


def planned(arms: Sequence[Arm], key: str) -> Opponents:
    """What the sweeps named, as ``twins`` (the healthy ones) or ``against``, each at the same point of a grid."""
    found: dict[str, Arm] = {}
    missing: dict[str, str] = {}
    for experiment in {arm.runs[0].path.parent.parent for arm in arms}:
        mine = {arm.runs[0].arm: arm for arm in arms if arm.runs[0].path.parent.parent == experiment}
        stated = read_experiment(experiment)
        named = stated.get(key) or {}
        if key == "twins" and not named and (reference := stated.get("reference")):
            named = dict.fromkeys(mine, reference)
        named |= {other: other for other in named.values()}
        for arm, other in named.items():
            if arm in mine and other in mine:
                found[mine[arm].name] = mine[other]
            elif arm in mine:
                missing[mine[arm].name] = other
    return Opponents(found, missing)


def pick_twins(arms: Sequence[Arm], name: str | None) -> Opponents:
    """The healthy arm that each arm is compared with: the one asked for, else the one that the sweep named.

    Raises:
        ValueError: no arm, or more than one, has the name asked for.
    """
    if name is None:
        return planned(arms, "twins")
    return Opponents(dict.fromkeys((arm.name for arm in arms), _one_arm(arms, name, "--reference")), {})


def pick_opponents(arms: Sequence[Arm], twins: Mapping[str, Arm], name: str | None) -> Opponents:
    """The second arm that each arm is compared with.

    It is the one asked for, or in a grid the one called so at the same point; else the one that the sweep named.

    Raises:
        ValueError: there is no such arm, nor one called so at a point of the grid.
    """
    if name is None:
        healthy = {twin.name for twin in twins.values()}  # compared with the others already
        found = planned(arms, "against")
        return Opponents({arm: other for arm, other in found.arms.items() if arm not in healthy}, found.missing)
    if any(name in (arm.name, arm.runs[0].arm) for arm in arms):
        return Opponents(dict.fromkeys((arm.name for arm in arms), _one_arm(arms, name, "--against")), {})
    points = {}  # of the grid, by twin, to the arm that is called so there
    for arm in arms:
        own, twin = arm.runs[0].arm, twins.get(arm.name)
        if twin is not None and own.startswith(f"{name}-") and twin.runs[0].arm.endswith(own[len(name) :]):
            points[twin.name] = arm
    if not points:
        raise ValueError(f"--against {name}: give one of the arms {', '.join(arm.name for arm in arms)}")
    at = {arm.name: points[twin.name] for arm in arms if (twin := twins.get(arm.name)) and twin.name in points}
    return Opponents(at, {})


def _one_arm(arms: Sequence[Arm], name: str, option: str) -> Arm:
    matches = [arm for arm in arms if name == arm.name] or [arm for arm in arms if name == arm.runs[0].arm]
    if len(matches) != 1:
        raise ValueError(f"{option} {name}: give one of the arms {', '.join(arm.name for arm in arms)}")
    return matches[0]
