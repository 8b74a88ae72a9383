"""`python -m lightning_qk report`: what the runs of an experiment came to, arm by arm.

The report reads run directories only, never configurations. It prints a table and writes `report.md` (the same
tables), `report.csv` (one row a run) and `figure.png`/`figure.svg`. A run without a verdict is named as unfinished and
never counted.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import statistics
import sys
from argparse import ArgumentError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from lightning_qk.events import Series, read_scalars
from lightning_qk.verdict import read_verdict

THRESHOLDS = (0.5, 1.0, 1.5, 2.0)
"""Nats over the running minimum at which the report judges every run again."""

CSV_KEYS = (
    *("step", "max_steps", "collapse_step", "guard_step", "loss", "min_loss", "val_loss", "sigma_q", "sigma_k"),
    *("max_logit", "max_logit_peak", "seconds", "config_hash", "error"),
)
Scalars = Mapping[Path, Mapping[str, Series]]
"""What each run logged, by run directory and tag."""

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


def wilson(k: int, n: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """Wilson score interval of a rate, 95 % by default; (0, 1) where nothing was observed."""
    if n == 0:
        return 0.0, 1.0
    rate, z2 = k / n, z * z
    centre = (rate + z2 / (2 * n)) / (1 + z2 / n)
    half = z / (1 + z2 / n) * math.sqrt(rate * (1 - rate) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def newcombe(k1: int, n1: int, k2: int, n2: int) -> tuple[float, float]:
    """Newcombe's 95 % interval of the difference k1/n1 - k2/n2, built from both Wilson intervals."""
    rate1, rate2, (low1, high1), (low2, high2) = k1 / n1, k2 / n2, wilson(k1, n1), wilson(k2, n2)
    difference = rate1 - rate2
    return (
        difference - math.hypot(rate1 - low1, high2 - rate2),
        difference + math.hypot(high1 - rate1, rate2 - low2),
    )


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


# ---- formatting ----------------------------------------------------------------------------------------------------


def short(value: float) -> str:
    """About three significant digits: 0.0443, 3.21, 81.2, 378,880."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:#.3g}"


def spread(values: Sequence[float], middle: Callable[[Sequence[float]], float]) -> str:
    """The middle and, over values that differ, the range; values that are not finite are counted apart."""
    usable = [value for value in values if math.isfinite(value)]
    text = short(middle(usable)) if usable else ""
    if len(set(usable)) > 1:
        text += f" [{short(min(usable))}..{short(max(usable))}]"
    if missing := len(values) - len(usable):
        text = f"{text} + {missing} not finite" if text else "not finite"
    return text or "-"


def arm_row(arm: Arm) -> dict[str, str]:
    """The cells of one arm, by column heading."""
    low, high = wilson(arm.k, arm.n)
    rate = f"{arm.k}/{arm.n}" + (f" ({arm.nonfinite} not finite)" if arm.nonfinite else "")
    guards = arm.values("guard_step")
    return {
        "arm": arm.name,
        "collapsed": rate if arm.n else "-",
        "95 % interval": f"{low:.2f}..{high:.2f}" if arm.n else "-",
        "collapse step": spread(arm.values("collapse_step"), statistics.median),
        "final loss": spread(arm.values("loss"), statistics.fmean),
        "sigma_q": spread(arm.values("sigma_q"), statistics.median),
        "max logit": spread(arm.values("max_logit"), statistics.median),
        "peak logit": short(max(peaks)) if (peaks := arm.values("max_logit_peak")) else "-",
        "guard fired": f"{len(guards)}/{arm.n} at {spread(guards, statistics.median)}" if guards else "-",
    }


def reference_row(arm: Arm, reference: Arm) -> dict[str, str]:
    """How an arm differs from the healthy twin: in its collapse rate, and in loss over the seeds that both have."""
    mine, theirs = ({run.seed: run.number("loss") for run in side.counted} for side in (arm, reference))
    pairs = [(a, b) for seed, a in mine.items() if a is not None and (b := theirs.get(seed)) is not None]
    low, high = newcombe(arm.k, arm.n, reference.k, reference.n)
    return {
        "arm": arm.name,
        f"collapse rate - {reference.name}": f"{arm.k / arm.n - reference.k / reference.n:+.2f}",
        "95 % interval ": f"{low:+.2f}..{high:+.2f}",
        f"final loss - {reference.name}": spread([a - b for a, b in pairs], statistics.fmean),
        "paired seeds": str(len(pairs)),
    }


def threshold_row(arm: Arm, scalars: Scalars) -> dict[str, str] | None:
    """The count of collapses at other thresholds: the excess passes T and never comes back to T/2.

    A run that was stopped at its collapse can not show how far it would have risen: `+1?` counts it apart. None where a
    run did not log its excess.
    """
    judged = [(run, scalars[run.path].get("collapse/excess")) for run in arm.counted if run.state != "nonfinite"]
    row = {"arm": arm.name}
    for threshold in THRESHOLDS:
        certain, open_ended = arm.nonfinite, 0
        for run, excess in judged:
            if excess is None:
                return None
            if stays_above(excess, threshold):
                certain += 1
            elif run.collapsed and (run.number("step") or 0) < (run.number("max_steps") or 0):
                open_ended += 1
        row[f"{threshold:g} nat"] = f"{certain}/{arm.n}" + (f" +{open_ended}?" if open_ended else "")
    return row


def stays_above(excess: Series, threshold: float) -> bool:
    """Whether the excess passes the threshold and never again falls to half of it."""
    values = excess.values
    back = [index for index, value in enumerate(values) if value <= threshold / 2]
    return bool((values[back[-1] + 1 if back else 0 :] > threshold).any())


def as_table(rows: Sequence[Mapping[str, str]], markdown: bool = False) -> str:
    """Rows under their headings, as aligned text or as a Markdown table (which is aligned text with rules)."""
    headings = list(dict.fromkeys(heading for row in rows for heading in row))
    cells = [
        [heading.strip() for heading in headings],
        *([row.get(heading, "-") for heading in headings] for row in rows),
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(headings))]
    lines = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in cells]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(("| " + " | ".join(line) + " |") if markdown else "  ".join(line).rstrip() for line in lines)


def report_text(arms: Sequence[Arm], reference: Arm | None, scalars: Scalars, markdown: bool = False) -> str:
    """The whole report: outcome, differences from the reference, other thresholds, and what was not counted."""
    counted = [arm for arm in arms if arm.n]
    parts = [
        as_table([arm_row(arm) for arm in arms], markdown),
        "Wilson 95 % intervals. Over seeds: mean loss, largest peak logit, median of the rest, [min..max].",
    ]
    others = [arm for arm in counted if arm is not reference]
    if reference is not None and reference.n and others:
        title = f"Against {reference.name} (rates with Newcombe 95 % intervals, losses over paired seeds)"
        parts += [title, as_table([reference_row(arm, reference) for arm in others], markdown)]
    thresholds = [row for arm in counted if (row := threshold_row(arm, scalars)) is not None]
    if thresholds:
        title = "Collapsed if the threshold were (+n?: n more were stopped before they could show it)"
        parts += [title, as_table(thresholds, markdown)]
    left_out = [(arm, run) for arm in arms for run in arm.runs if not run.counted]
    parts += [f"Not counted: {arm.name}/seed_{run.seed} is {run.state}{_reason(run)}" for arm, run in left_out]
    return "\n\n".join(parts) + "\n"


def _reason(run: Run) -> str:
    error = str((run.verdict or {}).get("error") or "").strip()
    return f" ({error.splitlines()[-1]})" if error else ""


def as_csv(arms: Sequence[Arm]) -> str:
    """One row a run, unfinished and failed ones included, with the verdict's own numbers."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["arm", "seed", "status", *CSV_KEYS])
    for arm in arms:
        for run in arm.runs:
            writer.writerow([arm.name, run.seed, run.state, *((run.verdict or {}).get(key) for key in CSV_KEYS)])
    return buffer.getvalue()


def as_json(arms: Sequence[Arm], reference: Arm | None) -> str:
    """Counts and intervals by arm, and every verdict as it was written."""
    summary = [
        {
            "arm": arm.name,
            "collapsed": arm.k,
            "n": arm.n,
            "nonfinite": arm.nonfinite,
            "interval": wilson(arm.k, arm.n),
            "runs": [
                {**(run.verdict or {}), "status": run.state, "seed": run.seed, "path": str(run.path)}
                for run in arm.runs
            ],
        }
        for arm in arms
    ]
    return json.dumps({"reference": reference.name if reference else None, "arms": summary}, indent=2)


# ---- command -------------------------------------------------------------------------------------------------------


def write_text_atomic(path: Path, text: str) -> None:
    """Write a file so that a reader finds the old text or the new, never half of one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


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


def make_report(
    directories: Sequence[Path], out: Path | None = None, reference: str | None = None
) -> tuple[str, str, Path]:
    """Read the runs and write `report.md`, `report.csv`, `figure.png` and `figure.svg`.

    Args:
        directories: Experiment, arm or run directories.
        out: Where to write; the experiment's directory by default.
        reference: The arm that the others are compared with.

    Returns:
        The text for the terminal, the same as JSON, and the path of the figure.
    """
    from lightning_qk.figures import TAGS, draw

    runs = find_runs(directories)
    experiments = {run.path.parent.parent for run in runs}
    if out is None and len(experiments) > 1:
        raise ValueError(f"{len(experiments)} experiments in one report: say where to write it with --out DIR")
    out = out if out is not None else experiments.pop()
    arms = group_arms(runs)
    twin = pick_reference(arms, reference)
    scalars = {run.path: read_scalars(run.path, (*TAGS, "collapse/excess")) for run in runs}

    out.mkdir(parents=True, exist_ok=True)
    draw(arms, twin, scalars, out)
    title = ", ".join(sorted({run.path.parent.parent.name for run in runs}))
    body = report_text(arms, twin, scalars, markdown=True)
    write_text_atomic(out / "report.md", f"# {title}\n\n![{title}](figure.png)\n\n{body}")
    write_text_atomic(out / "report.csv", as_csv(arms))
    return report_text(arms, twin, scalars), as_json(arms, twin), out / "figure.png"


def main(args: list[str] | None = None) -> int:
    """Entry point of `python -m lightning_qk report`; returns the exit code."""
    parser = ArgumentParser(
        prog="python -m lightning_qk report", description=__doc__, exit_on_error=False, allow_abbrev=False
    )
    parser.add_argument("dirs", type=str, nargs="+", help="experiment, arm or run directories, e.g. runs/demo")
    parser.add_argument(
        "--out", type=str | None, default=None, help="where to write; default: the experiment directory"
    )
    parser.add_argument("--reference", type=str | None, default=None, help="the arm to compare the others with")
    parser.add_argument("--format", choices=["table", "json"], default="table", help="what to print")
    try:
        options = parser.parse_args(args)
        out = Path(options.out) if options.out is not None else None
        text, data, figure = make_report([Path(path) for path in options.dirs], out, options.reference)
    except (ArgumentError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.format == "json":
        print(data)
    else:
        print(f"{text}\nwritten: {figure}, report.md, report.csv")
    return 0
