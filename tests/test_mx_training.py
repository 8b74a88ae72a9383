"""The plugin: options arrive, parts outside it are untouched, and it composes with the other faults."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from student import fit_student, mx, student
from tiny import assert_same, data, fault, fit, gpt, module, weights
from torch import nn

from callbacks import BiasMonitor, PrecisionSwitch, RouteSplice
from lightning_qk.mx_linear import MXLinear
from lightning_qk.mx_policy import OPERANDS, MXPolicy
from lightning_qk.mx_vector import Activation, MXLayerNorm, Sum
from lightning_qk.operand_format import OperandFormat
from lightning_qk.precision import FaultPrecision, GradientFault, MXTraining
from lightning_qk.routes import route_linears


def policy(**arguments: Any) -> MXPolicy:
    matmul = MXTraining(**arguments).matmul
    assert matmul is not None
    return matmul.policy


class TestOptions:
    def test_the_preset_is_the_policy(self) -> None:
        assert policy() == MXPolicy.preset("mxfp8_e4m3") and policy(preset="mxfp4") == MXPolicy.preset("mxfp4")

    def test_scale_rounding_and_block_reach_all_operands(self) -> None:
        seen = policy(preset="mxfp8_mix", scale="rceil", rounding="sr", block=16)
        assert {(one.scale, one.rounding, one.block) for one in seen.operands.values() if one} == {("rceil", "sr", 16)}
        assert seen.operands["dy_dgrad"] == OperandFormat("mxfp8_e5m2", "rceil", "sr", 16)

    def test_single_operands(self) -> None:
        seen = policy(rounding="away", operands={"x": {"rounding": "sr"}, "w": None, "dy_dgrad": "mxfp4_e2m1"})
        assert seen.x == OperandFormat("mxfp8_e4m3", rounding="sr") and seen.w is None
        assert seen.dy_dgrad == OperandFormat("mxfp4_e2m1", rounding="away")
        alone = policy(preset="fp32", operands={"w_dgrad": {"fmt": "mxfp6_e3m2", "block": None}})
        assert alone == MXPolicy(w_dgrad=OperandFormat("mxfp6_e3m2", block=None))

    def test_changes_come_last_and_in_order(self) -> None:
        seen = policy(changes=["bump", "forward_only"], activation="fp32", hadamard="all", ln_affine="bf16")
        assert seen.x == OperandFormat("mxfp8_e4m3", "rceil") and seen.dy_wgrad is None
        assert (seen.vector, seen.vector_backward) == ("bf16", "fp32")
        assert (seen.activation, seen.hadamard, seen.ln_affine) == ("fp32", "all", "bf16")
        assert policy(changes=["bump"], as_released=True).x == OperandFormat("mxfp8_e4m3", "bump_released")
        grid = policy(preset="bf16", weights="mxfp8_e4m3", activations="mxfp8_e5m2", changes=["bump"])
        assert {(one.fmt, one.scale) for one in grid.operands.values() if one} == {
            ("mxfp8_e4m3", "rceil"),
            ("mxfp8_e5m2", "rceil"),
        }
        assert policy(changes=["ln_fp32"], rounding="sr").ln_affine == "fp32"

    def test_what_is_of_all_operands_is_of_those_too_that_single_ones_add(self) -> None:
        added: dict[str, Any] = {"x": "mxfp8_e4m3", "w": {"fmt": "mxfp4_e2m1", "scale": "even"}}
        seen = policy(preset="bf16", scale="rceil", block=16, operands=added)
        assert seen.x == OperandFormat("mxfp8_e4m3", "rceil", block=16)
        assert seen.w == OperandFormat("mxfp4_e2m1", "even", block=16)
        own: dict[str, Any] = {"x": {"fmt": "nvfp4", "scale": "floor"}}
        assert policy(scale="rceil", operands=own).x == OperandFormat("nvfp4")

    def test_forward_only_stays_so_but_for_single_operands(self) -> None:
        seen = policy(preset="forward_only", weights="mxfp4_e2m1", activations="mxfp6_e2m3", vector="bf16")
        assert [name for name, one in seen.operands.items() if one] == ["x", "w"]
        assert (seen.w, seen.x) == (OperandFormat("mxfp4_e2m1"), OperandFormat("mxfp6_e2m3"))
        assert (seen.vector, seen.vector_backward) == ("bf16", "fp32")
        assert policy(preset="forward_only", operands={"w_dgrad": "mxfp4_e2m1"}).w_dgrad is not None

    def test_gains_in_mx_are_weights(self) -> None:
        e2m3 = OperandFormat("mxfp6_e2m3")
        assert policy(weights="mxfp6_e2m3", activations="mxfp6_e2m3") == MXPolicy.preset("mxfp6_e2m3")
        assert policy(activations="mxfp6_e2m3").gain == OperandFormat("mxfp8_e4m3")
        assert policy(preset="bf16", weights="mxfp6_e2m3").gain is None
        assert policy(preset="bf16", weights="mxfp6_e2m3", ln_affine="mx").gain == e2m3

    def test_a_control_takes_the_rounding_of_as_released(self) -> None:
        """configs/student_teacher/as_released.yaml is for all arms."""
        for preset in ("fp32", "bf16"):
            seen = policy(preset=preset, as_released=True, rounding="away")
            assert seen == dataclasses.replace(MXPolicy.preset(preset), as_released=True)

    def test_only_gains_may_have_a_rounding(self) -> None:
        assert policy(rounding="rz", operands=dict.fromkeys(OPERANDS)).gain == OperandFormat(
            "mxfp8_e4m3", rounding="rz"
        )

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            ({"preset": "mxfp5"}, "preset 'mxfp5'"),
            ({"changes": ["fp16"]}, "change 'fp16'"),
            ({"scale": "round"}, "scale='round'"),
            ({"rounding": "up"}, "rounding='up'"),
            ({"block": 0}, "block=0"),
            ({"operands": {"y": None}}, "operands.y is not one of x, w"),
            ({"operands": {"x": {"format": "mxfp4"}}}, "operands.x.format does not exist"),
            ({"operands": {"x": "mxfp5"}}, "mxfp5"),
            ({"preset": "fp32", "operands": {"x": {"scale": "ceil"}}}, "operands.x.fmt is missing"),
            ({"hadamard": "some"}, "hadamard='some'"),
            ({"hadamard": "weight_gradient", "block": 24}, "hadamard='weight_gradient' needs blocks of a power of two"),
            ({"preset": "nvfp4", "scale": "rceil"}, "scale='rceil' and block=32 are none of fmt='nvfp4'"),
            ({"preset": "nvfp4", "changes": ["bump"]}, "the change bump too"),
            ({"ln_affine": "fp8"}, "ln_affine='fp8'"),
            ({"base": "fp16"}, "base='fp16'"),
            ({"preset": "bf16", "scale": "flor"}, "scale='flor' is not one of"),
            ({"preset": "fp32", "rounding": "foo"}, "rounding='foo' is not one of"),
            ({"preset": "bf16", "block": 0}, "block=0"),
            ({"preset": "bf16", "scale": "rceil"}, "scale='rceil' is in no operand's format.* Leave it out"),
            ({"preset": "fp32", "rounding": "sr"}, "rounding='sr' is in no operand's format"),
            ({"rounding": "sr", "ln_affine": "bf16", "operands": dict.fromkeys(OPERANDS)}, "rounding='sr' is in no"),
            ({"scale": "ceil", "changes": ["bump"]}, "scale='ceil' is in no operand's format"),
            ({"block": 16, "changes": ["fp32"]}, "block=16 is in no operand's format"),
            ({"ln_affine": "bf16", "changes": ["ln_fp32"]}, "ln_affine='bf16' is undone by changes"),
            ({"preset": "bf16", "changes": ["bump"]}, "bump changes nothing in this policy"),
            ({"changes": ["ln_fp32", "bump", "ln_fp32"]}, "ln_fp32 changes nothing"),
            ({"changes": ["bump", "fp32"]}, "bump changes nothing in this policy, or others undo it"),
            ({"preset": "mxfp6_e2m3", "as_released": True, "changes": ["bump"]}, "alone, not of 'mxfp6_e2m3'"),
            ({"as_released": True, "rounding": "sr", "changes": ["bump"]}, "has no rounding='sr'"),
        ],
    )
    def test_errors_name_the_argument(self, arguments: dict[str, Any], named: str) -> None:
        with pytest.raises(ValueError, match=named):
            MXTraining(**arguments)


class TestScope:
    @pytest.mark.parametrize("route", ["qk", "mlp", "all"])
    @pytest.mark.parametrize("head", [False, True])
    def test_linears_by_route_and_head(self, route: str, head: bool) -> None:
        model = module()
        MXTraining(route=route, head=head, layers=[1]).convert_module(model)
        found = {name for name, part in model.named_modules() if isinstance(part, MXLinear)}
        assert found == set(route_linears(model, route, [1])) | ({"model.lm_head"} if head else set())
        norms = [part for part in model.modules() if isinstance(part, nn.LayerNorm)]
        assert norms and all(isinstance(part, MXLayerNorm) for part in norms)
        assert all(part.arithmetic is not None for part in model.modules() if isinstance(part, Activation))
        assert model.state_dict().keys() == module().state_dict().keys()

    def test_a_hadamard_transform_that_a_layer_has_no_blocks_for_is_refused_before_the_first_step(self) -> None:
        with pytest.raises(ValueError, match=r"up_proj has in_features=16, no multiple of the block of 32\. Leave"):
            MXTraining(route="mlp", hadamard="all").convert_module(module())
        MXTraining(route="mlp", hadamard="weight_gradient").convert_module(module())
        MXTraining("nvfp4", route="mlp", hadamard="all").convert_module(module())

    def test_a_released_bump_that_a_layer_has_no_blocks_for_is_refused_before_the_first_step(self) -> None:
        bump = MXTraining(changes=["bump"], as_released=True, route="mlp")
        with pytest.raises(ValueError, match=r"blocks.0.up_proj has out_features=170, no multiple of block=32\. Leave"):
            bump.convert_module(student(activation="swiglu"))
        bump.convert_module(student())

    def test_a_second_conversion_changes_nothing(self) -> None:
        model, plugin = module(), MXTraining(head=True)
        for _ in range(2):  # fit and validate both do
            plugin.convert_module(model)
        assert sum(isinstance(part, MXLinear) for part in model.modules()) == 2 * 6 + 1

    def test_two_models_have_policies_of_their_own(self) -> None:
        models = [student(), student()]
        for model, preset in zip(models, ("mxfp4", "fp32"), strict=True):
            mx(preset).convert_module(model)
        x = torch.randn(64, 32)
        plain = student().student(x)
        assert torch.equal(models[1].student(x), plain) and not torch.equal(models[0].student(x), plain)


class TestExactness:
    @pytest.mark.parametrize("base", ["fp32", "bf16"])
    def test_the_fp32_policy_is_the_run_without_it(self, tmp_path: Path, base: Any) -> None:
        control = MXTraining("fp32", head=True, base=base)
        left = fit(tmp_path, [], control, max_steps=4)
        right = fit(tmp_path, [], FaultPrecision(base=base), max_steps=4)
        assert left[1].losses == right[1].losses
        assert_same(weights(left[0]), weights(right[0]))

    def test_mx_is_another_run_and_repeats_itself(self, tmp_path: Path) -> None:
        settings: dict[str, Any] = {"head": True, "base": "fp32", "rounding": "sr", "block": 16}
        runs = [fit(tmp_path, [], MXTraining(seed=seed, **settings), max_steps=3)[1].losses for seed in (0, 0, 1)]
        exact = fit(tmp_path, [], FaultPrecision(base="fp32"), max_steps=3)[1].losses
        assert runs[0] == runs[1] and runs[0] != runs[2] and runs[0] != exact

    def test_activation_checkpointing_recomputes_the_same(self, tmp_path: Path) -> None:
        runs = [
            fit(
                tmp_path,
                [],
                MXTraining("mxfp4", rounding="sr", base="fp32"),
                module(activation_checkpointing=on),
                accumulate_grad_batches=2,
            )[1].losses
            for on in (False, True)
        ]
        assert runs[0] == runs[1]

    def test_the_reference_pass_is_untouched(self, tmp_path: Path) -> None:
        spliced = fit(tmp_path, [RouteSplice("mlp")], MXTraining("mxfp4", base="fp32"), max_steps=1)[1].gradients[0]
        exact = fit(tmp_path, [], FaultPrecision(base="fp32"), max_steps=1)[1].gradients[0]
        chosen = {f"{name}.weight" for name in route_linears(module(), "mlp")}
        assert_same({n: spliced[n] for n in chosen}, {n: exact[n] for n in chosen})
        assert any(not torch.equal(spliced[n], exact[n]) for n in exact.keys() - chosen)

    @pytest.mark.parametrize("there_too", [False, True])
    def test_validation_is_untouched_unless_asked(self, tmp_path: Path, there_too: bool) -> None:
        plugin = MXTraining("mxfp4", base="fp32", faults_in_validation=there_too)
        settings: dict[str, Any] = dict(max_steps=2, limit_val_batches=1.0, val_check_interval=2)
        model, recording = fit(tmp_path, [], plugin, **settings)
        plain = module()
        plain.load_state_dict(model.state_dict())
        validation = data(context=16)
        validation.load()
        with torch.no_grad():
            expected = [float(plain(*batch)) for batch in validation.val_dataloader()]
        same = recording.logged[-1]["loss/val"] == pytest.approx(sum(expected) / len(expected), rel=1e-6)
        assert same != there_too

    def test_layer_norm_biases_are_trained(self, tmp_path: Path) -> None:
        before = weights(student())
        for released in (False, True):
            trained = weights(fit_student(tmp_path, plugin=mx("mxfp8_e4m3", as_released=released), max_steps=2)[0])
            moved = {name: not torch.equal(value, before[name]) for name, value in trained.items()}
            assert all(now for name, now in moved.items() if "student" in name and "norm.bias" not in name)
            assert {now for name, now in moved.items() if "norm.bias" in name} == {not released}


class TestResidualStream:
    def test_sums_are_rounded_in_both_passes(self) -> None:
        """Every sum of the residual stream is on the grid of bfloat16, and so is what goes back into a branch."""
        seen: list[torch.Tensor] = []

        def keep(part: nn.Module, args: Any, output: torch.Tensor) -> None:
            seen.append(output.detach())
            args[1].register_hook(seen.append)

        for preset, on_grid in (("bf16", True), ("fp32", False)):
            seen.clear()
            model = gpt()
            MXTraining(preset, base="fp32").convert_module(model)
            sums = [part for part in model.modules() if isinstance(part, Sum)]
            assert len(sums) == 1 + len(model.blocks)  # of tokens and positions, and in every block
            for part in sums:
                part.register_forward_hook(keep)
            ids = torch.randint(0, 32, (2, 17), generator=torch.Generator().manual_seed(0))
            model.loss(ids[:, :-1], ids[:, 1:]).backward()
            assert len(seen) == 2 * (1 + 2 * len(model.blocks))
            assert all(torch.equal(x, x.bfloat16().float()) for x in seen) == on_grid


class TestCompiled:
    def test_compiled_blocks_train_the_same_across_a_switch(self, tmp_path: Path) -> None:
        def losses(compiled: bool) -> list[float]:
            model = module()
            for block in model.model.blocks if compiled else []:
                block.compile(backend="aot_eager")
            switch = PrecisionSwitch(["bf16_activations"], step=2)
            plugin = MXTraining("mxfp4", head=True, rounding="sr", base="fp32")
            return fit(tmp_path, [switch, RouteSplice("qk")], plugin, model, max_steps=4)[1].losses

        torch.compiler.reset()
        assert losses(compiled=True) == losses(compiled=False)

    def test_a_new_step_does_not_recompile_a_block(self) -> None:
        """LayerNorm gains and biases are quantised by the step's seed too."""
        torch.compiler.reset()
        model, plugin = module().model, MXTraining("mxfp4", rounding="sr", base="fp32")
        plugin.convert_module(model)
        plugin.switch.on = True
        for block in model.blocks:
            block.compile(backend="aot_eager")
        ids = torch.randint(0, 32, (2, 17), generator=torch.Generator().manual_seed(0))

        def loss(seed: int) -> float:
            plugin.switch.seed = seed
            value = model.loss(ids[:, :-1], ids[:, 1:])
            value.backward()
            return value.item()

        loss(0)
        with torch.compiler.set_stance("fail_on_recompile"):
            seen = [loss(seed) for seed in range(1, 13)]
        with torch.compiler.set_stance("force_eager"):
            assert seen == [loss(seed) for seed in range(1, 13)]
        assert len(set(seen)) == len(seen)


class TestComposition:
    def test_with_attention_and_gradient_faults(self, tmp_path: Path) -> None:
        finished = GradientFault("mlp", block=8)
        plugin = MXTraining("mxfp8_e4m3", attention=fault().attention, gradient=finished, base="fp32")
        without = [
            MXTraining("mxfp8_e4m3", attention=fault().attention, base="fp32"),
            MXTraining("mxfp8_e4m3", gradient=finished, base="fp32"),
            fault(gradient=finished),
        ]
        both = fit(tmp_path, [], plugin, max_steps=2)[1].losses
        assert all(fit(tmp_path, [], one, max_steps=2)[1].losses != both for one in without)

    def test_a_product_fault_is_the_policy_of_its_two_operands(self, tmp_path: Path) -> None:
        operand: Any = {"fmt": "mxfp4_e2m1"}
        by_policy = MXTraining("fp32", operands={"x_wgrad": operand, "dy_wgrad": operand}, route="mlp", base="fp32")
        by_fault = MXTraining("fp32", gradient=GradientFault("mlp", where="product"), base="fp32")
        runs = [fit(tmp_path, [], plugin, max_steps=2) for plugin in (by_policy, by_fault)]
        assert_same(weights(runs[0][0]), weights(runs[1][0]))

    def test_the_bias_monitor_reads_its_error(self, tmp_path: Path) -> None:
        monitor = BiasMonitor("mlp", every_n_steps=1)
        fit_student(tmp_path, [monitor], mx("mxfp8_e4m3"), max_steps=1)
        assert 0.02 < monitor._last["zeta"] < 0.2

    def test_a_policy_that_is_not_on_costs_no_clean_pass(self) -> None:
        plugin = mx("mxfp4")
        assert plugin.faults_in_passes and plugin.matmul is not None
        plugin.matmul.policy = MXPolicy()
        assert not plugin.faults_in_passes


class TestProducts:
    def test_emulation_is_chosen_and_said(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level("INFO"):
            plugin = mx("mxfp8_e4m3")
            fit_student(tmp_path, plugin=plugin, max_steps=1)
        assert "MX products: emulated (the device is cpu, not cuda)" in caplog.text
        assert plugin.verdict_fields() == {"mx_products": "emulated (the device is cpu, not cuda)"}

    @pytest.mark.parametrize(
        ("settings", "why"),
        [
            ({"native": False}, "native: false"),
            ({"preset": "bf16"}, "not two quantised operands"),
            ({"preset": "mxfp4"}, "is not MXFP8"),
            ({"preset": "mxfp8_e5m2"}, "two E5M2"),
            ({"changes": ["bump"], "as_released": True}, "bump_released is not one scale a block"),
            ({"block": 16}, "blocks of 32, not of 16"),
        ],
    )
    def test_or_why_there_can_be_no_other(self, settings: dict[str, Any], why: str) -> None:
        matmul = MXTraining(**settings).matmul
        assert matmul is not None
        matmul.choose_products(torch.device("cpu"))
        assert matmul.products.startswith("emulated (") and why in matmul.products and not matmul.native

    def test_each_of_the_three_is_told_and_again_after_a_change(self, caplog: pytest.LogCaptureFixture) -> None:
        matmul = MXTraining("mxfp8_mix").matmul
        assert matmul is not None
        with pytest.MonkeyPatch.context() as patch, caplog.at_level("INFO"):
            patch.setattr("lightning_qk.precision.matmul_formats.device_obstacle", lambda _: None)
            matmul.choose_products(torch.device("cuda"))
            assert matmul.native and "MX products: Y native, dW native, dX emulated (cuBLAS has no" in caplog.text
            matmul.change(["bf16_weights"])
            assert matmul.products == ""
            matmul.choose_products(torch.device("cuda"))
        assert matmul.native and "Y emulated (not two quantised operands), dW native" in matmul.products


def test_every_operand_matters_in_a_model(tmp_path: Path) -> None:
    """Each of the six alone changes a training run of the GPT, and each another one."""
    exact = tuple(fit(tmp_path, [], FaultPrecision(base="fp32"), max_steps=2)[1].losses)
    runs = {exact}
    for name in OPERANDS:
        plugin = MXTraining("fp32", operands={name: "mxfp4_e2m1"}, base="fp32")
        runs.add(tuple(fit(tmp_path, [], plugin, max_steps=2)[1].losses))
    assert len(runs) == 1 + len(OPERANDS)


def test_policies_compare_by_value() -> None:
    assert dataclasses.replace(MXPolicy.preset("mxfp4")) == MXPolicy.preset("mxfp4") != MXPolicy.preset("nvfp4")
    assert gpt().blocks  # a GPT is built without any policy
