"""Under FSDP2, two processes train as under DDP bit for bit, and as one process does up to the order of sums.

Both halve the batch and average two gradients, where a sum has but one order. Accumulation (FSDP2 reduces every
micro-batch, DDP the sum) and the global norm (FSDP2 sums the shards' squares) have another: bounds there.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from ranks import Case, ddp, fsdp, on_two_ranks, run
from runs import callback, finish, outcome, run_args, run_dir, start, write_tokens
from test_callbacks_step_profile import Kept
from tiny import assert_same, fault, module
from torch import Tensor

from callbacks import (
    BiasMonitor,
    CollapseStop,
    ComputeAccount,
    DirectionProbe,
    DivergenceStop,
    ErrorShaping,
    GradientDriftMonitor,
    LastBinMonitor,
    MomentumSigns,
    OperandAttribution,
    PrecisionSwitch,
    QKGuard,
    RandomState,
    RouteSplice,
    SpectralMonitor,
    StepProfile,
)
from lightning_qk.precision import FaultPrecision, GradientFault, MXGradient, MXTraining

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
NO_CLIP = {"gradient_clip_val": None}
# after three steps of Adam at 1e-2, which takes gradients near 0, where the last bits count, at full size
WEIGHTS, GRADIENTS = 1e-4, 1e-6
TIPPED = 1e-3  # the share of elements that a last bit may tip into a quantiser's other code


def mx(route: str = "mlp", **settings: Any) -> FaultPrecision:
    return MXGradient(**{"route": route, "block": 8, "base": "fp32", **settings})


def mx_training(**settings: Any) -> FaultPrecision:
    """Only rounds whole blocks, of one rank's rows or of its tokens: what one process rounds."""
    exact = dict.fromkeys(("vector", "ln_affine", "activation"), "fp32")
    return MXTraining("mxfp8_e4m3", head=True, base="fp32", **{**exact, **settings})


def case(*make: Any, plugin: Any = fault, **rest: Any) -> Case:
    return Case(lambda: [one() for one in make], plugin, **{"settings": NO_CLIP, **rest})


def bias(route: str = "qk") -> BiasMonitor:
    return BiasMonitor(route, window=2, every_n_steps=1)


class Throughput(Callback):
    """The tokens of a step in StepProfile's readings, whose seconds differ from rank to rank."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.kept = Kept()
        trainer.loggers = [self.kept]

    def verdict_fields(self) -> dict[str, list[int]]:
        readings = [values for _, values in self.kept.readings]
        return {"tokens": [round(values["speed/tokens_per_s"] * values["time/step"]) for values in readings]}


CASES = {
    "attention fault": case(),
    "attention fault, recomputed": case(arguments={"activation_checkpointing": True}),
    "gradient fault": case(plugin=mx),
    # 16 rows a block: across the shards, which hold 8 of 16 or 32 of 64 rows
    "gradient fault along rows": case(plugin=partial(mx, "all", axis=0, block=16, rounding="sr")),
    "product fault": case(plugin=partial(mx, where="product")),
    "splice": case(RouteSplice, plugin=partial(fault, gradient=GradientFault("mlp", block=8))),
    "splice of the others": case(partial(RouteSplice, "v", invert=True), plugin=partial(mx, "all")),
    **{
        f"probe {mode}": case(partial(DirectionProbe, mode))
        for mode in ("on_target", "off_target", "isotropic", "random_subspace")
    },
    **{
        f"shaping {mode}": case(partial(ErrorShaping, mode, coherence_window=2))
        for mode in ("itself", "random_signs", "rank_one", "time_shuffled")
    },
    "bias of an attention fault": case(bias),
    "bias of a gradient fault": case(partial(bias, "all"), plugin=partial(mx, "all")),
    "watchers": case(
        *(partial(SpectralMonitor, 1), partial(QKGuard, 1e-2), partial(CollapseStop, window=2)),
        *(partial(DivergenceStop, window=1), ComputeAccount, partial(StepProfile, 1), Throughput),
    ),
    "MX training": case(plugin=mx_training, fields={"bias": True, "tied": False}),
    "MX readings and a switch": case(
        partial(OperandAttribution, "all", every_n_steps=1),
        partial(LastBinMonitor, "all", True, every_n_steps=1, thresholds={"overflow_activations": 1e-3}, patience=2),
        partial(PrecisionSwitch, ["bf16_activations"], warning="overflow_activations"),
        plugin=mx_training,
    ),
    **{f"{mode} momentum": case(partial(MomentumSigns, mode, seed=0)) for mode in ("reversed", "random")},
    "SGD": case(arguments={"optimizer": "sgd", "lr": 0.3}),
}
SHARDED_ONLY = {  # one process draws other masks, and rounds to bfloat16 what it sums in another order
    "MX training in bfloat16": case(
        partial(PrecisionSwitch, ["bf16_activations"], 2),
        plugin=partial(MXTraining, "mxfp8_e4m3", head=True, rounding="sr", base="fp32"),
        fields={"bias": True, "tied": False},
    ),
    "bf16 and dropout": case(RouteSplice, bias, plugin=partial(fault, base="bf16"), fields={"dropout": 0.1}),
    "sigma-reparametrised": case(bias, fields={"sigma_reparam": True, "bias": True}),
}
REORDERED = {
    "drift": case(partial(GradientDriftMonitor, window=1, every_n_steps=1), arguments={"optimizer": "sgd", "lr": 3.0}),
    "accumulation": case(RouteSplice, bias, settings={**NO_CLIP, "accumulate_grad_batches": 2}),
    "clipping": case(RouteSplice, arguments={"optimizer": "sgd", "lr": 3.0}, settings={"gradient_clip_val": 0.05}),
}


class Climb(Callback):
    """A loss that is 2 nat higher from the third step on, to whoever judges it."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.fit_loop.total_batch_idx >= 2 * trainer.accumulate_grad_batches:
            outputs["loss"] = outputs["loss"] + 2 / trainer.accumulate_grad_batches


EVERYTHING = case(
    *(RouteSplice, partial(DirectionProbe, "on_target"), bias, partial(SpectralMonitor, 1)),
    *(partial(QKGuard, 0.029), Climb, partial(CollapseStop, window=1, stop=False), partial(DivergenceStop, 1.0, 1)),
    *(partial(GradientDriftMonitor, 1, 1), ComputeAccount, partial(StepProfile, 1)),
    plugin=partial(fault, gradient=GradientFault("mlp", block=8)),
    arguments={"activation_checkpointing": True, "optimizer": "sgd", "lr": 0.3},
    settings={**NO_CLIP, "accumulate_grad_batches": 2, "max_steps": 4},
)


def runs(root: Path, one: Case, strategies: Any) -> dict[str, tuple[Any, Any]]:
    work = {s.__name__: partial(lambda s: run(root / s.__name__, one, s()), s) for s in strategies}
    found = on_two_ranks(root, work)
    for left, right in found.values():
        for a, b in zip([*left["gradients"], left["weights"]], [*right["gradients"], right["weights"]], strict=True):
            assert_same(a, b)
        assert left["fields"] == right["fields"]
        assert left["losses"] != right["losses"]
    return found


def assert_close(left: dict[str, Tensor], right: dict[str, Tensor], atol: float) -> None:
    assert left and left.keys() == right.keys()
    far = [(value.double() - right[name].double()).abs().flatten() > atol for name, value in left.items()]
    assert torch.cat(far).double().mean() <= TIPPED


def assert_one_process(root: Path, one: Case, ranks: tuple[Any, Any]) -> None:
    """Gradients of the first step, whose weights are equal, and what became of the weights."""
    single = run(root / "single", one)
    assert_close(ranks[0]["gradients"][0], single["gradients"][0], GRADIENTS)
    assert_close(ranks[0]["weights"], single["weights"], WEIGHTS)
    for step, loss in enumerate(single["losses"]):
        mean = (ranks[0]["losses"][step] + ranks[1]["losses"][step]) / 2
        assert mean == pytest.approx(loss, rel=1e-5)
    for name, value in single["logged"].items():
        assert ranks[0]["logged"][name] == pytest.approx(value, rel=1e-3, abs=1e-6), name
    found, expected = flat(ranks[0]["fields"]), flat(single["fields"])
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        loose = isinstance(value, float)
        assert found[name] == (pytest.approx(value, rel=1e-2, abs=1e-2) if loose else value), name


def flat(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in fields.items():
        found |= flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


@pytest.mark.parametrize("name", CASES)
def test_two_shards_are_two_replicas_and_one_process(tmp_path: Path, name: str) -> None:
    found = runs(tmp_path, CASES[name], (ddp, fsdp))
    assert_replicas(found)
    assert_one_process(tmp_path, CASES[name], found["fsdp"])


def assert_replicas(found: dict[str, tuple[Any, Any]]) -> None:
    for sharded, replica in zip(found["fsdp"], found["ddp"], strict=True):
        for a, b in zip(sharded["gradients"], replica["gradients"], strict=True):
            assert_same(a, b)
        assert_same(sharded["weights"], replica["weights"])
        assert sharded["losses"] == replica["losses"]
        assert sharded["fields"] == replica["fields"]


@pytest.mark.parametrize("name", SHARDED_ONLY)
def test_two_shards_are_two_replicas(tmp_path: Path, name: str) -> None:
    assert_replicas(runs(tmp_path, SHARDED_ONLY[name], (ddp, fsdp)))


@pytest.mark.parametrize("name", REORDERED)
def test_two_shards_are_one_process(tmp_path: Path, name: str) -> None:
    found = runs(tmp_path, REORDERED[name], (fsdp,))
    logged = found["fsdp"][0]["logged"]
    assert name != "clipping" or logged["grad/clip_coef"] < 0.1
    assert_one_process(tmp_path, REORDERED[name], found["fsdp"])


def test_everything_at_once_is_the_same_however_it_is_spread(tmp_path: Path) -> None:
    """Accumulation and recomputation; both faults, a splice, a probe, a guard that fires and a collapse in mid-run."""
    for ranks in runs(tmp_path, EVERYTHING, (ddp, fsdp)).values():
        assert_one_process(tmp_path, EVERYTHING, ranks)
        guard, judge = (ranks[0]["fields"][name] for name in ("QKGuard", "CollapseStop"))
        assert ranks[0]["fields"]["DivergenceStop"]["divergence_step"] == 3
        assert guard["guard_step"] == 2 and (judge["status"], judge["collapse_step"]) == ("collapsed", 3)


def test_muon_in_shards_is_one_process_up_to_its_bfloat16(tmp_path: Path) -> None:
    """torch's Muon multiplies in bfloat16, and shards sum in another order: not bit for bit, but the same update.

    0.06 to 0.11 of it by the CPU's products.
    """
    one = case(arguments={"optimizer": "muon"})
    single = run(tmp_path / "single", one)
    started = run(tmp_path / "started", case(arguments={"optimizer": "muon", "lr": 1e-12}))["weights"]
    for rank in runs(tmp_path, one, (fsdp,))["fsdp"]:
        for name in [name for name in single["weights"] if name.endswith("proj.weight")]:
            moved = (single["weights"][name] - started[name]).norm()
            assert moved > 0.05 and (rank["weights"][name] - single["weights"][name]).norm() < 0.2 * moved, name


def test_guard_and_switch_act_on_both_ranks_though_one_alone_is_over(tmp_path: Path) -> None:
    def guarded(threshold: float) -> tuple[Any, Any]:
        over: dict[str, Any] = {"threshold": threshold, "trigger": "max_logit"}
        make = partial(PrecisionSwitch, ["none"], **over), partial(QKGuard, **over)
        one = case(*make, plugin=mx_training, settings={**NO_CLIP, "max_steps": 6})
        return runs(tmp_path, one, (fsdp,))["fsdp"]

    pairs = list(zip(*(rank["logits"] for rank in guarded(1e9)), strict=True))
    before = [max(map(max, pairs[:step]), default=0.0) for step in range(len(pairs))]
    step = next(step for step, pair in enumerate(pairs) if step and max(pair) > max(before[step], min(pair)))
    threshold = (max(pairs[step]) + max(before[step], min(pairs[step]))) / 2
    for rank in guarded(threshold):
        fields = rank["fields"]["QKGuard"]
        assert rank["fields"]["PrecisionSwitch"]["precision_switch_step"] == step + 1
        assert fields["guard_step"] == step + 1 and fields["guard_logit"] == pytest.approx(max(pairs[step]))
        assert all(on.all() for name, on in rank["weights"].items() if name.endswith(".qk_norm"))


def test_a_loss_that_is_not_finite_on_one_rank_stops_both(tmp_path: Path) -> None:
    class Poison(Callback):
        def on_train_batch_end(
            self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if trainer.global_rank == 1 and batch_idx == 1:
                outputs["loss"] = outputs["loss"] * float("nan")

    one = case(Poison, CollapseStop, settings={"max_steps": 5})
    for rank in on_two_ranks(tmp_path, {"fsdp": lambda: run(tmp_path, one, fsdp())})["fsdp"]:
        assert len(rank["losses"]) == 2 and rank["fields"]["CollapseStop"]["status"] == "nonfinite"


def test_lightnings_default_sizes_are_refused() -> None:
    model = module()
    model._device_mesh = {"tensor_parallel": SimpleNamespace(size=lambda: 2)}  # type: ignore[assignment]
    with pytest.raises(ValueError, match="tensor_parallel_size=2 is not supported; set it to 1"):
        model.configure_model()


@pytest.mark.slow
@pytest.mark.parametrize("distributed", [True, False])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, distributed: bool) -> None:
    """Both formats of checkpoint, every callback that has a state, the guard fired before."""

    def part(steps: int, *more: Any) -> Case:
        make = (
            *(RandomState, bias, partial(QKGuard, 1e-2), partial(CollapseStop, window=2), partial(SpectralMonitor, 1)),
            partial(ErrorShaping, "time_shuffled", "v", shuffle_window=3),
        )
        settings = {"max_steps": steps, "enable_checkpointing": True, "limit_val_batches": 1, "val_check_interval": 2}
        return case(*make, *more, fields={"dropout": 0.1}, settings=settings)

    save = partial(ModelCheckpoint, tmp_path, filename="last", every_n_train_steps=1, enable_version_counter=False)
    found = on_two_ranks(
        tmp_path,
        {
            "whole": lambda: run(tmp_path / "whole", part(6), fsdp(distributed)),
            "first": lambda: run(tmp_path / "first", part(3, save), fsdp(distributed)),
            "rest": lambda: run(tmp_path / "rest", part(6), fsdp(distributed), tmp_path / "last.ckpt"),
        },
    )
    for whole, rest in zip(found["whole"], found["rest"], strict=True):
        assert_same(whole["weights"], rest["weights"])
        assert whole["losses"][3:] == rest["losses"]
        assert whole["fields"] == rest["fields"] and whole["fields"]["QKGuard"]["guard"] == "fired"


@pytest.mark.slow
def test_the_command_line_starts_two_processes(tmp_path: Path) -> None:
    watch = callback("BiasMonitor", every_n_steps=1, window=2), callback("QKGuard", threshold=1e-6)
    strategy = [f"--trainer.strategy.{key}" for key in ("data_parallel_size=2", "tensor_parallel_size=1")]
    ranks = ["--trainer.devices=2", "--trainer.strategy=ModelParallelStrategy", *strategy]
    more = ["--trainer.max_steps=8", "--ckpt_path", "last"]
    tokens = write_tokens(tmp_path / "tokens")
    finish(start(["fit", *run_args(tmp_path, tokens, *watch, callback("RouteSplice")), *ranks], tmp_path))
    found = outcome(run_dir(tmp_path))
    assert found["verdict"]["step"] == 6 and found["verdict"]["guard_step"] == 1
    assert found["verdict"]["warnings"]["zeta/qk"]["last"] > 0
    assert found["curves"]["tokens"][1] == [repr(128.0 * step) for step in range(1, 7)]
    # a sharded checkpoint is a directory
    finish(start(["fit", *run_args(tmp_path, tokens, *watch, callback("RouteSplice")), *ranks, *more], tmp_path))
    found = outcome(run_dir(tmp_path))
    assert found["verdict"]["step"] == 8
    assert found["curves"]["tokens"][1] == [repr(128.0 * step) for step in range(1, 9)]
