"""Early warnings: alarms of the monitors' own thresholds, and of thresholds learned from the healthy twin."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from made_up_runs import cells, write_run

from lightning_qk.report import make_report

OWN, LEARNED = "## Early warnings, thresholds of the monitors", "## Early warnings, thresholds of the healthy twin"


def warned(alarm: int | None = None, threshold: float | None = 0.5, **more: Any) -> dict[str, Any]:
    return {"warnings": {"tied_rows": {"threshold": threshold, "alarm_step": alarm, "last": 0.1, **more}}}


def report(experiment: Path, **options: Any) -> str:
    (experiment / "experiment.json").write_text(json.dumps({"arms": ["fp32", "fault"], "reference": "fp32"}))
    make_report([experiment], **options)
    return (experiment / "report.md").read_text()


def test_alarms_are_counted_ahead_of_collapses_and_as_false_ones(tmp_path: Path) -> None:
    runs = tmp_path / "demo"
    for seed, alarm in enumerate((20, 40, 60, None)):
        write_run(runs, "fault", seed, "collapsed", collapse_step=50, **warned(alarm))
    write_run(runs, "fault", 4, **warned(70))
    write_run(runs, "fp32", 0, **warned(None))
    write_run(runs, "silent", 0, **warned(None, threshold=None))
    text = report(runs)
    assert cells(text, "fault", OWN)[1:] == [
        *("tied_rows", "0.500", "4/5", "50 [20..70]", "2/4", "20 [10..30]", "1/1"),
    ]
    assert cells(text, "fp32", OWN)[1:] == ["tied_rows", "0.500", "0/1", "-", "-", "-", "0/1"]
    assert "| silent" not in text[text.index(OWN) :]


def test_learned_threshold_leaves_the_seed_out(tmp_path: Path) -> None:
    runs = tmp_path / "demo"

    def logged(*values: float) -> dict[str, list[float]]:
        return {"warning/tied_rows": list(values)}

    write_run(runs, "fp32", 0, logged=logged(0.1, 0.5, 0.2), **warned())
    write_run(runs, "fp32", 1, logged=logged(0.1, 0.3, 0.2), **warned())
    write_run(runs, "fp32", 2, "collapsed", collapse_step=30, logged=logged(9, 9, 9), **warned())  # not healthy
    write_run(runs, "fault", 0, "collapsed", collapse_step=60, logged=logged(0.3, 0.31, 0.9), **warned())
    write_run(runs, "fault", 1, "collapsed", collapse_step=60, logged=logged(0.3, 0.31, math.nan), **warned())
    write_run(runs, "fault", 2, logged=logged(0.1, 0.5, 0.6), **warned())
    write_run(runs, "fault", 3, logged={}, **warned())
    text = report(runs)
    # seed 0: 0.3, crossed by the reading at 19, after step 20; seed 1: 0.5, crossed by what is no number; seed 2: 0.5.
    assert cells(text, "fault", LEARNED)[1:] == [
        *("tied_rows", "0.500 [0.300..0.500]", "3/3", "30 [20..30]", "2/2", "35 [30..40]", "1/1"),
    ]
    # the twin itself: seed 0 beyond 0.3, seed 1 within 0.5, seed 2 collapsed beyond 0.5
    assert cells(text, "fp32", LEARNED)[1:] == [
        *("tied_rows", "0.500 [0.300..0.500]", "2/3", "15 [10..20]", "1/1", "20", "1/2"),
    ]
    assert "did not log warning/tied_rows: fault/seed_3" in text
    assert "1 of 3 values of warning/tied_rows are not finite: fault/seed_1" in text


def test_low_readings_can_be_the_bad_ones(tmp_path: Path) -> None:
    runs = tmp_path / "demo"
    write_run(runs, "fp32", 0, logged={"warning/tied_rows": [0.9, 0.8]}, **warned(threshold=None, below=True))
    write_run(
        *(runs, "fault", 1, "collapsed"),
        collapse_step=30,
        logged={"warning/tied_rows": [0.8, 0.7]},
        **warned(threshold=None, below=True),
    )
    text = report(runs)
    assert OWN not in text
    assert cells(text, "fault", LEARNED)[1:] == ["tied_rows (low is bad)", "0.800", "1/1", "20", "1/1", "10", "0/0"]


def test_a_twin_of_the_same_seed_alone_teaches_nothing(tmp_path: Path) -> None:
    runs = tmp_path / "demo"
    for arm in ("fp32", "fault"):
        write_run(runs, arm, 0, logged={"warning/tied_rows": [0.1]}, **warned())
    text = report(runs)
    assert cells(text, "fault", LEARNED)[1:] == ["tied_rows", "-", "0/0", "-", "-", "-", "0/0"]
    assert "No other seed of the twin to learn from: tied_rows of fp32/seed_0, tied_rows of fault/seed_0." in text
