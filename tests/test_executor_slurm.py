"""What is asked of SLURM, and how its answers are read; its commands are played by small scripts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from jsonargparse import Namespace
from sweep_lab import Lab

from lightning_qk.executors.attempt import note_attempt, read_attempt
from lightning_qk.executors.job_queue import JobQueue
from lightning_qk.executors.submitit_executor import SubmititExecutor, _minutes, asks_for_gpu
from lightning_qk.experiment import SweepError
from lightning_qk.sweep import Sweep, make_executor

# sbatch keeps what it is given; squeue says what the test has written down, with the name of the last submission
COMMANDS = {
    "srun": "",
    "sbatch": '[ ! -e {root}/broken ] || {{ echo "queue is full" >&2; exit 1; }}\n'
    "cat $1 >> {root}/sbatch.txt; echo Submitted batch job 42",
    "squeue": '[ ! -e {root}/broken ] || {{ echo "slurmctld is away" >&2; exit 1; }}\n'
    'for name; do :; done; sed "s/NAME/$name/" {root}/jobs.txt',
}


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    for name, script in COMMANDS.items():
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\n{script.format(root=tmp_path)}\n")
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    (tmp_path / "jobs.txt").touch()
    return Lab(tmp_path)


def slurm(lab: Lab, parameters: dict[str, Any] | None = None, **options: Any) -> Sweep:
    queue = JobQueue(lab.path(""))
    return lab.sweep(executor=SubmititExecutor("slurm", {"time": 90, **(parameters or {})}, queue), **options)


def test_all_pending_runs_are_one_array(lab: Lab) -> None:
    lab.sweep(only=["fp32"], experiment=lab.experiment((0,))).run()
    parameters = {
        "partition": "gpu",
        "gpus_per_node": 1,
        "mem": "4GB",
        "array_parallelism": 2,
        "setup": ["module load x"],
    }
    assert slurm(lab, parameters).run(detach=True) == 0
    text = (lab.root / "sbatch.txt").read_text()
    for line in ("array=0-2%2", "gpus-per-node=1", "mem=4GB", "partition=gpu", "time=90", "signal=USR2@90", "requeue"):
        assert f"#SBATCH --{line}\n" in text
    assert "\nmodule load x\n" in text
    (submission,) = json.loads(lab.path("jobs.json").read_text())
    assert f"#SBATCH --job-name={submission['name']}\n" in text
    assert (submission["id"], submission["runs"]) == ("42", ["fault/seed_0", "fp32/seed_1", "fault/seed_1"])
    assert "4 runs, 1 done already, 3 submitted as slurm job 42, 0 queued or running" in lab.out.getvalue()
    assert read_attempt(lab.path("fault/seed_0")) == {"state": "queued", "executor": "slurm"}


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"gpus_per_node": 1}, True),
        ({"additional_parameters": {"gres": "gpu:a100:2"}}, True),
        ({"additional_parameters": {"tres-per-task": "gres/gpu:1"}}, True),
        ({"gpus_per_node": 0}, False),
        ({"partition": "nogpu", "account": "gpu_team", "additional_parameters": {"gres": "ssd:1"}}, False),
    ],
)
def test_a_job_with_a_gpu_is_one_that_asks_for_it(parameters: dict[str, Any], expected: bool) -> None:
    assert asks_for_gpu(parameters) == expected


def test_the_command_lines_jobs_outweigh_the_files(lab: Lab) -> None:
    options = Namespace(executor="slurm", jobs=3, slurm={"time": 90, "array_parallelism": 16})
    executor = make_executor(options, JobQueue(lab.path("")))
    assert isinstance(executor, SubmititExecutor) and executor.parameters["array_parallelism"] == 3


def test_runs_with_a_job_are_not_submitted_again(lab: Lab) -> None:
    slurm(lab).run(detach=True)
    (lab.root / "jobs.txt").write_text(
        "42_0|NAME|RUNNING\n42_1|NAME|COMPLETED\n42_2|NAME|PENDING\n42_3|NAME|COMPLETING\n"
    )
    assert JobQueue(lab.path("")).alive() == {"fp32/seed_0": "42_0", "fp32/seed_1": "42_2", "fault/seed_1": "42_3"}
    (lab.root / "sbatch.txt").unlink()
    sweep = slurm(lab)
    assert sweep.run(detach=True) == 0
    assert "--array" not in (lab.root / "sbatch.txt").read_text(), "one run left is a job of its own"
    assert [one["runs"] for one in json.loads(lab.path("jobs.json").read_text())][1:] == [["fault/seed_0"]]
    assert "scancel --name demo-" in sweep.executor.farewell()


def test_dry_run_shows_the_jobs(lab: Lab) -> None:
    assert slurm(lab, {"qos": "low"}).dry_run() == 0
    out = lab.out.getvalue()
    assert out.count("fake_fit.py") == 4
    assert "#SBATCH --array=0-3%4\n" in out and "#SBATCH --qos=low\n" in out
    assert not lab.path("").exists() and not (lab.root / "sbatch.txt").exists()


def test_refused_submission(lab: Lab) -> None:
    (lab.root / "broken").touch()
    with pytest.raises(SweepError, match="executor: slurm: queue is full"):
        slurm(lab).run()
    (lab.root / "broken").unlink()
    assert slurm(lab).run(detach=True) == 0


def test_no_answer_is_not_no_job(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm(lab).run(detach=True)
    (lab.root / "broken").touch()
    with pytest.raises(SweepError, match="slurmctld is away"):
        slurm(lab).run()
    (lab.root / "bin" / "squeue").unlink()
    monkeypatch.setenv("PATH", str(lab.root / "bin"))
    with pytest.raises(SweepError, match=r"squeue: not found, but jobs.json names jobs of SLURM"):
        lab.sweep().run()


def test_watching_outlasts_a_silent_scheduler(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_qk.executors.watch.POLL_S", 0.01)
    monkeypatch.setattr("lightning_qk.executors.watch.ASK_S", 0.0)
    only = {"only": ["fp32"], "experiment": lab.experiment((0,))}
    slurm(lab, **only).run(detach=True)
    (lab.root / "jobs.txt").write_text("42|NAME|RUNNING\n")
    sweep = slurm(lab, **only)
    answers = iter(["broken", "broken", "cancelled"])
    alive = sweep.queue.alive

    def ask() -> dict[str, str]:
        if (answer := next(answers, "cancelled")) == "broken":
            raise SweepError("slurmctld is away")
        (lab.root / "jobs.txt").write_text("42|NAME|CANCELLED\n" if answer == "cancelled" else "")
        return alive()

    monkeypatch.setattr(sweep.executor.queue, "alive", ask)
    assert sweep.executor.wait(sweep.runs, sweep.display, InterruptedNever()) == (1, [])
    out = lab.out.getvalue()
    assert out.count("slurmctld is away; asking again") == 1
    assert "fp32/seed_0: FAILED, its job ended without a verdict (the run was queued); it has no log" in out


class InterruptedNever:
    count = 0


@pytest.mark.parametrize(
    ("value", "minutes"), [(90, 90), ("90:00:00", 5400), ("2-12:00:00", 3600), ("0:00:30", 1), ("1-0:0:0", 1440)]
)
def test_time(value: Any, minutes: int) -> None:
    assert _minutes(value) == minutes


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"time": 43200}, "slurm.time: 43200 must be minutes, up to 3599, or text"),
        ({"time": "soon"}, "slurm.time: 'soon' must be minutes"),
        ({"partiton": "gpu"}, "slurm.partiton: not a parameter of submitit; did you mean partition"),
        ({"reservation": "x"}, "slurm.reservation: .*sbatch's other options go into additional_parameters"),
        ({"job_name": "x"}, "slurm.job_name: not a parameter"),
    ],
)
def test_mistakes_in_the_parameters_are_named(lab: Lab, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(SweepError, match=message):
        slurm(lab, parameters)


def test_time_limit_must_be_stated(lab: Lab) -> None:
    with pytest.raises(SweepError, match=r"slurm.time: missing"):
        SubmititExecutor("slurm", {}, JobQueue(lab.path("")))


def test_missing_parts_name_the_remedy(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SweepError, match="detach: runs of executor local end with the sweep"):
        lab.sweep().run(detach=True)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SweepError, match=r'executor: slurm: .*"srun"'):
        slurm(lab).run()
    monkeypatch.setitem(sys.modules, "submitit.slurm.slurm", None)
    with pytest.raises(SweepError, match=r"pip install 'lightning-qk\[slurm\]'"):
        slurm(lab)


def test_broken_files_are_named(lab: Lab) -> None:
    note_attempt(lab.path("fp32/seed_0"), state="running")
    (lab.path("fp32/seed_0") / "attempt.json").write_text("{")
    with pytest.raises(ValueError, match=r"fp32/seed_0/attempt.json: broken .*; delete it"):
        lab.sweep().run()
    lab.path("jobs.json").write_text("{")
    with pytest.raises(SweepError, match=r"jobs.json: broken .*; delete it once no job"):
        lab.sweep().run()
