"""An experiment: arms, seeds and overrides, as its YAML states them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from argparse import ArgumentError, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict

from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace

from lightning_qk.complaints import explain
from lightning_qk.experiment_arms import SweepError, expand_forks, expand_grid, grid_keys, pick_references
from lightning_qk.fork import Fork
from lightning_qk.overlays import find_config, refuse_duplicates

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


Files = str | list[str]
Grid = dict[str, list[Any] | dict[str, dict[str, Any]]]
ForksOptions = TypedDict(
    "ForksOptions", {"from": str, "steps": list[int], "before": list[int], "arms": dict[str, Files]}, total=False
)
# not a class, whose annotations are text that older versions of the parser do not read
SizeOptions = TypedDict(  # noqa: UP013
    "SizeOptions",
    {
        "base": Files,
        "overrides": dict[str, Any],
        "arms": dict[str, Files],
        "arm_overrides": dict[str, dict[str, Any]],
        "grid": Grid,
        "forks": ForksOptions,
    },
    total=False,
)


@dataclass(frozen=True)
class ExtrapolationOptions:
    """What the report fits the collapse steps of a grid against, and where it extrapolates to.

    Args:
        key: the key of the grid whose values enter as they are.
        to: a value of it beyond those at which runs collapse.
        log: further keys of the grid, whose logarithms enter.
    """

    key: str
    to: float
    log: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """One arm with one seed: where it lives and the arguments of `fit`."""

    arm: str
    seed: int
    path: Path
    fit_args: tuple[str, ...]
    fork: Fork | None = None

    @property
    def name(self) -> str:
        return f"{self.arm}/seed_{self.seed}"

    @property
    def parent(self) -> str | None:
        """Name of the run that it is a fork of, which must be done first."""
        return None if self.fork is None else f"{self.fork.arm}/seed_{self.seed}"


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
    twins: Mapping[str, str] = field(default_factory=dict)  # arms to their healthy twins, where not all have one
    against: Mapping[str, str] = field(default_factory=dict)  # arms to the second arm that they are compared with
    points: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # arms of a grid, to its values there
    extrapolate: Mapping[str, Any] | None = None  # what the report fits collapse steps against
    scaling_law: bool = False  # whether the report fits one to every arm
    forks: Mapping[str, Fork] = field(default_factory=dict)  # arms that begin with a checkpoint of another arm

    def __post_init__(self) -> None:
        for key, names in (("name", [self.name]), ("arms", list(self.arms))):
            for name in names:
                if not NAME.fullmatch(name):
                    raise SweepError(f"{key}: {name!r} names a directory; use letters, digits, '.', '_' and '-'")
        if not self.arms or not self.seeds:
            raise SweepError("arms, seeds: a sweep needs at least one of each")
        if len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0 or max(self.seeds) >= 2**32:
            raise SweepError(f"seeds: {list(self.seeds)} must be different, not negative and below 2^32")
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
        fork = self.forks.get(arm)
        if fork is not None:
            args.append(f"--run.fork={json.dumps(dataclasses.asdict(fork))}")
        for key, value in {**self.overrides, **self.arm_overrides.get(arm, {})}.items():
            args.append(f"--{key}={value if isinstance(value, str) else json.dumps(value)}")
        return Run(arm, seed, root / self.name / arm / f"seed_{seed}", (*args, "--ckpt_path", "last"), fork)


class _AsWritten(DefaultHelpFormatter, RawDescriptionHelpFormatter):
    """Leaves the description's lines as they are: there is YAML in it."""


def sweep_parser(description: str) -> ArgumentParser:
    """The parser of `sweep`, of which an experiment's YAML is the configuration file."""
    parser = ArgumentParser(
        prog="python -m lightning_qk sweep",
        description=description,
        formatter_class=_AsWritten,
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("-c", "--config", action="config", help="the experiment's YAML, required")
    parser.add_argument("--name", type=str, help="name of the experiment and of its directory")
    parser.add_argument("--base", type=Files, default=[], help="configurations of every run")
    parser.add_argument(
        "--sizes",
        type=dict[str, SizeOptions],
        default={},
        help="size to its base, overrides, arms (more, or other files), arm_overrides, forks and a grid of its own",
    )
    parser.add_argument("--size", type=str | None, default=None, help="one of the sizes; default: the first")
    parser.add_argument("--arms", type=dict[str, Files], default={}, help="arm to its overlay file or files")
    parser.add_argument("--seeds", type=list[int] | str, default=[0], help="e.g. 0,1,2")
    parser.add_argument("--overrides", type=dict[str, Any], default={}, help="dotted keys given to every run")
    parser.add_argument("--arm_overrides", type=dict[str, dict[str, Any]], default={}, help="arm to its dotted keys")
    parser.add_argument(
        "--grid",
        type=Grid,
        default={},
        help="for every arm: dotted key to values, or a name to named points that are dotted keys each",
    )
    parser.add_argument(
        "--forks", type=ForksOptions, default={}, help="arms that begin as another is: from, arms, and steps or before"
    )
    parser.add_argument(
        "--report.reference",
        type=str | dict[str, str] | None,
        default=None,
        help="the arm to compare the others with, or {arm: its healthy twin}; an arm may be a pattern such as 'mx_*'",
    )
    parser.add_argument(
        "--report.against",
        type=str | dict[str, str] | None,
        default=None,
        help="a second arm to compare them with, such as the fault, or {arm or pattern: the second arm}",
    )
    parser.add_argument(
        "--report.extrapolate",
        type=ExtrapolationOptions | None,
        default=None,
        help="fit collapse steps of a grid: {key: one of its keys, to: where to, log: further keys, by logarithm}",
    )
    parser.add_argument("--report.scaling_law", type=bool, default=False, help="fit L(N, D) to every arm of a grid")
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
    options = _parsed(args, sweep_parser(description))
    if len(options.config or []) != 1:
        raise SweepError("-c: give exactly one experiment, e.g. -c configs/experiments/demo.yaml")
    if options.name is None:
        raise SweepError(f"name: missing in {options.config[0]}; it names the directory of the runs")
    here = Path(str(options.config[0].absolute)).parent
    size, suffix = _pick_size(options.sizes, options.size)
    listed: dict[str, Files] = {**options.arms, **size.get("arms", {})}
    grid: Grid = size.get("grid", options.grid)
    if "grid" in size and any(arg.startswith("--grid") for arg in args):
        raise SweepError("--grid: the size has a grid of its own, which would replace it; change that in the YAML")
    arm_overrides = dict(size.get("arm_overrides", {}))
    arm_overrides |= {arm: {**arm_overrides.get(arm, {}), **own} for arm, own in options.arm_overrides.items()}
    arms, arm_overrides, bases = expand_grid(listed, arm_overrides, grid)
    own_forks: Mapping[str, Any] = size.get("forks", {})
    replaced = {"steps", "before"} if {"steps", "before"} & set(own_forks) else set()
    stated = {key: value for key, value in options.forks.items() if key not in replaced} | dict(own_forks)
    forked, forks = expand_forks(stated, listed, grid)
    for arm, fork in forks.items():  # the other arm, with more files on top
        arms[arm] = [*_listed(arms[fork.arm]), *_listed(stated["arms"][forked[arm]])]
        arm_overrides[arm] = arm_overrides[fork.arm]
    keys, reference, against = grid_keys(grid), options.report.reference, options.report.against
    named, of_grid = [*listed, *dict.fromkeys(forked.values())], (bases | forked, bool(grid))
    twins = pick_references("report.reference", reference, named, *of_grid)
    if isinstance(against, str):
        against = {"*": against}
    experiment = Experiment(
        name=options.name + suffix,
        base=_paths(here, options.base) + _paths(here, size.get("base", [])),
        arms={arm: _paths(here, files) for arm, files in arms.items()},
        seeds=tuple(_seed(seed) for seed in _listed(options.seeds)),
        overrides={**size.get("overrides", {}), **options.overrides},
        arm_overrides=arm_overrides,
        reference=None if twins or isinstance(reference, dict) else reference,
        bases=bases | forked,
        twins=twins,
        against=pick_references("report.against", against, named, *of_grid),
        points={arm: {k: v for k, v in arm_overrides[arm].items() if k in keys} for arm in bases if keys},
        extrapolate=_extrapolation(options.report.extrapolate, grid),
        forks=forks,
        scaling_law=options.report.scaling_law,
    )
    options.only = None if options.only is None else _listed(options.only)
    if options.only == []:
        raise SweepError("only: names no arm; leave it out to run all")
    return options, experiment


def _parsed(args: list[str], parser: ArgumentParser) -> Namespace:
    refuse_duplicates(args)
    try:
        options = parser.parse_args(args)
    except ArgumentError as error:
        raise SweepError(explain(str(error), args, {action.dest for action in parser._actions})) from error
    if not isinstance(options.report, Namespace):
        raise SweepError(
            f"report: {options.report} must be a mapping of reference, against, extrapolate and scaling_law; "
            "for no report at the end, set report_after to false"
        )
    for key, default in parser.get_defaults().items():  # the parser takes null for any type
        if default is not None and options[key] is None:
            raise SweepError(f"{key}: null is no value for it; leave the key out or give it one")
    return options


def _extrapolation(wanted: Namespace | None, grid: Grid) -> dict[str, Any] | None:
    """What the report is told of an extrapolation.

    Raises:
        SweepError: a key that is not of the grid, or values of it that are not numbers (or not positive, by logarithm).
    """
    if wanted is None:
        return None
    if left_out := [key for key in grid if key not in (wanted.key, *wanted.log)]:
        raise SweepError(f"report.extrapolate: {left_out[0]} of the grid is neither key nor in log")
    for key in (wanted.key, *wanted.log):
        if key not in grid:
            raise SweepError(
                f"report.extrapolate: {key} is not a key of the grid, which has {', '.join(grid) or 'none'}"
            )
        numbers = [value for value in grid[key] if isinstance(value, int | float) and not isinstance(value, bool)]
        if len(numbers) < len(grid[key]) or (key in wanted.log and min(numbers) <= 0):
            raise SweepError(f"report.extrapolate: grid.{key}: {grid[key]} must be numbers; those of log positive")
    return wanted.as_dict()


def _pick_size(sizes: Mapping[str, SizeOptions], name: str | None) -> tuple[SizeOptions, str]:
    """The size's own settings, and what it adds to the experiment's name: nothing for the first, which is the default.

    Raises:
        SweepError: there is no such size.
    """
    if name is None:
        return next(iter(sizes.values()), SizeOptions()), ""
    if name not in sizes:
        there = f"the sizes are {', '.join(sizes)}" if sizes else "this experiment has none"
        raise SweepError(f"size: {name!r} is not a size; {there}")
    return sizes[name], "" if name == next(iter(sizes)) else f"_{name}"


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
