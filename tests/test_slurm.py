"""Real trainings as jobs of a real SLURM; `slurm_cluster.py` says how it is set up and what it needs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from campaign import finished, write_campaign
from runs import outcome
from slurm_cluster import cluster, missing
from sweep_lab import wait_until

from lightning_qk.executors.attempt import read_attempt

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]
NAMES = ("fp32/seed_0", "fault/seed_0", "fp32/seed_1", "fault/seed_1")
MINUTES = 300.0  # to wait at most


@dataclass
class Desk:
    """Where a user of the cluster sits: an experiment whose runs pause at step 7, after the checkpoint of step 6."""

    directory: Path
    environment: dict[str, str]

    @property
    def root(self) -> Path:
        return self.directory / "runs"

    def start(self, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "lightning_qk", "sweep", "-c", str(self.directory / "campaign.yaml")]
        command += ["--root", str(self.root), "--report", "false", *options]
        return subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def sweep(self, *options: str) -> str:
        return ended(self.start(*options))

    def slurm(self, command: str) -> str:
        return subprocess.run(
            command, shell=True, env=self.environment, check=True, capture_output=True, text=True
        ).stdout

    def attempt(self, name: str) -> dict[str, Any]:
        return read_attempt(self.root / "campaign" / name)

    def paused(self) -> int:
        return len([file for file in Path(self.environment["PAUSE"]).iterdir() if file.name != "go"])

    def go_on(self) -> None:
        (Path(self.environment["PAUSE"]) / "go").touch()


def ended(process: subprocess.Popen[str], code: int = 0) -> str:
    output, _ = process.communicate(timeout=600)
    assert process.returncode == code, output
    return output


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with cluster(tmp_path_factory.mktemp("slurm") / "files") as environment:
        yield {**environment, "PYTHONPATH": str(Path(__file__).parent)}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, tokens: Path) -> dict[str, dict[str, Any]]:
    """What the runs leave behind when processes of this machine train them without interruption."""
    desk = Desk(tmp_path_factory.mktemp("calm"), {**os.environ, "PYTHONPATH": str(Path(__file__).parent)})
    write_campaign(desk.directory, tokens, steps=11, pause=7)
    desk.sweep("--jobs", "2")
    return finished(desk.root)


@pytest.fixture
def desk(tmp_path: Path, tokens: Path, slurm: dict[str, str]) -> Iterator[Desk]:
    (tmp_path / "pause").mkdir()
    parameters = {"partition": "low", "time": 30, "cpus_per_task": 1}
    write_campaign(tmp_path, tokens, steps=11, pause=7, executor="slurm", slurm=parameters)
    desk = Desk(tmp_path, {**slurm, "PAUSE": str(tmp_path / "pause")})
    yield desk
    desk.slurm("scancel --user root")
    wait_until(lambda: not desk.slurm("squeue --noheader").strip(), MINUTES)


def test_preempted_requeued_and_timed_out_runs_are_the_uninterrupted_ones(desk: Desk, calm: dict[str, Any]) -> None:
    assert "#SBATCH --array=0-3%4\n" in desk.sweep("--dry_run")
    assert "4 submitted as slurm job " in desk.sweep("--detach")
    wait_until(lambda: desk.paused() == 4, MINUTES)
    table = [line.split()[:2] for line in desk.sweep("--status").splitlines()]
    assert [row for row in table if row][4:8] == [["running", "run"], ["fp32", "2"], ["fault", "2"], ["total", "4"]]
    watching = desk.start()
    assert watching.stdout is not None
    begun = next(line for line in watching.stdout if "done already" in line)  # on busy cores it takes its time
    assert "4 runs, 0 done already, 4 queued or running already" in begun

    desk.slurm("sbatch --partition high --ntasks 1 --output /dev/null --wrap true")
    wait_until(lambda: any(desk.attempt(name)["number"] == 2 for name in NAMES), MINUTES)
    preempted, *others = sorted(NAMES, key=lambda name: -desk.attempt(name)["number"])
    late, requeued, spared = (desk.attempt(name)["job"] for name in others)
    desk.slurm(f"scancel --signal USR2 {late}")  # as SLURM does before the end of the time limit
    desk.slurm(f"scontrol requeue {requeued}")
    wait_until(lambda: all(desk.attempt(name)["number"] == 2 for name in others[:2]), MINUTES)
    desk.go_on()

    output = ended(watching)
    for name in (preempted, *others[:2]):
        assert f"{name}: started again (attempt 2), from its last checkpoint" in output
        assert desk.attempt(name)["resumed"]
    assert desk.attempt(others[2])["number"] == 1 and desk.attempt(others[2])["job"] == spared
    assert finished(desk.root) == calm and calm.keys() == set(NAMES)


def test_ctrl_c_leaves_jobs_that_scancel_ends(desk: Desk, calm: dict[str, Any]) -> None:
    one = ("--only", "fp32", "--seeds", "0")
    watching = desk.start(*one)
    wait_until(lambda: desk.paused() == 1, MINUTES)
    watching.send_signal(signal.SIGINT)
    output = ended(watching, 130)
    job = desk.attempt("fp32/seed_0")["job"]
    assert desk.slurm("squeue --noheader --format %i,%T").strip() == f"{job},RUNNING"
    command = re.search(r"to end them: (scancel --name campaign-\w+);", output)
    assert command is not None, output
    desk.slurm(command[1])
    wait_until(lambda: not desk.slurm("squeue --noheader").strip(), MINUTES)
    assert finished(desk.root) == {}
    assert "fp32/seed_0: interrupted at step" in desk.sweep("--status", *one)
    desk.go_on()
    assert "fp32/seed_0: started again (attempt 2), from its last checkpoint" in desk.sweep(*one)
    assert finished(desk.root) == {"fp32/seed_0": calm["fp32/seed_0"]}


def test_a_run_of_several_tasks_goes_on_together(desk: Desk, tokens: Path) -> None:
    one = ("--only", "fault", "--seeds", "0", "--size", "two")
    sizes = {"one": {}, "two": {"overrides": {"trainer.devices": 2, "trainer.strategy": "ddp"}}}
    parameters = {"partition": "low", "time": 30, "ntasks_per_node": 2}
    write_campaign(desk.directory, tokens, steps=11, pause=7, executor="slurm", slurm=parameters, sizes=sizes)
    watching = desk.start(*one)
    wait_until(lambda: desk.paused() == 1, MINUTES)
    run = desk.root / "campaign_two" / "fault" / "seed_0"
    desk.slurm(f"scancel --signal USR2 {read_attempt(run)['job']}")
    desk.go_on()
    assert "fault/seed_0: started again (attempt 2), from its last checkpoint" in ended(watching)
    assert (run / "log_1.txt").exists()
    found = outcome(run)
    calm = Desk(desk.directory / "calm", {**desk.environment, "PAUSE": str(desk.directory / "pause")})
    write_campaign(calm.directory, tokens, steps=11, pause=7, sizes=sizes)
    calm.sweep(*one)
    assert found == outcome(calm.root / "campaign_two" / "fault" / "seed_0"), "Lightning starts two processes itself"
