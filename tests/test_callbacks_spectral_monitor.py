"""SpectralMonitor: its numbers are what a decomposition and a brute-force maximum give, at the steps it says."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from tiny import fault, fit, module

from callbacks import SpectralMonitor
from lightning_qk.events import read_scalars
from lightning_qk.routes import attention_sites


class Oracle(Callback):
    """After every step, the leading singular values by full decomposition; at every micro-batch, the logits."""

    def __init__(self) -> None:
        self.sigma: list[dict[str, list[float]]] = []
        self.logits: list[list[float]] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        sites = attention_sites(pl_module)
        self.logits.append([float(site.core.max_logit_H.max()) for site in sites])
        self.sigma.append(
            {
                name: [float(torch.linalg.svdvals(getattr(site, f"{name}_proj").weight)[0]) for site in sites]
                for name in ("q", "k")
            }
        )


def scalars(tmp_path: Path, monitor: SpectralMonitor, accumulate: int = 1, **settings: Any) -> tuple[Oracle, Any]:
    oracle = Oracle()
    logger = TensorBoardLogger(tmp_path, name="arm", version="seed_0", default_hp_metric=False)
    fit(
        tmp_path,
        [monitor, oracle],
        settings.pop("plugin", fault()),
        logger=logger,
        log_every_n_steps=1,
        accumulate_grad_batches=accumulate,
        **settings,
    )
    return oracle, read_scalars(tmp_path / "arm" / "seed_0")


@pytest.mark.parametrize("plugin", [fault(), fault("fp32", None, core="sdpa")], ids=["streaming", "sdpa"])
def test_values_are_those_of_a_full_decomposition(tmp_path: Path, plugin: Any) -> None:
    monitor = SpectralMonitor(1)
    oracle, found = scalars(tmp_path, monitor, max_steps=5, plugin=plugin)
    for name in ("q", "k"):
        expected = [row[name] for row in oracle.sigma]
        assert found[f"sigma/{name}"].values == pytest.approx([max(row) for row in expected], rel=1e-5)
        for layer in range(2):
            series = found[f"sigma/{name}/layer_{layer:02d}"]
            assert series.values == pytest.approx([row[layer] for row in expected], rel=1e-5)
            assert series.steps.tolist() == [0, 1, 2, 3, 4]
    assert found["logit/max"].values == pytest.approx([max(row) for row in oracle.logits])
    assert found["logit/max/layer_01"].values == pytest.approx([row[1] for row in oracle.logits])
    assert len(set(found["sigma/q"].values)) == 5  # read after each step, not once
    fields = monitor.verdict_fields()
    assert fields["sigma_q"] == pytest.approx(max(oracle.sigma[-1]["q"]), rel=1e-5)
    assert fields["sigma_k"] == pytest.approx(max(oracle.sigma[-1]["k"]), rel=1e-5)
    assert fields["max_logit"] == pytest.approx(max(oracle.logits[-1]))
    assert fields["max_logit_peak"] == pytest.approx(max(max(row) for row in oracle.logits))


def test_logits_are_the_largest_of_the_steps_micro_batches(tmp_path: Path) -> None:
    oracle, found = scalars(tmp_path, SpectralMonitor(1), accumulate=3, max_steps=3)
    per_step = [oracle.logits[i : i + 3] for i in range(0, 9, 3)]
    assert found["logit/max"].values == pytest.approx([max(max(row) for row in step) for step in per_step])
    assert any(max(map(max, step)) > max(step[-1]) for step in per_step)  # the last micro-batch alone would be wrong


def test_only_every_nth_step_is_read_and_logged(tmp_path: Path) -> None:
    monitor = SpectralMonitor(3)
    reads: list[int] = []
    top = monitor._top

    def counted(weights: torch.Tensor) -> Any:
        reads.append(1)
        return top(weights)

    monitor._top = counted  # type: ignore[assignment]
    oracle, found = scalars(tmp_path, monitor, max_steps=7)
    assert len(reads) == 3
    assert found["sigma/q"].steps.tolist() == [0, 2, 5]  # steps 1, 3 and 6; TensorBoard counts from 0
    assert found["sigma/q"].values == pytest.approx([max(oracle.sigma[i]["q"]) for i in (0, 2, 5)], rel=1e-5)
    assert found["loss/train"].steps.tolist() == list(range(7))


def test_logits_between_two_readings_are_seen_too(tmp_path: Path) -> None:
    monitor = SpectralMonitor(3)
    oracle, found = scalars(tmp_path, monitor, max_steps=8)
    steps = [max(row) for row in oracle.logits]
    assert found["logit/peak"].values == pytest.approx([steps[0], max(steps[1:3]), max(steps[3:6])])
    assert found["logit/max"].values == pytest.approx([steps[0], steps[2], steps[5]])
    assert monitor.verdict_fields()["max_logit_peak"] == pytest.approx(max(steps))
    resumed = SpectralMonitor(3)
    resumed.load_state_dict(monitor.state_dict())
    assert resumed.verdict_fields() == monitor.verdict_fields()
    assert float(resumed.state_dict()["unread_logit"]) == pytest.approx(max(steps[6:]))


def test_per_layer_and_tied_rows_are_by_choice(tmp_path: Path) -> None:
    _, found = scalars(tmp_path / "with", SpectralMonitor(1, per_layer=False, tied_rows=True), max_steps=2)
    assert not [tag for tag in found if "layer" in tag]
    assert found["logit/tied_rows"].values.min() > 0  # logits of two mantissa bits tie all the time
    _, found = scalars(tmp_path / "without", SpectralMonitor(1), max_steps=2)
    assert "logit/tied_rows" not in found


def test_weights_that_have_blown_up_are_nan_not_an_error(tmp_path: Path) -> None:
    class Explode(Callback):
        def on_train_batch_start(
            self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 1:
                with torch.no_grad():
                    attention_sites(pl_module)[1].q_proj.weight[0, 0] = math.nan

    monitor = SpectralMonitor(1)
    logger = TensorBoardLogger(tmp_path, name="arm", version="seed_0", default_hp_metric=False)
    fit(tmp_path, [Explode(), monitor], fault(), max_steps=3, logger=logger, log_every_n_steps=1)
    found = read_scalars(tmp_path / "arm" / "seed_0")
    assert math.isfinite(found["sigma/q"].values[0])
    assert math.isnan(found["sigma/q"].values[-1]) and math.isnan(found["sigma/q/layer_01"].values[-1])
    assert math.isnan(monitor.verdict_fields()["sigma_q"])
    assert math.isnan(found["logit/max"].values[-1])


def test_nothing_seen_is_nothing_claimed() -> None:
    assert set(SpectralMonitor().verdict_fields().values()) == {None}
    with pytest.raises(ValueError, match="every_n_steps=0"):
        SpectralMonitor(0)


def test_state_round_trip(tmp_path: Path) -> None:
    monitor = SpectralMonitor(1)
    fit(tmp_path, [monitor], fault(), module(), max_steps=2)
    other = SpectralMonitor(1)
    other.load_state_dict(monitor.state_dict())
    assert other.verdict_fields() == monitor.verdict_fields()
    assert monitor.verdict_fields()["sigma_q"] > 0


@pytest.mark.parametrize("plugin", [fault(), fault("fp32", None, core="sdpa")], ids=["streaming", "sdpa"])
def test_entropy_is_that_of_the_attention_rows(tmp_path: Path, plugin: Any) -> None:
    kept = []

    class Keep(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            for site in attention_sites(pl_module):
                q, k = (x.double() for x in site.core._kept()[:2])
                scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
                p = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf).softmax(-1)
                kept.append(float(-(p * p.clamp_min(1e-300).log()).sum(-1).mean((0, 2)).min()))

    logger = TensorBoardLogger(tmp_path, name="arm", version="seed_0", default_hp_metric=False)
    fit(tmp_path, [SpectralMonitor(1, entropy=True), Keep()], plugin, logger=logger, log_every_n_steps=1, max_steps=2)
    found = read_scalars(tmp_path / "arm" / "seed_0")
    assert list(found["attention/entropy/layer_01"].values) == pytest.approx(kept[1::2], rel=1e-4)
    assert list(found["attention/entropy"].values) == pytest.approx([min(kept[:2]), min(kept[2:])], rel=1e-4)


def test_tied_rows_need_a_core_that_counts_them(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tied_rows=true needs a streaming core, got SDPACore"):
        fit(tmp_path, [SpectralMonitor(1, tied_rows=True)], fault("fp32", None, core="sdpa"))
