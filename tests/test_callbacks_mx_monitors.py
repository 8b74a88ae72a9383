"""Operand attribution, last-bin fractions and gradient drift: readings against the same numbers made by hand."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from student import fit_student, mx, student
from tiny import assert_same, data, fault, fit, gradients, module, weights
from torch import Tensor

from callbacks import BiasMonitor, GradientDriftMonitor, LastBinMonitor, OperandAttribution, PrecisionSwitch
from kernels.mx_saturation import mx_saturation
from lightning_qk.gaussian_data import GaussianLoader
from lightning_qk.mx_policy import CAUSES, MXPolicy
from lightning_qk.precision import GradientFault, MXTraining
from lightning_qk.routes import route_linears, route_parameters


def first_gradient(policy: MXPolicy, micro_batches: int = 1) -> dict[str, Tensor]:
    """Of the first optimizer step of the tiny student, under a policy."""
    model, plugin = student(), mx("fp32")
    assert plugin.matmul is not None
    plugin.matmul.policy = policy
    plugin.convert_module(model)
    loader = GaussianLoader(0, 64, 32, 1e-3, micro_batches)
    for index in range(micro_batches):
        (model(*loader[index]) / micro_batches).backward()
    chosen = route_parameters(model, "mlp")
    return {name: value.double() for name, value in gradients(model).items() if name in chosen}


def ratio(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    e = torch.cat([(left[name] - right[name]).flatten() for name in right])
    return float(e.norm() / torch.cat([value.flatten() for value in right.values()]).norm())


class TestAttribution:
    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_every_cause_is_that_policy_alone(self, tmp_path: Path, accumulate: int) -> None:
        monitor = OperandAttribution(causes=list(CAUSES), every_n_steps=1)
        policy = MXPolicy.preset("mxfp8_mix")
        settings: dict[str, Any] = dict(max_steps=1, accumulate_grad_batches=accumulate)
        fit_student(tmp_path, [monitor], mx("mxfp8_mix"), **settings)
        exact = first_gradient(MXPolicy(), accumulate)
        for cause in CAUSES:
            expected = ratio(first_gradient(policy.only(cause), accumulate), exact)
            assert expected > 0 or cause == "ln"  # gains are ones and biases zeros: exact in MX
            assert monitor._last[f"zeta_{cause}"] == pytest.approx(expected, rel=1e-4, abs=1e-9)
        faulty = first_gradient(policy, accumulate)
        assert monitor._last["zeta"] == pytest.approx(ratio(faulty, exact), rel=1e-4)
        each = [ratio({name: faulty[name]}, {name: exact[name]}) for name in exact]
        assert monitor._last["zeta_op"] == pytest.approx(max(each), rel=1e-4)
        sigma = [float(torch.linalg.matrix_norm(g, 2)) for g in exact.values()]
        error = [float(torch.linalg.matrix_norm(faulty[name] - exact[name], 2)) for name in exact]
        spectral = max(e / c for e, c in zip(error, sigma, strict=True))
        assert monitor._last["spectral"] == pytest.approx(spectral, rel=0.02)

    def test_two_of_them_share_a_pass(self, tmp_path: Path) -> None:
        alone, first, second = (OperandAttribution(causes=["x"], every_n_steps=1) for _ in range(3))
        second.layers = [0]
        fit_student(tmp_path, [alone], mx("mxfp8_e4m3"), max_steps=1)
        fit_student(tmp_path, [first, second], mx("mxfp8_e4m3"), max_steps=1)
        assert first._last["zeta_x"] == alone._last["zeta_x"] < 1.1 * alone._last["zeta"]

    def test_two_of_them_share_no_label(self, tmp_path: Path) -> None:
        monitors = [OperandAttribution(layers=layers, causes=["x"], every_n_steps=1) for layers in (None, [0], [1])]
        fit_student(tmp_path, monitors, mx("mxfp8_e4m3"), max_steps=1)
        warnings: dict[str, Any] = {}
        for monitor in monitors:
            warnings |= monitor.verdict_fields()["warnings"]
        assert {label for label in warnings if "zeta_x" in label} == {
            "attribution/zeta_x/mlp",
            "attribution/zeta_x/mlp/layers_0",
            "attribution/zeta_x/mlp/layers_1",
        }
        assert len({warnings[label]["last"] for label in warnings if "zeta_x" in label}) == 3

    def test_causes_add_up_in_squares(self, tmp_path: Path) -> None:
        monitor = OperandAttribution(every_n_steps=1)
        fit_student(tmp_path, [monitor], mx("mxfp8_e4m3"), student(width=128), max_steps=1)
        total = math.sqrt(sum(monitor._last[f"zeta_{cause}"] ** 2 for cause in monitor.causes))
        assert monitor._last["zeta"] == pytest.approx(total, rel=0.1)

    def test_training_is_unchanged_and_the_clean_pass_is_shared(self, tmp_path: Path) -> None:
        monitors = [OperandAttribution(every_n_steps=2), BiasMonitor("mlp", every_n_steps=1)]
        left = fit_student(tmp_path, monitors, mx("mxfp4", rounding="sr"), max_steps=4)[0]
        right = fit_student(tmp_path, [], mx("mxfp4", rounding="sr"), max_steps=4)[0]
        assert_same(weights(left), weights(right))
        assert monitors[0]._last["zeta"] == pytest.approx(monitors[1]._last["zeta"])

    def test_under_an_exact_policy_there_is_nothing_to_read(self, tmp_path: Path) -> None:
        monitor = OperandAttribution(every_n_steps=1)
        fit_student(tmp_path, [monitor], mx("fp32"), max_steps=2)
        assert monitor._last == {}
        assert monitor.verdict_fields()["warnings"]["attribution/zeta/mlp"]["last"] is None

    @pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
    def test_a_clean_gradient_of_zero_or_none_does_not_end_training(self, tmp_path: Path, value: float) -> None:
        """Of one weight, at the second of three steps; the other's readings are finite and must not hide it."""

        class Spoil(Callback):
            def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
                clean = trainer.precision_plugin.clean._accumulated  # type: ignore[attr-defined]
                *_, last = route_parameters(pl_module, "mlp").values()
                if trainer.global_step == 1 and last in clean:
                    clean[last].fill_(value)

        seen: list[dict[str, float]] = []

        class Readings(OperandAttribution):
            def read(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
                seen.append(dict(super().read(trainer, pl_module)))
                return seen[-1]

        fit_student(tmp_path, [Readings(causes=["x"], every_n_steps=1), Spoil()], mx("mxfp8_e4m3"), max_steps=3)
        assert all(math.isfinite(one) for reading in seen[::2] for one in reading.values())
        for name in ("zeta_op", "spectral"):
            assert seen[1][name] == math.inf if value == 0 else math.isnan(seen[1][name]), name

    def test_on_a_gpt(self, tmp_path: Path) -> None:
        monitor = OperandAttribution("qk", causes=["x", "w", "dy"], every_n_steps=1)
        fit(tmp_path, [monitor], MXTraining("mxfp8_e4m3", base="fp32"), max_steps=1)
        assert all(0 < monitor._last[f"zeta_{cause}"] < 1 for cause in ("x", "w", "dy"))

    def test_errors(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="causes: 'z' is not one of x, w"):
            OperandAttribution(causes=["z"])
        for plugin in (fault(), mx(gradient=GradientFault("mlp"))):
            with pytest.raises(MisconfigurationException, match="one cause at a time"):
                fit_student(tmp_path, [OperandAttribution()], plugin)


class TestLastBin:
    def test_readings_are_the_counts_of_what_the_layers_hold_and_get(self, tmp_path: Path) -> None:
        monitor = LastBinMonitor(every_n_steps=1)
        trained = fit_student(tmp_path, [monitor], mx("mxfp8_e4m3"), max_steps=1, accumulate_grad_batches=2)[0]
        expected: dict[str, list[Tensor]] = {
            "weights": [linear.weight for linear in route_linears(trained, "mlp").values()],
            "gains": [block.norm.weight for block in trained.student.blocks],  # type: ignore[misc, union-attr]
            "activations": [],
        }
        model, plugin = student(), mx("mxfp8_e4m3")
        plugin.convert_module(model)
        for linear in route_linears(model, "mlp").values():
            linear.register_forward_pre_hook(lambda _, args: expected["activations"].append(args[0]))
        loader = GaussianLoader(0, 64, 32, 1e-3, 2)
        for index in range(2):
            model(*loader[index])
        for kind, tensors in expected.items():
            counts = [mx_saturation(x.detach().bfloat16()) for x in tensors]
            elements = sum(one.elements for one in counts)
            last, over = (sum(int(getattr(one, name)) for one in counts) for name in ("last_bin", "overflow"))
            assert monitor._last[f"last_bin_{kind}"] == last / elements
            assert monitor._last[f"overflow_{kind}"] == over / elements
        assert monitor._last["last_bin_weights"] == 0  # uniform up to 1/sqrt(32), whose significand is 1.41
        assert monitor._last["overflow_activations"] > 0

    @pytest.mark.parametrize("first", [True, False])
    def test_after_a_switch_the_scale_is_the_new_one_in_a_resumed_run_too(self, tmp_path: Path, first: bool) -> None:
        """Under rceil nothing overflows, under floor activations do."""

        class Readings(LastBinMonitor):
            all: dict[int, dict[str, float]]

            def read(self, trainer: Any, pl_module: Any) -> dict[str, float]:
                self.all[trainer.global_step] = super().read(trainer, pl_module)
                return self.all[trainer.global_step]

        def run(steps: int, *more: Any, ckpt_path: Path | None = None) -> dict[int, dict[str, float]]:
            monitor, switch = Readings(every_n_steps=1), PrecisionSwitch(["bump"], step=2)
            monitor.all = {}
            callbacks = [monitor, switch, *more] if first else [switch, monitor, *more]
            settings: dict[str, Any] = {"enable_checkpointing": bool(more), "max_steps": steps}
            fit_student(tmp_path, callbacks, mx("mxfp8_e4m3"), ckpt_path=ckpt_path, **settings)
            return monitor.all

        whole = run(4)
        overflow = [reading["overflow_activations"] for reading in whole.values()]
        assert min(overflow[:2]) > 0 and overflow[2:] == [0, 0]
        run(3, ModelCheckpoint(tmp_path, filename="at", every_n_train_steps=1, enable_version_counter=False))
        assert run(4, ckpt_path=tmp_path / "at.ckpt") == {4: whole[4]}

    def test_clustered_gains(self, tmp_path: Path) -> None:
        model = student()
        for block in model.student.blocks:
            torch.nn.init.uniform_(block.norm.weight, 0.92, 0.94)  # type: ignore[arg-type, union-attr]
        monitor = LastBinMonitor(every_n_steps=1)
        fit_student(tmp_path, [monitor], mx("mxfp8_e4m3"), model, max_steps=1)
        assert monitor._last["last_bin_gains"] == monitor._last["overflow_gains"] == 1.0

    def test_its_format_is_the_policys_or_the_one_that_is_given(self, tmp_path: Path) -> None:
        def formats(plugin: Any, **arguments: Any) -> dict[str, tuple[str, str]]:
            monitor = LastBinMonitor(every_n_steps=1, **arguments)
            fit_student(tmp_path, [monitor], plugin, max_steps=1)
            formats = {kind: monitor._format(kind) for kind in ("weights", "gains", "activations")}
            return {kind: (one.fmt, one.scale) for kind, one in formats.items()}

        e4m3 = ("mxfp8_e4m3", "floor")
        assert set(formats(None).values()) == set(formats(mx("bf16")).values()) == {e4m3}
        assert set(formats(mx("mxfp4")).values()) == {("mxfp4_e2m1", "floor")}
        one_other = formats(mx("mxfp8_e4m3", operands={"w": {"fmt": "mxfp6_e2m3", "scale": "rceil"}}))
        assert one_other == {"weights": ("mxfp6_e2m3", "rceil"), "gains": e4m3, "activations": e4m3}
        given = formats(mx("mxfp4"), fmt="mxfp8_e5m2", scale="even")
        assert set(given.values()) == {("mxfp8_e5m2", "even")}
        with pytest.raises(ValueError, match="fmt='mxfp5'"):
            LastBinMonitor(fmt="mxfp5")
        with pytest.raises(MisconfigurationException, match="set fmt to one of"):
            formats(mx("nvfp4"))

    def test_training_is_unchanged_and_validation_does_not_count(self, tmp_path: Path) -> None:
        settings: dict[str, Any] = dict(max_steps=3, limit_val_batches=1.0, val_check_interval=1)
        monitors = [LastBinMonitor(every_n_steps=1, per_tensor=True), BiasMonitor("mlp", every_n_steps=1)]
        left = fit_student(tmp_path, monitors, mx(), **settings)[0]
        right = fit_student(tmp_path, [], mx(), max_steps=3)[0]
        assert_same(weights(left), weights(right))
        alone = LastBinMonitor(every_n_steps=1)
        fit_student(tmp_path, [alone], mx(), max_steps=3)
        assert alone._last == monitors[0]._last
        assert not any(linear._forward_pre_hooks for linear in route_linears(left, "mlp").values())

    def test_on_a_gpt_with_its_head(self, tmp_path: Path) -> None:
        monitor = LastBinMonitor("all", head=True, every_n_steps=1)
        model = module(activation_checkpointing=True)
        fit(tmp_path, [monitor], MXTraining("mxfp8_e4m3", head=True, base="fp32"), model, data(), max_steps=2)
        assert len(monitor._linears) == 13
        assert all(0 <= value < 0.2 for value in monitor._last.values())


class TestGradientDrift:
    def test_it_is_the_mean_norm_over_its_least(self, tmp_path: Path) -> None:
        monitor = GradientDriftMonitor(window=2, every_n_steps=1)
        _, recording = fit_student(tmp_path, [monitor], mx("fp32"), student(lr=0.1), max_steps=8)
        norms = [math.sqrt(sum(float(g.square().sum()) for g in step.values())) for step in recording.gradients]
        means = [(a + b) / 2 for a, b in itertools.pairwise(norms)]
        assert monitor._last["grad_norm_drift"] == pytest.approx(means[-1] / min(means), rel=1e-5)

    def test_before_a_window_there_is_no_reading(self, tmp_path: Path) -> None:
        monitor = GradientDriftMonitor(window=5, every_n_steps=1)
        fit_student(tmp_path, [monitor], mx("fp32"), max_steps=4)
        assert monitor._last == {}
        with pytest.raises(ValueError, match="window=0"):
            GradientDriftMonitor(window=0)

    def test_a_gradient_that_is_not_finite_is_an_alarm_and_no_least(self, tmp_path: Path) -> None:
        monitor = GradientDriftMonitor(window=1, every_n_steps=1, thresholds={"grad_norm_drift": 1e9})
        model = student()
        torch.nn.init.constant_(model.student.blocks[0].up_proj.weight, 1e30)  # type: ignore[arg-type, union-attr]
        fit_student(tmp_path, [monitor], mx("fp32"), model, max_steps=2)
        assert math.isnan(monitor._last["grad_norm_drift"]) and monitor.alarms == {"grad_norm_drift": 1}
        assert monitor._least == math.inf

    def test_state(self) -> None:
        first, second = GradientDriftMonitor(window=3), GradientDriftMonitor(window=3)
        first._norms.extend([1.0, 2.0, 3.0])
        first._least = 2.0
        second.load_state_dict(first.state_dict())
        assert second.state_dict() == first.state_dict()
