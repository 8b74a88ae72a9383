"""HeadSpectrumMonitor and DeltaSpectrumMonitor: dense float64 decompositions say the same."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from monitor_cases import NORMS, Explode, assert_resumes, run
from tiny import fault, fit, module

from callbacks import DeltaSpectrumMonitor, EarlyWarning, HeadSpectrumMonitor
from kernels import TopSingular
from lightning_qk.routes import attention_sites


def warnings(monitor: EarlyWarning) -> dict[str, Any]:
    return monitor.verdict_fields()["warnings"]


@pytest.mark.parametrize("name", NORMS)
def test_head_sigma_is_that_of_a_full_decomposition(tmp_path: Path, name: str) -> None:
    monitor = HeadSpectrumMonitor(1, per_head=True)
    snapshots, logged = run(tmp_path, monitor, name)
    for key in ("q", "k"):
        series = logged[f"head_sigma_{key}"]
        assert series.steps.tolist() == [0, 1, 2, 3]
        for step, value in zip(range(1, 5), series.values, strict=True):
            sigma = [torch.linalg.svdvals(snapshots.heads(step, layer, key))[:, 0] for layer in range(2)]
            assert value == pytest.approx(max(float(one.max()) for one in sigma), rel=1e-5)
            site = snapshots.sites[0]
            for layer in range(2):
                for head in range(site.n_heads if key == "q" else site.n_kv_heads):
                    group = 1 if key == "q" else site.n_heads // site.n_kv_heads
                    one = logged[f"head_sigma_{key}/layer_{layer:02d}/head_{head:02d}"].values[step - 1]
                    assert one == pytest.approx(float(sigma[layer][head * group]), rel=1e-5)
        assert warnings(monitor)[f"head_sigma_{key}"]["last"] == pytest.approx(series.values[-1])


def test_heads_are_logged_by_choice(tmp_path: Path) -> None:
    _, logged = run(tmp_path, HeadSpectrumMonitor(2))
    assert logged.keys() == {"head_sigma_q", "head_sigma_k"}
    assert logged["head_sigma_q"].steps.tolist() == [1, 3]


def test_one_head_that_runs_away_raises_the_alarm(tmp_path: Path) -> None:
    class Grow(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            if trainer.global_step == 2:
                with torch.no_grad():
                    attention_sites(pl_module)[1].k_weight[8:].mul_(100)

    monitor = HeadSpectrumMonitor(1, {"head_sigma_q": 3.0, "head_sigma_k": 3.0})
    run(tmp_path, [Grow(), monitor])
    assert [warnings(monitor)[f"head_sigma_{key}"]["alarm_step"] for key in ("q", "k")] == [None, 3]


def test_the_vectors_that_the_iteration_starts_from_survive_a_resume(tmp_path: Path) -> None:
    def make() -> HeadSpectrumMonitor:
        monitor = HeadSpectrumMonitor(1)
        monitor._top = TopSingular(k=1, exact_below=0)
        return monitor

    assert_resumes(tmp_path, make, {"n_heads": 1, "d_model": 32})
    monitor = make()
    run(tmp_path / "again", monitor, model=module({"n_heads": 1, "d_model": 32}))
    assert monitor.state_dict()["trial_NnB"] is not None


def spectrum(delta_Hnn: torch.Tensor) -> dict[str, float]:
    """Of the worst head."""
    p = torch.linalg.svdvals(delta_Hnn).square()
    p = p / p.sum(1, keepdim=True)
    return {
        "norm": float(delta_Hnn.flatten(1).norm(dim=1).max()),
        "stable_rank": float((1 / p[:, 0]).min()),
        "effective_rank": float((-(p * p.clamp_min(1e-300).log()).sum(1)).exp().min()),
    }


@pytest.mark.parametrize(("every", "stride"), [(1, None), (2, None), (3, 1), (3, 2)])
@pytest.mark.parametrize("name", NORMS)
def test_deltas_are_those_of_the_formed_matrices(tmp_path: Path, name: str, every: int, stride: int | None) -> None:
    monitor = DeltaSpectrumMonitor(every, stride=stride)
    snapshots, logged = run(tmp_path, monitor, name, steps=6)
    steps = list(range(every, 7, every))
    for i, step in enumerate(steps):
        before, first, second = step - (stride or every), [], []
        for layer in range(2):
            q, k = (snapshots.heads(before, layer, key) for key in "qk")
            dq, dk = snapshots.heads(step, layer, "q") - q, snapshots.heads(step, layer, "k") - k
            first.append(dq.mT @ k + q.mT @ dk)
            second.append(dq.mT @ dk)
        for delta, matrices in (("delta2", first), ("delta3", second)):
            for reading, value in spectrum(torch.cat(matrices)).items():
                series = logged[f"{delta}_{reading}"]
                assert series.steps.tolist() == [step - 1 for step in steps]
                assert series.values[i] == pytest.approx(value, rel=1e-4), (delta, reading)


def test_weights_that_stand_still_have_no_ranks(tmp_path: Path) -> None:
    mine = module()
    for site in attention_sites(mine):
        for key in "qk":
            site.projection(key).weight.requires_grad_(False)
    monitor = DeltaSpectrumMonitor(1, {"delta2_norm": 1e-9, "delta2_stable_rank": 100.0})
    run(tmp_path, monitor, model=mine)
    found = warnings(monitor)
    assert found["delta2_norm"]["last"] == found["delta3_norm"]["last"] == 0.0
    assert found["delta2_stable_rank"]["last"] is None and found["delta2_stable_rank"]["alarm_step"] is None


def test_a_step_along_one_direction_raises_the_alarm(tmp_path: Path) -> None:
    class Push(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            if trainer.global_step == 3:
                with torch.no_grad():
                    attention_sites(pl_module)[0].q_weight[:8] += 1.0

    monitor = DeltaSpectrumMonitor(1, {"delta2_effective_rank": 1.1, "delta2_norm": 1.0})
    run(tmp_path, [Push(), monitor])
    found = warnings(monitor)
    assert found["delta2_effective_rank"]["alarm_step"] == found["delta2_norm"]["alarm_step"] == 3
    assert found["delta3_norm"]["alarm_step"] is None


@pytest.mark.parametrize(("every", "stride"), [(2, None), (5, 3), (4, 1)])
def test_a_snapshot_survives_a_resume_between_two_readings(tmp_path: Path, every: int, stride: int | None) -> None:
    assert_resumes(tmp_path, lambda: DeltaSpectrumMonitor(every, stride=stride))


def test_a_monitor_that_a_resumed_run_adds_waits_for_its_first_snapshot(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, filename="last", every_n_train_steps=3)
    fit(tmp_path, [save], fault(), module(), max_steps=3, enable_checkpointing=True)
    _, logged = run(tmp_path, DeltaSpectrumMonitor(4), steps=8, ckpt_path=tmp_path / "last.ckpt")
    assert logged["delta2_norm"].steps.tolist() == [7]  # not 3, whose stride began before


@pytest.mark.parametrize("stride", [0, 4])
def test_a_stride_that_cannot_be(stride: int) -> None:
    with pytest.raises(ValueError, match=f"DeltaSpectrumMonitor: stride={stride} must be from 1 to every_n_steps=3"):
        DeltaSpectrumMonitor(3, stride=stride)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["q", "k"])
def test_weights_that_have_blown_up_are_nan_and_an_alarm(tmp_path: Path, name: str, value: float) -> None:
    heads = HeadSpectrumMonitor(1, {f"head_sigma_{name}": 1e3})
    deltas = DeltaSpectrumMonitor(1, {"delta2_norm": 1e3, "delta3_stable_rank": 0.5})
    _, logged = run(tmp_path, [Explode(value, name), heads, deltas], steps=3)
    assert math.isfinite(logged[f"head_sigma_{name}"].values[0])
    for key in (f"head_sigma_{name}", *DeltaSpectrumMonitor.limits):
        assert math.isnan(logged[key].values[1]), key
    assert warnings(heads)[f"head_sigma_{name}"]["alarm_step"] == 2
    assert warnings(deltas)["delta2_norm"]["alarm_step"] == warnings(deltas)["delta3_stable_rank"]["alarm_step"] == 2
