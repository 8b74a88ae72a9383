"""Every verdict under other crash rules: the offline rule is CollapseStop's."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from made_up_runs import cells, write_run

from callbacks import CollapseStop
from lightning_qk.crash_rule import RULES, Rule, onset
from lightning_qk.events import Series
from lightning_qk.report import make_report


def series(values: list[float]) -> Series:
    return Series(np.arange(len(values), dtype=float), np.array(values, dtype=float))


def test_rules_are_those_of_the_table() -> None:
    assert [str(rule) for rule in RULES] == [
        *("0.5/0.25", "0.75/0.375", "1/0.5", "1/0.75", "1.5/0.5", "1.5/0.75", "1.5/1", "2/0.5", "2/0.75", "2/1")
    ]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_offline_rule_is_the_online_one(rule: Rule, seed: int) -> None:
    draw = np.random.default_rng(seed)
    losses = 4 + np.cumsum(draw.normal(0, 0.35, 300)) + draw.normal(0, 0.5, 300)
    judge = CollapseStop(excess=rule.excess, margin=rule.margin, window=10, stop=False)
    steps, excess = [], []
    for step, loss in enumerate(losses.tolist(), start=1):
        judge.judge(loss, step)
        steps.append(step)
        excess.append(max(0.0, judge._mean() - judge._minimum))
        found = onset(Series(np.array(steps, dtype=float), np.array(excess)), rule)
        assert found == judge._onset, f"after step {step}"


def test_both_outcomes_are_in_the_test_above() -> None:
    found = []
    for seed in range(12):
        draw = np.random.default_rng(seed)
        judge = CollapseStop(excess=1.5, margin=0.75, stop=False)
        for step, loss in enumerate((4 + np.cumsum(draw.normal(0, 0.35, 300)) + draw.normal(0, 0.5, 300)).tolist()):
            judge.judge(loss, step)
        found.append((judge.status, judge._recovered > 0))
    assert {status for status, _ in found} == {"completed", "collapsed"}
    assert any(recovered for _, recovered in found)


@pytest.mark.parametrize(
    ("values", "rule", "expected"),
    [
        ([0, 2, 2], Rule(1.5, 0.75), 1),
        ([0, 2, 0.7, 1], Rule(1.5, 0.75), None),
        ([0, 2, 0.75, 1], Rule(1.5, 0.75), None),
        ([0, 2, 0.8, 1], Rule(1.5, 0.75), 1),
        ([0, 2, 0.8, 1], Rule(1.5, 1.0), None),
        ([0, 2, 0.1, 1, 3], Rule(1.5, 0.75), 4),
        ([0, 1.5], Rule(1.5, 0.75), None),
        ([0, math.nan, 2, math.nan], Rule(1.5, 0.75), 2),
        ([math.inf], Rule(1.5, 0.75), 0),
        ([], Rule(1.5, 0.75), None),
    ],
)
def test_onset(values: list[float], rule: Rule, expected: float | None) -> None:
    assert onset(series(values), rule) == expected


def test_stopped_runs_are_open_ended_and_each_run_has_its_step(tmp_path: Path) -> None:
    experiment = tmp_path / "demo"
    write_run(experiment, "fault", 0, "collapsed", collapse_step=40, step=60)  # excess 0, 0.2, ... 1.0, then stopped
    write_run(experiment, "fault", 1, "nonfinite", collapse_step=50, step=60, logged={"collapse/excess": [0.0] * 6})
    spike = [0.0, 0.0, 1.2, 1.2, 0.6, 0.0, 0.0, 0.0, 0.9, 0.9]
    write_run(experiment, "fault", 2, logged={"collapse/excess": spike})
    write_run(experiment, "fault", 3, "collapsed", collapse_step=41)  # trained to the end: 1.8
    write_run(experiment, "bare", 0, logged={"collapse/excess": None})
    make_report([experiment])
    text = (experiment / "report.md").read_text()
    assert cells(text, "fault", "## Collapsed under")[1:] == [
        *("4/4", "4/4", "2/4 +1?", "2/4 +1?", "2/4 +1?", "2/4 +1?", "2/4 +1?", "1/4 +1?", "1/4 +1?", "1/4 +1?", "2/4")
    ]
    assert "did not log collapse/excess: bare/seed_0" in text
    rows = (experiment / "report.csv").read_text().splitlines()
    columns = rows[0].split(",")
    by_rule = {
        (cell[0], cell[1]): dict(zip(columns, cell, strict=True)) for cell in (row.split(",") for row in rows[1:])
    }
    assert by_rule["fault", "0"]["collapse 0.5/0.25"] == "40", "logged at 39, after optimizer step 40"
    assert by_rule["fault", "0"]["collapse 1.5/0.75"] == "?"
    assert by_rule["fault", "1"]["collapse 2/1"] == "60", "where it was not finite; 50 is its own rule's step"
    assert by_rule["fault", "2"]["collapse 0.75/0.375"] == "90"
    assert by_rule["fault", "2"]["collapse 1/0.5"] == ""
    assert by_rule["bare", "0"]["collapse 1/0.5"] == ""
