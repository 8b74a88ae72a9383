"""How much every verdict depends on the crash rule.

The rule of arXiv 2608.02091 has two constants, T and M < T. With m(t) the mean loss of the last optimizer steps and
e(t) = m(t) - min over s <= t of m(s) its excess over the running minimum, a run has collapsed if e passes T and never
comes back to M or below; the collapse step is where it passed T. `callbacks.CollapseStop` judges so step by step while
a run trains, and logs e as `collapse/excess`; here any other rule is read from that series. e is known where it was
logged only: a spike between two logged steps is not seen, and a collapse step is late by up to that distance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lightning_qk.events import Scalars, Series
from lightning_qk.runs import Arm, Run
from lightning_qk.tables import Table

TAG = "collapse/excess"


class Rule(NamedTuple):
    """Nats over the running minimum that begin a collapse, and nats over it that count as recovered."""

    excess: float
    margin: float

    def __str__(self) -> str:
        return f"{self.excess:g}/{self.margin:g}"


PROXIES = (Rule(0.5, 0.25), Rule(0.75, 0.375))
RULES = (
    *PROXIES,
    *(Rule(excess, margin) for excess in (1.0, 1.5, 2.0) for margin in (0.5, 0.75, 1.0) if margin < excess),
)


class Judgement(NamedTuple):
    """What a run came to under a rule: collapsed or not (None: it was stopped before it could show), and where."""

    collapsed: bool | None
    step: float | None = None

    def cell(self) -> str:
        """For the table of runs: the collapse step, `?` where it can not be known, empty where there is none."""
        return "?" if self.collapsed is None else "" if self.step is None else f"{self.step:g}"


def onset(excess: Series, rule: Rule) -> float | None:
    """The step at which the excess passed the rule's threshold for good; None if it did not, or came back.

    A value that is not a number neither passes nor comes back.
    """
    back = np.flatnonzero(excess.values <= rule.margin)
    since = back[-1] + 1 if len(back) else 0
    above = np.flatnonzero(excess.values[since:] > rule.excess)
    return float(excess.steps[since + above[0]]) if len(above) else None


def judge(run: Run, excess: Series, rule: Rule) -> Judgement:
    """Judge a counted run by another rule; one whose loss was not finite has collapsed under any."""
    found = onset(excess, rule)
    if found is not None:
        return Judgement(True, found + 1)  # what follows optimizer step s is logged at s - 1
    if run.state == "nonfinite":
        return Judgement(True, run.number("nonfinite_step") or run.number("step"))  # its own rule's step is no other's
    return Judgement(None if run.collapsed and run.ended_early else False)


Judged = Mapping[Path, Mapping[Rule, Judgement]]
"""Runs under every rule, by run directory; runs that are not counted or did not log their excess are not in it."""


def judge_all(arms: Sequence[Arm], scalars: Scalars) -> Judged:
    """Every counted run that logged its excess, under every rule."""
    runs = [run for arm in arms for run in arm.counted if TAG in scalars[run.path]]
    return {run.path: {rule: judge(run, scalars[run.path][TAG], rule) for rule in RULES} for run in runs}


def rule_row(arm: Arm, judged: Judged) -> dict[str, str]:
    """How many collapsed under every rule, and how many verdicts some rule turns over."""
    runs = [run for run in arm.counted if run.path in judged]
    row = {"arm": arm.name}
    for rule in RULES:
        found = [judged[run.path][rule].collapsed for run in runs]
        row[str(rule)] = f"{found.count(True)}/{len(runs)}" + (f" +{found.count(None)}?" if None in found else "")
    turned = [
        run for run in runs if any(item.collapsed not in (run.collapsed, None) for item in judged[run.path].values())
    ]
    return row | {"turned over": f"{len(turned)}/{len(runs)}"}


def rule_table(arms: Sequence[Arm], judged: Judged) -> Table:
    """The counts of collapses under every rule, arm by arm."""
    return Table(
        "Collapsed under other crash rules",
        [rule_row(arm, judged) for arm in arms if any(run.path in judged for run in arm.runs)],
        "T/M: the excess over the running minimum, as logged, passes T nat and never comes back to M. "
        "+n?: n more were stopped at their collapse, before they could show it. Turned over: verdicts that some rule "
        f"here changes. The paper's rule is 1.5/0.75, the proxies' {PROXIES[1]}.",
    )
