"""BiasMonitor: its readings are those of the definition, when they are due, and training does not notice."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from ranks import Case, ddp, on_two_ranks, run
from student import fit_student, student
from student import mx as student_mx
from test_callbacks_error_shaping import Peek
from tiny import assert_same, fault, fit, gradients, module, weights
from torch import Tensor

from callbacks import BiasMonitor, ErrorShaping, QKGuard, RouteSplice
from lightning_qk.events import read_scalars
from lightning_qk.gaussian_data import GaussianLoader
from lightning_qk.precision import FaultPrecision, MXGradient
from lightning_qk.routes import attention_sites, route_parameters

NAMES = ("zeta", "cosine", "projection", "coherence")


def mx(route: str = "qk", **settings: Any) -> FaultPrecision:
    return MXGradient(**{"route": route, "block": 8, "base": "fp32", **settings})


FAULTS = {
    "attention": fault,
    "attention, bf16": partial(fault, base="bf16"),
    "attention, stochastic": partial(fault, overrides={"l_carry": "2:sr", "s": "fp32"}),
    "gradient": mx,
    "product": partial(mx, where="product"),
}


class Readings(BiasMonitor):
    """Keeps every reading, by optimizer step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.all: dict[int, dict[str, float]] = {}

    def read(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        self.all[trainer.global_step] = dict(super().read(trainer, pl_module))
        return self.all[trainer.global_step]


def flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([g.flatten().double() for g in gradients.values()])


def model(**fields: Any) -> Any:
    built = module(fields)
    for site in attention_sites(built):
        torch.nn.init.normal_(site.q_proj.weight, std=1.0)  # attention that is not flat: a fault that shows
    return built


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("route", ["qk", "all"])
def test_readings_are_those_of_the_definition(tmp_path: Path, name: str, route: str) -> None:
    peek, monitor = Peek(route), Readings(route, window=3, every_n_steps=2)
    fit(tmp_path, [peek, monitor], FAULTS[name](), model(), max_steps=9)
    assert list(monitor.all) == [2, 4, 6, 8]
    pairs = [(flat(peek.faulty[step - 1]), flat(peek.clean_ones[step - 1])) for step in monitor.all]
    signs = [(g - c).sign() for g, c in pairs]
    for i, ((g, c), reading) in enumerate(zip(pairs, monitor.all.values(), strict=True)):
        assert reading["zeta"] == pytest.approx(float((g - c).norm() / c.norm()), rel=1e-9) and reading["zeta"] > 1e-3
        assert reading["cosine"] == pytest.approx(float(g @ c / (g.norm() * c.norm())), rel=1e-9)
        assert reading["projection"] == pytest.approx(float((g - c) @ c / (c @ c)), rel=1e-9)
        if i < 2:
            assert "coherence" not in reading
        else:
            expected = float(torch.stack(signs[i - 2 : i + 1]).mean(0).abs().mean())
            assert reading["coherence"] == pytest.approx(expected, rel=1e-12) and 0 < expected < 1


def test_clean_is_the_gradient_of_the_same_weights_without_the_fault(tmp_path: Path) -> None:
    for plugin, exact in ((fault(), fault("fp32", None)), (mx(), FaultPrecision(base="fp32"))):
        monitor = Readings(every_n_steps=1)
        faulty = fit(tmp_path, [monitor], plugin, model(), max_steps=1)[1].gradients[0]
        clean = fit(tmp_path, [], exact, model(), max_steps=1)[1].gradients[0]
        g, c = (flat({name: found[name] for name in route_parameters(module(), "qk")}) for found in (faulty, clean))
        assert monitor.all[1]["zeta"] == pytest.approx(float((g - c).norm() / c.norm()), rel=1e-9)


def test_without_a_fault_there_is_no_error(tmp_path: Path) -> None:
    monitor = Readings("all", window=1, every_n_steps=1)
    fit(tmp_path, [monitor], FaultPrecision(base="fp32"), max_steps=2)
    for reading in monitor.all.values():
        assert reading == {"zeta": 0, "cosine": pytest.approx(1), "projection": 0, "coherence": 0}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", FAULTS)
def test_training_is_unchanged(tmp_path: Path, name: str, accumulate: int) -> None:
    runs = [
        fit(tmp_path, callbacks, FAULTS[name](), model(dropout=0.1), max_steps=4, accumulate_grad_batches=accumulate)
        for callbacks in ([BiasMonitor("all", window=2, every_n_steps=2, per_tensor=True)], [])
    ]
    assert_same(weights(runs[0][0]), weights(runs[1][0]))
    assert runs[0][1].losses == runs[1][1].losses
    for left, right in zip(runs[0][1].gradients, runs[1][1].gradients, strict=True):
        assert_same(left, right)


def test_running_estimates_of_the_model_are_unchanged(tmp_path: Path) -> None:
    """Sigma-reparametrisation takes a step of power iteration in every training pass, and the clean one is such."""
    fields = {"sigma_reparam": True, "dropout": 0.1}
    monitor = BiasMonitor("all", every_n_steps=1)
    read, plain = (fit(tmp_path, callbacks, fault(), module(fields), max_steps=4)[0] for callbacks in ([monitor], []))
    assert_same(weights(read), weights(plain))
    spliced, exact = (
        fit(tmp_path, callbacks, plugin, module(fields), max_steps=1)[1].gradients[0]
        for callbacks, plugin in (([RouteSplice("all")], fault()), ([], fault("fp32", None)))
    )
    chosen = route_parameters(module(fields), "all")
    assert_same({name: spliced[name] for name in chosen}, {name: exact[name] for name in chosen})


@pytest.mark.parametrize("accumulate", [1, 3])
def test_two_ranks_read_the_same_and_train_as_without(tmp_path: Path, accumulate: int) -> None:
    settings = {"accumulate_grad_batches": accumulate}

    def one(*callbacks: Callback) -> Case:
        return Case(lambda: list(callbacks), fields={"dropout": 0.1}, settings=settings)

    read = one(BiasMonitor(window=2, every_n_steps=1))
    found = on_two_ranks(
        tmp_path, {"read": lambda: run(tmp_path, read, ddp()), "plain": lambda: run(tmp_path, one(), ddp())}
    )
    for rank in range(2):
        assert_same(found["read"][rank]["weights"], found["plain"][rank]["weights"])
        assert found["read"][rank]["losses"] == found["plain"][rank]["losses"]
    assert found["read"][0]["fields"] == found["read"][1]["fields"]
    assert found["read"][0]["losses"] != found["read"][1]["losses"]


class Passes(Callback):
    """Counts forward passes without the fault, and what is kept when gradients are complete."""

    def __init__(self, plugin: FaultPrecision) -> None:
        self.plugin = plugin
        self.clean: dict[int, int] = {}
        self.kept: dict[int, int] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        forward = pl_module.forward

        def counted(*batch: Any) -> Any:
            step = trainer.global_step + 1
            self.clean[step] = self.clean.get(step, 0) + (not self.plugin.switch.on)
            return forward(*batch)

        pl_module.forward = counted  # type: ignore[method-assign]

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.kept[trainer.global_step + 1] = len(self.plugin.clean._kept)


@pytest.mark.parametrize("splice", [False, True])
@pytest.mark.parametrize("name", ["attention", "gradient"])
def test_the_clean_gradient_is_made_at_the_steps_that_are_read(tmp_path: Path, name: str, splice: bool) -> None:
    plugin = FAULTS[name]()
    passes, monitor = Passes(plugin), Readings(every_n_steps=3)
    callbacks = [passes, monitor, *([RouteSplice("mlp")] if splice else [])]
    fit(tmp_path, callbacks, plugin, max_steps=6, accumulate_grad_batches=2)
    due = {step: splice or step % 3 == 0 for step in range(1, 7)}
    assert passes.clean == {step: 2 * (on and name == "attention") for step, on in due.items()}
    assert [step for step, kept in passes.kept.items() if kept] == [step for step, on in due.items() if on]
    assert list(monitor.all) == [3, 6]
    if name == "gradient":
        assert passes.kept[3] == 4 * (1 + splice)  # copies of the routes, two matrices a layer each
    assert plugin.clean._kept == plugin.clean._accumulated == {}


@pytest.mark.parametrize("plugin", [fault, mx])
def test_it_reads_before_callbacks_that_edit_wherever_they_stand(tmp_path: Path, plugin: Any) -> None:
    alone = Readings(every_n_steps=1)
    fit(tmp_path, [alone], plugin(), model(), max_steps=1)
    for editor in (
        lambda: RouteSplice("qk"),
        lambda: ErrorShaping("random_signs", magnitude=3.0),
        lambda: QKGuard(mode="always_on", action="tighter_clip"),
    ):
        for order in (1, -1):
            monitor = Readings(every_n_steps=1)
            fit(tmp_path, [editor(), monitor][::order], plugin(), model(), max_steps=1)
            assert monitor.all == alone.all and monitor.all[1]["zeta"] > 0


def test_several_monitors_side_by_side(tmp_path: Path) -> None:
    monitors = [
        Readings("qk", window=1, every_n_steps=1, per_tensor=True, thresholds={"zeta": 1e-3}),
        Readings("mlp", window=1, every_n_steps=1),
        Readings("qk", [1], window=1, every_n_steps=1),
    ]
    assert len({monitor.state_key for monitor in monitors}) == 3
    logger = TensorBoardLogger(str(tmp_path), name="", version="")
    fit(tmp_path, monitors, mx("all"), max_steps=3, logger=logger)
    logged = read_scalars(tmp_path)
    for label, monitor in zip(("qk", "mlp", "qk/layers_1"), monitors, strict=True):
        warnings = monitor.verdict_fields()["warnings"]
        assert list(warnings) == [f"{name}/{label}" for name in NAMES]
        assert warnings[f"zeta/{label}"]["alarm_step"] == (1 if label == "qk" else None)
        for name in NAMES:
            assert logged[f"warning/{name}/{label}"].steps.tolist() == [0, 1, 2]
            values = logged[f"warning/{name}/{label}"].values.tolist()
            assert values == pytest.approx([reading[name] for reading in monitor.all.values()], rel=1e-6)
    zetas = {tag.removeprefix("warning/zeta/qk/") for tag in logged if tag.startswith("warning/zeta/qk/model")}
    assert zetas == set(route_parameters(module(), "qk"))
    name = "model.blocks.1.attention.k_proj.weight"
    peek = Peek("qk")
    fit(tmp_path / "peek", [peek], mx("all"), max_steps=1)
    g, c = peek.faulty[0][name], peek.clean_ones[0][name]
    assert logged[f"warning/zeta/qk/{name}"].values[0] == pytest.approx(float((g - c).norm() / c.norm()), rel=1e-6)


def test_gains_and_biases_on_request_and_every_ratio_of_a_tensor(tmp_path: Path) -> None:
    logger = TensorBoardLogger(str(tmp_path), name="", version="")
    monitors = [Readings("mlp", every_n_steps=1), Readings("mlp", per_tensor=True, vectors=True, every_n_steps=1)]
    fit_student(tmp_path, monitors, student_mx("mxfp4"), max_steps=1, logger=logger)
    alone = Readings("mlp", every_n_steps=1)
    fit_student(tmp_path, [alone], student_mx("mxfp4"), max_steps=1)
    assert monitors[0].all == alone.all and len({one.state_key for one in monitors}) == 2
    assert monitors[1].label("zeta") == "zeta/mlp_and_vectors"

    def first_gradient(preset: str) -> dict[str, Tensor]:
        model = student()
        student_mx(preset).convert_module(model)
        model(*GaussianLoader(0, 64, 32, 1e-3, 1)[0]).backward()
        return {name: value.double() for name, value in gradients(model).items()}

    faulty, exact = first_gradient("mxfp4"), first_gradient("fp32")
    logged = read_scalars(tmp_path)
    assert {name for name in exact if exact[name].ndim == 1} > {"student.blocks.0.norm.weight"}
    for name, c in exact.items():
        g = faulty[name]
        expected = {
            "zeta": (g - c).norm() / c.norm(),
            "cosine": (g * c).sum() / (g.norm() * c.norm()),
            "projection": ((g - c) * c).sum() / c.norm() ** 2,
        }
        for reading, value in expected.items():
            found = logged[f"warning/{reading}/mlp_and_vectors/{name}"].values[0]
            assert found == pytest.approx(float(value), rel=1e-4, abs=1e-9), (name, reading)
    g, c = flat(faulty), flat(exact)
    assert monitors[1].all[1]["zeta"] == pytest.approx(float((g - c).norm() / c.norm()), rel=1e-6)
    with pytest.raises(ValueError, match=r"vectors are those of the whole model; leave out layers=\[0\]"):
        BiasMonitor("mlp", [0], vectors=True)


@pytest.mark.parametrize("plugin", [fault, mx])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_reads_nan_once(tmp_path: Path, plugin: Any, value: float) -> None:
    class Poison(Callback):
        def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
            if trainer.global_step == 2:
                for p in route_parameters(pl_module, "k").values():
                    assert p.grad is not None
                    p.grad[0, 0] = value

        def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
            if trainer.global_step == 2:
                pl_module.zero_grad()

    monitor = Readings(window=2, every_n_steps=1)
    fit(tmp_path, [monitor, Poison()], plugin(), max_steps=4)
    assert all(math.isnan(monitor.all[3][name]) for name in NAMES) and list(monitor.all[3]) == list(NAMES)
    assert all(math.isfinite(monitor.all[4][name]) for name in NAMES)


def test_signs_drawn_anew_read_the_floor_that_is_documented() -> None:
    monitor, draw = BiasMonitor(), torch.Generator().manual_seed(0)
    for _ in range(100):
        signs = torch.randint(2, (200, 200), generator=draw, dtype=torch.int8) * 2 - 1
        monitor._take({"weight": signs})
    assert monitor._coherence() == pytest.approx(math.comb(16, 8) / 2**16, abs=3e-3)
    assert math.sqrt(2 / (math.pi * 16)) == pytest.approx(math.comb(16, 8) / 2**16, rel=0.02)


def test_it_goes_on_where_a_checkpoint_was_taken(tmp_path: Path) -> None:
    whole, first, rest = (Readings(window=3, every_n_steps=1, thresholds={"coherence": 0.1}) for _ in range(3))
    save = ModelCheckpoint(tmp_path, filename="at", every_n_train_steps=1, enable_version_counter=False)
    fit(tmp_path, [whole], fault(), max_steps=6)
    fit(tmp_path, [first, save], fault(), max_steps=4, enable_checkpointing=True)
    fit(tmp_path, [rest], fault(), ckpt_path=tmp_path / "at.ckpt", max_steps=6)
    assert rest.all == {step: whole.all[step] for step in (5, 6)}
    assert rest.verdict_fields() == whole.verdict_fields()
    assert whole.verdict_fields()["warnings"]["coherence/qk"]["alarm_step"] == 3
    with pytest.raises(ValueError, match="window=2 but the checkpoint's monitor had 3"):
        BiasMonitor(window=2).load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({"window": 0}, "window=0"), ({"every_n_steps": 0}, "every_n_steps=0"), ({"thresholds": {"bias": 1.0}}, "'bias'")],
)
def test_arguments_that_cannot_be(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"BiasMonitor: .*{named}"):
        BiasMonitor(**arguments)


def test_it_needs_a_plugin_with_a_fault_switch_and_a_route(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match="BiasMonitor needs a plugin"):
        fit(tmp_path, [BiasMonitor()], None, max_steps=1)
    with pytest.raises(ValueError, match="'qkv'"):
        fit(tmp_path, [BiasMonitor("qkv")], fault(), max_steps=1)
