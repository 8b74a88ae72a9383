"""Interventions in the report: made-up forks of made-up runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from made_up_runs import cells, write_run

from lightning_qk.report import make_report
from lightning_qk.runs import find_runs, group_arms


def fork(root: Path, arm: str, seed: int, step: int, onset: int | None, **verdict: Any) -> None:
    state = {} if onset is None else {"collapse_step": onset}
    verdict = {"fork": {"arm": "e4m3", "step": step, "checkpoint": "x.ckpt"}, **state, **verdict}
    write_run(root, arm, seed, "completed" if onset is None else "collapsed", **verdict)


def test_what_averts_and_what_delays(tmp_path: Path) -> None:
    root = tmp_path / "demo"
    for seed, onset in enumerate((40, 50, 60)):
        write_run(root, "e4m3", seed, "collapsed", collapse_step=onset)
    write_run(root, "e4m3", 3)  # which did not collapse: its fork averts nothing
    for seed, (step, onset) in enumerate(((30, None), (40, 70), (50, 90), (30, None))):
        fork(root, "bump", seed, step, onset)
    for seed, (step, onset) in enumerate(((30, 40), (40, 50))):
        fork(root, "control", seed, step, onset)
    against = {"bump": "control", "control": "control"}
    (root / "experiment.json").write_text(json.dumps({"arms": ["e4m3", "bump", "control"], "against": against}))
    _, out = make_report([root])
    text = (out / "report.md").read_text()
    assert cells(text, "bump", "## Interventions")[1:] == [
        *("e4m3", "35 [30..50]", "1/3", "0.06..0.79", "25 [20..30]", "2/2", "-", "-", "-", "-")
    ]
    assert cells(text, "control", "## Interventions")[3:7] == ["0/2", "0.00..0.66", "0", "0/2"]
    assert "\n| e4m3 " not in text[text.index("## Interventions") : text.index("## Collapsed under")]
    # survival is from the fork on
    lifetimes = {arm.name: arm.lifetimes for arm in group_arms(find_runs([root]))}
    assert lifetimes["bump"] == ([30.0, 40.0], [70.0])  # not the one that had nothing to avert
    assert "not counted: began as a run that did not collapse: bump/seed_3" in text
    assert lifetimes["e4m3"] == ([40.0, 50.0, 60.0], [100.0])
    assert cells(text, "control", "## Survival")[3] == "10"
    assert "Steps since it began" in (out / "survival.svg").read_text()


def test_a_spike_that_comes_back_is_averted_too(tmp_path: Path) -> None:
    root = tmp_path / "demo"
    for seed, onset in enumerate((40, 50, 60, None)):
        write_run(root, "e4m3", seed, "completed", divergence_step=onset)
    for seed, onset in enumerate((None, 75, 50, 45)):
        fork(root, "bump", seed, 30, None, divergence_step=onset)
    _, out = make_report([root])
    row = cells((out / "report.md").read_text(), "bump", "## Interventions")
    assert row[3:] == ["-", "-", "-", "-", "1/3", "0.06..0.79", "7.50 [-10..25]", "1/2"]


def test_an_onset_before_the_fork_cannot_be_averted(tmp_path: Path) -> None:
    root = tmp_path / "demo"
    for seed in (0, 1):
        write_run(root, "e4m3", seed, "collapsed", collapse_step=60, divergence_step=(20, 55)[seed])
        fork(root, "bump", seed, 30, 70, divergence_step=(20, 65)[seed])
    _, out = make_report([root])
    assert cells((out / "report.md").read_text(), "bump", "## Interventions")[3:] == [
        *("0/2", "0.00..0.66", "10", "2/2", "0/1", "0.00..0.79", "10", "1/1")
    ]


def test_without_forks_there_is_no_such_table(tmp_path: Path) -> None:
    write_run(tmp_path / "demo", "fp32", 0)
    write_run(tmp_path / "demo", "fp32", 1)
    _, out = make_report([tmp_path / "demo"])
    assert "Interventions" not in (out / "report.md").read_text()
