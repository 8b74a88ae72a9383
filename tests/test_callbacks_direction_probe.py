"""DirectionProbe: what it removes from the realised update, by an oracle of its own, and nothing else."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from test_ddp import two_ranks
from tiny import assert_same, fault, fit, module, weights
from torch import Tensor

from callbacks.direction_probe import MODES, SIDES, DirectionProbe, _with_energy, edited
from callbacks.draws import generator
from lightning_qk.events import read_scalars
from lightning_qk.precision import FaultPrecision
from lightning_qk.routes import route_parameters

Q = list(route_parameters(module(), "q"))  # names of the query projections
SHAPES = [(16, 16), (24, 7), (7, 24)]


def on_target(w: np.ndarray, d: np.ndarray, side: str, k: int) -> np.ndarray:
    """The component of d along the k leading singular directions of w, from the eigenvectors of w w' and w' w."""
    left, right = (np.linalg.eigh(gram)[1][:, -k:] for gram in (w @ w.T, w.T @ w))
    if side != "right":
        d = sum(np.outer(u, u @ d) for u in left.T)
    if side != "left":
        d = sum(np.outer(d @ v, v) for v in right.T)
    return d


def square(x: np.ndarray) -> float:
    return float((x * x).sum())


def removed(before: np.ndarray, after: np.ndarray, share: float) -> np.ndarray:
    """R of ``after = (before - R) / sqrt(1 - share)``."""
    return before - after * math.sqrt(1 - share)


def check(w: np.ndarray, d: np.ndarray, after: np.ndarray, mode: str, side: str, k: int, tolerance: float) -> None:
    """That ``after`` is the update ``d`` of ``w`` as the mode says; all but random_subspace."""
    size, target = math.sqrt(square(d)), on_target(w, d, side, k)
    share = square(target) / size**2
    assert 1e-4 < share < 0.5
    if mode == "isotropic":
        np.testing.assert_allclose(after, d * math.sqrt(1 - share), rtol=0, atol=tolerance * size)
        return
    assert math.sqrt(square(after)) == pytest.approx(size, rel=tolerance)
    gone = removed(d, after, share)
    assert square(gone) == pytest.approx(share * size**2, abs=tolerance * size**2)
    if mode == "on_target":
        np.testing.assert_allclose(gone, target, rtol=0, atol=tolerance * size)
        assert math.sqrt(square(on_target(w, after, side, k))) < tolerance * size
    else:
        assert math.sqrt(square(on_target(w, gone, side, k))) < tolerance * size
        assert float((gone * d).sum()) == pytest.approx(square(gone), abs=tolerance * size**2)  # a projection of d


def matrices(m: int, n: int, boost: float = 0.0, side: str = "both", k: int = 3) -> tuple[Tensor, Tensor]:
    """A weight and an update with ``1 + boost`` times as much on target as by chance."""
    draw = np.random.default_rng(m * n)
    w, d = draw.standard_normal((2, m, n))
    d += boost * on_target(w, d, side, k)
    return torch.from_numpy(w), torch.from_numpy(d)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("mode", ["on_target", "off_target", "isotropic"])
def test_the_edit_is_what_the_mode_says(mode: str, side: str, shape: tuple[int, int]) -> None:
    for k in (1, 3):
        w, d = matrices(*shape, boost=0.3 if side == "both" else -0.3, side=side, k=k)
        after, reading = edited(w, d, mode, side, k, generator(1))
        check(w.numpy(), d.numpy(), after.numpy(), mode, side, k, 1e-10)
        share = square(on_target(w.numpy(), d.numpy(), side, k)) / square(d.numpy())
        assert reading.energy == pytest.approx(share, rel=1e-10) and not reading.overdrawn
        s = np.linalg.svd(w.numpy(), compute_uv=False)
        assert reading.gap == pytest.approx(s[k - 1] / s[k], rel=1e-10)


@pytest.mark.parametrize("shape", SHAPES)
def test_off_target_takes_directions_of_the_complement_while_it_can(shape: tuple[int, int]) -> None:
    """Two-sided, neither a leading left nor a leading right direction is touched; not a multiple of the complement."""
    w, d = matrices(*shape)
    after, reading = edited(w, d, "off_target", "both", 3, generator(1))
    gone = removed(d.numpy(), after.numpy(), reading.energy)
    for side in ("left", "right"):
        assert math.sqrt(square(on_target(w.numpy(), gone, side, 3))) < 1e-12
    other, reading = edited(w, d, "off_target", "both", 3, generator(2))
    elsewhere = removed(d.numpy(), other.numpy(), reading.energy)
    assert abs(float((gone * elsewhere).sum())) < 0.7 * square(gone)
    assert torch.equal(edited(w, d, "off_target", "both", 3, generator(1))[0], after)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("side", SIDES)
def test_off_target_removes_the_energy_up_to_half_and_says_when_it_cannot(side: str, shape: tuple[int, int]) -> None:
    shares, overdrawn = [], []
    for boost in np.linspace(-0.3, 6, 25):
        w, d = matrices(*shape, boost=float(boost), side=side)
        update, reading = edited(w, d, "off_target", side, 3, generator(1))
        target, after = on_target(w.numpy(), d.numpy(), side, 3), update.numpy()
        share = square(target) / square(d.numpy())
        scale = float((on_target(w.numpy(), after, side, 3) * target).sum()) / square(target)
        gone = d.numpy() - after / scale
        assert square(gone) == pytest.approx(square(target), rel=1e-9)
        assert math.sqrt(square(on_target(w.numpy(), gone, side, 3))) < 1e-10
        assert square(after) == pytest.approx(square(d.numpy()), rel=1e-12)
        assert reading.energy == pytest.approx(share, rel=1e-9)
        if not reading.overdrawn:
            assert float((gone * d.numpy()).sum()) == pytest.approx(square(gone), rel=1e-9)
        shares.append(share)
        overdrawn.append(reading.overdrawn)
    assert min(shares) < 0.5 < max(shares)
    assert overdrawn == [share > 0.5 for share in shares]


def test_any_energy_is_met_by_a_projection() -> None:
    c = torch.from_numpy(np.random.default_rng(0).standard_normal(9))
    c[4] = 0
    held = c.square().cumsum(0)
    energies = [*torch.linspace(0, 1, 101).double() * held[-1], *held, *(held - 1e-9)[[0, 5, 8]]]
    for energy in energies:
        taken, more = _with_energy(c, energy.clamp_max(held[-1]))
        assert not more
        assert float(taken.square().sum()) == pytest.approx(float(energy), rel=1e-9, abs=1e-15)
        assert float((taken * c).sum()) == pytest.approx(float(energy), rel=1e-9, abs=1e-15)
        whole = min(int((held < energy).sum()), len(c) - 2)
        assert torch.equal(taken[:whole], c[:whole]) and not taken[whole + 2 :].any()
    taken, more = _with_energy(c, 4 * held[-1])
    assert more and torch.allclose(taken, 2 * c)
    taken, more = _with_energy(torch.zeros_like(c), held[-1])
    assert more and not taken.any()


@pytest.mark.parametrize("side", SIDES)
def test_a_random_subspace_has_k_directions_of_no_meaning(side: str) -> None:
    w, d = matrices(24, 16)
    edits = [edited(w, d, "random_subspace", side, 3, generator(seed)) for seed in range(2)]
    for after, reading in edits:
        assert float(after.norm()) == pytest.approx(float(d.norm()), rel=1e-12)
        gone = removed(d.numpy(), after.numpy(), reading.energy)
        assert np.linalg.matrix_rank(gone, tol=1e-8) == 3
        u, _, vt = np.linalg.svd(gone)
        expected = d.numpy()
        if side != "right":
            expected = u[:, :3] @ u[:, :3].T @ expected
        if side != "left":
            expected = expected @ vt[:3].T @ vt[:3]
        np.testing.assert_allclose(gone, expected, atol=1e-10)
        assert square(on_target(w.numpy(), gone, side, 3)) > 1e-6
        assert reading.energy == pytest.approx(square(gone) / square(d.numpy()), rel=1e-9)
    assert edits[0][1].energy != edits[1][1].energy


@pytest.mark.parametrize("mode", MODES)
def test_updates_without_a_direction(mode: str) -> None:
    w, d = matrices(16, 16)
    after, reading = edited(w, torch.zeros_like(d), mode, "both", 3, generator(1))
    assert not after.any() and reading.energy == 0 and not reading.overdrawn
    u, _, vt = torch.linalg.svd(w)
    after, _ = edited(w, torch.outer(u[:, 0], vt[0]), mode, "both", 3, generator(1))  # wholly on target
    assert bool(torch.isfinite(after).all())
    if mode == "on_target":
        assert float(after.norm()) < 1e-12  # nothing is left that could be rescaled


class Watch(Callback):
    """The weights before the step, after the optimizer's own update, and at the end. Goes before the probe."""

    def __init__(self) -> None:
        self.steps: list[tuple[dict[str, Tensor], ...]] = []
        self.logged: list[dict[str, float]] = []
        self.hooks: list[int] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.optimizers[0].register_step_post_hook(lambda *_: self._now.append(weights(pl_module)))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._now = [weights(pl_module)]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step > len(self.steps):
            self.steps.append((*self._now, weights(pl_module)))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.hooks.append(len(trainer.optimizers[0]._optimizer_step_post_hooks))


def updates(step: tuple[dict[str, Tensor], ...], name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The weight before, the optimizer's update and the one that was made of it."""
    before, stepped, after = (weight[name].double().numpy() for weight in step)
    return before, stepped - before, after - before


def model(**arguments: Any) -> Any:
    """With a spread of singular values, so that the leading directions are well-defined."""
    built = module(**{"warmup_steps": 0, "weight_decay": 0.1, **arguments})
    for p in route_parameters(built, "all").values():
        torch.nn.init.normal_(p, std=0.1)
    return built


RUNS = [
    *((mode, "both", "both", {}) for mode in MODES),
    ("on_target", "left", "q", {"accumulate_grad_batches": 2}),
    ("on_target", "right", "mlp", {}),
    ("off_target", "right", "k", {"accumulate_grad_batches": 2}),
    ("off_target", "left", "mlp", {}),
]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize(("mode", "side", "target", "settings"), RUNS)
def test_the_realised_update_of_a_run(
    tmp_path: Path, mode: Any, side: Any, target: str, settings: dict[str, Any], optimizer: str
) -> None:
    lr = 1e-2 if optimizer == "adamw" else 0.5
    watch, probe = Watch(), DirectionProbe(mode, target, k=2, side=side, layers=[1])
    built = model(optimizer=optimizer, lr=lr)
    fit(tmp_path, [watch, probe], fault(), built, max_steps=3, **settings)
    edited_names = set(route_parameters(built, {"both": "qk"}.get(target, target), [1]))
    assert len(watch.steps) == 3 and len(edited_names) == {"both": 2, "q": 1, "k": 1, "mlp": 2}[target]
    for step in watch.steps:
        for name in edited_names:
            w, d, after = updates(step, name)
            if mode == "random_subspace":
                assert square(after) == pytest.approx(square(d), rel=1e-6) and square(after - d) > 1e-4 * square(d)
            else:
                check(w, d, after, mode, side, 2, 1e-6)
        untouched = [
            {name: value for name, value in now.items() if name not in edited_names} for now in (step[1], step[2])
        ]
        assert_same(*untouched)


def test_only_the_steps_that_are_asked_for_are_edited(tmp_path: Path) -> None:
    watch = Watch()
    logger = TensorBoardLogger(tmp_path, name="arm", version="seed_0", default_hp_metric=False)
    probe = DirectionProbe(start_step=3, every_n_steps=2)
    fit(tmp_path, [watch, probe], fault(), model(), max_steps=8, accumulate_grad_batches=2, logger=logger)
    changed = [not torch.equal(*(now[Q[0]] for now in step[1:])) for step in watch.steps]
    assert [step + 1 for step, change in enumerate(changed) if change] == [4, 6, 8]
    found = read_scalars(tmp_path / "arm" / "seed_0")
    assert found["probe/energy"].steps.tolist() == [3, 5, 7] and found["loss/train"].steps.tolist() == list(range(8))


@pytest.mark.parametrize("mode", ["on_target", "off_target"])
def test_what_it_logs_is_what_it_did(tmp_path: Path, mode: Any) -> None:
    watch = Watch()
    logger = TensorBoardLogger(tmp_path, name="arm", version="seed_0", default_hp_metric=False)
    _, recording = fit(tmp_path, [watch, DirectionProbe(mode, k=2)], fault(), model(), max_steps=4, logger=logger)
    found = read_scalars(tmp_path / "arm" / "seed_0")
    names = list(route_parameters(module(), "qk"))
    for at, step in enumerate(watch.steps):
        energy, gap = {}, {}
        for name in names:
            w, d, _ = updates(step, name)
            s = np.linalg.svd(w, compute_uv=False)
            energy[name], gap[name] = square(on_target(w, d, "both", 2)) / square(d), s[1] / s[2]
        expected = {"probe/energy_max": max(energy.values())}
        for suffix, chosen in (("", names), *((f"/{p}", [n for n in names if p in n]) for p in ("q_proj", "k_proj"))):
            expected[f"probe/energy{suffix}"] = float(np.mean([energy[name] for name in chosen]))
            expected[f"probe/gap{suffix}"] = min(gap[name] for name in chosen)
        if mode == "off_target":
            expected["probe/overdrawn"] = sum(share > 0.5 for share in energy.values()) / len(energy)
        logged = {tag: series.values[at] for tag, series in found.items() if tag.startswith("probe/")}
        assert logged == pytest.approx(expected, rel=1e-5)
        assert recording.logged[at] == pytest.approx({**recording.logged[at], **expected}, rel=1e-5)
    assert len(set(found["probe/energy"].values)) == 4


def test_no_hook_outlives_the_run(tmp_path: Path) -> None:
    class Stop(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            self.optimizer = trainer.optimizers[0]
            assert len(self.optimizer._optimizer_step_post_hooks) == 1
            raise RuntimeError("stopped here")

    probe, last = DirectionProbe(), Watch()
    watch = Watch()
    fit(tmp_path, [watch, probe, last], fault(), max_steps=1)
    assert watch.hooks == [3] and last.hooks == [2]  # before and after the probe's own on_train_end
    stop = Stop()
    with pytest.raises(RuntimeError, match="stopped here"):
        fit(tmp_path, [probe, stop], fault(), max_steps=1)
    assert not stop.optimizer._optimizer_step_post_hooks and not probe._hooks and not probe._before


@pytest.mark.parametrize("mode", ["off_target", "random_subspace"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, mode: Any) -> None:
    runs = {}
    for seed in (0, 1):
        saver = ModelCheckpoint(tmp_path / str(seed), filename="{step}", every_n_train_steps=3)
        probe = DirectionProbe(mode, seed=seed)
        runs[seed] = fit(tmp_path, [probe, saver], fault(), max_steps=5, enable_checkpointing=True)
    saved = tmp_path / "0" / "step=3.ckpt"
    resumed, recording = fit(tmp_path, [DirectionProbe(mode)], fault(), ckpt_path=saved, max_steps=5)
    assert recording.losses == runs[0][1].losses[3:] != runs[1][1].losses[3:]
    assert_same(weights(resumed), weights(runs[0][0]))
    assert recording.logged[-1] == runs[0][1].logged[-1]


def test_directions_are_drawn_anew_for_every_step_and_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def recorded(*args: Any) -> Any:
        seeds.append(args[-1].initial_seed())
        return edited(*args)

    monkeypatch.setattr("callbacks.direction_probe.edited", recorded)
    for seed in (0, 1, 0):
        fit(tmp_path, [DirectionProbe("off_target", seed=seed)], fault(), max_steps=3)
    assert len(seeds) == 36 and len(set(seeds)) == 24 and seeds[:12] == seeds[24:]


def test_ranks_keep_equal_weights(tmp_path: Path) -> None:
    """Under DDP, and the probe did act."""
    for mode in ("on_target", "off_target"):
        first, second = two_ranks(tmp_path / mode, [DirectionProbe(mode)], max_steps=2, accumulate_grad_batches=2)  # type: ignore[arg-type]
        assert_same(first["weights"], second["weights"])
        assert first["losses"] != second["losses"]
        for name in ("probe/energy", "probe/gap"):
            assert first["logged"][name] == second["logged"][name] > 0


def test_an_update_that_is_not_finite_is_left_to_others(tmp_path: Path) -> None:
    class Poison(Callback):
        def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
            p = route_parameters(pl_module, "q", [0]).popitem()[1]
            if trainer.global_step == 1:
                assert p.grad is not None
                p.grad[0, 0] = math.nan

    watch = Watch()
    _, recording = fit(tmp_path, [Poison(), watch, DirectionProbe()], fault(), max_steps=3, gradient_clip_val=None)
    assert torch.equal(*(now[Q[0]].nan_to_num() for now in watch.steps[1][1:]))
    assert not torch.equal(*(now[Q[1]] for now in watch.steps[1][1:]))
    assert math.isfinite(recording.logged[0]["probe/energy"]) and math.isnan(recording.logged[1]["probe/energy"])
    assert math.isnan(recording.logged[1]["probe/gap"])


def test_it_works_without_a_fault_and_with_any_precision(tmp_path: Path) -> None:
    for plugin in (None, FaultPrecision(base="bf16")):
        with_probe, without = (fit(tmp_path, c, plugin, max_steps=2)[0] for c in ([DirectionProbe()], []))
        assert not torch.equal(weights(with_probe)[Q[0]], weights(without)[Q[0]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "sideways"}, "mode='sideways' .on_target, off_target"),
        ({"side": "top"}, "side='top'"),
        ({"k": 0}, "k=0"),
        ({"start_step": 0}, "start_step=0"),
        ({"every_n_steps": 0}, "every_n_steps=0"),
        ({"k": 16}, r"k=16 leaves nothing .*q_proj.weight \(16, 16\); set k below 16"),
        ({"target": "qkv"}, "'qkv'"),
        ({"layers": [2]}, "2 is not a layer"),
    ],
)
def test_arguments_that_cannot_be(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, [DirectionProbe(**arguments)], fault(), max_steps=1)
