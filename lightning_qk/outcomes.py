"""What the arms came to, alone and against each other: the rows of the report's tables and of its CSV files."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lightning_qk.crash_rule import RULES, Judged
from lightning_qk.runs import Arm, Run
from lightning_qk.statistics import (
    BOOTSTRAP_SEED,
    FEWEST_PAIRS,
    RESAMPLES,
    bootstrap_mean,
    fisher,
    holm,
    kaplan_meier,
    log_rank,
    newcombe,
    wilson,
)
from lightning_qk.tables import Table, p_value, short, spread

RUNAWAY = (100, 1_000, 10_000)
"""Largest logits that count as run away."""

TESTED_RUNAWAY = 1_000
"""The one whose rates the arms are compared by."""

KEYS = (
    *("step", "max_steps", "collapse_step", "guard_step", "loss", "min_loss", "val_loss", "sigma_q", "sigma_k"),
    *("max_logit", "max_logit_peak", "seconds", "config_hash", "error"),
)
"""What the table of runs takes from a verdict."""


def interval(limits: tuple[float, float], sign: str = "") -> str:
    """Limits to two decimals; a dash where they are not defined."""
    low, high = limits
    return f"{low:{sign}.2f}..{high:{sign}.2f}" if low == low else "-"


def arm_row(arm: Arm) -> dict[str, str]:
    """The cells of one arm, by column heading."""
    rate = f"{arm.k}/{arm.n}" + (f" ({arm.nonfinite} not finite)" if arm.nonfinite else "")
    guards = arm.values("guard_step")
    return {
        "arm": arm.name,
        "collapsed": rate if arm.n else "-",
        "95 % interval": interval(wilson(arm.k, arm.n)) if arm.n else "-",
        "collapse step": spread(arm.values("collapse_step"), statistics.median),
        "final loss": spread(arm.values("loss"), statistics.fmean),
        "sigma_q": spread(arm.values("sigma_q"), statistics.median),
        "max logit": spread(arm.values("max_logit"), statistics.median),
        "peak logit": short(float(np.max(peaks))) if (peaks := arm.values("max_logit_peak")) else "-",
        "guard fired": f"{len(guards)}/{arm.n} at {spread(guards, statistics.median)}" if guards else "-",
    }


def survival_row(arm: Arm) -> dict[str, str]:
    """The Kaplan-Meier curve of an arm with counted runs, at its end and where half have collapsed."""
    curve = kaplan_meier(arm.lifetimes)
    median = curve.median()
    return {
        "arm": arm.name,
        "runs": str(arm.n),
        "collapsed": str(arm.k),
        "last step": short(curve.steps[-1]),
        "survival there": f"{curve.fraction[-1]:.2f}",
        "95 % interval": interval((curve.low[-1], curve.high[-1])),
        "half collapsed by step": "-" if median is None else short(median),
    }


def pairs(arm: Arm, other: Arm) -> list[tuple[Run, Run]]:
    """The counted runs with the same seed."""
    theirs = {run.seed: run for run in other.counted}
    return [(run, theirs[run.seed]) for run in arm.counted if run.seed in theirs]


def paired(arm: Arm, other: Arm, key: str) -> list[float]:
    """A number of the verdict less the other's, over the seeds that both have."""
    numbers = [(run.number(key), twin.number(key)) for run, twin in pairs(arm, other)]
    return [a - b for a, b in numbers if a is not None and b is not None]


def compare(arm: Arm, other: Arm) -> dict[str, Any]:
    """Every number that compares two arms with counted runs."""
    losses, validations = paired(arm, other, "loss"), paired(arm, other, "val_loss")
    usable, usable_validations = ([loss for loss in side if abs(loss) < float("inf")] for side in (losses, validations))
    ran_away, others = runaways(arm, TESTED_RUNAWAY), runaways(other, TESTED_RUNAWAY)
    return {
        "other": other.name,
        "rate_difference": arm.k / arm.n - other.k / other.n,
        "rate_interval": newcombe(arm.k, arm.n, other.k, other.n),
        "fisher": fisher(arm.k, arm.n, other.k, other.n),
        "log_rank": log_rank(arm.lifetimes, other.lifetimes),
        "losses": losses,
        "loss_difference": statistics.fmean(usable) if usable else None,
        "loss_interval": bootstrap_mean(usable),
        "validations": validations,
        "val_loss_difference": statistics.fmean(usable_validations) if usable_validations else None,
        "val_loss_interval": bootstrap_mean(usable_validations),
        "pairs": len(losses),
        "pairs_used": len(usable),
        "pairs_early": sum(a.ended_early or b.ended_early for a, b in pairs(arm, other)),
        "fisher_least": fisher(arm.n, arm.n, 0, other.n),
        "runaway_fisher": fisher(*ran_away, *others) if ran_away[1] and others[1] else None,
    }


def comparisons(arms: Sequence[Arm], others: Mapping[str, Arm]) -> dict[str, dict[str, Any]]:
    """Every arm against its counterpart, with Holm's correction over all of them."""
    pairs = [(arm, others[arm.name]) for arm in arms if arm.name in others and arm is not others[arm.name]]
    found = {arm.name: compare(arm, other) for arm, other in pairs if arm.n and other.n}
    for test in ("fisher", "runaway_fisher"):
        tested = [item for item in found.values() if item[test] is not None]
        for item, p in zip(tested, holm([item[test] for item in tested]), strict=True):
            item[f"{test}_holm"] = p
    return found


def comparison_table(title: str, compared: Mapping[str, Mapping[str, Any]]) -> Table:
    """Rates, survival and losses against the counterparts."""
    several = len({item["other"] for item in compared.values()}) > 1
    early = any(item["pairs_early"] for item in compared.values())
    validated = any(item["validations"] for item in compared.values())
    least = min((item["fisher_least"] for item in compared.values()), default=1.0) * len(compared)
    rows = [
        {
            "arm": name,
            **({"against": item["other"]} if several else {}),
            "collapse rate": f"{item['rate_difference']:+.2f}",
            "95 % (rate)": interval(item["rate_interval"], "+"),
            "Fisher p": p_value(item["fisher"]),
            "Holm": p_value(item["fisher_holm"]),
            "log-rank p": p_value(item["log_rank"]),
            "final loss": spread(item["losses"], statistics.fmean),
            "95 % (loss)": _short_interval(item["loss_interval"]),
            **({"validation loss": spread(item["validations"], statistics.fmean)} if validated else {}),
            **({"95 % (validation)": _short_interval(item["val_loss_interval"])} if validated else {}),
            "paired seeds": str(item["pairs_used"])
            + (f" of {item['pairs']}" if item["pairs_used"] < item["pairs"] else ""),
            **({"ended early": str(item["pairs_early"])} if early else {}),
        }
        for name, item in compared.items()
    ]
    return Table(
        title,
        rows,
        "Differences: collapse rates with Newcombe's interval; final and validation losses over the seeds that both "
        f"have, mean and range, with a percentile bootstrap of the mean ({RESAMPLES:,} resamples, seed "
        f"{BOOTSTRAP_SEED}; none below {FEWEST_PAIRS} pairs). Validation is without the fault unless a plugin's "
        "faults_in_validation is set. A bootstrap interval never leaves the range of the pairs, so whatever its name "
        "it covers at most 75 % at 3 pairs, 88 % at 4, 94 % at 5. Fisher: two-sided, every run on its own; with n runs "
        "a side never below 0.10 at 3, 0.029 at 4, 0.0079 at 5. Holm: that p corrected for the table's "
        f"{len(rows)} tests, the least of which is never below {p_value(min(1.0, least))} with these numbers of runs. "
        "The log-rank p is not corrected, and only rough for few collapses."
        + (
            " Ended early: pairs with a run that stopped before its last step, whose final loss is of another step."
            if early
            else ""
        ),
    )


def _short_interval(limits: tuple[float, float] | None) -> str:
    return "..".join(map(short, limits)) if limits else "-"


def ran_away(run: Run, size: float) -> bool | None:
    """Whether the largest logit passed a size, None where it is not known; one that is not finite passed any."""
    peak = run.number("max_logit_peak")
    return None if peak is None else not peak <= size


def runaways(arm: Arm, size: float) -> tuple[int, int]:
    """How many runs' largest logit passed a size, of how many."""
    known = [passed for run in arm.counted if (passed := ran_away(run, size)) is not None]
    return sum(known), len(known)


def runaway_row(arm: Arm, compared: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, str]:
    """How often the largest logit passed some sizes, whatever the loss did, and the test of one against the others."""
    row = {"arm": arm.name}
    for size in RUNAWAY:
        k, n = runaways(arm, size)
        row[f"logit > {size:,}"] = f"{k}/{n} ({interval(wilson(k, n))})"
    for side, items in compared.items():
        item = items.get(arm.name, {})
        row |= {
            side: item.get("other", "-"),
            f"Fisher p ({side})": p_value(item.get("runaway_fisher")),
            f"Holm ({side})": p_value(item.get("runaway_fisher_holm")),
        }
    return row


def runaway_table(arms: Sequence[Arm], compared: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Table:
    """Logits that ran away, arm by arm, with the comparisons of both sides (`twin`, and `against` if there is one)."""
    compared = {side: items for side, items in compared.items() if items}
    return Table(
        "Logits ran away",
        [runaway_row(arm, compared) for arm in arms if arm.values("max_logit_peak")],
        "By the largest one of the run; Wilson 95 % intervals. Fisher: two-sided, of the rates of "
        f"logits above {TESTED_RUNAWAY:,}; Holm: that p corrected for the tests of its column.",
    )


def run_numbers(arm: Arm, run: Run, judged: Judged) -> dict[str, Any]:
    """A row of `report.csv`: the verdict's own numbers, and the collapse step under every rule."""
    by_rule = judged.get(run.path)
    return {
        **{"arm": arm.name, "seed": run.seed, "status": run.state},
        **{key: (run.verdict or {}).get(key) for key in KEYS},
        **{f"collapse {rule}": None if by_rule is None else by_rule[rule].cell() for rule in RULES},
    }


def arm_numbers(arm: Arm, judged: Judged, against: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A row of `arms.csv`.

    Args:
        arm: The arm.
        judged: Its runs under every crash rule.
        against: What it is compared with, `twin` or `against`, to the numbers of that comparison, where there are any.
    """
    steps, (low, high) = arm.values("collapse_step"), wilson(arm.k, arm.n)
    curve = kaplan_meier(arm.lifetimes) if arm.n else None
    row: dict[str, Any] = {
        **{"arm": arm.name, "runs": len(arm.runs), "counted": arm.n, "collapsed": arm.k, "nonfinite": arm.nonfinite},
        **{"wilson_low": low if arm.n else None, "wilson_high": high if arm.n else None},
        **{"collapse_step_median": statistics.median(steps) if steps else None},
        **{"collapse_step_min": min(steps, default=None), "collapse_step_max": max(steps, default=None)},
        "last_step": curve.steps[-1] if curve else None,
        "survival": curve.fraction[-1] if curve else None,
        "survival_low": curve.low[-1] if curve and curve.low[-1] == curve.low[-1] else None,
        "survival_high": curve.high[-1] if curve and curve.high[-1] == curve.high[-1] else None,
        "survival_median_step": curve.median() if curve else None,
    }
    for key in ("loss", "sigma_q", "max_logit", "max_logit_peak"):
        values = arm.values(key)
        row[f"{key}_mean"] = float(np.mean(values)) if values else None  # nan if one of them is
        row[f"{key}_median"] = float(np.median(values)) if values else None
    ran_away, logged = runaways(arm, TESTED_RUNAWAY)
    row |= {"logits_logged": logged, f"logit_above_{TESTED_RUNAWAY}": ran_away}
    row["judged"] = sum(run.path in judged for run in arm.counted)
    for rule in RULES:
        found = [judged[run.path][rule].collapsed for run in arm.counted if run.path in judged]
        row |= {f"collapsed {rule}": found.count(True), f"open {rule}": found.count(None)}
    for side in ("twin", "against"):
        item = against.get(side, {})
        rate_low, rate_high = item.get("rate_interval") or (None, None)
        loss_low, loss_high = item.get("loss_interval") or (None, None)
        val_low, val_high = item.get("val_loss_interval") or (None, None)
        row |= {
            **{side: item.get("other"), f"{side}_rate_difference": item.get("rate_difference")},
            **{f"{side}_rate_low": rate_low, f"{side}_rate_high": rate_high},
            **{f"{side}_fisher": item.get("fisher"), f"{side}_fisher_holm": item.get("fisher_holm")},
            **{
                f"{side}_log_rank": item.get("log_rank"),
                f"{side}_pairs": item.get("pairs"),
                f"{side}_pairs_used": item.get("pairs_used"),
            },
            **{f"{side}_loss_difference": item.get("loss_difference")},
            **{f"{side}_loss_low": loss_low, f"{side}_loss_high": loss_high},
            **{f"{side}_val_loss_difference": item.get("val_loss_difference")},
            **{f"{side}_val_loss_low": val_low, f"{side}_val_loss_high": val_high},
            **{f"{side}_{test}": item.get(test) for test in ("runaway_fisher", "runaway_fisher_holm")},
        }
    return row
