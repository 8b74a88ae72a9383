"""``fit``, ``validate`` and ``test``: run directories, finished and unfinished runs, and errors that name the key."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from runs import callback, finish, run_args, run_dir, start, write_tokens

from lightning_qk.__main__ import main as command
from lightning_qk.cli import RunConfig, main, resolve_run
from lightning_qk.events import read_scalars
from lightning_qk.verdict import DONE, read_verdict, write_sealed

MONITOR = callback("SpectralMonitor", every_n_steps=2)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tokens: dict[str, Any]) -> Path:
    """The root of one finished run."""
    root = tmp_path_factory.mktemp("runs")
    assert main(["fit", *run_args(root, tokens, MONITOR, callback("CollapseStop"))]) == 0
    return root


@pytest.fixture
def root(finished: Path, tmp_path: Path) -> Path:
    """A copy of it to change."""
    shutil.copytree(finished, tmp_path / "runs")
    return tmp_path / "runs"


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def failure(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command that is wrong says; its exit status must be 2 and it may not end in a traceback."""
    capsys.readouterr()
    try:
        code: Any = main(args)
    except SystemExit as error:  # the parser's own way
        code = error.code
    message = capsys.readouterr().err
    assert code == 2, message
    assert "Traceback" not in message
    return message


# what a run leaves behind


def test_layout_of_a_run_directory(finished: Path) -> None:
    directory = run_dir(finished)
    names = sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())
    events = [name for name in names if name.startswith("events.out.tfevents.")]
    assert len(events) == 1
    assert sorted(set(names) - set(events)) == [
        *("checkpoints/last.ckpt", "checkpoints/step_6.ckpt", "config.yaml", "hparams.yaml", "progress.json"),
        "verdict.json",
    ]
    assert sorted(p.name for p in finished.iterdir()) == ["exp"]
    verdict = read_verdict(directory)
    assert verdict is not None
    assert (verdict["status"], verdict["step"], verdict["seed"]) == ("completed", 6, 3)
    assert (verdict["experiment"], verdict["arm"]) == ("exp", "arm")
    assert verdict["val_loss"] > 0 and verdict["sigma_q"] > 0


def test_the_saved_configuration_repeats_the_run(finished: Path, tokens: dict[str, Any]) -> None:
    saved = run_dir(finished) / "config.yaml"
    config = yaml.safe_load(saved.read_text())
    assert config["trainer"]["plugins"]["init_args"]["carry"] == 2 and config["seed_everything"] == 3
    verdict = read_verdict(run_dir(finished))
    assert verdict is not None
    again = resolve_run(["-c", str(saved)])
    assert again.config_hash == verdict["config_hash"]
    assert again.run_dir == run_dir(finished)


def test_tags_and_steps(finished: Path) -> None:
    found = read_scalars(run_dir(finished))
    tags = {
        *("loss/train", "loss/val", "grad/norm", "grad/clip_coef", "tokens", "collapse/excess", "epoch", "logit/peak"),
        *(f"{name}{layer}" for name in ("sigma/q", "sigma/k", "logit/max") for layer in ("", "/layer_00", "/layer_01")),
    }
    assert set(found) >= tags
    assert found["loss/train"].steps.tolist() == [0, 1, 2, 3, 4, 5]
    assert found["sigma/q"].steps.tolist() == [0, 1, 3, 5]
    assert len(found["loss/val"]) == 2
    assert found["tokens"].values.tolist() == [64.0 * (i + 1) for i in range(6)]


def test_a_checkpoint_holds_plain_values_only(finished: Path) -> None:
    content = torch.load(run_dir(finished) / "checkpoints" / "last.ckpt", weights_only=True)
    assert content["global_step"] == 6
    assert {"RandomState", "RunRecorder", "SpectralMonitor", "CollapseStop"} <= set(content["callbacks"])


# a directory that is in use


def test_an_existing_run_is_not_overwritten(
    root: Path, tokens: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(root)
    message = failure(["fit", *run_args(root, tokens)], capsys)
    assert str(run_dir(root)) in message and "(completed)" in message
    assert "--ckpt_path last" in message and "--run.overwrite" in message
    (run_dir(root) / "verdict.json").unlink()
    assert "(unfinished)" in failure(["fit", *run_args(root, tokens)], capsys)
    before = {name: text for name, text in before.items() if not name.endswith("verdict.json")}
    assert contents(root) == before


def test_overwrite_replaces_it(root: Path, tokens: dict[str, Any]) -> None:
    (run_dir(root) / "stale").touch()
    assert main(["fit", *run_args(root, tokens, steps=2), "--run.overwrite", "true"]) == 0
    verdict = read_verdict(run_dir(root))
    assert verdict is not None and verdict["step"] == 2
    assert not (run_dir(root) / "stale").exists()
    assert read_scalars(run_dir(root))["loss/train"].steps.tolist() == [0, 1]


def test_a_run_that_failed_before_its_first_step_is_begun_anew(
    tmp_path: Path, tokens: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = callback("RouteSplice", route="qk", layers=[9])
    assert main(["fit", *run_args(tmp_path, tokens, wrong)]) == 2
    verdict = read_verdict(run_dir(tmp_path))
    assert verdict is not None and (verdict["status"], verdict["step"]) == ("failed", 0)
    capsys.readouterr()
    assert main(["fit", *run_args(tmp_path, tokens)]) == 0
    assert "beginning anew where a run failed at step 0 (ValueError: " in capsys.readouterr().out
    verdict = read_verdict(run_dir(tmp_path))
    assert verdict is not None and verdict["status"] == "completed"
    assert read_scalars(run_dir(tmp_path))["loss/train"].steps.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("state", ["finished", "killed", "failed on resuming"])
def test_a_resume_by_mistake_changes_nothing(
    state: str, root: Path, tokens: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of another configuration: no verdict, no config.yaml, no point of a curve; nor does it free the place."""
    if state != "finished":
        (run_dir(root) / "verdict.json").unlink()
    if state == "failed on resuming":  # as versions before this one left it
        write_sealed(run_dir(root) / "verdict.json", {"schema": 1, "status": "failed", "step": 0, "error": "wrong"})
    before = contents(root)
    args = ["fit", *run_args(root, tokens, MONITOR, callback("CollapseStop"), steps=9), "--ckpt_path", "last"]
    message = failure([*args, "--model.lr=0.5", "--trainer.gradient_clip_val=0.25"], capsys)
    assert "model.lr=0.5 (there 0.01), trainer.gradient_clip_val=0.25 (there " in message and "config.yaml" in message
    assert "holds a run already" in failure(args[:-2], capsys)
    assert contents(root) == before
    assert main(args) == 0
    verdict = read_verdict(run_dir(root))
    assert verdict is not None and (verdict["status"], verdict["step"]) == ("completed", 9)


@pytest.mark.parametrize("content", ["trainer: [", "", "7", "run: {}", "\0\0", "trainer: {callbacks: [1]}\nrun: {}\n"])
def test_a_resume_by_mistake_beside_a_damaged_configuration(
    content: str, root: Path, tokens: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir(root) / "config.yaml").write_text(content)
    args = ["fit", *run_args(root, tokens, MONITOR, callback("CollapseStop"), steps=9), "--ckpt_path", "last"]
    message = failure([*args, "--model.lr=0.5"], capsys)
    assert "another configuration" in message and "config.yaml is damaged" in message


def test_a_finished_run_is_left_alone(root: Path, tokens: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(root)
    args = run_args(root, tokens, MONITOR, callback("CollapseStop"))
    assert main(["fit", *args, "--ckpt_path", "last"]) == 0
    assert "completed at step 6" in capsys.readouterr().out
    assert contents(root) == before


def test_a_finished_run_goes_on_when_more_is_asked(root: Path, tokens: dict[str, Any]) -> None:
    args = run_args(root, tokens, MONITOR, callback("CollapseStop"), steps=9)
    assert main(["fit", *args, "--ckpt_path", "last"]) == 0
    verdict = read_verdict(run_dir(root))
    assert verdict is not None and (verdict["step"], verdict["max_steps"]) == (9, 9)
    assert read_scalars(run_dir(root))["loss/train"].steps.tolist() == list(range(9))


def test_last_is_the_newest_whole_checkpoint(root: Path, tokens: dict[str, Any]) -> None:
    """A run killed while it copied a checkpoint leaves a part of it."""
    last = run_dir(root) / "checkpoints" / "last.ckpt"
    last.write_bytes(last.read_bytes()[:-500])
    args = run_args(root, tokens, MONITOR, callback("CollapseStop"), steps=9)
    assert main(["fit", *args, "--ckpt_path", "last"]) == 0
    assert read_scalars(run_dir(root))["loss/train"].steps.tolist() == list(range(9))
    verdict = read_verdict(run_dir(root))
    assert verdict is not None and verdict["step"] == 9


def test_a_moved_run_goes_on_from_its_newest_checkpoint(root: Path, tokens: dict[str, Any]) -> None:
    moved = root.with_name("moved")
    root.rename(moved)
    for steps in (9, 12):
        args = run_args(moved, tokens, MONITOR, callback("CollapseStop"), steps=steps)
        assert main(["fit", *args, "--ckpt_path", "last"]) == 0
    assert read_scalars(run_dir(moved))["loss/train"].steps.tolist() == list(range(12))
    newest = max((run_dir(moved) / "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert torch.load(newest, weights_only=True)["global_step"] == 12


def test_last_without_a_checkpoint_starts_the_run(tmp_path: Path, tokens: dict[str, Any]) -> None:
    assert main(["fit", *run_args(tmp_path, tokens, steps=1), "--ckpt_path", "last"]) == 0
    assert read_verdict(run_dir(tmp_path)) is not None


def test_a_changed_hyperparameter_is_refused_on_resume(
    root: Path, tokens: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    args = [*run_args(root, tokens, MONITOR, callback("CollapseStop")), "--ckpt_path", "last", "--model.lr", "0.02"]
    assert "model.lr=0.02" in failure(["fit", *args], capsys)


# what a run would be


@pytest.mark.parametrize("extra", [[], ["--ckpt_path", "last"], ["--run.overwrite", "true"]])
def test_resolving_a_run_touches_nothing(root: Path, tokens: dict[str, Any], extra: list[str]) -> None:
    """Neither a finished run, which it does not refuse, nor one to be overwritten."""
    before = contents(root)
    args = run_args(root, tokens, MONITOR, callback("CollapseStop"))
    verdict = read_verdict(run_dir(root))
    assert verdict is not None
    (there, elsewhere) = (resolve_run([*run, *extra]) for run in (args, [*args, "--run.experiment", "new"]))
    assert there.run_dir == run_dir(root)
    assert contents(root) == before and not elsewhere.run_dir.exists()


def test_a_verdict_whose_hash_has_names_in_it_is_still_of_its_run(
    root: Path, tokens: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    args = run_args(root, tokens, MONITOR, callback("CollapseStop"))
    plain = yaml.safe_load(resolve_run(args).deciding)
    for arm, code in (("arm", 0), ("other", 2)):
        text = yaml.safe_dump({**plain, "run": {"experiment": "exp", "arm": arm}}, sort_keys=True)
        old = {"config_hash": hashlib.sha256(text.encode()).hexdigest()[:16]}
        write_sealed(run_dir(root) / "verdict.json", {**(read_verdict(run_dir(root)) or {}), **old})
        # of another configuration it would go on, here from a checkpoint that cannot be read
        (run_dir(root) / "checkpoints" / "last.ckpt").write_bytes(b"")
        (run_dir(root) / "checkpoints" / "step_6.ckpt").unlink(missing_ok=True)
        assert main(["fit", *args, "--ckpt_path", "last"]) == code
        assert ("nothing to do" in capsys.readouterr().out) == (code == 0)


def test_the_hash_ignores_names_places_and_how_a_run_is_shown(tmp_path: Path, tokens: dict[str, Any]) -> None:
    base = resolve_run(run_args(tmp_path, tokens))
    assert base.run_dir == tmp_path / "exp" / "arm" / "seed_3"
    for extra in (
        ["--run.root", str(tmp_path / "elsewhere")],
        ["--run.experiment", "other"],
        ["--run.arm", "other"],
        ["--ckpt_path", "last"],
        ["--run.overwrite", "true"],
        ["--trainer.enable_progress_bar", "true"],
    ):
        assert resolve_run([*run_args(tmp_path, tokens), *extra]).config_hash == base.config_hash, extra


def test_no_progress_bar_is_the_last_word(
    tmp_path: Path, tokens: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    args = run_args(tmp_path, tokens, callback("RunProgressBar"), steps=1)  # as base.yaml lists it
    assert main(["fit", *args]) == 0
    told = capsys.readouterr()
    assert "Epoch" not in told.out + told.err
    (tmp_path / "exp").rename(tmp_path / "before")
    assert main(["fit", *args, "--trainer.enable_progress_bar=true"]) == 0
    assert "Epoch" in capsys.readouterr().out


def test_another_seed_needs_no_parsing(
    tmp_path: Path, tokens: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    args = run_args(tmp_path, tokens)
    parsed = resolve_run([*args, "--seed_everything", "17"])
    assert resolve_run(args).with_seed(17) == parsed != resolve_run(args)
    assert parsed.with_seed(3) == resolve_run(args)
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "")


@pytest.mark.parametrize(
    "extra",
    [
        ["--seed_everything", "4"],
        ["--model.lr", "0.02"],
        ["--trainer.max_steps", "7"],
        ["--trainer.plugins.init_args.carry", "3"],
        ["--trainer.plugins.init_args.overrides", "{lse: fp32}"],
        ["--trainer.plugins.init_args.gradient.block=null"],
        [f"--trainer.callbacks+={callback('QKGuard', threshold=60)}"],
        [f"--trainer.callbacks+={callback('RouteSplice', route='qk')}"],
        ["--data.init_args.batch_size", "5"],
    ],
    ids=lambda extra: extra[0].lstrip("-")[:30],
)
def test_the_hash_changes_with_all_that_decides_the_numbers(
    tmp_path: Path, tokens: dict[str, Any], extra: list[str]
) -> None:
    args = run_args(tmp_path, tokens)
    assert resolve_run([*args, *extra]).config_hash != resolve_run(args).config_hash


def test_the_hash_knows_a_callbacks_arguments(tmp_path: Path, tokens: dict[str, Any]) -> None:
    hashes = {resolve_run(run_args(tmp_path, tokens, callback("QKGuard", threshold=t))).config_hash for t in (30, 60)}
    assert len(hashes) == 2


# errors: see also test_bad_input.py


@pytest.mark.parametrize("name", ["", ".", "..", "a/b"])
def test_names_that_are_no_directories_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"run\.arm="):
        RunConfig(arm=name)
    assert RunConfig().arm == "base" and "failed" not in DONE


# validate and test


def evaluate_args(root: Path, tokens: dict[str, Any]) -> list[str]:
    return run_args(root, tokens)


@pytest.mark.parametrize("subcommand", ["validate", "test"])
def test_a_checkpoint_is_evaluated_and_its_run_left_alone(
    root: Path, tokens: dict[str, Any], subcommand: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(root)
    assert main([subcommand, *evaluate_args(root, tokens), "--ckpt_path", "last"]) == 0
    assert contents(root) == before
    verdict = read_verdict(run_dir(root))
    assert verdict is not None
    shown = capsys.readouterr().out
    key = "loss/val" if subcommand == "validate" else "loss/test"
    (value,) = re.findall(rf"{key}\W+([\d.]+)", shown)  # a table with rich, plain columns without
    assert float(value) == pytest.approx(verdict["val_loss"], rel=1e-5)


def test_threads_can_be_set_from_outside(
    tmp_path: Path, tokens: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_QK_THREADS", "2")
    assert main(["fit", *run_args(tmp_path, tokens, steps=1)]) == 0
    verdict = read_verdict(run_dir(tmp_path))
    assert verdict is not None and verdict["threads"] == 2


# the command


def test_the_command_dispatches_and_names_what_it_knows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, code in ((["--help"], 0), ([], 2), (["train"], 2)):
        monkeypatch.setattr(sys, "argv", ["lightning-qk", *arguments])
        assert command() == code
        shown = capsys.readouterr()
        for name in ("fit", "validate", "test", "sweep", "report"):
            assert name in shown.out + shown.err
    assert "'train' is not a command" in shown.err


def test_python_m_runs_and_fails_as_it_should(tmp_path: Path, tokens: dict[str, Any]) -> None:
    good = start(["fit", *run_args(tmp_path, tokens, steps=2)], tmp_path)
    bad = start(["fit", *run_args(tmp_path / "bad", tokens), "--model.lr", "fast"], tmp_path)
    finish(good)
    assert json.loads((run_dir(tmp_path) / "verdict.json").read_text())["status"] == "completed"
    message = finish(bad, code=2)
    assert "model.lr" in message and "Traceback" not in message


def python(code: str, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ)
    if path is not None:
        env["PYTHONPATH"] = str(path)
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


def test_importing_the_package_is_light(tmp_path: Path) -> None:
    heavy = ("lightning", "triton", "datasets", "torch._inductor", "matplotlib", "tensorboard", "jsonargparse")
    done = python(
        f"import sys, lightning_qk; print([m for m in {heavy} if m in sys.modules]);"
        "lightning_qk.GPT; print('lightning' in sys.modules);"
        "print(lightning_qk.StdlibCorpus.__name__, 'lightning' in sys.modules)",
        tmp_path,
    )
    assert done.stdout.split() == ["[]", "False", "StdlibCorpus", "True"], done.stderr


@pytest.mark.parametrize("name", ["kernels", "callbacks"])
def test_another_package_of_that_name_is_recognised(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("def get_kernel(): ...\n")
    done = python("import lightning_qk", tmp_path, path=tmp_path)
    assert done.returncode != 0
    said = done.stderr.splitlines()[-1]
    assert str(tmp_path / name / "__init__.py") in said and "rename it" in said and f"pip uninstall {name}" in said


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    import lightning_qk

    with pytest.raises(AttributeError, match="no attribute 'GPT3'"):
        _ = lightning_qk.GPT3
    for name in lightning_qk.__all__:
        assert getattr(lightning_qk, name) is not None
