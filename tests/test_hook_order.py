"""The order of one optimizer step, with every callback on: this order is what the arms' meaning rests on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from step_trace import Trace
from tiny import data, fault, module, trainer

from callbacks import (
    BiasMonitor,
    CollapseStop,
    DeltaSpectrumMonitor,
    DirectionProbe,
    ErrorShaping,
    HeadSpectrumMonitor,
    LogitBoundMonitor,
    QKGuard,
    RouteSplice,
    SpectralAlignmentMonitor,
    SpectralMonitor,
    TiedRowMonitor,
)
from callbacks.random_state import RandomState
from callbacks.run_recorder import RunRecorder
from lightning_qk.precision import GradientFault
from lightning_qk.routes import attention_sites

MICRO = ["forward(faulty)", "backward(faulty)", "forward(clean)", "backward(clean)"]
STEP = [
    "gradient fault",
    "error read",
    "splice",
    "shape",
    "clip",
    "step",
    "probe",
    "spectra",
    "guard decides",
    "collapse judges",
    *["warnings"] * 6,
]
WATCHERS = slice(7, 10)  # which YAML may list in any order


def traced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, accumulate: int, order: list[int]) -> list[str]:
    """Two optimizer steps, as a list of what happened."""
    trace, plugin, model = Trace(monkeypatch), fault(gradient=GradientFault("mlp", block=8)), module()
    trace.watch_training(model, lambda: "faulty" if plugin.switch.on else "clean")
    monitor, stop, guard, splice = SpectralMonitor(1), CollapseStop(), QKGuard(1e9), RouteSplice("qk")
    shaping, probe = ErrorShaping("random_signs", route="v"), DirectionProbe()
    bias = BiasMonitor("qk", every_n_steps=1)
    warnings = [
        *(TiedRowMonitor(1), HeadSpectrumMonitor(every_n_steps=1), LogitBoundMonitor(every_n_steps=1)),
        *(DeltaSpectrumMonitor(every_n_steps=1), SpectralAlignmentMonitor(every_n_steps=1), bias),
    ]
    trace.watch(bias, "compare", "error read")
    for warning in warnings:
        trace.watch(warning, "note", "warnings")
    trace.watch(plugin.gradient, "perturb", "gradient fault")
    trace.watch(splice, "on_before_optimizer_step", "splice", before=False)
    trace.watch(shaping, "on_before_optimizer_step", "shape", before=False)
    trace.watch(probe, "_after_step", "probe")
    trace.watch(monitor, "_top", "spectra")
    trace.watch(guard, "_decide", "guard decides")
    trace.watch(stop, "judge", "collapse judges")
    watching = [monitor, guard, stop]
    interventions = splice, shaping, probe
    callbacks = [RandomState(), RunRecorder(), *interventions, *(watching[i] for i in order), *warnings]
    trainer(tmp_path, callbacks, plugin, max_steps=2, accumulate_grad_batches=accumulate).fit(model, data())
    assert all(not site.qk_norm_on for site in attention_sites(model))
    return trace


@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_training_step_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, accumulate: int) -> None:
    assert traced(monkeypatch, tmp_path, accumulate, [0, 1, 2]) == (MICRO * accumulate + STEP) * 2


def test_the_order_of_interventions_does_not_depend_on_the_yaml(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trace = traced(monkeypatch, tmp_path, 1, [2, 1, 0])
    assert len(STEP[WATCHERS]) == 3
    turned = [*STEP[: WATCHERS.start], *reversed(STEP[WATCHERS]), *STEP[WATCHERS.stop :]]
    assert trace == [*MICRO, *turned] * 2


def test_the_guard_acts_from_the_step_after_its_decision(tmp_path: Path) -> None:
    """Validation that follows the decision already runs with QK-norm on; the step that fired did not."""
    model = module()
    seen: list[tuple[str, bool]] = []
    forward = model.forward
    runner = trainer(tmp_path, [QKGuard(1e-6)], fault(), limit_val_batches=1, val_check_interval=1, max_steps=2)

    def watched(*batch: Any) -> Any:
        seen.append(("train" if runner.training else "validate", attention_sites(model)[0].qk_norm_on))
        return forward(*batch)

    model.forward = watched  # type: ignore[method-assign, assignment]
    runner.fit(model, data())
    assert seen == [("train", False), ("validate", True), ("train", True), ("validate", True)]
