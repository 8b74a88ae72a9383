"""Thresholds of a guard, chosen on half of the seeds and judged on the other, in made-up runs of known outcome."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_up_runs import write_run

from lightning_qk.activation import activation_table
from lightning_qk.events import read_history
from lightning_qk.report import make_report
from lightning_qk.runs import find_runs, group_arms, pick_twins

HEALTHY = {0: 20.0, 1: 40.0, 2: 30.0, 3: 50.0, 4: 90.0}  # largest logits: seeds 0 and 1 choose 40


def logits(peak: float, at: int) -> dict[str, Any]:
    """Ten readings that reach the peak at one of them."""
    return {"logit/max": [peak if index == at else 5.0 for index in range(10)]}


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    root = tmp_path / "demo"
    for seed, peak in HEALTHY.items():
        write_run(root, "fp32", seed, logged=logits(peak, 9))
    for seed, at in {0: 0, 1: 0, 2: 1, 3: 3, 4: 8}.items():  # collapse at 50: seed 4 has its first large logit after it
        write_run(root, "fault", seed, "collapsed", logged=logits(500.0, at), collapse_step=50)
    for seed in HEALTHY:
        write_run(root, "guarded", seed, logged=logits(500.0, 0), guard="fired", guard_step=10)
    return root


def rows(root: Path) -> list[list[str]]:
    runs = find_runs([root])
    arms = group_arms(runs)
    scalars = {run.path: read_history(run.path, {"logit/max"})[0] for run in runs}
    return activation_table(arms, pick_twins(arms, "fp32"), scalars).lines()[1:]


def test_chosen_on_one_half_and_judged_on_the_other(experiment: Path) -> None:
    found = {row[0]: row[1:] for row in rows(experiment)}
    assert list(found) == ["10", "20", "30", "40 (chosen)", "45", "60", "100"]
    # seeds 2, 3 and 4: healthy 30, 50 and 90; collapses after logits at steps 20, 40, and 90
    assert found["40 (chosen)"] == ["2/3", "0.21..0.94", "1/3", "0.06..0.79", "20 [10..30]"]
    assert [found[key][0] for key in ("20", "30", "60", "100")] == ["3/3", "2/3", "1/3", "0/3"]
    make_report([experiment], reference="fp32")
    text = (experiment / "report.md").read_text()
    assert "seeds 2, 3, 4; the chosen threshold is the largest logit of the healthy twins at seeds 0, 1." in text


def test_nothing_to_say_without_seeds_or_collapses(experiment: Path, tmp_path: Path) -> None:
    for seed in range(3):
        write_run(tmp_path / "few", "fp32", seed)
        write_run(tmp_path / "few", "fault", seed, "collapsed", collapse_step=50)
    assert rows(tmp_path / "few") == []
    for seed in range(4):
        write_run(tmp_path / "calm", "fp32", seed)
        write_run(tmp_path / "calm", "fault", seed)
    assert rows(tmp_path / "calm") == []
