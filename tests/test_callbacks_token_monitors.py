"""LogitBoundMonitor, SpectralAlignmentMonitor and TiedRowMonitor: what they read of the tokens, against oracles."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from monitor_cases import NORMS, Explode, Snapshots, assert_resumes, run
from tiny import data, fault, fit, module, trainer

from callbacks import EarlyWarning, LogitBoundMonitor, RouteSplice, SpectralAlignmentMonitor, TiedRowMonitor
from kernels import RoundingSites, TopSingular
from lightning_qk.attention import FaultSwitch, StreamingCore
from lightning_qk.routes import attention_sites

ALIGNMENT: dict[str, float | None] = {"sign_majority": 0.99, "alignment": 1.0}


def warnings(monitor: EarlyWarning) -> dict[str, Any]:
    return monitor.verdict_fields()["warnings"]


def dense_bound(snapshots: Snapshots, step: int) -> float:
    """Of the weights after ``step`` and the tokens that it saw, with every bilinear form in full."""
    bounds = []
    for layer, x in enumerate(snapshots.tokens[step - 1]):
        q, k = (snapshots.heads(step, layer, key) for key in "qk")
        biases = snapshots.biases[step][layer]
        if biases["q"] is not None:
            q, k = (
                torch.cat([w, torch.as_tensor(biases[key]).view(-1, q.shape[1], 1)], 2)
                for w, key in ((q, "q"), (k, "k"))
            )
            x = torch.cat([x, torch.ones(len(x), 1)], 1)
        norm = torch.linalg.matrix_norm(q.mT @ k, 2).max() / q.shape[1] ** 0.5
        bounds.append(float(norm * x.norm(dim=1).max() ** 2))
    return max(bounds)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_the_bound_is_that_of_the_formed_matrices(tmp_path: Path, name: str, bias: bool) -> None:
    monitor = LogitBoundMonitor(1)
    own = {"model": module({"bias": bias}, lr=3e-2)} if name == "own" else {}
    snapshots, logged = run(tmp_path, monitor, name, **own)
    assert logged["logit_bound"].values == pytest.approx(
        [dense_bound(snapshots, step) for step in range(1, 5)], rel=1e-4
    )


def test_no_logit_of_the_pass_is_beyond_the_bound(tmp_path: Path) -> None:
    """With a learning rate that leaves the weights where they were."""
    logits: list[float] = []

    class Logits(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            for site in attention_sites(pl_module):
                site.core.observed = True

        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            logits.append(max(float(site.core.max_logit_H.max()) for site in attention_sites(pl_module)))

    mine = module({"bias": True}, lr=1e-9)
    with torch.no_grad():
        for site in attention_sites(mine):
            for p in (site.q_weight, site.k_weight, site.bias("q"), site.bias("k")):
                assert p is not None
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    _, logged = run(tmp_path, [Logits(), LogitBoundMonitor(1)], model=mine, plugin=fault("fp32", None))
    assert all(0.1 * bound < logit < bound for logit, bound in zip(logits, logged["logit_bound"].values, strict=True))


def test_a_bound_over_the_limit_is_an_alarm(tmp_path: Path) -> None:
    monitor = LogitBoundMonitor(1, {"logit_bound": 5.0})
    mine = module(lr=1e-9)
    run(tmp_path, monitor, model=mine)
    assert warnings(monitor)["logit_bound"]["alarm_step"] is None
    with torch.no_grad():
        attention_sites(mine)[1].q_weight.mul_(1e4)
    monitor = LogitBoundMonitor(1, {"logit_bound": 5.0})
    run(tmp_path, monitor, model=mine)
    assert warnings(monitor)["logit_bound"]["alarm_step"] == 1


def dense_alignment(snapshots: Snapshots, step: int, projections: str) -> tuple[float, float]:
    majorities, sizes = [], []
    for layer, x in enumerate(snapshots.tokens[step - 1]):
        for name in projections:
            v = torch.linalg.svd(snapshots.weights[step][layer][name], full_matrices=False).Vh[0]
            cosine = torch.nn.functional.cosine_similarity(x, v[None])
            up = float((cosine > 0).double().mean())
            majorities.append(max(up, 1 - up))
            sizes.append(float(cosine.abs().mean()))
    return max(majorities), max(sizes)


@pytest.mark.parametrize("projections", ["qk", "q", "vk"])
@pytest.mark.parametrize("name", NORMS)
def test_the_cosines_are_those_of_a_full_decomposition(tmp_path: Path, name: str, projections: str) -> None:
    monitor = SpectralAlignmentMonitor(1, projections=list(projections))
    snapshots, logged = run(tmp_path, monitor, name)
    expected = [dense_alignment(snapshots, step, projections) for step in range(1, 5)]
    assert logged["sign_majority"].values == pytest.approx([row[0] for row in expected], abs=1e-6)
    assert logged["alignment"].values == pytest.approx([row[1] for row in expected], rel=1e-4)
    assert len(set(logged["alignment"].values)) == 4


def test_tokens_on_one_side_of_the_leading_direction_are_an_alarm(tmp_path: Path) -> None:
    mine = module({"bias": True}, lr=1e-9)
    norm, site = mine.model.blocks[1].attention_norm, attention_sites(mine)[1]
    with torch.no_grad():
        norm.bias[3] = 20.0
        site.k_weight.zero_()[:, 3] = -1.0
    limit = {"sign_majority": 0.95}
    monitor, healthy = (SpectralAlignmentMonitor(1, limit, projections=names) for names in (None, ["q"]))
    run(tmp_path, monitor, model=mine)
    found = warnings(monitor)
    assert found["sign_majority"]["alarm_step"] == 1 and found["sign_majority"]["last"] == 1.0
    assert found["alignment"]["last"] > 0.9 and found["alignment"]["threshold"] is None
    run(tmp_path, healthy, model=module(lr=1e-9))
    assert 0.5 <= warnings(healthy)["sign_majority"]["last"] < 0.95
    assert warnings(healthy)["sign_majority"]["alarm_step"] is None


def test_the_vectors_that_the_iteration_starts_from_survive_a_resume(tmp_path: Path) -> None:
    def make() -> SpectralAlignmentMonitor:
        monitor = SpectralAlignmentMonitor(1)
        monitor._top = {name: TopSingular(k=1, exact_below=0) for name in "qk"}
        return monitor

    assert_resumes(tmp_path, make, {"d_model": 32})
    monitor = make()
    run(tmp_path / "again", monitor, model=module({"d_model": 32}))
    assert all(trial is not None for trial in monitor.state_dict()["trial_NnB"].values())


@pytest.mark.parametrize("projections", [[], ["q", "x"], ["qk"]])
def test_projections_that_there_are_not(projections: list[str]) -> None:
    with pytest.raises(ValueError, match=r"SpectralAlignmentMonitor: projections=.* must be some of q, k, v, o"):
        SpectralAlignmentMonitor(projections=projections)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["q", "k"])
def test_weights_that_have_blown_up_are_an_alarm(tmp_path: Path, name: str, value: float) -> None:
    bound, alignment = LogitBoundMonitor(1, {"logit_bound": 1e9}), SpectralAlignmentMonitor(1, ALIGNMENT)
    tied = TiedRowMonitor(1)
    _, logged = run(tmp_path, [Explode(value, name), bound, alignment, tied], steps=3)
    for key in ("logit_bound", "sign_majority", "alignment"):
        assert math.isfinite(logged[key].values[0]) and math.isnan(logged[key].values[1]), key
    for monitor, key in ((bound, "logit_bound"), (alignment, "sign_majority"), (alignment, "alignment")):
        assert warnings(monitor)[key]["alarm_step"] == 2
    assert math.isfinite(logged["tied_rows"].values[1])


def test_an_input_that_is_not_finite_is_an_alarm(tmp_path: Path) -> None:
    class Blind(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            with torch.no_grad():
                pl_module.model.token_embedding.weight[5] = math.nan

        def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            pl_module.zero_grad()

    bound, alignment = LogitBoundMonitor(1, {"logit_bound": 1e9}), SpectralAlignmentMonitor(1, ALIGNMENT)
    _, logged = run(tmp_path, [Blind(), bound, alignment], steps=1)
    assert logged["logit_bound"].values == [math.inf] and math.isnan(logged["sign_majority"].values[0])
    assert warnings(bound)["logit_bound"]["alarm_step"] == warnings(alignment)["sign_majority"]["alarm_step"] == 1


def test_tied_rows_are_counted_of_those_that_can_tie() -> None:
    exact = RoundingSites.preset("fp32")
    core = StreamingCore(exact, exact, 8, FaultSwitch())
    q, k = (
        torch.randint(-1, 2, (3, 2, 12, 4), generator=torch.Generator().manual_seed(seed)).float() for seed in (0, 1)
    )
    core(q.requires_grad_(), k, torch.randn(3, 2, 12, 4))
    scores = (q @ k.mT).masked_fill(torch.ones(12, 12).triu(1).bool(), -math.inf)
    tied = (scores == scores.amax(-1, keepdim=True)).sum(-1) > 1
    torch.testing.assert_close(core.tied_fraction_H, tied[:, :, 1:].float().mean((0, 2)))
    assert not tied[:, :, 0].any() and 0 < core.tied_fraction_H.min() < 1
    with torch.no_grad():
        core(q[:1, :, :5], k[:1, :, :5], k[:1, :, :5])  # a validation pass
    torch.testing.assert_close(core.tied_fraction_H, tied[:, :, 1:].float().mean((0, 2)))


@pytest.mark.parametrize("plugin", [fault(), fault(heads=[1])], ids=["all heads", "some heads"])
def test_the_worst_head_of_the_last_micro_batch_is_read(tmp_path: Path, plugin: Any) -> None:
    expected: list[float] = []

    class Own(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            counts = torch.stack([site.core.tied_rows_H for site in attention_sites(pl_module)])  # type: ignore[attr-defined]
            expected.append(float(counts.max()) / (4 * 15))

    callbacks = [RouteSplice("qk"), Own(), TiedRowMonitor(2)]
    settings: dict[str, Any] = dict(accumulate_grad_batches=2, limit_val_batches=1, val_check_interval=1)
    _, logged = run(tmp_path, callbacks, plugin=plugin, **settings)
    assert logged["tied_rows"].steps.tolist() == [1, 3]
    assert logged["tied_rows"].values == pytest.approx([expected[3], expected[7]])
    assert expected[3] > 0


def test_logits_that_are_all_the_same_are_an_alarm(tmp_path: Path) -> None:
    mine, monitor, healthy = module(lr=1e-9), TiedRowMonitor(1), TiedRowMonitor(1)
    run(tmp_path, healthy, model=mine, plugin=fault("fp32", None))
    assert warnings(healthy)["tied_rows"].items() >= {"threshold": 0.5, "alarm_step": None, "last": 0.0}.items()
    with torch.no_grad():
        attention_sites(mine)[0].q_weight[:8] = 0.0
    run(tmp_path, monitor, model=mine, plugin=fault("fp32", None), steps=1)
    assert warnings(monitor)["tied_rows"].items() >= {"threshold": 0.5, "alarm_step": 1, "last": 1.0}.items()


def test_a_core_that_does_not_count_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"TiedRowMonitor: .* streaming core, got SDPACore; leave the monitor out"):
        fit(tmp_path, [TiedRowMonitor()], fault("fp32", None, core="sdpa"))


@pytest.mark.parametrize("batch_size", [4, 3])
def test_a_compiled_core_knows_its_rows(tmp_path: Path, batch_size: int) -> None:
    readings = []
    for compiled in (False, True):
        mine, monitor = module(), TiedRowMonitor(1)
        if compiled:
            for block in mine.model.blocks:
                block.compile(backend="eager")
        trainer(tmp_path, [monitor], fault("fp32", None), max_steps=2).fit(mine, data(batch_size=batch_size))
        trainer(tmp_path, [monitor], fault(), max_steps=2).fit(mine, data(batch_size=2 * batch_size))
        readings.append(warnings(monitor)["tied_rows"]["last"])
    assert readings[0] == pytest.approx(readings[1], abs=0.05) and readings[0] > 0
