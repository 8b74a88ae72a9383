"""The arms that an experiment has besides those it lists: at the points of a grid, and as forks; and their twins."""

from __future__ import annotations

import fnmatch
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_qk.fork import Fork


class SweepError(ValueError):
    """The sweep can not start: the message names what is wrong and how to go on."""


def expand_grid(
    arms: Mapping[str, Any], arm_overrides: Mapping[str, Mapping[str, Any]], grid: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]], dict[str, str]]:
    """Every arm at every point of the grid, as arms of their own: ``fault`` becomes ``fault-lr_0.004``, and so on.

    An axis of named points, each of which sets several keys, gives their names: ``fault-small``.

    Returns:
        By the new arm: its files, its overrides, and the arm that it comes from.

    Raises:
        SweepError: a key without values, a value twice, or overrides of an arm that is not there.
    """
    axes = [_axis(key, values) for key, values in grid.items()]
    unknown = [arm for arm in arm_overrides if arm not in arms]
    if unknown:
        raise SweepError(f"arm_overrides: {unknown[0]!r} is not an arm; the arms are {', '.join(arms)}")
    files, overrides, bases = {}, {}, {}
    for arm in arms:
        for point in itertools.product(*axes):
            setting = {key: value for _, settings in point for key, value in settings.items()}
            name = "-".join([arm, *(label for label, _ in point)])
            if name in files:
                raise SweepError(f"grid: two points are called {name}; their keys end alike")
            files[name], overrides[name] = arms[arm], {**arm_overrides.get(arm, {}), **setting}
            bases[name] = arm
    return files, overrides, bases


def _axis(key: str, values: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """The points of one axis of a grid: what each is called and what it sets."""
    if isinstance(values, Mapping) and values:
        return list(values.items())
    if not values or len({json.dumps(value) for value in values}) < len(values):
        raise SweepError(f"grid.{key}: {values} must be a list of different values, or named points")
    return [(f"{key.rpartition('.')[2]}_{_in_name(value)}", {key: value}) for value in values]


def expand_forks(
    forks: Mapping[str, Any], arms: Mapping[str, Any], grid: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, Fork]]:
    """Every arm of ``forks`` at every step of it: ``bump`` becomes ``bump-step_300`` or ``bump-before_100``, and so on.

    Returns:
        By the new arm: the arm that it comes from, and what it is a fork of.

    Raises:
        SweepError: a key is missing or unknown, an arm is not there or there twice, or there is a grid besides.
    """
    if not forks:
        return {}, {}
    at = [key for key in ("steps", "before") if key in forks]
    if len(at) != 1 or set(forks) != {"from", "arms", *at}:
        raise SweepError(f"forks: has {', '.join(forks)}; it needs from, arms, and one of steps and before")
    parent, steps = forks["from"], forks[at[0]]
    if parent not in arms:
        raise SweepError(f"forks.from: {parent!r} is not an arm; the arms are {', '.join(arms)}")
    if not steps or any(type(step) is not int or step < 1 for step in steps) or len(set(steps)) < len(steps):
        raise SweepError(f"forks.{at[0]}: {steps} must be a list of different numbers of steps, each at least 1")
    if grid:
        raise SweepError("forks: an experiment has forks or a grid, not both; write two experiments")
    if not forks["arms"]:
        raise SweepError("forks.arms: has none; give the forks names and overlay files")
    if twice := sorted(set(forks["arms"]) & set(arms)):
        raise SweepError(f"forks.arms: {twice[0]!r} is an arm already; give the fork another name")
    all_forks = [Fork(parent, step) if at == ["steps"] else Fork(parent, before=step) for step in steps]
    forked = {f"{arm}-{fork.label}": (arm, fork) for fork in all_forks for arm in forks["arms"]}
    return {name: arm for name, (arm, _) in forked.items()}, {name: fork for name, (_, fork) in forked.items()}


def grid_keys(grid: Mapping[str, Any]) -> list[str]:
    """The dotted keys that a grid sets, at some point or all."""
    axes = [list(values.values()) if isinstance(values, Mapping) else [[name]] for name, values in grid.items()]
    return list(dict.fromkeys(key for points in axes for point in points for key in point))


def pick_references(
    key: str,
    reference: str | Mapping[str, str] | None,
    arms: Sequence[str],
    bases: Mapping[str, str],
    has_grid: bool,
) -> dict[str, str]:
    """The arm that every arm is compared with; empty where all have the one that `reference` names, or none.

    Args:
        key: What `reference` is called, for messages.
        reference: An arm, or arms and patterns of arms to the ones they are compared with. The first that matches an
            arm counts; one that others are compared with is its own.
        arms: The arms of the YAML.
        bases: Those at the points of a grid and the forks, to the arm of the YAML that each is of. Its counterpart is
            at the same point or step; an arm that has none there is compared with nothing.
        has_grid: Whether there is a grid.

    Raises:
        SweepError: a key that matches no arm, a value that is none, or an arm that is a value and shall have another.
    """
    if reference is None or isinstance(reference, str):
        if reference is None or not has_grid or reference not in arms:
            return {}
        return {arm: reference + arm.removeprefix(base) for arm, base in bases.items()}
    for pattern, other in reference.items():
        if other not in arms:
            raise SweepError(f"{key}.{pattern}: {other!r} is not an arm; the arms are {', '.join(arms)}")
        if not fnmatch.filter(arms, pattern):
            raise SweepError(f"{key}.{pattern}: matches no arm; the arms are {', '.join(arms)}")
        if pattern in reference.values() and pattern != other:
            raise SweepError(f"{key}.{pattern}: a twin of others is its own, it can not be compared with {other}")
    found = {}
    for arm in arms:
        patterns = [pattern for pattern in reference if fnmatch.fnmatchcase(arm, pattern)]
        if arm in reference.values() or patterns:
            found[arm] = arm if arm in reference.values() else reference[patterns[0]]
    others = {arm: found[base] + arm.removeprefix(base) for arm, base in bases.items() if base in found}
    return {arm: other for arm, other in others.items() if other in bases}


def _in_name(value: Any) -> str:
    text = value if isinstance(value, str) else "none" if value is None else json.dumps(value)
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("_")
