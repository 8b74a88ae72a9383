"""The order of one optimizer step with MX formats and everything that goes with them, and of one on two ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import test_hook_order
from lightning.pytorch.callbacks import LambdaCallback
from ranks import ddp, on_two_ranks
from step_trace import Trace
from tiny import data, fault, module, trainer
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import callbacks
from callbacks import (
    ComputeAccount,
    DivergenceStop,
    GradientDriftMonitor,
    LastBinMonitor,
    MomentumSigns,
    OperandAttribution,
    PrecisionSwitch,
    QKGuard,
    RouteSplice,
    StepProfile,
)
from lightning_qk.precision import GradientFault, MXTraining

PASSES = [
    *("forward(formats)", "backward(formats)", "forward(exact)", "backward(exact)"),
    *("forward(one cause)", "backward(one cause)"),
]
REST = [
    *("error read", "splice", "momentum", "guard edits", "norm read", "clip", "step"),
    *("divergence judges", "guard looks", "warnings", "warnings", "warnings"),
]


def test_one_training_step_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The policy changes between the second step and the third, whose only pass is exact then."""
    plugin, model = MXTraining("mxfp8_e4m3", base="fp32"), module()
    assert plugin.matmul is not None
    formats, initial = plugin.matmul, plugin.matmul.policy

    def state() -> str:
        if not plugin.switch.on or formats.policy.is_exact:
            return "exact"
        return "formats" if formats.policy == initial else "one cause"

    trace = Trace(monkeypatch)
    trace.watch_training(model, state)
    attribution = OperandAttribution("qk", causes=["x"], every_n_steps=1)
    drift, last_bin = GradientDriftMonitor(1, every_n_steps=1), LastBinMonitor(every_n_steps=1)
    splice, guard = RouteSplice("mlp"), QKGuard(mode="always_on", action="zclip")
    momentum = MomentumSigns("random")
    switch, stop = PrecisionSwitch(["fp32"], step=2), DivergenceStop()
    trace.watch(attribution, "compare", "error read")
    trace.watch(splice, "on_before_optimizer_step", "splice")
    trace.watch(momentum, "on_before_optimizer_step", "momentum")
    trace.watch(guard, "on_before_optimizer_step", "guard edits")
    trace.watch(drift, "on_before_optimizer_step", "norm read")
    for warning in (attribution, drift, last_bin):
        trace.watch(warning, "note", "warnings")
    trace.watch(stop, "on_train_batch_end", "divergence judges")
    trace.watch(guard, "on_train_batch_end", "guard looks")
    trace.watch(formats, "change", "policy changes")
    watching = [switch, splice, momentum, stop, guard, attribution, last_bin, drift, ComputeAccount(), StepProfile(1)]
    trainer(tmp_path, watching, plugin, max_steps=3).fit(model, data())
    step = [*PASSES, *REST]
    assert trace == [*step, *step, "policy changes", "forward(exact)", "backward(exact)", *REST]


def reduced(root: Path) -> list[str]:
    """One step of a rank."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        trace, plugin, model = Trace(monkeypatch), fault(gradient=GradientFault("mlp", block=8)), module()

        def reduce(state: Any, bucket: Any) -> Any:
            trace.append("reduce(faulty)" if plugin.switch.on else "reduce(clean)")
            return allreduce_hook(state, bucket)

        splice = RouteSplice("qk")
        trace.watch_training(model, lambda: "faulty" if plugin.switch.on else "clean")
        trace.watch(plugin.gradient, "perturb", "gradient fault")
        trace.watch(splice, "on_before_optimizer_step", "splice")
        reduce.__annotations__.clear()  # DDP refuses any but its own, and here they are strings
        hook = LambdaCallback(on_train_start=lambda run, _: run.strategy.model.register_comm_hook(None, reduce))
        trainer(root, [splice, hook], plugin, max_steps=1, devices=2, strategy=ddp()).fit(model, data())
        return list(trace)


def test_faults_of_the_finished_gradient_come_after_the_reduction(tmp_path: Path) -> None:
    passes = [f"{what}({state})" for state in ("faulty", "clean") for what in ("forward", "backward", "reduce")]
    for trace in on_two_ranks(tmp_path, {"trace": partial(reduced, tmp_path)})["trace"]:
        assert trace == [*passes, "gradient fault", "splice", "clip", "step"]


def test_every_callback_of_a_step_is_in_a_trace() -> None:
    elsewhere = {
        "EarlyWarning",
        "Limit",
        "ResumedCheckpoints",
        "ResumedValidation",
        "RunProgressBar",
    }  # bases, and none within a step
    assert set(callbacks.__all__) - elsewhere <= vars(test_hook_order).keys() | globals().keys()
