"""The report's tables: rows of an arm's numbers, as text, Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lightning_qk.events import Series
from lightning_qk.intervals import newcombe, wilson
from lightning_qk.runs import Arm, Run

THRESHOLDS = (0.5, 1.0, 1.5, 2.0)
"""Nats over the running minimum at which the report judges every run again."""

RUNAWAY = (100, 1_000, 10_000)
"""Largest logits that count as run away."""

CSV_KEYS = (
    *("step", "max_steps", "collapse_step", "guard_step", "loss", "min_loss", "val_loss", "sigma_q", "sigma_k"),
    *("max_logit", "max_logit_peak", "seconds", "config_hash", "error"),
)
Scalars = Mapping[Path, Mapping[str, Series]]
"""What each run logged, by run directory and tag."""


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


def runaway_row(arm: Arm) -> dict[str, str]:
    """How often the largest logit passed some sizes, whatever the loss did. One that is not finite passed them all."""
    peaks = arm.values("max_logit_peak")
    row = {"arm": arm.name}
    for size in RUNAWAY:
        k = sum(not peak <= size for peak in peaks)
        low, high = wilson(k, len(peaks))
        row[f"logit > {size:,}"] = f"{k}/{len(peaks)} ({low:.2f}..{high:.2f})"
    return row


def warning_rows(arm: Arm) -> list[dict[str, str]]:
    """For every early-warning monitor that had a threshold: how often it raised an alarm, when, and how far ahead.

    In runs that collapsed an alarm is a warning if it came before; in the others it is a false one.
    """
    readings = list(dict.fromkeys(name for run in arm.counted for name in run.warnings))
    rows = []
    for name in readings:
        seen = [(run, run.warnings[name]) for run in arm.counted if name in run.warnings]
        seen = [(run, warning) for run, warning in seen if warning["threshold"] is not None]
        if not seen:
            continue
        alarms = [(run, warning) for run, warning in seen if warning["alarm_step"] is not None]
        leads = [warning["lead_steps"] for _, warning in alarms if warning["lead_steps"] is not None]
        collapsed = sum(run.collapsed for run, _ in seen)
        rows.append(
            {
                "arm": arm.name,
                "reading": name,
                "threshold": short(seen[0][1]["threshold"]),
                "alarms": f"{len(alarms)}/{len(seen)}",
                "alarm step": spread([warning["alarm_step"] for _, warning in alarms], statistics.median),
                "warned of collapses": f"{sum(lead > 0 for lead in leads)}/{collapsed}" if collapsed else "-",
                "steps ahead": spread(leads, statistics.median),
                "false alarms": f"{sum(not run.collapsed for run, _ in alarms)}/{len(seen) - collapsed}",
            }
        )
    return rows


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
    runaways = [runaway_row(arm) for arm in counted if arm.values("max_logit_peak")]
    if runaways:
        parts += ["Logits ran away (largest one of the run, as it was sampled)", as_table(runaways, markdown)]
    warnings = [row for arm in counted for row in warning_rows(arm)]
    if warnings:
        parts += ["Early warnings", as_table(warnings, markdown)]
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
