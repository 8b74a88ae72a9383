"""Runs that begin with a checkpoint of another: what they are named, when they start, and that they are exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from runs import callback, run_args, write_tokens
from sweep_lab import Lab

from lightning_qk.checkpoints import global_step
from lightning_qk.cli import main, resolve_run
from lightning_qk.events import read_history
from lightning_qk.experiment import SweepError, parse_sweep
from lightning_qk.experiment_arms import expand_forks
from lightning_qk.fork import Fork
from lightning_qk.verdict import read_verdict

STUDENT = Path(__file__).parents[1] / "configs" / "student_teacher"


def write_experiment(root: Path, **changes: Any) -> Path:
    for name in ("base", "fp8", "bump", "none"):
        (root / f"{name}.yaml").write_text("")
    forks = {"from": "fp8", "steps": [2, 4], "arms": {"bump": "bump.yaml", "none": ["none.yaml"]}}
    content = {"name": "demo", "base": "base.yaml", "arms": {"fp8": "fp8.yaml"}, "seeds": [3], "forks": forks}
    path = root / "demo.yaml"
    path.write_text(yaml.safe_dump({**content, **changes}))
    return path


def test_every_fork_at_every_step_is_an_arm_over_the_other(tmp_path: Path) -> None:
    path = write_experiment(tmp_path, arm_overrides={"fp8": {"a.b": 1}})
    _, experiment = parse_sweep(["-c", str(path)], "")
    assert list(experiment.arms) == ["fp8", "bump-step_2", "none-step_2", "bump-step_4", "none-step_4"]
    parent, *_, late = experiment.runs(Path("runs"))
    assert (parent.parent, late.parent) == (None, "fp8/seed_3")
    assert not [arg for arg in parent.fit_args if arg.startswith("--run.fork")]
    assert '--run.fork={"arm": "fp8", "step": 4, "before": null}' in late.fit_args and "--a.b=1" in late.fit_args
    files = [str(tmp_path / f"{name}.yaml") for name in ("base", "fp8", "none")]
    assert [arg for arg in late.fit_args if arg.endswith(".yaml")] == files
    assert [run.arm for run in experiment.runs(Path("runs"), ["bump"])] == ["bump-step_2", "bump-step_4"]


def test_a_size_has_steps_of_its_own(tmp_path: Path) -> None:
    path = write_experiment(tmp_path, sizes={"proxy": {}, "paper": {"forks": {"before": [100]}}})
    _, experiment = parse_sweep(["-c", str(path), "--size", "paper"], "")
    assert dict(experiment.forks) == {f"{arm}-before_100": Fork("fp8", before=100) for arm in ("bump", "none")}


def test_a_size_forks_an_arm_of_its_own(tmp_path: Path) -> None:
    size = {"arms": {"fp6": "fp8.yaml"}, "forks": {"from": "fp6", "steps": [3]}}
    path = write_experiment(tmp_path, sizes={"paper": size, "wide": {"grid": {"a.b": [1]}}})
    _, experiment = parse_sweep(["-c", str(path), "--size", "paper"], "")
    assert dict(experiment.forks) == {f"{arm}-step_3": Fork("fp6", 3) for arm in ("bump", "none")}
    with pytest.raises(SweepError, match="forks or a grid, not both"):
        parse_sweep(["-c", str(path), "--size", "wide"], "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": None}, "forks.steps: None must be a list"),
        ({"steps": [2, 2]}, "forks.steps"),
        ({"steps": [0]}, "forks.steps"),
        ({"from": "bf16"}, "forks.from: 'bf16' is not an arm; the arms are fp8"),
        ({"arms": {"fp8": "x"}}, "forks.arms: 'fp8' is an arm already"),
        ({"step": 3}, "forks: has from, steps, arms, step; it needs from, arms, and one of steps and before"),
        ({"before": [3]}, "one of steps and before"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    forks = {"from": "fp8", "steps": [2], "arms": {"bump": "bump.yaml"}, **change}
    with pytest.raises(SweepError, match=message):
        expand_forks(forks, {"fp8": "fp8.yaml"}, {})


def test_forks_and_a_grid_are_two_experiments() -> None:
    with pytest.raises(SweepError, match="forks or a grid, not both"):
        expand_forks({"from": "fp8", "steps": [2], "arms": {"bump": "bump.yaml"}}, {"fp8": ""}, {"model.lr": [1]})


FORKS = {"late": Fork("fp32", 10)}


def lab_with_forks(root: Path) -> Lab:
    lab = Lab(root)
    lab.experiment((0,))  # writes the arm's file
    return lab


def forked(lab: Lab, seeds: tuple[int, ...] = (0,)) -> Any:
    arm = (lab.root / "arm.yaml",)
    return lab.experiment(seeds, arms={"late": arm, "fp32": arm}, forks=FORKS)


def test_a_fork_waits_for_its_parent(tmp_path: Path) -> None:
    lab = lab_with_forks(tmp_path)
    assert lab.sweep(jobs=2, experiment=forked(lab, (0, 1))).run() == 0
    launched = lab.launched()
    assert set(launched[:2]) == {"fp32-seed_0", "fp32-seed_1"} and set(launched[2:]) == {"late-seed_0", "late-seed_1"}
    record = json.loads(lab.path("experiment.json").read_text())
    assert record["forks"] == {"late": {"arm": "fp32", "step": 10, "before": None}}
    assert lab.sweep(jobs=2, experiment=forked(lab, (0, 1))).run() == 0 and len(lab.launched()) == 4


def test_forks_of_a_failed_run_are_not_started_the_others_are(tmp_path: Path) -> None:
    lab = lab_with_forks(tmp_path)
    lab.how = {"fp32/seed_0": "crash"}
    assert lab.sweep(jobs=1, experiment=forked(lab, (0, 1))).run() == 1
    assert lab.launched() == ["fp32-seed_0", "fp32-seed_1", "late-seed_1"]
    assert "late/seed_0: not run, it is a fork of fp32/seed_0, which is not done" in lab.out.getvalue()
    lab.how = {}
    assert lab.sweep(jobs=1, experiment=forked(lab, (0, 1))).run() == 0
    assert lab.launched()[3:] == ["fp32-seed_0", "late-seed_0"]


def test_a_fork_without_its_parent_is_not_run(tmp_path: Path) -> None:
    lab = lab_with_forks(tmp_path)
    assert lab.sweep(experiment=forked(lab), only=["late"]).run() == 1
    assert lab.launched() == [] and "run that too" in lab.out.getvalue()


def test_a_fork_before_an_onset_that_never_came_is_left_out_and_is_no_failure(tmp_path: Path) -> None:
    lab = lab_with_forks(tmp_path)
    lab.how = {"fp32/seed_1": "collapsed"}
    arm = (lab.root / "arm.yaml",)
    arms, forks = {"late": arm, "fp32": arm}, {"late": Fork("fp32", before=5)}
    assert lab.sweep(jobs=1, experiment=lab.experiment((0, 1), arms=arms, forks=forks)).run() == 0
    assert lab.launched() == ["fp32-seed_0", "fp32-seed_1", "late-seed_1"]
    assert "late/seed_0: not run, " in (said := lab.out.getvalue())
    assert "fp32/seed_0 neither collapsed nor diverged, so that there is no `before`\n" in said


def arguments(root: Path, *overlays: str, fork: Fork | None = None, steps: int = 6) -> list[str]:
    files = ("base", "small", "arms/mxfp4", *overlays)
    args = [part for name in files for part in ("-c", str(STUDENT / f"{name}.yaml"))]
    args += ["--run.root", str(root), f"--trainer.max_steps={steps}", "--trainer.log_every_n_steps=1"]
    args += ["--model.init_args.width=32", "--data.init_args.batch_size=32", "--trainer.val_check_interval=2"]
    keep = {"every_n_train_steps": 2, "save_top_k": -1, "monitor": "step", "mode": "max", "filename": "step_{step}"}
    args.append(
        "--trainer.callbacks+="
        + json.dumps({"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": keep})
    )
    if fork is not None:
        args += [f'--run.fork={{"arm": "{fork.arm}", "step": {fork.step}}}', "--ckpt_path", "last"]
    return args


def curve(run: Path) -> dict[int, float]:
    series = read_history(run, {"loss/train"})[0]["loss/train"]
    return dict(zip(map(int, series.steps), map(float, series.values), strict=True))


def weights(run: Path) -> dict[str, Any]:
    return torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def test_a_fork_without_a_change_is_the_parent_bit_for_bit(tmp_path: Path) -> None:
    assert main(["fit", *arguments(tmp_path)]) == 0
    parent, control = tmp_path / "default" / "mxfp4" / "seed_0", tmp_path / "default" / "switch_none" / "seed_0"
    fork = Fork("mxfp4", 4)
    assert main(["fit", *arguments(tmp_path, "switches/none", fork=fork)]) == 0
    whole, forked_curve = curve(parent), curve(control)
    assert list(forked_curve) == [4, 5] and forked_curve == {step: whole[step] for step in (4, 5)}  # counted from 0
    for name, value in weights(parent).items():
        assert torch.equal(value, weights(control)[name]), name
    verdict, theirs = read_verdict(control), read_verdict(parent)
    assert verdict is not None and theirs is not None and "fork" not in theirs
    assert verdict["fork"]["arm"] == "mxfp4" and verdict["fork"]["step"] == 4
    assert global_step(parent / "checkpoints" / verdict["fork"]["checkpoint"]) == 4
    assert (verdict["step"], verdict["loss"], verdict["val_loss"]) == (6, theirs["loss"], theirs["val_loss"])
    assert verdict["precision_switch_step"] == 4
    # killed after its own checkpoint of step 6, of which the last step is passed over: from the fork again, or its own
    (control / "verdict.json").unlink()
    assert main(["fit", *arguments(tmp_path, "switches/none", fork=fork)]) == 0
    again = read_verdict(control)
    assert again is not None and again["loss"] == verdict["loss"] and again["fork"] == verdict["fork"]


def test_a_fork_with_a_change_differs_after_its_step_only(tmp_path: Path) -> None:
    assert main(["fit", *arguments(tmp_path, steps=4)]) == 0
    assert main(["fit", *arguments(tmp_path, "switches/fp32", fork=Fork("mxfp4", 2), steps=4)]) == 0
    whole, forked_curve = (curve(tmp_path / "default" / arm / "seed_0") for arm in ("mxfp4", "switch_fp32"))
    assert list(forked_curve) == [2, 3] and forked_curve[2] != whole[2]


def test_a_checkpoint_that_was_not_kept_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *arguments(tmp_path, steps=2)]) == 0
    assert main(["fit", *arguments(tmp_path, "switches/none", fork=Fork("mxfp4", 3))]) == 2
    error = capsys.readouterr().err
    assert "has no checkpoint of step 3 (steps kept: 2)" in error and "save_top_k" in error


def test_a_fork_is_of_the_configuration_and_no_fork_is_not(tmp_path: Path) -> None:
    hashes = {resolve_run(arguments(tmp_path, fork=fork)).config_hash for fork in (Fork("a", 1), Fork("a", 2), None)}
    assert len(hashes) == 3
    for wrong in ({"step": 0}, {}, {"step": 1, "before": 1}):
        with pytest.raises(ValueError, match="one of step="):
            Fork("a", **wrong)


def test_before_the_onset_is_the_newest_checkpoint_old_enough(tmp_path: Path) -> None:
    parent, run = tmp_path / "fp8" / "seed_0", tmp_path / "bump" / "seed_0"
    (parent / "checkpoints").mkdir(parents=True)
    for step in (50, 100, 150):
        torch.save({"global_step": step}, parent / "checkpoints" / f"step_{step}.ckpt")

    def fork(before: int, **verdict: int | None) -> int:
        content = {"schema": 1, "status": "completed", **verdict}
        (parent / "verdict.json").write_text(json.dumps(content))
        return Fork("fp8", before=before).checkpoint(run)[1]

    assert fork(30, collapse_step=180, divergence_step=None) == 150
    assert fork(31, collapse_step=180) == 100
    assert fork(31, collapse_step=180, divergence_step=90) == 50
    with pytest.raises(FileNotFoundError, match="onset at step 90, its first checkpoint 40 before, not 50"):
        fork(50, collapse_step=90)
    assert Fork("fp8", before=50).obstacle(run) is not None and Fork("fp8", before=40).obstacle(run) is None
    with pytest.raises(FileNotFoundError, match="neither collapsed nor diverged"):
        fork(50, collapse_step=None)


def test_a_fork_may_bring_a_guard_that_its_parent_had_not(tmp_path: Path) -> None:
    data = write_tokens(tmp_path / "data")
    assert main(["fit", *run_args(tmp_path, data, steps=3)]) == 0
    fork = ["--run.arm", "guarded", '--run.fork={"arm": "arm", "step": 3}', "--ckpt_path", "last"]
    guard = callback("QKGuard", threshold=1e-6, trigger="max_logit")
    assert main(["fit", *run_args(tmp_path, data, guard), *fork]) == 0
    verdict = read_verdict(tmp_path / "exp" / "guarded" / "seed_3")
    assert verdict is not None and verdict["fork"]["step"] == 3 and verdict["guard_step"] == 4
