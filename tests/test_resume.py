"""A run that was killed and resumed is the uninterrupted run, bit for bit: curves, verdict and the guard's step."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import callback, finish, killed, outcome, run_args, run_dir, start, write_tokens

from lightning_qk.checkpoints import global_step
from lightning_qk.cli import main
from lightning_qk.verdict import read_verdict

# ModelCheckpoint and validation come every 3 steps. A training batch has a start and an end; checkpoint calls come in
# pairs, step_3.ckpt and then last.ckpt.
KILLS = {
    "before the first checkpoint": ("on_train_batch_end", 2),
    "at a step that would save": ("on_train_batch_end", 6),
    "between the two files of a checkpoint": ("on_save_checkpoint", 4),
    "in the first validation": ("on_validation_batch_start", 1),
    "in a later validation": ("on_validation_batch_start", 4),
    "after a validation": ("on_validation_end", 2),
    "right after a checkpoint": ("on_before_backward", 7),
    "two steps after a checkpoint": ("on_train_batch_start", 9),
    "at the last step": ("on_train_batch_end", 11),
    "after the last step": ("on_train_end", 1),
}
GUARD = callback("QKGuard", mode="fire_at_step", fire_step=5)
WATCH = (callback("SpectralMonitor", every_n_steps=2), callback("CollapseStop", window=4))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def plain(root: Path, tokens: dict[str, Any]) -> list[str]:
    return run_args(root, tokens, *WATCH, GUARD, steps=11)


def rich(root: Path, tokens: dict[str, Any]) -> list[str]:
    """Dropout, stochastic rounding, a splice, accumulation, and a guard that looks every other step."""
    args = run_args(
        root,
        tokens,
        *WATCH,
        callback("QKGuard", threshold=0.05, every_n_steps=2),
        callback("RouteSplice", route="qk"),
        steps=11,
        dropout=0.2,
    )
    return [
        *args,
        "--trainer.accumulate_grad_batches=2",
        "--trainer.plugins.init_args.overrides={l_carry: '2:sr', o_carry: '2:sr'}",
        "--model.schedule=cosine",
        "--trainer.val_check_interval=6",
    ]


ARMS = {"plain": plain, "rich": rich}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tokens: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What the uninterrupted runs leave."""
    torch.set_num_threads(1)
    outcomes = {}
    for name, arm in ARMS.items():
        root = tmp_path_factory.mktemp(name)
        assert main(["fit", *arm(root, tokens)]) == 0
        outcomes[name] = outcome(run_dir(root))
        assert sorted(p.name for p in (run_dir(root) / "checkpoints").iterdir()) == ["last.ckpt", "step_9.ckpt"]
    return outcomes


def test_the_uninterrupted_runs_show_what_is_compared(whole: dict[str, dict[str, Any]]) -> None:
    for name, found in whole.items():
        assert found["verdict"]["guard"] == "fired" and 3 < found["verdict"]["guard_step"] < 9, name
        assert found["verdict"]["status"] == "completed" and found["verdict"]["step"] == 11
        steps, values = found["curves"]["loss/train"]
        assert steps == list(range(11)) and len(set(values)) == 11
        assert len(found["curves"]["loss/val"][0]) == 3
        assert found["curves"]["sigma/q"][0] == [0, 1, 3, 5, 7, 9]
    assert "splice/cosine/qk" in whole["rich"]["curves"]


def resumed(arm: str, root: Path, tokens: dict[str, Any], kills: list[tuple[str, int]]) -> dict[str, Any]:
    args = ["fit", *ARMS[arm](root, tokens)]
    for hook, call in kills:
        killed([*args, f"--trainer.callbacks+={callback('runs.Kill', hook=hook, call=call)}", "--ckpt_path", "last"])
        assert not (run_dir(root) / "verdict.json").exists()
    assert main([*args, "--ckpt_path", "last"]) == 0
    saved = {p.name for p in (run_dir(root) / "checkpoints").iterdir()}
    assert {"last.ckpt", "step_9.ckpt"} <= saved and not any(name.startswith("last-v") for name in saved)
    assert global_step(run_dir(root) / "checkpoints" / "last.ckpt") == 9
    return outcome(run_dir(root))


@pytest.mark.parametrize("when", KILLS)
def test_killed_and_resumed(tmp_path: Path, tokens: dict[str, Any], whole: dict[str, Any], when: str) -> None:
    assert resumed("plain", tmp_path, tokens, [KILLS[when]]) == whole["plain"]


@pytest.mark.parametrize("when", ["between the two files of a checkpoint", "two steps after a checkpoint"])
def test_killed_and_resumed_with_everything_on(
    tmp_path: Path, tokens: dict[str, Any], whole: dict[str, Any], when: str
) -> None:
    hook, call = KILLS[when]
    call = call * 2 if hook.startswith("on_train_batch") else call  # two micro-batches a step
    assert resumed("rich", tmp_path, tokens, [(hook, call)]) == whole["rich"]


@pytest.mark.parametrize("arm", ARMS)
def test_killed_again_and_again(tmp_path: Path, tokens: dict[str, Any], whole: dict[str, Any], arm: str) -> None:
    micro = 2 if arm == "rich" else 1
    kills = [("on_train_batch_end", 2 * micro), *[("on_train_batch_start", 5 * micro)] * 2, ("on_train_batch_end", 1)]
    assert resumed(arm, tmp_path, tokens, kills) == whole[arm]


def test_killed_between_two_micro_batches_of_a_resumed_step(
    tmp_path: Path, tokens: dict[str, Any], whole: dict[str, dict[str, Any]]
) -> None:
    """The step that a run goes on from is not saved again with half of the next one's gradient behind it."""
    kills = [("on_train_batch_start", 8), ("on_train_batch_start", 2)]  # the third step is saved after batch 6
    assert resumed("rich", tmp_path, tokens, kills) == whole["rich"]


def test_files_of_a_killed_run_are_written_over(
    tmp_path: Path, tokens: dict[str, Any], whole: dict[str, dict[str, Any]]
) -> None:
    args = ["fit", *plain(tmp_path, tokens), "--ckpt_path", "last"]
    killed([*args, f"--trainer.callbacks+={callback('runs.Kill', hook='on_train_batch_start', call=8)}"])
    directory = run_dir(tmp_path) / "checkpoints"
    for name in ("last.ckpt", "step_9.ckpt"):
        (directory / name).write_bytes(b"damaged")
    with pytest.warns(UserWarning, match=r"last\.ckpt is damaged"):
        assert main(args) == 0
    assert outcome(run_dir(tmp_path)) == whole["plain"]
    # Lightning keeps the one that it went on from
    steps = {"last.ckpt": 9, "step_9.ckpt": 9, "step_6.ckpt": 6}
    assert {path.name: global_step(path) for path in directory.iterdir()} == steps


def test_a_damaged_last_checkpoint_is_replaced_though_no_step_is_left_to_save(
    tmp_path: Path, tokens: dict[str, Any], whole: dict[str, dict[str, Any]]
) -> None:
    args = ["fit", *plain(tmp_path, tokens), "--ckpt_path", "last"]
    killed([*args, f"--trainer.callbacks+={callback('runs.Kill', hook='on_train_batch_end', call=11)}"])
    last = run_dir(tmp_path) / "checkpoints" / "last.ckpt"
    last.write_bytes(last.read_bytes()[:1000])
    with pytest.warns(UserWarning, match=r"last\.ckpt is damaged"):
        assert main(args) == 0
    assert outcome(run_dir(tmp_path)) == whole["plain"]
    assert global_step(last) == 11


def test_a_terminated_run_says_so_by_its_exit_status(
    tmp_path: Path, tokens: dict[str, Any], whole: dict[str, dict[str, Any]]
) -> None:
    args = ["fit", *plain(tmp_path, tokens), "--ckpt_path", "last"]
    kill = callback("runs.Kill", hook="on_before_backward", call=5, number=int(signal.SIGTERM))
    killed([*args, f"--trainer.callbacks+={kill}"], code=128 + signal.SIGTERM)
    assert read_verdict(run_dir(tmp_path)) is None
    assert main(args) == 0
    assert outcome(run_dir(tmp_path)) == whole["plain"]


def test_a_process_that_is_killed_from_outside(tmp_path: Path, tokens: dict[str, Any], whole: dict[str, Any]) -> None:
    """The same through ``python -m lightning_qk``, which shares nothing with this process."""
    args = ["fit", *plain(tmp_path, tokens)]
    process = start(
        [*args, f"--trainer.callbacks+={callback('runs.Kill', hook='on_train_batch_end', call=8)}"], tmp_path
    )
    finish(process, code=-signal.SIGKILL)
    assert not (run_dir(tmp_path) / "verdict.json").exists()
    finish(start([*args, "--ckpt_path", "last"], tmp_path))
    assert outcome(run_dir(tmp_path)) == whole["plain"]


@pytest.mark.slow
@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("step", range(1, 12))
def test_killed_at_every_step(
    tmp_path: Path, tokens: dict[str, Any], whole: dict[str, Any], arm: str, step: int
) -> None:
    micro = 2 if arm == "rich" else 1
    for hook in ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end"):
        call = step if hook == "on_before_optimizer_step" else step * micro
        assert resumed(arm, tmp_path / hook, tokens, [(hook, call)]) == whole[arm], hook
