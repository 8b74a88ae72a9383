"""RouteSplice: the clean gradient on one route, the faulty one everywhere else, and nothing else touched."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tiny import SIZE, Recording, assert_same, fault, fit, gradients, module, weights
from torch import Tensor

from callbacks import BiasMonitor, ErrorShaping, QKGuard, RouteSplice, SpectralMonitor
from lightning_qk.module import GPTModule
from lightning_qk.precision import FaultPrecision, MXTraining
from lightning_qk.routes import ROUTES, attention_sites, route_parameters

SITES = ["bf16_carry", "stochastic"]


def plugin(sites: str, base: str = "fp32") -> Any:
    if sites == "stochastic":
        return fault("bf16_carry", overrides={"l_carry": "2:sr", "o_carry": "2:sr", "s": "fp32"}, base=base)
    return fault(sites, 2 if sites == "bf16_carry" else None, base=base)


def run(tmp_path: Path, callbacks: Sequence[Callback], sites: str, steps: int = 1, **settings: Any) -> Recording:
    base = settings.pop("base", "fp32")
    fields = {"dropout": settings.pop("dropout", 0.0)}
    checkpointing = settings.pop("activation_checkpointing", False)
    model = module(fields, activation_checkpointing=checkpointing)
    for site in attention_sites(model):
        torch.nn.init.normal_(site.q_proj.weight, std=1.0)  # attention that is not flat: a fault that shows
    return fit(tmp_path, callbacks, plugin(sites, base), model, max_steps=steps, **settings)[1]


def check(tmp_path: Path, route: str, sites: str, layers: list[int] | None = None, **settings: Any) -> None:
    """Gradients of the first optimizer step, where all three runs have the same weights."""
    spliced, faulty, clean = (
        run(tmp_path, callbacks, site, **settings).gradients[0]
        for callbacks, site in (([RouteSplice(route, layers)], sites), ([], sites), ([], "fp32"))
    )
    chosen = set(route_parameters(module(), route, layers))
    assert_same({n: g for n, g in spliced.items() if n in chosen}, {n: g for n, g in clean.items() if n in chosen})
    assert_same(
        {n: g for n, g in spliced.items() if n not in chosen}, {n: g for n, g in faulty.items() if n not in chosen}
    )
    assert not any(torch.equal(faulty[name], clean[name]) for name in chosen)


@pytest.mark.parametrize("route", ROUTES)
def test_the_route_gets_the_clean_gradient_and_no_other_does(tmp_path: Path, route: str) -> None:
    check(tmp_path, route, "bf16_carry")


@pytest.mark.parametrize("sites", SITES)
@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate_grad_batches": 2},
        {"dropout": 0.3},
        {"base": "bf16"},
        {"dropout": 0.3, "accumulate_grad_batches": 3, "base": "bf16", "activation_checkpointing": True},
    ],
    ids=["accumulate", "dropout", "bf16", "all"],
)
def test_it_does_so_under(tmp_path: Path, sites: str, settings: dict[str, Any]) -> None:
    check(tmp_path, "qk", sites, **settings)


def test_only_the_chosen_layers_are_spliced(tmp_path: Path) -> None:
    check(tmp_path, "qk", "bf16_carry", layers=[1])


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("base", ["fp32", "bf16"])
def test_without_a_fault_the_splice_changes_nothing(tmp_path: Path, base: str, accumulate: int) -> None:
    """Four steps, dropout on: the second pass draws the same masks and leaves the generator as it was."""
    runs = [
        run(tmp_path, callbacks, "fp32", steps=4, base=base, dropout=0.3, accumulate_grad_batches=accumulate)
        for callbacks in ([RouteSplice("all")], [])
    ]
    assert runs[0].losses == runs[1].losses and len(set(runs[0].losses)) == 4 * accumulate
    for left, right in zip(runs[0].gradients, runs[1].gradients, strict=True):
        assert_same(left, right)
    row = runs[0].logged[-1]
    assert row["splice/cosine/all"] == pytest.approx(1, abs=1e-5) and row["splice/relative_error/all"] == 0
    assert row["grad/norm_faulty"] == row["grad/norm_clean"] == row["grad/norm"]


def test_the_primary_pass_and_its_sensors_are_untouched(tmp_path: Path) -> None:
    class Primary(Callback):
        """Gradients after the faulty backward pass: placed before the splice, and after it."""

        def __init__(self) -> None:
            self.gradients: list[dict[str, Tensor]] = []

        def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.gradients.append(gradients(pl_module))

    before, after, monitor = Primary(), Primary(), SpectralMonitor(1)
    spliced = run(
        tmp_path, [before, RouteSplice("qk"), after, monitor], "bf16_carry", dropout=0.2, accumulate_grad_batches=2
    )
    assert len(before.gradients) == 2
    for left, right in zip(before.gradients, after.gradients, strict=True):
        assert_same(left, right)
    alone = SpectralMonitor(1)
    plain = run(tmp_path, [alone], "bf16_carry", dropout=0.2, accumulate_grad_batches=2)
    assert spliced.losses == plain.losses
    assert alone.verdict_fields()["max_logit"] == monitor.verdict_fields()["max_logit"]


def test_what_it_logs_is_what_it_did(tmp_path: Path) -> None:
    spliced, faulty, clean = (
        run(tmp_path, callbacks, sites, gradient_clip_val=0.05)
        for callbacks, sites in (([RouteSplice("qk")], "bf16_carry"), ([], "bf16_carry"), ([], "fp32"))
    )
    route = route_parameters(module(), "qk")
    e, c = (torch.cat([r.gradients[0][name].flatten().double() for name in route]) for r in (faulty, clean))
    row = spliced.logged[0]
    assert row["splice/cosine/qk"] == pytest.approx(float(e @ c / (e.norm() * c.norm())), rel=1e-4)
    assert row["splice/relative_error/qk"] == pytest.approx(float((e - c).norm() / c.norm()), rel=1e-4)
    assert row["splice/relative_error/qk"] > 0.01
    assert row["grad/norm_faulty"] == pytest.approx(faulty.logged[0]["grad/norm"], rel=1e-6)
    assert row["grad/norm_clean"] == pytest.approx(clean.logged[0]["grad/norm"], rel=1e-6)
    assert row["grad/clip_coef_faulty"] == pytest.approx(faulty.logged[0]["grad/clip_coef"], rel=1e-6)
    assert row["grad/clip_coef_clean"] == pytest.approx(clean.logged[0]["grad/clip_coef"], rel=1e-6)
    assert row["grad/clip_coef_clean"] < 1
    mixed = torch.stack([g.norm() for g in spliced.gradients[0].values()]).norm()
    assert row["grad/norm"] == pytest.approx(float(mixed), rel=1e-6)


def test_splice_and_guard_work_together(tmp_path: Path) -> None:
    """The clean pass runs with QK-norm too once the guard has fired: both passes are of the same model."""
    guard = QKGuard(threshold=1e-6)
    model, recording = fit(tmp_path, [guard, RouteSplice("all")], plugin("fp32"), max_steps=3)
    assert guard.fired_step == 1
    assert [row["splice/relative_error/all"] for row in recording.logged] == [0, 0, 0]
    assert attention_sites(model)[0].qk_norm_on


def test_no_graph_outlives_the_clean_pass(tmp_path: Path) -> None:
    alive: list[list[str]] = []
    losses: list[tuple[str, weakref.ref[Tensor]]] = []

    class Alive(Callback):
        def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
            gc.collect()
            assert [kind for kind, _ in losses] == ["faulty", "clean"]
            alive.append([kind for kind, loss in losses if loss() is not None])
            losses.clear()

    model = module()
    forward, switch = model.forward, fault()

    def watched(*batch: Any) -> Tensor:
        loss = forward(*batch)
        losses.append(("faulty" if switch.switch.on else "clean", weakref.ref(loss)))
        return loss

    model.forward = watched  # type: ignore[method-assign, assignment]
    fit(tmp_path, [RouteSplice("qk"), Alive()], switch, model, max_steps=2)
    assert alive == [[], []]
    assert switch.clean._kept == switch.clean._accumulated == {}


def test_it_needs_a_plugin_that_can_run_clean(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match=r"got Precision: set trainer\.plugins"):
        fit(tmp_path, [RouteSplice("qk")], None, max_steps=1)
    left, right = (fit(tmp_path, c, FaultPrecision(base="fp32"))[0] for c in ([RouteSplice("all")], []))
    assert_same(weights(left), weights(right))


@pytest.mark.parametrize(("arguments", "named"), [(("qkv", None), "'qkv'"), (("q", [2]), "2 is not a layer")])
def test_a_wrong_route_is_refused_before_training(tmp_path: Path, arguments: tuple[Any, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        fit(tmp_path, [RouteSplice(*arguments)], fault(), max_steps=1)


@pytest.mark.parametrize(
    ("callbacks", "problem"),
    [
        (lambda: [RouteSplice("qk"), RouteSplice("q")], "RouteSplice .route qk.: RouteSplice writes the gradient"),
        (lambda: [ErrorShaping(route="v"), RouteSplice("vo")], "ErrorShaping .route v.: RouteSplice writes"),
        (lambda: [RouteSplice("qk", invert=True), RouteSplice("mlp")], "writes the gradient of the same weights"),
        (
            lambda: [QKGuard(1e-6, action="tighter_clip"), RouteSplice("qk")],
            "QKGuard edits the gradient before it, which would be undone.*list guards after it",
        ),
        (lambda: [RouteSplice("qk"), ErrorShaping(route="v"), QKGuard(1e-6, action="tighter_clip")], None),
        (lambda: [QKGuard(1e-6), RouteSplice("qk"), RouteSplice("mlp")], None),
    ],
)
def test_edits_that_would_undo_each_other_are_refused(tmp_path: Path, callbacks: Any, problem: str | None) -> None:
    if problem is None:
        run(tmp_path, callbacks(), "bf16_carry")
    else:
        with pytest.raises(MisconfigurationException, match=problem):
            run(tmp_path, callbacks(), "bf16_carry")


def test_two_routes_have_tags_of_their_own(tmp_path: Path) -> None:
    row = run(tmp_path, [RouteSplice("qk"), RouteSplice("mlp")], "bf16_carry").logged[0]
    assert row["splice/relative_error/qk"] != row["splice/relative_error/mlp"]


class Logits(GPTModule):
    """A stranger: its forward gives logits, and its training_step makes a loss of them."""

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        return self.model(tokens_BT)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.model.loss(*batch)


def test_a_module_whose_forward_is_not_the_loss_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"forward\(\*batch\).*LossModule"):
        fit(tmp_path, [RouteSplice("qk")], fault(), Logits(overrides=SIZE))


@pytest.mark.parametrize("order", [["qk", "mlp"], ["mlp", "qk"]])
def test_the_faulty_norm_is_that_of_the_whole_gradient_whoever_edits_first(tmp_path: Path, order: list[str]) -> None:
    row = run(tmp_path, [RouteSplice(route) for route in order], "bf16_carry").logged[0]
    alone = run(tmp_path, [], "bf16_carry").logged[0]
    assert row["grad/norm_faulty"] == pytest.approx(alone["grad/norm"], rel=1e-6)


def test_splices_of_one_route_in_other_layers_have_readings_of_their_own(tmp_path: Path) -> None:
    row = run(tmp_path, [RouteSplice("qk", [0]), RouteSplice("qk", [1])], "bf16_carry").logged[0]
    whole = run(tmp_path, [RouteSplice("qk")], "bf16_carry").logged[0]
    errors = [row[f"splice/relative_error/qk/layers_{layer}"] for layer in (0, 1)]
    assert errors[0] != errors[1] and min(errors) < whole["splice/relative_error/qk"] < max(errors)


def test_a_clean_pass_leaves_the_sensors_of_the_models_own_attention_alone(tmp_path: Path) -> None:
    """The guard decides on the logits of the pass that trains, not on those of the clean one."""
    logits = []
    for callbacks in ([], [BiasMonitor(every_n_steps=1)]):
        monitor = SpectralMonitor(1)
        fit(tmp_path, [*callbacks, monitor], MXTraining("mxfp4", base="fp32"), module())
        logits.append(monitor.verdict_fields()["max_logit"])
    clean = SpectralMonitor(1)
    fit(tmp_path, [clean], MXTraining("fp32", base="fp32"), module())
    assert logits[0] == logits[1] != clean.verdict_fields()["max_logit"]
