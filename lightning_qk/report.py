"""`python -m lightning_qk report`: what the runs of an experiment came to, arm by arm.

The report reads run directories only, never configurations. It prints a table and writes `report.md` (the same
tables), `report.csv` (one row a run) and `figure.png`/`figure.svg`. A run without a verdict is named as unfinished and
never counted.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentError
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser

from lightning_qk.events import read_scalars
from lightning_qk.runs import find_runs, group_arms, pick_reference
from lightning_qk.tables import as_csv, as_json, report_text


def write_text_atomic(path: Path, text: str) -> None:
    """Write a file so that a reader finds the old text or the new, never half of one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


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
