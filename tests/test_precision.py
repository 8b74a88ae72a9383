"""The precision plugins: which arithmetic is on in which pass, and what they refuse."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from tiny import assert_same, batch, data, fault, fit, gpt, module, trainer, weights
from torch import Tensor

from callbacks import CollapseStop, QKGuard, RouteSplice, SpectralMonitor
from kernels import RoundingSites
from lightning_qk.attention import FlashCore, SDPACore, StreamingCore
from lightning_qk.precision import BF16CarryAttention, FaultPrecision, MXGradient, MXTraining
from lightning_qk.routes import attention_sites

EVALUATE: dict[str, Any] = dict(limit_val_batches=1.0, val_check_interval=1)


class Arithmetic(Callback):
    """Keeps what every pass runs under."""

    def __init__(self) -> None:
        self.passes: list[tuple[str, bool, bool]] = []
        self.dtypes: set[tuple[str, torch.dtype]] = set()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if getattr(self, "_attached", False):
            return
        self._attached = True
        plugin: Any = trainer.precision_plugin
        forward = pl_module.forward

        def watched(*batch: Any) -> Tensor:
            kind = "train" if trainer.training else "validate"
            self.passes.append((kind, plugin.switch.on, plugin.switch.recording))
            return forward(*batch)

        pl_module.forward = watched  # type: ignore[method-assign]
        attention_sites(pl_module)[0].q_proj.register_forward_hook(
            lambda layer, inputs, output: self.dtypes.add(("train" if trainer.training else "validate", output.dtype))
        )


@pytest.mark.parametrize("faults_in_validation", [False, True])
def test_the_fault_is_on_in_training_and_in_validation_by_choice(tmp_path: Path, faults_in_validation: bool) -> None:
    seen = Arithmetic()
    fit(tmp_path, [seen], fault(faults_in_validation=faults_in_validation), max_steps=2, **EVALUATE)
    train, validate = ("train", True, True), ("validate", faults_in_validation, False)
    assert seen.passes == [train, validate, validate] * 2


def validation_loss(tmp_path: Path, plugin: Any) -> float:
    model = module()
    for site in attention_sites(model):
        torch.nn.init.normal_(site.q_proj.weight, std=1.0)
        torch.nn.init.normal_(site.v_proj.weight, std=1.0)
    return trainer(tmp_path, plugin=plugin, limit_val_batches=1.0).validate(model, data(), verbose=False)[0]["loss/val"]


def test_validation_is_healthy_unless_told_otherwise(tmp_path: Path) -> None:
    healthy = validation_loss(tmp_path, fault("fp32", None))
    assert validation_loss(tmp_path, fault()) == healthy
    assert abs(validation_loss(tmp_path, fault(faults_in_validation=True)) - healthy) > 1e-4
    assert validation_loss(tmp_path, None) == pytest.approx(healthy, rel=1e-5)


def test_reference_is_clean_leaves_the_sensors_and_restores(tmp_path: Path) -> None:
    plugin = fault()
    model = gpt()
    for site in attention_sites(model):
        torch.nn.init.normal_(site.q_proj.weight, std=2.0)
    clean = gpt()
    clean.load_state_dict(model.state_dict())
    plugin.convert_module(model)
    x = torch.arange(16).view(1, 16)
    faulty = model(x)
    sensors = [site.core.max_logit_H for site in attention_sites(model)]
    with plugin.reference():
        reference = model(x)
    torch.testing.assert_close(reference, clean(x))
    assert not torch.allclose(faulty, reference, atol=1e-3)
    assert all(site.core.max_logit_H is sensor for site, sensor in zip(attention_sites(model), sensors, strict=True))
    torch.testing.assert_close(model(x), faulty, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="inside"), plugin.reference():
        raise RuntimeError("inside")
    assert plugin.switch.on and plugin.switch.recording


@pytest.mark.parametrize("base", ["bf16", "fp32"])
def test_base_is_the_dtype_of_products_and_weights_stay_float32(tmp_path: Path, base: str) -> None:
    seen = Arithmetic()
    model, recording = fit(tmp_path, [seen], fault(base=base), max_steps=1, **EVALUATE)
    expected = torch.bfloat16 if base == "bf16" else torch.float32
    assert seen.dtypes == {("train", expected), ("validate", expected)}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {g.dtype for g in recording.gradients[0].values()} == {torch.float32}


def test_convert_module_is_in_place_and_idempotent() -> None:
    plugin = fault()
    model = module()
    sites = attention_sites(model)
    sites[0].core.observed = True
    assert plugin.convert_module(model) is model
    assert plugin.convert_module(model) is model
    assert attention_sites(model) == sites
    assert [site.core.layer for site in sites] == [0, 1]  # type: ignore[attr-defined]
    assert [site.core.observed for site in sites] == [True, False]
    assert all(site.core.switch is plugin.switch for site in sites)  # type: ignore[attr-defined]
    assert model.state_dict().keys() == module().state_dict().keys()


def test_the_base_class_changes_no_core(tmp_path: Path) -> None:
    model = FaultPrecision(base="fp32").convert_module(module())
    assert all(type(site.core) is SDPACore for site in attention_sites(model))
    left, right = (fit(tmp_path, plugin=plugin)[0] for plugin in (FaultPrecision(base="fp32"), None))
    assert_same(weights(left), weights(right))


def test_layers_and_heads_carry_the_fault_alone() -> None:
    plugin = fault(layers=[1], heads=[0, 0])
    cores: list[Any] = [site.core for site in attention_sites(plugin.convert_module(module()))]
    assert [core.sites.is_exact for core in cores] == [True, False]
    assert [core.heads for core in cores] == [(0,), (0,)]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"layers": [0, 2]}, r"layers=\[0, 2\] but the model has layers 0 to 1"),
        ({"layers": [-1]}, r"layers=\[-1\]"),
        ({"heads": [2]}, r"heads=\[2\] but the model has heads 0 to 1"),
    ],
)
def test_a_scope_outside_the_model_is_refused(tmp_path: Path, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        fit(tmp_path, plugin=fault(**settings), max_steps=1)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"sites": "bf16carry"}, "attention: sites='bf16carry' is not one of fp32, fa2, bf16_carry"),
        ({"clean_sites": "clean"}, "clean_sites='clean'"),
        ({"overrides": {"o_cary": 2}}, "overrides.o_cary is not one of.*o_carry"),
        ({"overrides": {"o_carry": "half"}}, "site o_carry: rounding 'half'"),
        ({"carry": 24}, "24"),
        ({"tile": 0}, "tile=0"),
        ({"q_tile": 0}, "q_tile=0"),
        ({"base": "fp16"}, "base='fp16'"),
        ({"core": "sdpa"}, "core='sdpa' cannot round"),
        ({"core": "flash"}, "core='flash' cannot round"),
        ({"core": "eager", "sites": "fp32"}, "core='eager' is not one of streaming, sdpa, flash"),
        ({"core": "sdpa", "sites": "fp32", "overrides": {"lse": 7}}, "core='sdpa' cannot round"),
    ],
)
def test_argument_errors_name_the_argument(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        BF16CarryAttention(**settings)


def test_flash_is_sdpa_or_an_error(tmp_path: Path) -> None:
    runs = [fit(tmp_path, plugin=fault("fp32", None, core=core), max_steps=2)[0] for core in ("flash", "sdpa")]
    assert_same(*map(weights, runs))  # on a CPU it is what SDPA picks
    (core, *_) = (site.core for site in attention_sites(runs[0]))
    assert isinstance(core, FlashCore)
    q, v = torch.randn(1, 2, 8, 4), torch.randn(1, 2, 8, 6)
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="No available kernel"):
        core(q, q, v)


def test_arguments_become_sites_and_tiles() -> None:
    plugin = BF16CarryAttention("bf16_carry", carry="3:sr", overrides={"lse": "fp32"}, tile=64, q_tile=32)
    assert (
        str(plugin.attention.faulty.l_carry),
        str(plugin.attention.faulty.lse),
        str(plugin.attention.faulty.pv),
    ) == ("3:sr", "fp32", "bf16")
    (core, *_) = (site.core for site in attention_sites(plugin.convert_module(gpt())))
    assert isinstance(core, StreamingCore)
    assert (core.tile, core.clean_sites) == ((32, 64), RoundingSites())


def test_trainer_precision_next_to_the_plugin_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="precision"):
        trainer(tmp_path, plugin=fault(), precision="bf16-mixed")
    assert isinstance(fault(), Precision)


def test_streaming_without_roundings_trains_as_sdpa_does(tmp_path: Path) -> None:
    (_, streaming), (_, sdpa) = (
        fit(tmp_path, [SpectralMonitor(1)], fault("fp32", None, core=core), max_steps=6)
        for core in ("streaming", "sdpa")
    )
    assert streaming.losses == pytest.approx(sdpa.losses, rel=1e-5)
    for ours, theirs in zip(streaming.logged, sdpa.logged, strict=True):
        assert ours["logit/max"] == pytest.approx(theirs["logit/max"], rel=1e-3)
    _, faulty = fit(tmp_path, plugin=fault(carry=1), max_steps=6)
    assert abs(faulty.losses[-1] - sdpa.losses[-1]) > 1e-4


@pytest.mark.parametrize("carry", [2, "2:sr"])
def test_sensors_and_validation_change_no_training(tmp_path: Path, carry: int | str) -> None:
    """Under the fault, at every step, dropout included."""
    watchers = [SpectralMonitor(1), CollapseStop(), QKGuard(threshold=1e9)]
    watched, seen = fit(tmp_path, watchers, fault(carry=carry), module({"dropout": 0.1}), max_steps=4, **EVALUATE)
    alone, plain = fit(tmp_path, [], fault(carry=carry), module({"dropout": 0.1}), max_steps=4)
    assert seen.losses == plain.losses
    assert_same(weights(watched), weights(alone))


def test_validation_leaves_the_sensors_to_training(tmp_path: Path) -> None:
    runs = [fit(tmp_path, [SpectralMonitor(1)], fault(), max_steps=4, **settings)[1] for settings in ({}, EVALUATE)]
    logits = [[row["logit/max"] for row in run.logged] for run in runs]
    assert logits[0] == logits[1] and len(set(logits[0])) > 1


def test_stochastic_roundings_draw_anew_each_step_and_by_the_plugins_seed(tmp_path: Path) -> None:
    class Seeds(Callback):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.seen.append(trainer.precision_plugin.switch.seed)  # type: ignore[attr-defined]

    losses, seeds = [], []
    for seed in (0, 0, 1):
        watcher = Seeds()
        plugin = fault("fp32", overrides={"l_carry": "1:sr"}, carry=None, seed=seed)
        losses.append(fit(tmp_path, [watcher], plugin, accumulate_grad_batches=2)[1].losses)
        seeds.append(watcher.seen)
    assert losses[0] == losses[1] != losses[2]
    assert seeds[0] == seeds[1] and len(set(seeds[0] + seeds[2])) == 12


def test_cores_read_logits_in_bf16_as_they_are(tmp_path: Path) -> None:
    """The sensor reports what the faulty arithmetic made of the scores, so a rounded logit is a rounded number."""
    _, recording = fit(
        tmp_path, [SpectralMonitor(1)], fault("fp32", carry=None, overrides={"s_scaled": 1}), max_steps=2
    )
    mantissa, _ = math.frexp(recording.logged[-1]["logit/max"])
    assert mantissa in (0.5, 0.75)


@pytest.mark.parametrize(
    "faulty",
    [
        fault,
        lambda: MXGradient("mlp", where="product", base="fp32"),
        lambda: MXTraining("mxfp4", base="fp32"),
    ],
    ids=["attention", "product", "formats"],
)
def test_faults_end_with_their_run(tmp_path: Path, faulty: Callable[[], FaultPrecision]) -> None:
    used = module()
    fit(tmp_path, [], faulty(), used)
    used.load_state_dict(module().state_dict())
    fresh, (tokens, targets) = module(), batch()
    assert torch.equal(used(tokens, targets), fresh(tokens, targets))
    healthy = [fit(tmp_path, [], FaultPrecision(base="fp32"), model)[1] for model in (used, fresh)]
    assert_same(healthy[0].gradients[0], healthy[1].gradients[0])
    again, first = (fit(tmp_path, [], faulty(), model)[1] for model in (module(), module()))
    assert again.losses == first.losses != healthy[0].losses


def test_a_plugin_forgets_what_the_callbacks_of_a_run_asked_for(tmp_path: Path) -> None:
    plugin = fault()
    for _ in range(2):
        fit(tmp_path, [RouteSplice("qk")], plugin)
        assert not plugin.clean._requests
    fit(tmp_path, [], plugin)


def test_passes_draw_apart_on_ranks_and_batches() -> None:
    plugin, seeds = BF16CarryAttention(seed=3), set()
    for rank, batch_index in itertools.product(range(2), range(3)):
        fit_loop = SimpleNamespace(total_batch_idx=batch_index)
        run = SimpleNamespace(fit_loop=fit_loop, world_size=2, global_rank=rank)
        plugin._module = SimpleNamespace(trainer=run, device=torch.device("cpu"))
        with plugin.train_step_context():
            seeds.add(plugin.switch.seed)
    assert len(seeds) == 6
