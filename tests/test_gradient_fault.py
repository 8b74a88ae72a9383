"""The gradient fault: where it acts, on what, and that a clean splice takes it back bit for bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from ranks import ddp, on_two_ranks
from tiny import Recording, assert_same, data, fault, fit, gpt, module, weights
from torch import Tensor

from callbacks import QKGuard, RouteSplice
from kernels import mx_quantize
from lightning_qk.mx_linear import MXLinear, OperandFormat
from lightning_qk.precision import BF16CarryAttention, FaultPrecision, GradientFault, MXGradient
from lightning_qk.routes import ROUTES, route_linears, route_parameters


def mx(route: str = "mlp", **settings: Any) -> MXGradient:
    return MXGradient(**{"route": route, "block": 8, "base": "fp32", **settings})


def clean() -> FaultPrecision:
    return FaultPrecision(base="fp32")


def on_route(gradients: dict[str, Tensor], route: str, layers: list[int] | None = None) -> set[str]:
    chosen = set(route_parameters(module(), route, layers))
    assert chosen <= gradients.keys()
    return chosen


class TestFinishedGradient:
    @pytest.mark.parametrize("route", ROUTES)
    def test_the_route_is_quantised_and_nothing_else(self, tmp_path: Path, route: str) -> None:
        """The first gradients that reach clipping, against the no-fault run's quantised by hand."""
        faulty = fit(tmp_path, [], mx(route), max_steps=1)[1].gradients[0]
        exact = fit(tmp_path, [], clean(), max_steps=1)[1].gradients[0]
        chosen = on_route(faulty, route)
        expected = {n: mx_quantize(g, block=8) if n in chosen else g for n, g in exact.items()}
        assert_same(faulty, expected)
        assert not any(torch.equal(faulty[name], exact[name]) for name in chosen)

    @pytest.mark.parametrize(
        "settings",
        [
            {"fmt": "mxfp8_e4m3", "scale": "rceil"},
            {"axis": 0, "block": 4},
            {"block": None},
            {"rounding": "away"},
            {"layers": [1]},
        ],
    )
    def test_every_setting_arrives(self, tmp_path: Path, settings: dict[str, Any]) -> None:
        faulty = fit(tmp_path, [], mx(**settings), max_steps=1)[1].gradients[0]
        exact = fit(tmp_path, [], clean(), max_steps=1)[1].gradients[0]
        chosen = on_route(faulty, "mlp", settings.pop("layers", None))
        arguments = {"block": 8, **settings}
        assert_same(faulty, {n: mx_quantize(g, **arguments) if n in chosen else g for n, g in exact.items()})

    def test_error_gain_scales_the_error(self, tmp_path: Path) -> None:
        exact, once, thrice = (
            fit(tmp_path, [], plugin, max_steps=1)[1].gradients[0] for plugin in (clean(), mx(), mx(error_gain=3.0))
        )
        for name in on_route(exact, "mlp"):
            torch.testing.assert_close(thrice[name] - exact[name], 3 * (once[name] - exact[name]), rtol=1e-4, atol=1e-7)

    def test_it_acts_once_on_the_accumulated_gradient(self, tmp_path: Path) -> None:
        settings: dict[str, Any] = dict(max_steps=1, accumulate_grad_batches=3)
        faulty = fit(tmp_path, [], mx(), **settings)[1].gradients[0]
        exact = fit(tmp_path, [], clean(), **settings)[1].gradients[0]
        for name in on_route(exact, "mlp"):
            assert torch.equal(faulty[name], mx_quantize(exact[name], block=8))

    def test_stochastic_rounding_differs_by_step_weight_and_seed_only(self, tmp_path: Path) -> None:
        fault = GradientFault(rounding="sr", block=8)
        model = gpt()
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.7)  # equal in all weights, so that equal draws would show

        def perturbed(seed: int) -> list[Tensor]:
            copies = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            fault.perturb(model, seed)
            result = [p.grad.clone() for p in route_parameters(model, "mlp").values() if p.grad is not None]
            for p, copy in zip(model.parameters(), copies, strict=True):
                p.grad = copy
            return result

        first, again, other = perturbed(1 << 32), perturbed(1 << 32), perturbed(2 << 32)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
        assert not torch.equal(first[0], first[2])  # the up projections of the two layers
        losses = [fit(tmp_path, [], mx(rounding="sr", seed=seed), max_steps=5)[1].losses for seed in (0, 0, 1)]
        assert losses[0] == losses[1] != losses[2]

    def test_validation_has_no_part_in_it(self, tmp_path: Path) -> None:
        evaluate: dict[str, Any] = dict(limit_val_batches=1.0, val_check_interval=1)
        left, right = (fit(tmp_path, [], mx(), max_steps=3, **settings)[0] for settings in ({}, evaluate))
        assert_same(weights(left), weights(right))


class TestSpliceTakesItBack:
    """Post-reduction: the clean gradient is the one before the fault, so the run is that without a fault."""

    @pytest.mark.parametrize("route", ["qk", "v", "mlp", "all"])
    @pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
    @pytest.mark.parametrize("accumulate", [1, 3])
    def test_in_one_process(self, tmp_path: Path, route: str, optimizer: str, accumulate: int) -> None:
        def run(callbacks: list[Callback], plugin: FaultPrecision) -> tuple[dict[str, Tensor], Recording]:
            lr = 1e-2 if optimizer == "adamw" else 0.3
            model = module({"dropout": 0.1}, optimizer=optimizer, lr=lr, weight_decay=0.1)
            model, recording = fit(tmp_path, callbacks, plugin, model, max_steps=4, accumulate_grad_batches=accumulate)
            return weights(model), recording

        (spliced, seen), (exact, plain), (faulty, _) = (
            run([RouteSplice(route)], mx(route)), run([], clean()), run([], mx(route))
        )  # fmt: skip
        assert_same(spliced, exact)
        assert seen.losses == plain.losses
        assert not all(torch.equal(faulty[name], exact[name]) for name in exact)

    @pytest.mark.parametrize("accumulate", [1, 3])
    @pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
    def test_on_two_ranks(self, tmp_path: Path, optimizer: str, accumulate: int) -> None:
        def run(callbacks: list[Callback], plugin: FaultPrecision) -> dict[str, Tensor]:
            ranks: dict[str, Any] = dict(devices=2, strategy=ddp(), accumulate_grad_batches=accumulate)
            model, batches = module(optimizer=optimizer), data(batch_size=4)
            return weights(fit(tmp_path, callbacks, plugin, model, batches, max_steps=3, **ranks)[0])

        work = {
            "spliced": partial(run, [RouteSplice("mlp")], mx("mlp")),
            "exact": partial(run, [], clean()),
            "faulty": partial(run, [], mx("mlp")),
        }
        for spliced, exact, faulty in zip(*on_two_ranks(tmp_path, work).values(), strict=True):
            assert_same(spliced, exact)
            assert not all(torch.equal(faulty[name], exact[name]) for name in exact)

    def test_another_route_clean_leaves_the_fault(self, tmp_path: Path) -> None:
        left, right = (fit(tmp_path, callbacks, mx("mlp"))[0] for callbacks in ([RouteSplice("qk")], []))
        assert_same(weights(left), weights(right))

    def test_inverted_it_leaves_the_fault_on_its_route_alone(self, tmp_path: Path) -> None:
        spliced = fit(tmp_path, [RouteSplice("v", invert=True)], mx("all"), max_steps=4)[0]
        alone = fit(tmp_path, [], mx("v"), max_steps=4)[0]
        assert_same(weights(spliced), weights(alone))

    def test_inverted_for_an_attention_fault_cleans_embeddings_too(self, tmp_path: Path) -> None:
        def first(callbacks: list[Callback], sites: str) -> dict[str, Tensor]:
            model = module()
            for p in route_parameters(model, "q").values():
                torch.nn.init.normal_(p, std=1.0)
            return fit(tmp_path, callbacks, fault(sites, 2 if sites != "fp32" else None), model, max_steps=1)[
                1
            ].gradients[0]

        spliced, faulty, exact = (
            first([RouteSplice("qk", invert=True)], "bf16_carry"), first([], "bf16_carry"), first([], "fp32")
        )  # fmt: skip
        chosen = on_route(spliced, "qk")
        assert_same(spliced, {n: faulty[n] if n in chosen else exact[n] for n in spliced})

    def test_what_it_logs_is_the_fault(self, tmp_path: Path) -> None:
        seen = fit(tmp_path, [RouteSplice("mlp")], mx("mlp"), max_steps=1)[1].logged[0]
        exact = fit(tmp_path, [], clean(), max_steps=1)[1].gradients[0]
        chosen = on_route(exact, "mlp")
        c = torch.cat([exact[name].flatten().double() for name in chosen])
        e = torch.cat([mx_quantize(exact[name], block=8).flatten().double() for name in chosen])
        assert seen["splice/cosine/mlp"] == pytest.approx(float(e @ c / (e.norm() * c.norm())), rel=1e-5)
        assert seen["splice/relative_error/mlp"] == pytest.approx(float((e - c).norm() / c.norm()), rel=1e-4)
        norm = torch.stack([g.double().norm() for g in exact.values()]).norm()
        assert seen["grad/norm_clean"] == pytest.approx(float(norm), rel=1e-5) == seen["grad/norm"]
        assert seen["grad/norm_faulty"] != seen["grad/norm_clean"]

    def test_nothing_is_kept_after_the_step_or_without_a_request(self, tmp_path: Path) -> None:
        for callbacks in ([RouteSplice("mlp")], []):
            plugin = mx()
            fit(tmp_path, callbacks, plugin, max_steps=2)
            assert plugin.clean._kept == plugin.clean._accumulated == {}


class TestProduct:
    def linear_gradients(self, bias: bool, shape: tuple[int, ...], autocast: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Gradients of x, weight and bias through a quantised product and through a plain layer."""
        results = []
        for quantised in (True, False):
            torch.manual_seed(0)
            linear = torch.nn.Linear(24, 16, bias=bias)
            x = torch.randn(*shape, 24, requires_grad=True)
            if quantised:
                switch = BF16CarryAttention().switch
                MXLinear.take_over(linear, switch, OperandFormat("mxfp4_e2m1"), stream=0)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
                y = linear(x)
            dy = torch.randn(y.shape).to(y.dtype)
            y.backward(dy)
            results.append([y.detach(), x.grad, linear.weight.grad, *([linear.bias.grad] if bias else []), dy])
        return results[0], results[1]

    @pytest.mark.parametrize("autocast", [False, True])
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("shape", [(64,), (2, 40), (2, 3, 7)])
    def test_only_the_weight_gradient_changes(self, bias: bool, shape: tuple[int, ...], autocast: bool) -> None:
        quantised, plain = self.linear_gradients(bias, shape, autocast)
        y, dx, dw, *db, dy = quantised
        assert torch.equal(y, plain[0]) and torch.equal(dx, plain[1])
        assert not torch.equal(dw, plain[2])
        for left, right in zip(db, plain[3:-1], strict=True):
            torch.testing.assert_close(left, right)
        torch.manual_seed(0)
        torch.nn.Linear(24, 16, bias=bias)
        x = torch.randn(*shape, 24).to(y.dtype).flatten(0, -2)
        expected = mx_quantize(dy.flatten(0, -2), axis=0).T @ mx_quantize(x, axis=0)
        assert torch.equal(dw, expected.float())

    def test_it_is_another_fault_than_the_finished_gradients(self, tmp_path: Path) -> None:
        product, finished, exact = (
            fit(tmp_path, [], plugin, max_steps=1)[1].gradients[0] for plugin in (mx(where="product"), mx(), clean())
        )
        for name in on_route(exact, "mlp"):
            assert not torch.equal(product[name], exact[name]) and not torch.equal(product[name], finished[name])
        others = exact.keys() - on_route(exact, "mlp")
        assert_same({n: product[n] for n in others}, {n: exact[n] for n in others})

    def test_a_splice_cleans_it_by_a_second_pass(self, tmp_path: Path) -> None:
        for accumulate in (1, 2):
            settings: dict[str, Any] = dict(max_steps=1, accumulate_grad_batches=accumulate)
            spliced = fit(tmp_path, [RouteSplice("mlp")], mx(where="product"), **settings)[1].gradients[0]
            assert_same(spliced, fit(tmp_path, [], clean(), **settings)[1].gradients[0])

    def test_layers_keep_their_names_and_parameters(self, tmp_path: Path) -> None:
        model = module()
        before = {name: id(p) for name, p in model.named_parameters()}
        plugin = mx("qk", where="product")
        plugin.convert_module(model)
        plugin.convert_module(model)  # fit and validate both do
        assert {name: id(p) for name, p in model.named_parameters()} == before
        assert all(isinstance(linear, MXLinear) for linear in route_linears(model, "qk").values())
        assert not any(isinstance(linear, MXLinear) for linear in route_linears(model, "mlp").values())
        assert model.state_dict().keys() == module().state_dict().keys()

    def test_under_activation_checkpointing_and_accumulation(self, tmp_path: Path) -> None:
        def run(checkpointing: bool) -> dict[str, Tensor]:
            model = module(activation_checkpointing=checkpointing)
            return fit(tmp_path, [], mx(where="product", rounding="sr"), model, accumulate_grad_batches=2)[1].gradients[
                0
            ]

        assert_same(run(True), run(False))


class TestComposition:
    def test_attention_and_gradient_faults_act_together(self, tmp_path: Path) -> None:
        both = fault(gradient=GradientFault("mlp", block=8))
        other = mx(attention=both.attention)
        runs = [fit(tmp_path, [], plugin, max_steps=1)[1].gradients[0] for plugin in (both, other, fault())]
        assert_same(runs[0], runs[1])
        chosen = on_route(runs[2], "mlp")
        assert_same(runs[0], {n: mx_quantize(g, block=8) if n in chosen else g for n, g in runs[2].items()})

    def test_the_clean_gradient_is_free_of_both(self, tmp_path: Path) -> None:
        plugin = fault(gradient=GradientFault("all", block=8))
        spliced = fit(tmp_path, [RouteSplice("all")], plugin, max_steps=1)[1].gradients[0]
        exact = fit(tmp_path, [], clean(), max_steps=1)[1].gradients[0]
        for name in on_route(exact, "all"):
            torch.testing.assert_close(spliced[name], exact[name], rtol=1e-4, atol=1e-6)

    def test_with_a_guard(self, tmp_path: Path) -> None:
        guard = QKGuard(threshold=1e-6)
        fit(tmp_path, [guard], mx("qk"), max_steps=2)
        assert guard.fired_step == 1


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"route": "qkv"}, "route='qkv' is not one of q, k"),
        ({"fmt": "mxfp5"}, "mxfp5"),
        ({"scale": "round"}, "round"),
        ({"rounding": "up"}, "up"),
        ({"block": 0}, "block"),
        ({"axis": 2}, "axis=2"),
        ({"where": "input"}, "where='input'"),
        ({"where": "product", "error_gain": 2.0}, "leave error_gain=1"),
    ],
)
def test_argument_errors_name_the_argument(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        MXGradient(**settings)
