"""Run directories of known outcome, as `fit` leaves them: events and a verdict."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from callbacks import CollapseStop

MAX_STEPS = 100


def write_run(
    experiment: Path,
    arm: str,
    seed: int,
    status: str = "completed",
    logged: dict[str, Any] | None = None,
    **verdict: Any,
) -> Path:
    """A run with simple curves, and a verdict unless the status is `unfinished`.

    Args:
        experiment: Directory of the experiment.
        arm: Name of the arm.
        seed: The seed.
        status: The verdict's status.
        logged: Further tags, each with its values at steps 9, 19, ...; None in place of a tag's values leaves it out.
        verdict: Fields of the verdict other than the usual ones.
    """
    path = experiment / arm / f"seed_{seed}"
    path.mkdir(parents=True)
    count = verdict.get("step", MAX_STEPS) // 10
    curves: dict[str, Any] = {
        "loss/train": [3.0 - 0.1 * index for index in range(count)],
        "sigma/q": [2.0 + 0.2 * index for index in range(count)],
        "logit/max": [5.0 + 10 * index for index in range(count)],
        "collapse/excess": [0.2 * index if status == "collapsed" else 0.0 for index in range(count)],
        **(logged or {}),
    }
    with SummaryWriter(str(path)) as writer:
        for tag, values in curves.items():
            for index, value in enumerate(values if values is not None else ()):
                writer.add_scalar(tag, value, 10 * index + 9)
    if status != "unfinished":
        content = {
            **{"schema": 1, "status": status, "experiment": experiment.name, "arm": arm, "seed": seed},
            **{"step": MAX_STEPS, "max_steps": MAX_STEPS, "collapse_step": None, "guard_step": None, "loss": 2.0},
            **{"min_loss": 1.5, "val_loss": 2.1, "sigma_q": 4.0, "sigma_k": 4.0, "max_logit": 40.0},
            **{"max_logit_peak": 50.0, "seconds": 1.0, "versions": {}, "config_hash": "abc", "error": None},
            **verdict,
        }
        (path / "verdict.json").write_text(json.dumps(content))
    return path


def train(
    experiment: Path,
    arm: str,
    seed: int,
    losses: Sequence[float],
    rule: CollapseStop,
    readings: dict[str, Sequence[float]] | None = None,
    thresholds: dict[str, dict[str, Any]] | None = None,
) -> None:
    """A run that had these losses, judged as it went: everything is logged at every step, after which it can be redone.

    Args:
        experiment: Directory of the experiment.
        arm: Name of the arm.
        seed: The seed.
        losses: Loss of every optimizer step, as it would be without a stop.
        rule: The judge.
        readings: Early-warning readings at every step.
        thresholds: What the verdict says of each reading.
    """
    path = experiment / arm / f"seed_{seed}"
    step = 0
    with SummaryWriter(str(path)) as writer:
        for step, loss in enumerate(losses, start=1):
            rule.judge(loss, step)
            row = {"loss/train": loss, "sigma/q": loss, "logit/max": 10 * loss}
            if rule.current_excess is not None:
                row["collapse/excess"] = rule.current_excess
            row |= {f"warning/{name}": values[step - 1] for name, values in (readings or {}).items()}
            for tag, value in row.items():
                writer.add_scalar(tag, value, step - 1)
            if rule.over:
                break
    fields = {
        key: value if value is None or math.isfinite(value) else str(value) for key, value in _numbers(rule).items()
    }
    verdict = {"schema": 1, "status": rule.status, "step": step, "max_steps": len(losses), **fields}
    verdict |= {
        "sigma_q": losses[step - 1],
        "max_logit": 10 * losses[step - 1],
        "max_logit_peak": 10 * max(losses[:step]),
    }
    (path / "verdict.json").write_text(json.dumps(verdict | {"warnings": thresholds or {}}))


def _numbers(rule: CollapseStop) -> dict[str, float | None]:
    fields = rule.verdict_fields()
    return {key: fields[key] for key in ("collapse_step", "loss", "min_loss")}


def cells(text: str, arm: str, title: str = "## Outcome") -> list[str]:
    """The cells of an arm's row in the Markdown table under a title."""
    table = text[text.index(title) :]
    row = next(line for line in table.splitlines() if line.startswith(f"| {arm} "))
    return [cell.strip() for cell in row.strip("|").split("|")]
