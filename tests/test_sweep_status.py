"""`sweep --status`: what the files of an experiment tell, whether or not somebody works on it."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from sweep_lab import Lab

from lightning_qk.executors.attempt import note_attempt
from lightning_qk.experiment import Experiment
from lightning_qk.sweep_status import show_status


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


LEFT = ["run", "time", "left", "(h:mm:ss)"]


def status(lab: Lab, experiment: Experiment, only: list[str] | None = None) -> list[str]:
    stream = io.StringIO()
    assert show_status(experiment, lab.root / "runs", only, stream) == 0
    return stream.getvalue().splitlines()


def attempt(lab: Lab, name: str, step: int | None = None, speed: float | None = None, **fields: Any) -> None:
    note_attempt(lab.path(name), **{"executor": "slurm", "number": 1, **fields})
    if step is not None:
        state = {"phase": "training", "step": step, "max_steps": 100, "steps_per_s": speed, "loss": 2.5}
        (lab.path(name) / "progress.json").write_text(json.dumps(state))


def test_nothing_has_started(lab: Lab) -> None:
    lines = status(lab, lab.experiment((0,)))
    assert lines[:2] == ["fp32/seed_0: not started", "fault/seed_0: not started"]
    assert [line.split() for line in lines[3:]] == [
        *(["not", "started", *LEFT], ["fp32", "1", "-"], ["fault", "1", "-"], ["total", "2", "-"])
    ]


def test_every_state(lab: Lab) -> None:
    lab.how = {"fault/seed_0": "collapsed"}
    assert lab.sweep(experiment=lab.experiment((0,))).run() == 0
    attempt(lab, "fp32/seed_1", state="running", step=50, speed=2.0)
    attempt(lab, "fault/seed_1", state="queued")
    attempt(lab, "fp32/seed_2", state="requeued", step=30)
    attempt(lab, "fault/seed_2", state="failed", problem="exit status 3")
    lab.path("fault/seed_2/log.txt").touch()
    attempt(lab, "fp32/seed_3", state="running", step=40)  # its process was killed without notice
    os.utime(lab.path("fp32/seed_3/attempt.json"), (0, 0))
    attempt(lab, "fault/seed_3", state="stopped", step=20)
    lines = status(lab, lab.experiment((0, 1, 2, 3)))
    assert lines[0].startswith("fp32/seed_0: completed") and lines[1].startswith("fault/seed_0: collapsed at step 7")
    assert "50/100" in lines[2] and "2.0 it/s" in lines[2] and "ETA 0:25" in lines[2]
    assert lines[3:6] == [
        "fault/seed_1: queued",
        "fp32/seed_2: queued, was at step 30 of 100",
        f"fault/seed_2: FAILED, exit status 3; see {lab.path('fault/seed_2/log.txt')}",
    ]
    assert lines[6] == "fp32/seed_3: interrupted at step 40 of 100, goes on from step 0, for it has no checkpoint"
    assert lines[9].split() == ["collapsed", "completed", "running", "queued", "interrupted", "failed", *LEFT]
    # the fake fit says that it took a second; 25 s are left of the one that runs
    assert lines[10].split() == ["fp32", "0", "1", "1", "1", "1", "0", "0:27"]
    assert lines[11].split() == ["fault", "1", "0", "0", "1", "1", "1", "0:03"]
    assert lines[12].split() == ["total", "1", "1", "1", "2", "2", "1", "0:30"]
    assert lines[13] == "left: 0:30, 1 at a time as now"
    assert len(status(lab, lab.experiment((0, 1, 2, 3)), only=["fault"])) == 4 + 1 + 3


def test_a_log_that_was_never_written_is_not_named(lab: Lab) -> None:
    attempt(lab, "fp32/seed_0", state="failed", problem="not submitted: no such partition")
    assert status(lab, lab.experiment((0,)))[0] == "fp32/seed_0: FAILED, not submitted: no such partition"


def test_runs_that_a_local_sweep_left_are_not_queued(lab: Lab) -> None:
    attempt(lab, "fp32/seed_0", state="running", executor="local")
    attempt(lab, "fault/seed_0", state="queued", executor="local")
    assert status(lab, lab.experiment((0,)))[1] == "fault/seed_0: queued"
    note_attempt(lab.path("fp32/seed_0"), state="stopped")
    assert status(lab, lab.experiment((0,)))[1] == "fault/seed_0: not started"


def test_a_new_attempt_outweighs_the_verdict_of_a_failed_one(lab: Lab) -> None:
    lab.how = {"fp32/seed_0": "failed"}
    assert lab.sweep(experiment=lab.experiment((0,)), only=["fp32"]).run() == 1
    assert status(lab, lab.experiment((0,)))[0].startswith("fp32/seed_0: FAILED, verdict: failed; see ")
    note_attempt(lab.path("fp32/seed_0"), state="running")
    assert status(lab, lab.experiment((0,)))[0].split() == ["fp32", "seed", "0", "starting"]
