"""Thresholds of a guard, chosen on half of the seeds and judged on the other, in made-up runs of known outcome."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_up_runs import write_run

from lightning_qk.activation import TAGS, activation_table
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
    scalars = {run.path: read_history(run.path, set(TAGS))[0] for run in runs}
    return activation_table(arms, pick_twins(arms, "fp32").arms, scalars).lines()[1:]


def test_chosen_on_one_half_and_judged_on_the_other(experiment: Path) -> None:
    found = {row[0]: row[1:] for row in rows(experiment)}
    assert list(found) == ["10", "20", "30", "40 (chosen)", "45", "60", "100"]
    # seeds 2, 3 and 4: healthy 30, 50 and 90; collapses after logits at steps 20, 40, and 90
    assert found["40 (chosen)"] == ["2/3", "0.21..0.94", "1/3", "0.06..0.79", "20 [10..30]"]
    assert [found[key][0] for key in ("20", "30", "60", "100")] == ["3/3", "2/3", "1/3", "0/3"]
    make_report([experiment], reference="fp32")
    text = (experiment / "report.md").read_text()
    assert "seeds 2, 3, 4; the chosen threshold is the largest logit of the healthy twins at seeds 0, 1." in text


def test_what_comes_between_two_readings_counts(experiment: Path) -> None:
    write_run(experiment, "fp32", 5, logged={**logits(5.0, 0), "logit/peak": [200.0] * 10})
    found = {row[0]: row[1] for row in rows(experiment)}
    # the halves are now seeds 0 to 2, the largest 40, and 3 to 5: 50, 90 and 200
    assert (found["40 (chosen)"], found["60"], found["100"]) == ("3/3", "2/3", "1/3")
    make_report([experiment], reference="fp32")
    assert "Logits of the readings alone" in (experiment / "report.md").read_text(), "of the other runs"


def test_false_activations_need_no_collapse(tmp_path: Path) -> None:
    for seed in range(4):
        write_run(tmp_path / "calm", "fp32", seed, logged=logits(50.0, 3))
    found = {row[0]: row[1:] for row in rows(tmp_path / "calm")}
    assert found["45"] == ["2/2", "0.34..1.00", "0/0", "-", "-"] and found["60"][0] == "0/2"


def test_how_the_largest_logits_are_distributed(tmp_path: Path) -> None:
    for seed, peak in enumerate((10.0, 30.0, 20.0, 50.0, 40.0)):
        write_run(tmp_path / "demo", "fp32", seed, max_logit_peak=peak)
        write_run(tmp_path / "demo", "guarded", seed, max_logit_peak=peak, guard="dormant")
    make_report([tmp_path / "demo"])
    text = (tmp_path / "demo" / "report.md").read_text()
    table = text[text.index("## The largest logit of a run") :].splitlines()
    assert [cell.strip() for cell in table[2].split("|")[1:-1]] == [
        *("arm", "runs", "least", "25 %", "median", "75 %", "90 %", "largest")
    ]
    assert [cell.strip() for cell in table[4].split("|")[1:-1]] == ["fp32", "5", "10", "20", "30", "40", "46", "50"]
    assert "guarded" not in "".join(table[5:8])


def test_nothing_to_say_with_few_seeds(tmp_path: Path) -> None:
    for seed in range(3):
        write_run(tmp_path / "few", "fp32", seed)
        write_run(tmp_path / "few", "fault", seed, "collapsed", collapse_step=50)
    assert rows(tmp_path / "few") == []
