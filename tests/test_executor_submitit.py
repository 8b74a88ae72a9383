"""Jobs of submitit on this machine: the path that SLURM takes, without SLURM. `fit` is played by a small script."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sweep_lab import Lab, Resolved, verdict, wait_until

from lightning_qk.executors import watch
from lightning_qk.executors.attempt import read_attempt
from lightning_qk.executors.job_queue import JobQueue
from lightning_qk.executors.submitit_executor import SubmititExecutor
from lightning_qk.experiment import SweepError
from lightning_qk.sweep import Sweep

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="submitit's local jobs are found in /proc")


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setattr(watch, "POLL_S", 0.05)
    monkeypatch.setattr(watch, "ASK_S", 0.3)
    lab = Lab(tmp_path)
    yield lab
    for process in JobQueue(lab.path("")).alive().values():
        os.kill(int(process), signal.SIGTERM)


def jobs(lab: Lab, max_num_timeout: int = 1, **options: Any) -> Sweep:
    """A sweep of one run, fp32/seed_0; with `only=None` of two."""
    parameters = {"time": 5, "max_num_timeout": max_num_timeout}
    executor = SubmititExecutor("submitit_local", parameters, JobQueue(lab.path("")))
    return lab.sweep(**{"experiment": lab.experiment((0,)), "executor": executor, "only": ["fp32"], **options})


def alive(lab: Lab) -> set[str]:
    return set(JobQueue(lab.path("")).alive())


def pause(lab: Lab, **options: Any) -> None:
    """Start the run, and wait until it is two steps past its second checkpoint."""
    lab.how["fp32/seed_0"] = "pause"
    jobs(lab, **options).run(detach=True)
    wait_until(lab.path("board/fp32-seed_0.paused").exists)


def go_on(lab: Lab) -> None:
    lab.path("board/go").touch()


def test_all_runs_are_jobs(lab: Lab) -> None:
    lab.how = {"fault/seed_0": "crash", "fp32/seed_0": "env"}
    assert jobs(lab, only=None).run() == 1
    out = lab.out.getvalue()
    assert "2 runs, 0 done already, 2 submitted as submitit_local job " in out
    assert "fp32/seed_0: completed at step 10 of 20" in out
    assert "fault/seed_0: FAILED, exit status 3; the end of" in out and "    RuntimeError: out of memory" in out
    assert read_attempt(lab.path("fault/seed_0"))["state"] == "failed"
    assert json.loads(lab.path("board/fp32-seed_0.env").read_text())["LIGHTNING_QK_THREADS"] == "1", "as a local run"
    lab.how = {}
    assert jobs(lab, only=None).run() == 0
    assert lab.launched()[2:] == ["fault-seed_0"]


def test_the_same_command_attaches_to_the_jobs(lab: Lab) -> None:
    pause(lab)
    file = lab.path("jobs.json")
    file.write_text(
        json.dumps([{**one, "id": None} for one in json.loads(file.read_text())])
    )  # killed while submitting
    assert jobs(lab, only=None).run(detach=True) == 0
    assert alive(lab) >= {"fp32/seed_0"}
    assert "1 submitted as submitit_local job " in lab.out.getvalue()
    go_on(lab)
    assert jobs(lab, only=None).run() == 0
    assert sorted(lab.launched()) == ["fault-seed_0", "fp32-seed_0"]


def test_a_preempted_run_goes_on_from_its_checkpoint(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> None:
    calm = Lab(tmp_path_factory.mktemp("calm"), how={"fp32/seed_0": "train"})
    assert calm.sweep(only=["fp32"], experiment=calm.experiment((0,))).run() == 0
    pause(lab)
    os.kill(read_attempt(lab.path("fp32/seed_0"))["watcher"], signal.SIGUSR2)
    assert jobs(lab).run() == 0
    attempt = read_attempt(lab.path("fp32/seed_0"))
    assert (attempt["number"], attempt["resumed"]) == (2, True)
    assert "fp32/seed_0: started again (attempt 2), from its last checkpoint" in lab.out.getvalue()
    assert verdict(lab, "fp32/seed_0") == verdict(calm, "fp32/seed_0")
    assert lab.launched().count("fp32-seed_0") == 2


def test_a_run_that_reaches_its_time_limit_too_often(lab: Lab) -> None:
    pause(lab, max_num_timeout=0)
    os.kill(read_attempt(lab.path("fp32/seed_0"))["watcher"], signal.SIGUSR2)
    wait_until(lambda: not alive(lab))
    attempt = read_attempt(lab.path("fp32/seed_0"))
    assert (attempt["state"], attempt["problem"]) == ("failed", "Job not requeued because: timed-out too many times.")
    assert not lab.verdicts()


def test_a_cancelled_job_is_not_counted_and_goes_on_later(lab: Lab) -> None:
    pause(lab)
    subprocess.run(jobs(lab).queue.cancel_commands(), shell=True, check=True)
    wait_until(lambda: not alive(lab))
    assert read_attempt(lab.path("fp32/seed_0"))["state"] == "stopped"
    assert not lab.verdicts()
    assert jobs(lab).run() == 0
    assert read_attempt(lab.path("fp32/seed_0"))["number"] == 2
    assert lab.launched() == ["fp32-seed_0"] * 2


def test_a_job_that_is_killed_while_it_is_watched(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    pause(lab)
    sweep = jobs(lab)
    begin = sweep.display.begin

    def begin_and_kill(*args: Any, **counts: Any) -> None:
        begin(*args, **counts)
        os.kill(read_attempt(lab.path("fp32/seed_0"))["watcher"], signal.SIGKILL)

    monkeypatch.setattr(sweep.display, "begin", begin_and_kill)
    assert sweep.run() == 1
    assert "fp32/seed_0: FAILED, its job ended without a verdict (the run was running)" in lab.out.getvalue()


def test_local_processes_do_not_run_what_has_a_job(lab: Lab) -> None:
    pause(lab)
    with pytest.raises(SweepError, match=r"1 of the runs have jobs \(fp32/seed_0\).*end them: kill \d+"):
        lab.sweep().run()
    assert lab.sweep(only=["fault"]).run() == 0


def test_changed_configuration_of_a_queued_run_is_refused(lab: Lab) -> None:
    pause(lab)
    with pytest.raises(SweepError, match="fp32/seed_0: holds a started run of another configuration"):
        jobs(lab, resolve=lambda args: Resolved("new")).run()


DRIVER = textwrap.dedent(
    """
    import signal, sys
    from pathlib import Path
    sys.path.insert(0, str(Path(sys.argv[1]).parent))
    import test_executor_submitit
    signal.signal(signal.SIGINT, signal.default_int_handler)
    lab = test_executor_submitit.Lab(Path(sys.argv[2]), how={"fp32/seed_0": "pause"}, out=sys.stdout)
    sys.exit(test_executor_submitit.jobs(lab).run())
    """
)


def test_ctrl_c_leaves_the_jobs(lab: Lab) -> None:
    driver = lab.root / "driver.py"
    driver.write_text(DRIVER)
    log = lab.root / "out.txt"
    with log.open("w") as file:
        command = [sys.executable, str(driver), __file__, str(lab.root)]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    wait_until(lambda: lab.path("board/fp32-seed_0.paused").exists() or process.poll() is not None)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    process.wait(60)
    out = log.read_text()
    assert process.returncode == 130, out
    assert "runs left (fp32/seed_0" in out and "their jobs go on; to end them: kill " in out
    assert "fp32/seed_0" in alive(lab)
    go_on(lab)
    assert jobs(lab).run() == 0
    assert lab.launched() == ["fp32-seed_0"]
