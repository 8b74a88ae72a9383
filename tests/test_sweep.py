"""The sweep: what it launches, in how many processes, and what it leaves behind. `fit` is played by a small script."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest
from sweep_lab import Lab, Resolved, alive, verdict, wait_until

from lightning_qk import resolved_run
from lightning_qk import sweep as sweep_module
from lightning_qk.cores import usable_cores
from lightning_qk.executors import local
from lightning_qk.executors.local import LocalPool
from lightning_qk.experiment import Experiment, SweepError
from lightning_qk.sweep import Sweep, main


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def test_all_runs_get_verdict_log_and_record(lab: Lab) -> None:
    lab.how["fault/seed_1"] = "collapsed"
    assert lab.sweep(jobs=2).run() == 0
    assert verdict(lab, "fault/seed_1")["status"] == "collapsed"
    log = lab.path("fp32/seed_1/log.txt").read_text()
    assert "fake_fit.py" in log and "training fp32-seed_1" in log
    record = json.loads(lab.path("experiment.json").read_text())
    assert (record["arms"], record["seeds"], record["reference"]) == (["fp32", "fault"], [0, 1], None)
    out = lab.out.getvalue()
    assert "fault/seed_1: collapsed at step 7 of 20, final loss 2.00, min loss 1.00, " in out
    assert "\x1b" not in out, "no cursor movement where the output is not a terminal"


def test_seeds_first_then_arms(lab: Lab) -> None:
    assert lab.sweep(jobs=1).run() == 0
    assert lab.launched() == ["fp32-seed_0", "fault-seed_0", "fp32-seed_1", "fault-seed_1"]


def test_jobs_run_together_and_no_more_than_asked(lab: Lab) -> None:
    lab.how = {f"{arm}/seed_{seed}": "pair" for arm in ("fp32", "fault") for seed in (0, 1, 2)}
    assert lab.sweep(experiment=lab.experiment((0, 1, 2)), jobs=2).run() == 0
    counts = [int(count) for count in lab.path("board/counts").read_text().split()]
    assert len(counts) == 6
    assert max(counts) <= 2


@pytest.mark.parametrize("gpus", [[], ["2", "5"]])
def test_environment_of_a_run(lab: Lab, gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_gpus", lambda: gpus)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    lab.how["fp32/seed_0"] = "env"
    resolve = lambda args: Resolved(gpus=len(gpus) // 2)  # noqa: E731
    sweep = lab.sweep(resolve=resolve, experiment=lab.experiment((0,)), only=["fp32"])
    assert sweep.run() == 0
    assert sweep.executor.jobs == (2 if gpus else usable_cores())
    env = json.loads(lab.path("board/fp32-seed_0.env").read_text())
    assert env["CUDA_VISIBLE_DEVICES"] == ("2" if gpus else None)
    assert env["OMP_NUM_THREADS"] == env["LIGHTNING_QK_THREADS"] == (None if gpus else "1")


@pytest.mark.parametrize(
    ("each", "expected"), [(1, ["0", "1", "2", "3", "4"]), (2, ["0,1", "2,3"]), (5, ["0,1,2,3,4"])]
)
def test_a_run_of_several_gpus_has_them_to_itself(
    lab: Lab, each: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_gpus", lambda: ["0", "1", "2", "3", "4"])
    pool = local.LocalPool()
    assert pool.submit([], lambda run: [], each) == f"{len(expected)} at a time" and pool.gpus == expected
    with pytest.raises(SweepError, match=r"trainer\.devices: 6, but this machine has 5 GPUs; lower it"):
        pool.submit([], lambda run: [], 6)


@pytest.mark.parametrize(
    ("devices", "there", "expected"), [(1, 4, 1), ("2", 4, 2), ([0, 3], 4, 2), ("0,1,2", 4, 3), (-1, 4, 4), (8, 0, 0)]
)
def test_gpus_that_devices_asks_for(devices: object, there: int, expected: int) -> None:
    assert resolved_run._devices(devices, there) == expected


def test_done_runs_are_not_run_again_and_failed_ones_are(lab: Lab) -> None:
    lab.how = {"fault/seed_0": "failed"}
    assert lab.sweep(jobs=2).run() == 1
    assert len(lab.launched()) == 4
    lab.how = {}
    assert lab.sweep(jobs=2).run() == 0
    assert lab.launched()[4:] == ["fault-seed_0"]
    assert lab.path("fault/seed_0/log.txt").read_text().count("training") == 2, "the log is appended to"


def test_failed_runs_are_reported_and_the_others_go_on(lab: Lab) -> None:
    lab.how = {"fp32/seed_0": "crash", "fault/seed_0": "silent"}
    assert lab.sweep(jobs=1).run() == 1
    out = lab.out.getvalue()
    assert f"fp32/seed_0: FAILED, exit status 3; the end of {lab.path('fp32/seed_0/log.txt')}" in out
    assert "    RuntimeError: out of memory" in out
    assert "fault/seed_0: FAILED, left no verdict" in out
    assert verdict(lab, "fault/seed_1")["status"] == "completed"


def test_changed_configuration_of_a_finished_run_is_refused(lab: Lab) -> None:
    assert lab.sweep(jobs=2).run() == 0
    with pytest.raises(SweepError, match=r"fp32/seed_0: holds a finished run .*config_hash hash, now new.*--root"):
        lab.sweep(resolve=lambda args: Resolved("new")).run()
    assert len(lab.launched()) == 4


def test_changed_configuration_of_a_started_run_is_refused(lab: Lab) -> None:
    lab.how = {"fp32/seed_0": "silent"}
    assert lab.sweep(jobs=2).run() == 1

    def changed(args: list[str]) -> Resolved:
        return Resolved(by_seed={0: "new"} if "fp32" in args else {})

    lab.path("fp32/seed_0/checkpoints").mkdir()
    checkpoint = lab.path("fp32/seed_0/checkpoints/last.ckpt")
    checkpoint.touch()
    with pytest.raises(SweepError, match="fp32/seed_0: holds a started run of another configuration"):
        lab.sweep(resolve=changed).run()
    checkpoint.unlink()  # with nothing to resume from, the new configuration starts afresh
    lab.how = {}
    assert lab.sweep(resolve=changed).run() == 0


def test_an_arm_is_resolved_once_for_all_its_seeds(lab: Lab) -> None:
    asked: list[str] = []

    def resolve(args: list[str]) -> Resolved:
        asked.append(args[args.index("--run.arm") + 1])
        return Resolved(asked[-1], by_seed={3: f"{asked[-1]} of 3"})

    sweep = lab.sweep(resolve=resolve, experiment=lab.experiment((0, 3)))
    assert sweep.hashes() == {
        **{"fp32/seed_0": "fp32", "fault/seed_0": "fault"},
        **{"fp32/seed_3": "fp32 of 3", "fault/seed_3": "fault of 3"},
    }
    assert asked == ["fp32", "fault"]


def test_mistake_in_the_last_arm_stops_before_the_first_run(lab: Lab) -> None:
    def resolve(args: list[str]) -> Resolved:
        if args[args.index("--run.arm") + 1] == "fault":
            raise ValueError("Key 'trainer.max_stepz' is not expected")
        return Resolved()

    with pytest.raises(SweepError, match=r"arm fault \(.*arm.yaml\): Key 'trainer.max_stepz'"):
        lab.sweep(resolve=resolve).run()
    assert not (lab.root / "runs").exists()


def test_broken_verdict_names_the_file(lab: Lab) -> None:
    lab.path("fp32/seed_0").mkdir(parents=True)
    lab.path("fp32/seed_0/verdict.json").write_text("{")
    with pytest.raises(ValueError, match=r"fp32/seed_0/verdict.json"):
        lab.sweep().run()


def test_dry_run_prints_commands_and_writes_nothing(lab: Lab) -> None:
    assert lab.sweep().dry_run() == 0
    assert lab.out.getvalue().count("fake_fit.py") == 4
    assert not (lab.root / "runs").exists()


def test_dry_run_prints_every_command_as_soon_as_it_knows_it(lab: Lab) -> None:
    def resolve(args: list[str]) -> Resolved:
        if args[args.index("--run.arm") + 1] == "fault":
            assert "# fp32/seed_0: to run\n" in lab.out.getvalue()
            raise ValueError("Key 'trainer.max_stepz' is not expected")
        return Resolved()

    with pytest.raises(SweepError, match="arm fault"):
        lab.sweep(resolve=resolve).dry_run()


def test_second_sweep_on_the_same_experiment_is_refused(lab: Lab) -> None:
    lab.path("").mkdir(parents=True)
    with lab.path(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(SweepError, match=r"\.lock: another sweep runs this experiment"):
            lab.sweep().run()
    assert lab.launched() == []
    assert lab.sweep().run() == 0


def test_main_runs_and_reports(lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lab.how = {"fp32/seed_1": "crash"}
    (lab.root / "arm.yaml").touch()
    config = lab.root / "demo.yaml"
    config.write_text("{name: demo, arms: {fp32: arm.yaml, fault: arm.yaml}, seeds: [0, 1], report: {reference: fp32}}")

    def build(experiment: Experiment, root: Path, executor: LocalPool, only: list[str] | None) -> Sweep:
        return lab.sweep(experiment=experiment, executor=executor, only=only)

    monkeypatch.setattr(sweep_module, "Sweep", build)
    assert main(["-c", str(config), "--jobs", "2"]) == 1
    out = capsys.readouterr().out
    assert "not counted: failed (exit status 3): fp32/seed_1\n" in out
    assert "Against fp32" in out
    assert f"tensorboard --logdir {lab.path('')}" in out
    assert lab.path("figure.png").exists()


# ---- interrupts ----------------------------------------------------------------------------------------------------

DRIVER = textwrap.dedent(
    """
    import signal, sys
    from pathlib import Path
    sys.path.insert(0, str(Path(sys.argv[1]).parent))
    from sweep_lab import Lab
    from lightning_qk.executors import attempt
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
    attempt.GRACE_S = 0.3
    lab = Lab(Path(sys.argv[2]), out=sys.stdout)
    lab.how = {"fp32/seed_1": "hang", "fault/seed_1": "hang"}
    sys.exit(lab.sweep(jobs=2).run())
    """
)


@pytest.fixture
def hanging(lab: Lab) -> Any:
    """A sweep with two finished runs and two that hang, each with a worker process of its own."""
    driver = lab.root / "driver.py"
    driver.write_text(DRIVER)
    process = subprocess.Popen(
        [sys.executable, str(driver), __file__, str(lab.root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    files = [lab.path(f"board/{arm}-seed_1.pids") for arm in ("fp32", "fault")]
    try:
        wait_until(lambda: all(file.exists() for file in files) or process.poll() is not None)
        assert process.poll() is None, process.communicate()[0]
        pids = [int(pid) for file in files for pid in file.read_text().split()]
        assert all(alive(pid) for pid in pids)
        yield types.SimpleNamespace(process=process, pids=pids)
    finally:
        process.kill()
        process.wait()
        for file in files:
            for pid in file.read_text().split() if file.exists() else []:
                if alive(int(pid)):
                    os.kill(int(pid), signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_keeps_finished_runs_and_leaves_no_orphan(lab: Lab, hanging: Any, number: signal.Signals) -> None:
    hanging.process.send_signal(number)
    out, _ = hanging.process.communicate(timeout=60)
    assert hanging.process.returncode == 130, out
    wait_until(lambda: not any(alive(pid) for pid in hanging.pids))
    assert verdict(lab, "fp32/seed_0")["status"] == verdict(lab, "fault/seed_0")["status"] == "completed"
    assert "2 of 4 runs left (fp32/seed_1, fault/seed_1)" in out
    assert "the same command goes on from here" in out
    assert lab.sweep(jobs=2).run() == 0
    assert sorted(lab.launched()[4:]) == ["fault-seed_1", "fp32-seed_1"]


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_runs_die_with_a_killed_sweep(hanging: Any) -> None:
    hanging.process.kill()
    hanging.process.wait()
    trainers = hanging.pids[::2]
    wait_until(lambda: not any(alive(pid) for pid in trainers))


def test_help_leaves_the_yaml_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "\n    sizes:                                    # --size paper" in capsys.readouterr().out
