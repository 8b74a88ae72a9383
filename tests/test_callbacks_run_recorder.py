"""RunRecorder and the verdict file: what a run leaves behind, however it ends."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from tiny import data, fault, fit, module

from callbacks import CollapseStop, QKGuard, RunProgressBar, RunRecorder, SpectralMonitor
from callbacks.run_recorder import _FIELDS
from lightning_qk.events import read_scalars
from lightning_qk.precision import FaultPrecision, MXGradient
from lightning_qk.routes import attention_sites
from lightning_qk.verdict import read_verdict, versions, write_json_atomic, write_sealed

ALL = {
    *("schema", "status", "experiment", "arm", "seed", "step", "max_steps", "val_loss", "seconds", "versions"),
    *("threads", "config_hash", "error", "guard", "guard_logit", "recovered_spikes", "data", *_FIELDS),
}


def recorder() -> RunRecorder:
    return RunRecorder("exp", "arm", seed=7, config_hash="abc", refresh_s=0.0)


class At(Callback):
    """Does something at the end of a batch."""

    def __init__(self, batch_idx: int, action: Any) -> None:
        self.batch_idx, self.action = batch_idx, action

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.batch_idx:
            self.action(trainer, outputs)


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.splitlines()[-1]


def test_a_completed_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callbacks = [recorder(), SpectralMonitor(1), CollapseStop(window=2), QKGuard(threshold=1e-9)]
    settings: dict[str, Any] = dict(max_steps=4, limit_val_batches=1.0, val_check_interval=2)
    _, recording = fit(tmp_path, callbacks, fault(), **settings)
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert len(verdict.pop("checksum")) == 16
    assert set(verdict) == ALL
    expected = {
        **{"schema": 1, "status": "completed", "experiment": "exp", "arm": "arm", "seed": 7, "config_hash": "abc"},
        **{"step": 4, "max_steps": 4, "guard": "fired", "guard_step": 1, "error": None, "collapse_step": None},
        **{"threads": 1, "recovered_spikes": 0, "versions": versions()},
    }
    assert {key: verdict[key] for key in expected} == expected
    assert verdict["loss"] == pytest.approx(sum(recording.losses) / 4)
    pairs = [(a + b) / 2 for a, b in zip(recording.losses, recording.losses[1:], strict=False)]
    assert verdict["min_loss"] == pytest.approx(min(pairs))
    assert verdict["val_loss"] == pytest.approx(recording.logged[-1]["loss/val"], abs=0.5)
    assert verdict["sigma_q"] > 0 and verdict["sigma_k"] > 0 and verdict["max_logit_peak"] >= verdict["max_logit"]
    assert verdict["seconds"] > 0 and verdict["data"] == data().describe() | {"source": "numbers", "sha256": "0" * 64}
    assert verdict["versions"]["torch"] == torch.__version__
    assert read_verdict(tmp_path) == verdict
    said = last_line(capsys)
    assert said.startswith(f"completed at step 4 of 4, final loss {verdict['loss']:#.3g}, min loss ")
    assert ", guard fired at 1, " in said and said.endswith(f" s: {tmp_path}")


def test_a_collapsed_run_says_when(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def diverge(trainer: Trainer, outputs: Any) -> None:
        outputs["loss"] += 9

    stop = CollapseStop(window=1, patience=0)
    fit(tmp_path, [At(2, diverge), stop, recorder()], max_steps=9)
    verdict = read_verdict(tmp_path)
    assert verdict is not None
    assert (verdict["status"], verdict["collapse_step"], verdict["step"], verdict["error"]) == ("collapsed", 3, 3, None)
    said = last_line(capsys)
    assert said.startswith("collapsed at step 3 of 9, final loss ") and said.endswith(f" s: {tmp_path}")


def test_numbers_that_are_not_finite_survive_the_file(tmp_path: Path) -> None:
    def poison(trainer: Trainer, outputs: Any) -> None:
        with torch.no_grad():
            for p in trainer.lightning_module.parameters():
                p.fill_(math.nan)

    fit(tmp_path, [SpectralMonitor(1), At(1, poison), CollapseStop(), recorder()], fault(), max_steps=9)
    text = (tmp_path / "verdict.json").read_text()
    assert json.loads(text)["sigma_q"] == "nan" and "NaN" not in text
    verdict = read_verdict(tmp_path)
    assert verdict is not None
    assert (verdict["status"], verdict["collapse_step"], verdict["step"]) == ("nonfinite", 3, 3)
    assert math.isnan(verdict["sigma_q"])
    assert json.loads((tmp_path / "progress.json").read_text())["loss"] == "nan"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_the_last_step_ruins_are_a_verdict(tmp_path: Path, value: float) -> None:
    """No loss has seen them: sigma has."""

    def poison(trainer: Trainer, outputs: Any) -> None:
        with torch.no_grad():
            attention_sites(trainer.lightning_module)[0].q_proj.weight[0, 0] = value

    fit(tmp_path, [At(2, poison), SpectralMonitor(1), CollapseStop(), recorder()], fault(), max_steps=3)
    verdict = read_verdict(tmp_path)
    assert verdict is not None and math.isfinite(verdict["loss"]) and not math.isfinite(verdict["sigma_q"])
    assert (verdict["status"], verdict["collapse_step"], verdict["step"]) == ("nonfinite", 3, 3)


def test_a_validation_loss_that_is_not_finite_is_a_verdict(tmp_path: Path) -> None:
    """One batch of several is enough; in training all is well."""
    model = module()
    forward = model.forward
    losses: list[float] = []

    def ruined(*batch: Any) -> torch.Tensor:
        loss = forward(*batch)
        if not model.training:
            losses.append(math.nan if losses else float(loss))
            loss = loss * losses[-1]
        return loss

    model.forward = ruined  # type: ignore[method-assign]
    settings: dict[str, Any] = dict(max_steps=2, limit_val_batches=2, val_check_interval=2)
    fit(tmp_path, [CollapseStop(), recorder()], model=model, **settings)
    verdict = read_verdict(tmp_path)
    assert verdict is not None and len(losses) == 2 and math.isnan(verdict["val_loss"])
    assert (verdict["status"], verdict["collapse_step"]) == ("nonfinite", 2) and math.isfinite(verdict["loss"])


def test_a_validation_loss_that_was_not_finite_once_stays_so(tmp_path: Path) -> None:
    model = module()
    forward = model.forward
    seen: list[float] = []

    def ruined(*batch: Any) -> torch.Tensor:
        loss = forward(*batch)
        if model.training:
            return loss
        seen.append(float(loss))
        return loss * math.nan if len(seen) == 1 else loss

    model.forward = ruined  # type: ignore[method-assign]
    fit(tmp_path, [CollapseStop(), recorder()], model=model, max_steps=2, limit_val_batches=1, val_check_interval=1)
    verdict = read_verdict(tmp_path)
    assert verdict is not None and len(seen) == 2 and math.isnan(verdict["val_loss"])
    assert verdict["status"] == "nonfinite"


def test_the_first_reading_that_is_not_finite_is_told(tmp_path: Path) -> None:
    """In any Trainer; a later one may be finite again, and no loss has seen it."""

    def poison(trainer: Trainer, outputs: Any) -> None:
        with torch.no_grad():
            attention_sites(trainer.lightning_module)[0].q_proj.weight[0, 0] = math.nan

    monitor = SpectralMonitor(1)
    with pytest.warns(UserWarning, match="SpectralMonitor: not finite at step 2: "):
        fit(tmp_path, [At(1, poison), monitor, recorder()], fault(), max_steps=3)
    assert monitor.verdict_fields()["nonfinite_step"] == 2
    resumed = SpectralMonitor(1)
    resumed.load_state_dict(monitor.state_dict())
    assert resumed.verdict_fields()["nonfinite_step"] == 2
    verdict = read_verdict(tmp_path)
    assert verdict is not None and (verdict["status"], verdict["collapse_step"]) == ("nonfinite", 2)


class Refuse(Callback):
    """Fails before the first step."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        raise ValueError("no")


@pytest.mark.parametrize(("before", "kept"), [("completed", True), ("collapsed", True), ("failed", False)])
def test_what_fails_before_its_first_step_takes_no_verdict_away(tmp_path: Path, before: str, kept: bool) -> None:
    earlier = {"schema": 1, "status": before, "step": 7, "error": None}
    write_sealed(tmp_path / "verdict.json", earlier)
    with pytest.raises(ValueError, match="no"):
        fit(tmp_path, [recorder(), Refuse()], max_steps=9)
    verdict = read_verdict(tmp_path)
    assert verdict is not None and (verdict == earlier) == kept
    assert kept or (verdict["step"], verdict["error"]) == (0, "ValueError: no")


def test_a_failure_is_forgotten_once_training_goes_on(tmp_path: Path) -> None:
    write_sealed(tmp_path / "verdict.json", {"schema": 1, "status": "failed", "step": 7, "error": "no memory"})
    seen: list[bool] = []

    def look(trainer: Trainer, outputs: Any) -> None:
        seen.append((tmp_path / "verdict.json").exists())

    fit(tmp_path, [At(1, look), recorder()], max_steps=2)
    assert seen == [False] and (tmp_path / "verdict.json").exists()


def test_progress_is_written_as_it_goes(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    def read(trainer: Trainer, outputs: Any) -> None:
        seen.append(json.loads((tmp_path / "progress.json").read_text()))

    class Before(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            read(trainer, None)

    callbacks: list[Callback] = [SpectralMonitor(1), QKGuard(threshold=1e-9), recorder(), Before()]
    fit(tmp_path, callbacks, fault(), max_steps=3)
    last = json.loads((tmp_path / "progress.json").read_text())
    keys = {"step", "max_steps", "loss", "sigma_q", "max_logit", "guard", "steps_per_s", "phase"}
    assert all(set(row) == keys for row in (*seen, last))
    assert [row["step"] for row in seen] == [0, 1, 2] and last["step"] == 3
    assert [row["phase"] for row in seen] == ["starting", "training", "training"] and last["phase"] == "finished"
    assert [row["guard"] for row in seen] == ["dormant", "fired", "fired"]
    assert seen[0]["steps_per_s"] is None and seen[0]["sigma_q"] is None and last["steps_per_s"] > 0
    assert last["loss"] > 0 and last["sigma_q"] > 0 and last["max_steps"] == 3


def test_progress_is_not_written_more_often_than_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("callbacks.run_recorder.time.monotonic", lambda: now[0])
    seen: list[int] = []

    def tick(trainer: Trainer, outputs: Any) -> None:
        now[0] += 0.4

    class After(At):
        def on_train_batch_end(self, *args: Any) -> None:
            seen.append(json.loads((tmp_path / "progress.json").read_text())["step"])

    class Tick(At):
        def on_train_batch_end(self, *args: Any) -> None:
            tick(*args[:2])

    fit(tmp_path, [Tick(0, tick), RunRecorder(refresh_s=1.0), After(0, tick)], max_steps=6)
    assert seen == [0, 0, 3, 3, 3, 6]


def test_an_exception_is_a_failed_run_with_its_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(trainer: Trainer, outputs: Any) -> None:
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        fit(tmp_path, [SpectralMonitor(1), CollapseStop(), recorder(), At(1, fail)], fault(), max_steps=4)
    verdict = read_verdict(tmp_path)
    assert verdict is not None
    assert (verdict["status"], verdict["error"], verdict["step"]) == ("failed", "RuntimeError: disk full", 2)
    assert set(verdict) == ALL - {"guard", "guard_logit"}
    assert last_line(capsys).startswith("failed at step 2 of 4, final loss ")


@pytest.mark.parametrize("exception", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_run_has_no_verdict(
    tmp_path: Path, exception: type[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(trainer: Trainer, outputs: Any) -> None:
        raise exception

    with pytest.raises(BaseException) as raised:
        fit(tmp_path, [recorder(), At(1, interrupt)], max_steps=4)
    assert isinstance(raised.value, KeyboardInterrupt | SystemExit)
    assert read_verdict(tmp_path) is None
    assert (tmp_path / "progress.json").exists()
    assert last_line(capsys) == f"interrupted at step 2, --ckpt_path last goes on with it: {tmp_path}"


def test_sigterm_leaves_no_verdict(tmp_path: Path) -> None:
    """What a scheduler sends before its time limit: the run can go on from its checkpoint."""

    def terminate(trainer: Trainer, outputs: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit):
            fit(tmp_path, [recorder(), At(1, terminate)], max_steps=6)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert read_verdict(tmp_path) is None
    assert json.loads((tmp_path / "progress.json").read_text())["step"] < 6


def test_seconds_add_up_over_resumes() -> None:
    first, second = RunRecorder(), RunRecorder()
    first._started -= 100
    second.load_state_dict(first.state_dict())
    assert 100 <= second.state_dict()["seconds"] < 200


def test_events_are_on_disk_before_a_checkpoint_is(tmp_path: Path) -> None:
    """Those of the checkpoint's own step too: whoever goes on from it does not log them again."""
    there: list[tuple[int, set[str]]] = []

    class Reader(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            step = checkpoint["global_step"] - 1
            there.append((step, {tag for tag, one in read_scalars(tmp_path).items() if step in one.steps}))
            super().save_checkpoint(checkpoint, path, storage_options)

    logger = TensorBoardLogger(tmp_path, name="", version="")
    save = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=2, save_top_k=-1)
    plugins = [fault(), Reader()]
    settings: dict[str, Any] = dict(logger=logger, enable_checkpointing=True, accumulate_grad_batches=2)
    fit(tmp_path, [recorder(), SpectralMonitor(1), CollapseStop(), save], plugins, max_steps=5, **settings)
    assert [step for step, _ in there] == [1, 3]
    scalars = read_scalars(tmp_path)
    for step, tags in there:
        assert tags == {tag for tag, one in scalars.items() if step in one.steps}
        assert {"loss/train", "tokens", "sigma/q", "collapse/excess"} <= tags
    assert scalars["loss/train"].steps.tolist() == [0, 1, 2, 3, 4]


def test_an_amplified_error_is_in_the_verdict(tmp_path: Path) -> None:
    for name, plugin in (("gain", MXGradient(error_gain=16.0, base="fp32")), ("none", FaultPrecision(base="fp32"))):
        fit(tmp_path / name, [recorder()], plugin, max_steps=1)
    assert read_verdict(tmp_path / "gain")["error_gain"] == 16.0  # type: ignore[index]
    assert "error_gain" not in read_verdict(tmp_path / "none")  # type: ignore[operator]


# the file itself


def test_json_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "verdict.json"
    write_json_atomic(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json_atomic(path, {"a": 2, "b": object()})  # fails half way through

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_qk.verdict.os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_json_atomic(path, {"a": 3})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in path.parent.iterdir()] == ["verdict.json"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_not_finite_numbers_are_strings_at_any_depth(tmp_path: Path) -> None:
    write_json_atomic(tmp_path / "x.json", {"a": [math.inf, {"b": -math.inf}], 3: (math.nan, 1.5)})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": ["inf", {"b": "-inf"}], "3": ["nan", 1.5]}


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 2, "status": "completed"}', '{"schema": 1, "status": "fine"}'])
def test_what_is_no_verdict_is_refused_with_its_path(tmp_path: Path, text: str) -> None:
    (tmp_path / "verdict.json").write_text(text)
    with pytest.raises(ValueError, match=r"verdict\.json is not .*delete it"):
        read_verdict(tmp_path)


@pytest.mark.parametrize("value", [{"loss": 1.25}, {"loss": math.nan, "deep": {"list": [1, -math.inf]}}])
def test_a_changed_verdict_is_refused_with_its_path(tmp_path: Path, value: dict[str, Any]) -> None:
    verdict = {"schema": 1, "status": "completed", "collapse_step": None, **value}
    path = tmp_path / "verdict.json"
    write_sealed(path, verdict)
    assert repr(read_verdict(tmp_path)) == repr(verdict)
    path.write_text(path.read_text().replace("completed", "collapsed"))
    with pytest.raises(ValueError, match=r"verdict\.json was changed or damaged .*Put back the file, or delete it"):
        read_verdict(tmp_path)


def test_a_run_without_a_verdict_has_none(tmp_path: Path) -> None:
    assert read_verdict(tmp_path) is None
    assert read_verdict(tmp_path / "nowhere") is None


def test_the_progress_bar_shows_what_matters(tmp_path: Path) -> None:
    shown: list[dict[str, Any]] = []

    class Bar(RunProgressBar):
        def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> Any:
            shown.append(super().get_metrics(trainer, pl_module))
            return shown[-1]

    callbacks = [SpectralMonitor(1), QKGuard(mode="fire_at_step", fire_step=2), Bar(refresh_rate=1)]
    fit(tmp_path, callbacks, fault(), module(), max_steps=3, enable_progress_bar=True)
    assert set(shown[-1]) == {"loss", "sigma_q", "logit", "guard"}
    assert shown[-1]["guard"] == "fired@2" and "dormant" in [row["guard"] for row in shown]
    assert float(shown[-1]["sigma_q"]) > 0 and float(shown[-1]["loss"]) > 0
