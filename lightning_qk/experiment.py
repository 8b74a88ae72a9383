"""An experiment: arms, seeds and overrides, as its YAML states them."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from argparse import ArgumentError
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser, Namespace

from lightning_qk.overlays import find_config

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class SweepError(ValueError):
    """The sweep can not start: the message names what is wrong and how to go on."""


@dataclass(frozen=True)
class Run:
    """One arm with one seed: where it lives and the arguments of `fit`."""

    arm: str
    seed: int
    path: Path
    fit_args: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.arm}/seed_{self.seed}"


@dataclass(frozen=True)
class Experiment:
    """An experiment as its YAML states it, with absolute paths."""

    name: str
    base: tuple[Path, ...]
    arms: Mapping[str, tuple[Path, ...]]
    seeds: tuple[int, ...]
    overrides: Mapping[str, Any] = field(default_factory=dict)
    arm_overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    reference: str | None = None
    bases: Mapping[str, str] = field(default_factory=dict)  # arms of a grid, to the arm of the YAML that they are of
    twins: Mapping[str, str] = field(default_factory=dict)  # arms of a grid, to the reference at the same point

    def __post_init__(self) -> None:
        for key, names in (("name", [self.name]), ("arms", list(self.arms))):
            for name in names:
                if not NAME.fullmatch(name):
                    raise SweepError(f"{key}: {name!r} names a directory; use letters, digits, '.', '_' and '-'")
        if not self.arms or not self.seeds:
            raise SweepError("arms, seeds: a sweep needs at least one of each")
        if len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise SweepError(f"seeds: {list(self.seeds)} must be different and not negative")
        reference = [] if self.reference is None else [self.reference]
        for key, names in (("arm_overrides", list(self.arm_overrides)), ("report.reference", reference)):
            for name in names:
                if name not in self.arms:
                    raise SweepError(f"{key}: {name!r} is not an arm; the arms are {', '.join(self.arms)}")
        for key in itertools.chain(self.overrides, *self.arm_overrides.values()):
            if key.startswith("run.") or key in ("ckpt_path", "seed_everything"):
                raise SweepError(f"overrides: {key} is the sweep's own; it names the directories and goes on in them")
        for arm, files in self.arms.items():
            for file in (*self.base, *files):
                if not file.is_file():
                    raise SweepError(f"arm {arm}: no such file: {file}; paths are relative to the experiment's YAML")

    def runs(self, root: Path, only: Sequence[str] | None = None) -> list[Run]:
        """All runs, the first seed of every arm first; with `only`, those of some arms, or of all points of an arm.

        Raises:
            SweepError: an arm is not there.
        """
        names = {arm: {arm, self.bases.get(arm, arm)} for arm in self.arms}
        known = dict.fromkeys([*self.bases.values(), *self.arms])
        unknown = [arm for arm in only or () if arm not in known]
        if unknown:
            raise SweepError(f"only: {', '.join(unknown)}: not an arm; the arms are {', '.join(known)}")
        arms = [arm for arm in self.arms if only is None or names[arm] & set(only)]
        return [self._run(arm, seed, root) for seed in self.seeds for arm in arms]

    def _run(self, arm: str, seed: int, root: Path) -> Run:
        args = [part for file in (*self.base, *self.arms[arm]) for part in ("-c", str(file))]
        args += [
            "--seed_everything",
            str(seed),
            "--run.root",
            str(root),
            "--run.experiment",
            self.name,
            "--run.arm",
            arm,
        ]
        for key, value in {**self.overrides, **self.arm_overrides.get(arm, {})}.items():
            args.append(f"--{key}={value if isinstance(value, str) else json.dumps(value)}")
        return Run(arm, seed, root / self.name / arm / f"seed_{seed}", (*args, "--ckpt_path", "last"))


def sweep_parser(description: str) -> ArgumentParser:
    """The parser of `sweep`, of which an experiment's YAML is the configuration file."""
    parser = ArgumentParser(
        prog="python -m lightning_qk sweep", description=description, exit_on_error=False, allow_abbrev=False
    )
    parser.add_argument("-c", "--config", action="config", help="the experiment's YAML, required")
    parser.add_argument("--name", type=str, help="name of the experiment and of its directory")
    parser.add_argument("--base", type=str | list[str], default=[], help="configurations of every run")
    parser.add_argument("--sizes", type=dict[str, dict[str, Any]], default={}, help="size to its base and overrides")
    parser.add_argument("--size", type=str | None, default=None, help="one of the sizes; default: the first")
    parser.add_argument("--arms", type=dict[str, str | list[str]], default={}, help="arm to its overlay file or files")
    parser.add_argument("--seeds", type=list[int] | str, default=[0], help="e.g. 0,1,2")
    parser.add_argument("--overrides", type=dict[str, Any], default={}, help="dotted keys given to every run")
    parser.add_argument("--arm_overrides", type=dict[str, dict[str, Any]], default={}, help="arm to its dotted keys")
    parser.add_argument("--grid", type=dict[str, list[Any]], default={}, help="dotted key to values, for every arm")
    parser.add_argument("--report.reference", type=str | None, default=None, help="the arm to compare the others with")
    parser.add_argument("--report_after", type=bool, default=True, help="report at the end (short: --report false)")
    parser.add_argument(
        "--executor", type=Literal["local", "slurm", "submitit_local"], default="local", help="who runs"
    )
    parser.add_argument("--slurm", type=dict[str, Any], default={}, help="submitit's parameters: time, partition, ...")
    parser.add_argument("--jobs", type=int | None, default=None, help="runs at a time; default: one a GPU, else a core")
    parser.add_argument("--only", type=list[str] | str | None, default=None, help="arms to run, e.g. fp32,fault")
    parser.add_argument("--root", type=str, default="runs", help="directory of all experiments")
    parser.add_argument("--dry_run", action="store_true", help="print the commands and start nothing")
    parser.add_argument("--detach", action="store_true", help="submit and return; not with the local executor")
    parser.add_argument("--status", action="store_true", help="tell where all runs are and start nothing")
    return parser


def parse_sweep(args: list[str], description: str) -> tuple[Namespace, Experiment]:
    """Parse the arguments of `sweep` and the experiment's YAML.

    Raises:
        SweepError: for an unknown key, a wrong value, or a file that is not there.
    """
    # `report` is a group with the reference in it, so its on/off switch needs a key of its own.
    args = [re.sub(r"^--report(?==|$)", "--report_after", arg) for arg in args]
    try:
        options = sweep_parser(description).parse_args(args)
    except ArgumentError as error:
        raise SweepError(f"sweep {shlex.join(args)}: {error}; see --help") from error
    if len(options.config or []) != 1:
        raise SweepError("-c: give exactly one experiment, e.g. -c configs/experiments/demo.yaml")
    if options.name is None:
        raise SweepError(f"name: missing in {options.config[0]}; it names the directory of the runs")
    here = Path(str(options.config[0].absolute)).parent
    size, suffix = _pick_size(options.sizes, options.size)
    if wrong := [arm for arm in size.get("arms", {}) if arm not in options.arms]:
        raise SweepError(f"sizes: arms has {wrong[0]!r}, but a size only replaces the files of an arm that there is")
    sized = size.get("arm_overrides", {})
    arm_overrides = {arm: {**sized.get(arm, {}), **options.arm_overrides.get(arm, {})} for arm in options.arms}
    arm_overrides |= {arm: {} for arm in (*sized, *options.arm_overrides) if arm not in arm_overrides}
    arms, arm_overrides, bases = expand_grid({**options.arms, **size.get("arms", {})}, arm_overrides, options.grid)
    reference, twins = options.report.reference, dict[str, str]()
    if options.grid and reference in options.arms:
        twins, reference = {arm: reference + arm.removeprefix(base) for arm, base in bases.items()}, None
    experiment = Experiment(
        name=options.name + suffix,
        base=_paths(here, options.base) + _paths(here, size.get("base", [])),
        arms={arm: _paths(here, files) for arm, files in arms.items()},
        seeds=tuple(_seed(seed) for seed in _listed(options.seeds)),
        overrides={**size.get("overrides", {}), **options.overrides},
        arm_overrides=arm_overrides,
        reference=reference,
        bases=bases,
        twins=twins,
    )
    options.only = None if options.only is None else _listed(options.only)
    return options, experiment


def _pick_size(sizes: Mapping[str, Mapping[str, Any]], name: str | None) -> tuple[Mapping[str, Any], str]:
    """The size's own settings, and what it adds to the experiment's name: nothing for the first, which is the default.

    Raises:
        SweepError: there is no such size, or it has an unknown key.
    """
    for key, size in sizes.items():
        if wrong := sorted(set(size) - {"base", "overrides", "arms", "arm_overrides"}):
            raise SweepError(
                f"sizes.{key}: unknown key {wrong[0]!r}; a size has base, overrides, arms and arm_overrides"
            )
    if name is None:
        return next(iter(sizes.values()), {}), ""
    if name not in sizes:
        raise SweepError(f"size: {name!r} is not one of {', '.join(sizes) or 'none: this experiment has no sizes'}")
    return sizes[name], "" if name == next(iter(sizes)) else f"_{name}"


def expand_grid(
    arms: Mapping[str, Any], arm_overrides: Mapping[str, Mapping[str, Any]], grid: Mapping[str, list[Any]]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]], dict[str, str]]:
    """Every arm at every point of the grid, as arms of their own: ``fault`` becomes ``fault-lr_0.004``, and so on.

    Returns:
        By the new arm: its files, its overrides, and the arm that it comes from.

    Raises:
        SweepError: a key without values, a value twice, or overrides of an arm that is not there.
    """
    for key, values in grid.items():
        if not values or len({json.dumps(value) for value in values}) < len(values):
            raise SweepError(f"grid.{key}: {values} must be a list of different values")
    unknown = [arm for arm in arm_overrides if arm not in arms]
    if unknown:
        raise SweepError(f"arm_overrides: {unknown[0]!r} is not an arm; the arms are {', '.join(arms)}")
    files, overrides, bases = {}, {}, {}
    for arm in arms:
        for point in itertools.product(*grid.values()):
            setting = dict(zip(grid, point, strict=True))
            name = "-".join([arm, *(f"{key.rpartition('.')[2]}_{_in_name(value)}" for key, value in setting.items())])
            if name in files:
                raise SweepError(f"grid: two points are called {name}; their keys end alike")
            files[name], overrides[name] = arms[arm], {**arm_overrides.get(arm, {}), **setting}
            bases[name] = arm
    return files, overrides, bases


def _in_name(value: Any) -> str:
    text = value if isinstance(value, str) else "none" if value is None else json.dumps(value)
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("_")


def _paths(here: Path, files: str | list[str]) -> tuple[Path, ...]:
    return tuple(find_config(file, here).resolve() for file in ([files] if isinstance(files, str) else files))


def _listed(value: str | list[Any]) -> list[Any]:
    """A list, or the comma-separated text that is easier to type."""
    return [item.strip() for item in value.split(",")] if isinstance(value, str) else value


def _seed(value: str | int) -> int:
    try:
        return int(value)
    except ValueError as error:
        raise SweepError(f"seeds: {value!r} is not a whole number; write e.g. --seeds 0,1,2") from error
