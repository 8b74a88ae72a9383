"""`python -m lightning_qk report`: what the runs of an experiment came to, arm by arm.

The report reads run directories only, never configurations. It writes its tables as `report.md` and `report.tex` and
prints them, with one seed an arm only those that need no more; the numbers go to `report.csv` (one row a run) and
`arms.csv` (one row an arm); the curves to `figure.png` and `figure.svg`, survival to `survival.png` and `survival.svg`;
`coherence.png` and `.svg` are for runs that read the error of their gradient (`ErrorShaping`); `extrapolation.csv`,
`.png` and `.svg` for an experiment that asks for a fit of its collapse steps; and the directory `aggregate/` is for
TensorBoard. A run without a verdict is named as unfinished and never counted; what is missing, broken or not finite is
named too.
"""

from __future__ import annotations

import json
import math
import sys
from argparse import ArgumentError
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from lightning_qk import crash_rule, error_coherence, extrapolation
from lightning_qk.activation import TAGS as LOGITS
from lightning_qk.activation import activation_table, logit_table
from lightning_qk.alarms import PREFIX, alarm_tables, readings
from lightning_qk.complaints import complain
from lightning_qk.crash_rule import Judged, judge_all, rule_table
from lightning_qk.divergence_table import divergence_table
from lightning_qk.error_coherence import Errors
from lightning_qk.events import Scalars, read_history
from lightning_qk.extrapolation import Extrapolation
from lightning_qk.figures import TAGS
from lightning_qk.fork_table import fork_table
from lightning_qk.outcomes import (
    arm_numbers,
    arm_row,
    comparison_table,
    comparisons,
    run_numbers,
    runaway_table,
    survival_row,
)
from lightning_qk.runs import Arm, Run, find_runs, group_arms, pick_opponents, pick_twins
from lightning_qk.scaling_tables import scaling_tables
from lightning_qk.tables import Table, as_csv, as_latex, as_text
from lightning_qk.verdict import encode, write_text_atomic

NAMED = 8
"""Runs that a remark names before it only counts."""


@dataclass(frozen=True)
class Report:
    """All that the outputs are made of.

    Attributes:
        title: Names of the experiments.
        arms: Arms in the order in which they are listed.
        twins: The healthy twin of an arm, by name.
        against: The second arm that an arm is compared with, by name.
        scalars: What each run logged, by run directory and tag.
        judged: The runs under every crash rule.
        errors: The errors of the gradient, of runs that read them.
        compared: Every arm against its `twin`, and `against` the second arm if one was named, by arm.
        extrapolations: What was fitted to the collapse steps, where the experiment asks for it.
        problems: Runs by what is wrong with them.
    """

    title: str
    arms: Sequence[Arm]
    twins: Mapping[str, Arm]
    against: Mapping[str, Arm]
    scalars: Scalars
    judged: Judged
    errors: Errors
    compared: Mapping[str, Mapping[str, Mapping[str, Any]]]
    extrapolations: Sequence[Extrapolation]
    problems: Mapping[str, Sequence[str]]

    @property
    def counted(self) -> list[Arm]:
        return [arm for arm in self.arms if arm.n]

    @property
    def healthy(self) -> set[str]:
        """Names of the arms that are twins."""
        return {twin.name for twin in self.twins.values()}

    @property
    def fitted(self) -> list[Extrapolation]:
        return [one for one in self.extrapolations if one.fits]

    @property
    def figures(self) -> list[str]:
        """Names of the figures that there is something to draw for."""
        there = {"survival": self.counted, "coherence": self.errors, "extrapolation": self.fitted}
        return ["figure", *(name for name, content in there.items() if content)]

    @property
    def one_seed(self) -> bool:
        """Whether no arm has more than one run."""
        return all(len(arm.runs) == 1 for arm in self.arms)


def gather(runs: Sequence[Run], reference: str | None = None, against: str | None = None) -> Report:
    """Read what the runs logged, judge them and compare the arms."""
    arms = group_arms(runs)
    healthy = pick_twins(arms, reference)
    twins = healthy.arms
    second = pick_opponents(arms, twins, against)
    sides = {"twin": twins, "against": second.arms}
    tags = {*TAGS, *LOGITS, crash_rule.TAG, *(PREFIX + name for name in readings(arms)), *error_coherence.tags(runs)}
    histories = {run.path: read_history(run.path, tags) for run in runs}
    problems: dict[str, list[str]] = defaultdict(list)
    for arm in arms:
        for run in arm.runs:
            for problem in (*histories[run.path][1], *_problems(run, histories[run.path][0])):
                problems[problem].append(f"{arm.name}/seed_{run.seed}")
        for problem in _problems_of_arm(arm):
            problems[problem].append(arm.name)
        for side in (healthy, second):
            if arm.n and arm.name in side.arms and not side.arms[arm.name].n:
                problems[f"not compared: {side.arms[arm.name].name} has no run that counts"].append(arm.name)
            if arm.name in side.missing:
                problems[f"not compared: {side.missing[arm.name]} has no runs"].append(arm.name)
    extrapolations = extrapolation.extrapolate(arms)
    for one in extrapolations:
        if one.problem:
            problems[f"not extrapolated to {one.key} = {one.to:g}: {one.problem}"].append(one.arm)
    scalars = {path: history for path, (history, _) in histories.items()}
    return Report(
        title=", ".join(sorted({run.path.parent.parent.name for run in runs})),
        arms=arms,
        twins=twins,
        scalars=scalars,
        judged=judge_all(arms, scalars),
        errors=error_coherence.measure(runs, scalars),
        against=second.arms,
        compared={side: comparisons(arms, others) for side, others in sides.items()},
        extrapolations=extrapolations,
        problems=problems,
    )


def _problems(run: Run, scalars: Mapping[str, Any]) -> Iterator[str]:
    """What is missing in a run, or not finite."""
    if run.moot:
        yield "not counted: began as a run that did not collapse"
    elif not run.counted:
        yield f"not counted: {run.state}" + (f" ({run.problem})" if run.problem else "")
    if not scalars:
        yield "no scalars in its event files"
    for tag in (*TAGS, crash_rule.TAG):
        if scalars and tag not in scalars:
            yield f"did not log {tag}"
    for name in run.warnings:
        if run.counted and PREFIX + name not in scalars:
            yield f"did not log {PREFIX}{name}"
    for suffix in error_coherence.suffixes([run]):
        if run.counted and error_coherence.error_of(run, suffix, scalars) is None:
            yield f"no {error_coherence.COHERENCE}{suffix} of an error before it collapsed or ran away"
    for tag, series in scalars.items():
        if wrong := len(series) - len(series.finite()):
            yield f"{wrong} of {len(series)} values of {tag} are not finite"
    for key in ("step", "max_steps", "loss", *(["collapse_step"] if run.collapsed else [])):
        value = run.number(key)
        if run.counted and value is None:
            yield f"verdict without {key}" + ("; its last step stands in" if key == "collapse_step" else "")
        elif run.counted and value is not None and not math.isfinite(value):
            yield f"verdict: {key} is {value}"


def _problems_of_arm(arm: Arm) -> Iterator[str]:
    """In what its runs differ, besides their seed."""
    for key in ("max_steps", "threads", "versions"):
        kinds = {json.dumps((run.verdict or {}).get(key), sort_keys=True) for run in arm.counted}
        if len(kinds) > 1:
            yield f"runs of different {key} in one arm ({'; '.join(sorted(kinds))})"


def tables(report: Report) -> list[Table]:
    """Outcome, survival, comparisons, other crash rules, logits and early warnings, where there is anything to show."""
    compared = report.compared
    names = sorted(report.healthy)
    found = [
        Table(
            "Outcome",
            [arm_row(arm) for arm in report.arms],
            "Wilson 95 % intervals. Over seeds: mean loss, largest peak logit, median of the rest, [min..max]. A run's "
            "final loss is the mean of its last 50 steps, its peak logit the largest that the monitor saw.",
        ),
        Table(
            "Survival",
            [survival_row(arm) for arm in report.counted] if any(arm.k for arm in report.arms) else [],
            "Kaplan-Meier: the fraction not collapsed at the arm's last step, with Greenwood's 95 % interval on the "
            "log(-log) scale, which is not defined at 0 and 1; runs that ended healthy are censored at their last. "
            "Steps are those since a run began: at step 0, or as a fork of another.",
        ),
        comparison_table(f"Against {names[0] if len(names) == 1 else 'the healthy twin'}", compared["twin"]),
        comparison_table(f"Against {_opponent(compared)}", compared.get("against", {})),
        fork_table(report.arms),
        rule_table(report.arms, report.judged),
        divergence_table(report.arms),
        runaway_table(report.counted, compared),
        error_coherence.error_table(report.counted, report.errors),
        *extrapolation.tables(report.extrapolations),
        logit_table(report.counted),
        activation_table(report.arms, report.twins, report.scalars),
        *alarm_tables(report.arms, report.twins, report.scalars),
        *scaling_tables(report.arms),
    ]
    return [table for table in found if table.rows]


def tables_of_one_seed(report: Report) -> list[Table]:
    """What one seed an arm can tell: outcomes, and fits over the points of a grid, which need no seeds."""
    rows = [{name: cell for name, cell in arm_row(arm).items() if name != "95 % interval"} for arm in report.arms]
    found = [Table("Outcome", rows), *extrapolation.tables(report.extrapolations), *scaling_tables(report.arms)]
    return [table for table in found if table.rows]


def _opponent(compared: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    others = {item["other"] for item in compared.get("against", {}).values()}
    return others.pop() if len(others) == 1 else "the second arm"


def remarks(report: Report) -> str:
    """What is wrong with which runs, one line each."""
    return "".join(
        f"{problem}: {', '.join(names[:NAMED])}{f' and {len(names) - NAMED} more' if len(names) > NAMED else ''}\n"
        for problem, names in report.problems.items()
    )


def numbers(report: Report) -> list[dict[str, Any]]:
    """One row an arm."""
    return [
        arm_numbers(
            arm, report.judged, {side: rows[arm.name] for side, rows in report.compared.items() if arm.name in rows}
        )
        | error_coherence.arm_numbers(arm, report.errors)
        for arm in report.arms
    ]


def as_json(report: Report) -> str:
    """The arms' numbers, every verdict as it was written, and what is wrong."""

    def verdict(run: Run) -> dict[str, Any]:
        return {**(run.verdict or {}), "status": run.state, "seed": run.seed, "path": str(run.path)}

    rows = zip(report.arms, numbers(report), strict=True)
    arms = [row | {"runs": [verdict(run) for run in arm.runs]} for arm, row in rows]
    content = {"healthy": sorted(report.healthy), "arms": arms, "problems": report.problems}
    return json.dumps(encode(content), indent=2, allow_nan=False)


def write(report: Report, out: Path) -> None:
    """Write every output into a directory."""
    from lightning_qk.coherence_figure import draw_coherence
    from lightning_qk.extrapolation_figure import draw_extrapolation
    from lightning_qk.figures import draw
    from lightning_qk.survival_figure import draw_survival
    from lightning_qk.tensorboard_export import export, place

    place(out)  # refuses before anything is written
    out.mkdir(parents=True, exist_ok=True)
    draw(report.arms, report.healthy, report.scalars, out)
    if report.counted:
        draw_survival(report.counted, {**report.against, **report.twins}, report.healthy, out)
    if report.errors:
        draw_coherence(report.arms, report.healthy, report.errors, out)
    if report.fitted:
        draw_extrapolation(report.fitted, out)
        write_text_atomic(out / "extrapolation.csv", as_csv(list(extrapolation.numbers(report.fitted))))
    figures = [out / f"{name}.png" for name in report.figures]
    export(report.arms, report.scalars, figures, out)
    content = tables(report)
    images = "\n\n".join(f"![{path.stem} of {report.title}]({path.name})" for path in figures)
    parts = [f"# {report.title}", images, as_text(content, markdown=True)]
    if report.problems:
        parts += ["## Remarks", "\n".join(f"- {line}" for line in remarks(report).splitlines())]
    write_text_atomic(out / "report.md", "\n\n".join(parts) + "\n")
    write_text_atomic(out / "report.tex", as_latex(content))
    rows = [
        run_numbers(arm, run, report.judged) | error_coherence.run_numbers(run, report.errors)
        for arm in report.arms
        for run in arm.runs
    ]
    write_text_atomic(out / "report.csv", as_csv(rows))
    write_text_atomic(out / "arms.csv", as_csv(numbers(report)))


def make_report(
    directories: Sequence[Path], out: Path | None = None, reference: str | None = None, against: str | None = None
) -> tuple[Report, Path]:
    """Read the runs and write every output.

    Args:
        directories: Experiment, arm or run directories.
        out: Where to write; the experiment's directory by default, if that is what is reported.
        reference: The arm that the others are compared with, in place of the twins that the sweep named.
        against: A second arm to compare them with.

    Returns:
        The report and the directory that it was written to.
    """
    runs = find_runs(directories)
    experiments = {run.path.parent.parent for run in runs}
    if out is None and len(experiments) > 1:
        raise ValueError(f"{len(experiments)} experiments in one report: say where to write it with --out DIR")
    given = {directory.resolve() for directory in directories}
    if out is None and not any(given & {one, *one.parents} for one in experiments):
        raise ValueError(
            f"{directories[0]} is only a part of {experiments.pop()}, whose report would be replaced: "
            "say where to write with --out DIR"
        )
    out = out if out is not None else experiments.pop()
    report = gather(runs, reference, against)
    write(report, out)
    return report, out


def main(args: list[str] | None = None) -> int:
    """Entry point of `python -m lightning_qk report`; returns the exit code."""
    parser = ArgumentParser(
        prog="python -m lightning_qk report", description=__doc__, exit_on_error=False, allow_abbrev=False
    )
    parser.add_argument("dirs", type=str, nargs="+", help="experiment, arm or run directories, e.g. runs/demo")
    parser.add_argument(
        "--out",
        type=str | None,
        default=None,
        help="where to write; default: the experiment directory, given whole",
    )
    parser.add_argument("--reference", type=str | None, default=None, help="the arm to compare the others with")
    parser.add_argument(
        "--against", type=str | None, default=None, help="a second arm to compare them with, e.g. fault"
    )
    parser.add_argument("--format", choices=["table", "json"], default="table", help="what to print")
    try:
        options = parser.parse_args(args)
        directories = [Path(path) for path in options.dirs]
        out = Path(options.out) if options.out is not None else None
        report, out = make_report(directories, out, options.reference, options.against)
    except (ArgumentError, ValueError, OSError) as error:
        return complain(error, sys.argv[1:] if args is None else args)
    if options.format == "json":
        print(as_json(report))
    else:
        print(as_text(tables_of_one_seed(report) if report.one_seed else tables(report)))
        print(f"\n{remarks(report)}")
        if report.one_seed:
            print("One seed an arm has no statistics; for them: sweep with --seeds 0,1,2,3,4.")
        print(f"figures: {', '.join(str(out / f'{name}.png') for name in report.figures)}, and each as .svg")
        more = ", extrapolation.csv" if report.fitted else ""
        print(f"written to {out}: report.md, report.tex, report.csv, arms.csv{more}, aggregate/")
    return 0
