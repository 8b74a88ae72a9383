"""A change of the policy while training goes: when it acts, what it leaves alone, and that it survives a resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from student import fit_student, mx, student
from test_callbacks_qk_guard_triggers import Oracle, first_extreme, uneven
from tiny import Recording, assert_same, fault, fit, trainer, weights

from callbacks import BiasMonitor, GradientDriftMonitor, LastBinMonitor, OperandAttribution, PrecisionSwitch
from callbacks.guard_triggers import TRIGGERS, Trigger
from lightning_qk.gaussian_data import GaussianData
from lightning_qk.mx_policy import CHANGES, MXPolicy
from lightning_qk.precision import AttentionFault, MXTraining


class Policies(Callback):
    """The policy of every step's passes."""

    def __init__(self) -> None:
        self.seen: list[MXPolicy] = []

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        matmul: Any = trainer.precision_plugin.matmul  # type: ignore[attr-defined]
        self.seen.append(matmul.policy)


E4M3 = MXPolicy.preset("mxfp8_e4m3")


class Reads(Trigger):
    """How often it has been read."""

    quantity = "reads"
    count = 0

    def read(self, sites: Any, limit: float) -> torch.Tensor:
        self.count += 1
        return torch.tensor([float(self.count)])

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def streaming() -> MXTraining:
    """With a core that counts tied rows."""
    return MXTraining("mxfp4", base="fp32", attention=AttentionFault(carry=4, tile=8))


def triggered(root: Path, trigger: str) -> tuple[int, Callable[[], PrecisionSwitch]]:
    """The first step that is worse than all before it, and a switch that falls after it; of ``uneven`` models."""
    oracle, sign = Oracle(), TRIGGERS[trigger].sign
    fit(root, [oracle], streaming(), uneven(), max_steps=6)
    worst = [float(sign * (sign * values).max()) for values in oracle.seen[TRIGGERS[trigger].quantity]]
    step, threshold = first_extreme(worst, sign)
    return step, lambda: PrecisionSwitch(["fp32"], trigger=trigger, threshold=threshold)


class TestWhen:
    @pytest.mark.parametrize("change", CHANGES)
    def test_a_step(self, tmp_path: Path, change: str) -> None:
        switch, policies = PrecisionSwitch([change], step=2), Policies()
        fit_student(tmp_path, [switch, policies], mx("mxfp8_e4m3"), max_steps=4)
        assert policies.seen == [E4M3] * 2 + [E4M3.changed(change)] * 2
        assert switch.switched_step == 2
        assert switch.verdict_fields() == {"precision_switch": change, "precision_switch_step": 2}

    def test_step_zero_is_before_the_first_and_the_last_step_after_it(self, tmp_path: Path) -> None:
        switch, policies = PrecisionSwitch(["bump", "ln_fp32"], step=0), Policies()
        fit_student(tmp_path, [switch, policies], mx("mxfp8_e4m3"), max_steps=1)
        assert policies.seen == [E4M3.changed("bump").changed("ln_fp32")]
        late = PrecisionSwitch(["fp32"], step=1)
        fit_student(tmp_path, [late], mx(), max_steps=1)
        assert late.switched_step is None  # nothing came after

    def test_only_between_optimizer_steps(self, tmp_path: Path) -> None:
        switch, policies = PrecisionSwitch(["fp32"], step=1), Policies()
        fit_student(tmp_path, [switch, policies], mx("mxfp8_e4m3"), max_steps=2, accumulate_grad_batches=3)
        assert policies.seen == [E4M3] * 3 + [MXPolicy()] * 3

    @pytest.mark.parametrize("first", [True, False])
    @pytest.mark.parametrize(
        ("monitor", "warning"),
        [
            (lambda: BiasMonitor("mlp", every_n_steps=1, thresholds={"zeta": 1e-3}, first_step=2), "zeta/mlp"),
            (
                lambda: LastBinMonitor(every_n_steps=1, thresholds={"last_bin_activations": 1e-3}, first_step=2),
                "last_bin_activations",
            ),
            (
                lambda: GradientDriftMonitor(2, every_n_steps=1, thresholds={"grad_norm_drift": 0.5}),
                "grad_norm_drift",
            ),
            (
                lambda: OperandAttribution(every_n_steps=2, causes=["w"], thresholds={"zeta_w": 1e-3}),
                "attribution/zeta_w/mlp",
            ),
        ],
    )
    def test_an_alarm_wherever_the_monitor_stands(
        self, tmp_path: Path, monitor: Any, warning: str, first: bool
    ) -> None:
        switch, policies, watching = PrecisionSwitch(["fp32"], warning=warning), Policies(), monitor()
        callbacks = [switch, watching, policies] if first else [watching, switch, policies]
        fit_student(tmp_path, callbacks, mx("mxfp8_e4m3"), max_steps=4)
        assert switch.switched_step == 2 and policies.seen == [E4M3] * 2 + [MXPolicy()] * 2

    def test_no_alarm_no_switch(self, tmp_path: Path) -> None:
        switch = PrecisionSwitch(["fp32"], warning="zeta/mlp")
        monitor = BiasMonitor("mlp", every_n_steps=1, thresholds={"zeta": 1e3})
        fit_student(tmp_path, [switch, monitor], mx("mxfp8_e4m3"), max_steps=3)
        assert switch.switched_step is None

    @pytest.mark.parametrize(("threshold", "step"), [(1e-6, 1), (1e6, None)])
    def test_a_guards_trigger(self, tmp_path: Path, threshold: float, step: int | None) -> None:
        for trigger in ("max_logit", "logit_bound"):
            switch = PrecisionSwitch(["fp32"], trigger=trigger, threshold=threshold)
            fit(tmp_path, [switch], MXTraining("mxfp8_e4m3", base="fp32"), max_steps=3)
            assert switch.switched_step == step

    @pytest.mark.parametrize("trigger", TRIGGERS)
    def test_any_trigger_at_the_first_step_beyond_its_threshold(self, tmp_path: Path, trigger: str) -> None:
        step, switch = triggered(tmp_path, trigger)
        callback, policies = switch(), Policies()
        fit(tmp_path, [callback, policies], streaming(), uneven(), max_steps=step + 1)
        assert callback.switched_step == step
        assert policies.seen == [MXPolicy.preset("mxfp4")] * step + [MXPolicy()]


class TestWhatItLeavesAlone:
    def test_the_control_is_the_uninterrupted_run(self, tmp_path: Path) -> None:
        def run(callbacks: list[Callback]) -> tuple[Any, Recording]:
            return fit_student(tmp_path, callbacks, mx("mxfp4", rounding="sr"), max_steps=5)

        (left, seen), (right, plain) = run([PrecisionSwitch(["none"], step=2)]), run([])
        assert_same(weights(left), weights(right))
        assert seen.losses == plain.losses

    def test_a_switch_acts_from_its_step_on(self, tmp_path: Path) -> None:
        losses = [
            fit_student(tmp_path, callbacks, mx("mxfp4"), max_steps=5)[1].losses
            for callbacks in ([PrecisionSwitch(["fp32"], step=3)], [])
        ]
        assert losses[0][:3] == losses[1][:3] and losses[0][3] != losses[1][3]

    def test_a_switch_at_zero_is_another_policy_from_the_start(self, tmp_path: Path) -> None:
        switched = fit_student(tmp_path, [PrecisionSwitch(["forward_only"], step=0)], mx("mxfp8_e4m3"), max_steps=3)[0]
        assert_same(weights(switched), weights(fit_student(tmp_path, [], mx("forward_only"), max_steps=3)[0]))


class TestResume:
    def callbacks(self, change: str, how: str) -> list[Callback]:
        if how == "step":
            return [PrecisionSwitch([change], step=2)]
        monitor = BiasMonitor("mlp", every_n_steps=1, window=2, thresholds={"zeta": 1e-3}, first_step=2)
        return [PrecisionSwitch([change], warning="zeta/mlp"), monitor]

    @pytest.mark.parametrize("how", ["step", "warning"])
    @pytest.mark.parametrize("change", ["none", "fp32", "bf16_activations"])
    @pytest.mark.parametrize("stop", [1, 2, 4])
    def test_across_a_switch_bit_for_bit(self, tmp_path: Path, change: str, how: str, stop: int) -> None:
        """Before it, at the step after which it falls, and after it."""
        whole, recording = fit_student(
            tmp_path, self.callbacks(change, how), mx("mxfp4", rounding="sr"), model=student(), max_steps=6
        )
        keep = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=stop, save_top_k=-1, filename="{step}")
        fit_student(
            tmp_path, [*self.callbacks(change, how), keep], mx("mxfp4", rounding="sr"), max_steps=stop,
            enable_checkpointing=True,
        )  # fmt: skip
        (checkpoint,) = (tmp_path / "kept").glob(f"step={stop}.ckpt")
        callbacks = self.callbacks(change, how)
        again, rest = fit_student(
            tmp_path, callbacks, mx("mxfp4", rounding="sr"), student(seed=9), checkpoint, max_steps=6
        )
        assert_same(weights(again), weights(whole))
        assert rest.losses == recording.losses[stop:]
        assert callbacks[0].switched_step == 2  # type: ignore[attr-defined]

    @pytest.mark.parametrize("trigger", TRIGGERS)
    def test_across_a_switch_by_a_trigger_bit_for_bit(self, tmp_path: Path, trigger: str) -> None:
        """Before it, at the step after which it falls, and after it."""
        step, switch = triggered(tmp_path, trigger)
        keep = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=1, save_top_k=-1, filename="{step}")
        expected = switch()
        whole, recording = fit(
            tmp_path, [expected, keep], streaming(), uneven(), max_steps=step + 2, enable_checkpointing=True
        )
        for stop in (step - 1, step, step + 1):
            callback, checkpoint = switch(), tmp_path / "kept" / f"step={stop}.ckpt"
            again, rest = fit(tmp_path, [callback], streaming(), uneven(), ckpt_path=checkpoint, max_steps=step + 2)
            assert_same(weights(again), weights(whole))
            assert rest.losses == recording.losses[stop:]
            assert callback.switched_step == expected.switched_step == step
            torch.testing.assert_close(callback.state_dict(), expected.state_dict(), rtol=0, atol=0)

    def test_a_trigger_keeps_its_memory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(TRIGGERS, "reads", Reads)
        switches = [PrecisionSwitch(["fp32"], trigger="reads", threshold=2.5) for _ in range(2)]
        keep = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=2, save_top_k=-1, filename="{step}")
        fit(tmp_path, [switches[0], keep], streaming(), max_steps=2, enable_checkpointing=True)
        fit(tmp_path, [switches[1]], streaming(), ckpt_path=tmp_path / "kept" / "step=2.ckpt", max_steps=4)
        assert switches[1].switched_step == 3

    def test_the_order_of_several_switches_is_kept(self, tmp_path: Path) -> None:
        def callbacks() -> list[Callback]:
            return [PrecisionSwitch(["bump"], step=2), PrecisionSwitch(["fp32"], step=1), Policies()]

        keep = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=3, save_top_k=-1, filename="{step}")
        plugin = mx("mxfp8_e4m3")
        fit_student(tmp_path, [*callbacks(), keep], plugin, max_steps=3, enable_checkpointing=True)
        assert plugin.matmul is not None and plugin.matmul.changes == ["fp32", "bump"]
        resumed, again = mx("mxfp8_e4m3"), callbacks()
        fit_student(tmp_path, again, resumed, student(), tmp_path / "kept" / "step=3.ckpt", max_steps=4)
        assert resumed.matmul is not None and resumed.matmul.changes == ["fp32", "bump"]
        assert again[2].seen == [MXPolicy()]  # type: ignore[attr-defined]

    def fit_and_keep_one(self, root: Path, plugin: MXTraining) -> Path:
        """A run that switches after step 2 and keeps a checkpoint of step 1."""
        keep = ModelCheckpoint(root / "kept", every_n_train_steps=1, save_top_k=-1, filename="{step}")
        switch = PrecisionSwitch(["fp32"], step=2)
        fit_student(root, [switch, keep], plugin, max_steps=3, enable_checkpointing=True)
        return root / "kept" / "step=1.ckpt"

    @pytest.mark.parametrize("old", [False, True])
    def test_the_same_plugin_goes_back_with_a_checkpoint(self, tmp_path: Path, old: bool) -> None:
        plugin, policies = mx("mxfp8_e4m3"), Policies()
        path = self.fit_and_keep_one(tmp_path, plugin)
        assert plugin.matmul is not None and plugin.matmul.changes == ["fp32"]
        if old:  # once, there was no state without changes
            checkpoint = torch.load(path, weights_only=False)
            del checkpoint["MXTraining"]
            torch.save(checkpoint, path)
        fit_student(tmp_path, [policies], plugin, student(), path, max_steps=3)
        assert policies.seen == [E4M3] * 2 and plugin.matmul.changes == []

    def test_the_same_plugin_and_switch_begin_anew_without_one(self, tmp_path: Path) -> None:
        plugin, switch, policies = mx("mxfp8_e4m3"), PrecisionSwitch(["fp32"], step=1), Policies()
        for _ in range(2):
            fit_student(tmp_path, [switch, policies], plugin, max_steps=2)
        assert policies.seen == [E4M3, MXPolicy()] * 2

    def test_a_trainer_that_goes_on_keeps_the_change(self, tmp_path: Path) -> None:
        plugin, switch, policies = mx("mxfp8_e4m3"), PrecisionSwitch(["fp32"], step=1), Policies()
        model, one = student(), trainer(tmp_path, [switch, policies], plugin, max_steps=2, gradient_clip_val=None)
        for steps in (2, 4):
            one.fit_loop.epoch_loop.max_steps = steps
            one.fit(model, GaussianData(batch_size=64, seed=0, val_batches=2))
        assert policies.seen == [E4M3, *[MXPolicy()] * 3] and switch.switched_step == 1

    def test_a_changed_policy_is_not_lost_silently(self) -> None:
        with pytest.raises(ValueError, match=r"has been changed \(fp32\)"):
            fault().load_state_dict({"matmul_changes": ["fp32"]})


class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            ({"changes": []}, r"changes=\[\]"),
            ({"changes": ["fp16"], "step": 1}, "fp16"),
            ({"changes": ["fp32"]}, "give one of step=None"),
            ({"changes": ["fp32"], "step": 1, "warning": "zeta"}, "give one of step=1"),
            ({"changes": ["fp32"], "step": -1}, "step=-1"),
            ({"changes": ["fp32"], "trigger": "logit"}, "trigger='logit' is not one of"),
            ({"changes": ["fp32"], "trigger": "sigma_q"}, "set threshold"),
            ({"changes": ["fp32"], "step": 1, "threshold": 3.0}, "threshold=3.0"),
        ],
    )
    def test_arguments(self, arguments: dict[str, Any], named: str) -> None:
        with pytest.raises(ValueError, match=named):
            PrecisionSwitch(**arguments)

    def test_a_plugin_without_a_policy(self, tmp_path: Path) -> None:
        for plugin in (fault(), None):
            with pytest.raises(MisconfigurationException, match="PrecisionSwitch needs MXTraining"):
                fit(tmp_path, [PrecisionSwitch(["fp32"], step=1)], plugin)

    def test_a_change_that_the_formats_cannot_have(self, tmp_path: Path) -> None:
        recording = Policies()
        with pytest.raises(ValueError, match="the change bump too"):
            fit_student(tmp_path, [PrecisionSwitch(["bump"], step=1), recording], mx("nvfp4"), max_steps=2)
        assert not recording.seen  # before the first step

    def test_a_trigger_that_the_core_cannot_tell(self, tmp_path: Path) -> None:
        switch = PrecisionSwitch(["fp32"], trigger="tied_rows", threshold=1.0)
        with pytest.raises(
            ValueError, match=r"^trigger='tied_rows' needs .* got SDPACore.* MXTraining in its attention"
        ):
            fit(tmp_path, [switch], MXTraining(base="fp32"), max_steps=1)

    @pytest.mark.parametrize(
        ("settings", "changes", "named"),
        [
            ({"rounding": "sr"}, ["bump"], "has no rounding='sr'"),
            ({"preset": "mxfp6_e2m3"}, ["bump"], "not of 'mxfp6_e2m3'"),
            ({}, ["bump"], "up_proj has out_features=170, no multiple of block=32"),
            ({"changes": ["ln_fp32"]}, ["ln_fp32"], "ln_fp32 changes nothing in this policy"),
            ({"preset": "fp32"}, ["fp32"], "fp32 changes nothing in this policy"),
            ({}, ["ln_fp32", "fp32"], "ln_fp32 changes nothing in this policy, or others undo it"),
        ],
    )
    def test_a_change_that_this_run_cannot_have(
        self, tmp_path: Path, settings: dict[str, Any], changes: list[str], named: str
    ) -> None:
        recording, plugin = Policies(), mx(**{"preset": "mxfp8_e4m3", "as_released": True, **settings})
        with pytest.raises(ValueError, match=named):
            swiglu = student(activation="swiglu")
            fit_student(tmp_path, [PrecisionSwitch(changes, step=2), recording], plugin, swiglu, max_steps=4)
        assert not recording.seen  # before the first step

    def test_a_warning_that_no_monitor_gives(self, tmp_path: Path) -> None:
        without = [[], [BiasMonitor("mlp")]]  # the second has the reading, but no threshold
        for monitors in without:
            with pytest.raises(ValueError, match="warning='zeta/mlp' is no reading with a threshold"):
                fit_student(tmp_path, [PrecisionSwitch(["fp32"], warning="zeta/mlp"), *monitors], mx())
