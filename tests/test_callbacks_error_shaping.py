"""ErrorShaping: the error that reaches clipping is the one that the mode says, of the size that it says."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from test_ddp import two_ranks
from tiny import Recording, assert_same, data, fault, fit, module, trainer, weights
from torch import Tensor

from callbacks.clean_gradient import CleanGradientCallback
from callbacks.error_shaping import MADE_UP, MODES, ErrorShaping
from lightning_qk.events import read_scalars
from lightning_qk.precision import FaultPrecision, MXGradient
from lightning_qk.routes import attention_sites, route_parameters

STEPS = 6


class Peek(CleanGradientCallback):
    """Faulty and clean gradients of every step, in float64. Goes before the shaping."""

    def __init__(self, route: str) -> None:
        super().__init__(route)
        self.faulty: list[dict[str, Tensor]] = []
        self.clean_ones: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        chosen = self.parameters(pl_module)
        self.faulty.append({name: p.grad.double() for name, p in chosen.items() if p.grad is not None})
        self.clean_ones.append({name: self.clean(trainer, p).double() for name, p in chosen.items()})


class Errors:
    """By step and weight: e before the shaping, the error after it, and the clean gradient."""

    def __init__(self, peek: Peek, recording: Recording) -> None:
        self.clean = peek.clean_ones
        self.before = [
            {name: faulty[name] - clean[name] for name in clean}
            for faulty, clean in zip(peek.faulty, peek.clean_ones, strict=True)
        ]
        self.after = [
            {name: gradients[name].double() - clean[name] for name in clean}
            for gradients, clean in zip(recording.gradients, peek.clean_ones, strict=True)
        ]
        self.recording = recording

    def rows(self) -> list[tuple[int, str, Tensor, Tensor, float]]:
        """Step, weight, e, what was applied, and the float32 rounding that it carries."""
        return [
            (step, name, e, self.after[step][name], 2e-7 * float(self.clean[step][name].abs().max()))
            for step, errors in enumerate(self.before)
            for name, e in errors.items()
        ]


def model() -> Any:
    built = module()
    for site in attention_sites(built):
        torch.nn.init.normal_(site.q_proj.weight, std=1.0)  # attention that is not flat: a fault that shows
    return built


def run(tmp_path: Path, shaping: ErrorShaping, plugin: Any = None, **settings: Any) -> Errors:
    peek = Peek(shaping.route)
    plugin = fault() if plugin is None else plugin
    _, recording = fit(tmp_path, [peek, shaping], plugin, model(), **{"max_steps": STEPS, **settings})
    errors = Errors(peek, recording)
    assert len(errors.after) == settings.get("max_steps", STEPS) and len(errors.after[0]) == 4
    return errors


def close(x: Tensor, y: Tensor, rounding: float) -> bool:
    return bool((x - y).abs().max() <= rounding + 1e-6 * y.abs().max())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("route", "plugin", "settings"),
    [
        ("qk", {}, {"accumulate_grad_batches": 2}),
        ("mlp", {"route": "mlp", "base": "fp32"}, {}),
    ],
    ids=["carry", "mxfp4"],
)
def test_the_error_keeps_its_size_and_takes_the_shape(
    tmp_path: Path, mode: Any, route: str, plugin: dict[str, Any], settings: dict[str, Any]
) -> None:
    shaping = ErrorShaping(mode, route, shuffle_window=3, magnitude=1.0)
    errors = run(tmp_path, shaping, MXGradient(**plugin) if plugin else fault(), **settings)
    for _, _, e, applied, rounding in errors.rows():
        assert float(e.norm()) > 1e-3 * rounding
        assert float(applied.norm()) == pytest.approx(float(e.norm()), rel=1e-4, abs=rounding * e.numel() ** 0.5)
        assert mode in ("itself", "mean_removed", "time_shuffled") or not close(applied, e, 100 * rounding)
    SHAPE_CHECKS[mode](errors)


def check_itself(errors: Errors) -> None:
    assert all(torch.equal(applied, e) for _, _, e, applied, _ in errors.rows())


def agreement(errors: Errors, left: int, right: int, name: str) -> float:
    """The share of elements with the same sign in two steps, of those that are not lost to rounding."""
    first, second = errors.after[left][name], errors.after[right][name]
    rounding = 2e-6 * float(errors.clean[left][name].abs().max() + errors.clean[right][name].abs().max())
    clear = (first.abs() > rounding) & (second.abs() > rounding)
    assert int(clear.sum()) > 40
    return float((first.sign() == second.sign())[clear].double().mean())


def check_random_signs(errors: Errors) -> None:
    for _, _, e, applied, rounding in errors.rows():
        assert close(applied.abs(), e.abs(), rounding)
        assert 0.35 < float((applied * e > 0)[e.abs() > 10 * rounding].double().mean()) < 0.65
    for name in errors.after[0]:
        assert all(0.3 < agreement(errors, step, step + 1, name) < 0.7 for step in range(STEPS - 1))


def check_frozen_signs(errors: Errors) -> None:
    for _, _, e, applied, rounding in errors.rows():
        assert close(applied.abs(), e.abs(), rounding)
        assert 0.35 < float((applied > 0)[e.abs() > 10 * rounding].double().mean()) < 0.65
    for name in errors.after[0]:
        assert all(agreement(errors, 0, step, name) == 1 for step in range(STEPS))


def scaled(shape: Tensor, e: Tensor) -> Tensor:
    return shape * (e.norm() / shape.norm())


def check_mean_removed(errors: Errors) -> None:
    for _, _, e, applied, rounding in errors.rows():
        assert close(applied, scaled(e - e.sum() / e.numel(), e), rounding)


def check_mean_only(errors: Errors) -> None:
    signs = set()
    for _, _, e, applied, rounding in errors.rows():
        each = e.norm() / e.numel() ** 0.5 * e.sum().sign()
        assert close(applied, torch.full_like(e, float(each)), rounding)
        signs.add(float(e.sum().sign()))
    assert signs == {1.0, -1.0}


def test_the_mean_is_removed_from_an_error_that_has_one() -> None:
    """An attention weight's own error has hardly any."""
    e = torch.from_numpy(np.random.default_rng(0).standard_normal((5, 7))) + 2
    shaped = {mode: ErrorShaping(mode)._shaped(e, e, "q", 0) for mode in ("mean_removed", "mean_only")}
    centred = e - e.sum() / 35
    torch.testing.assert_close(shaped["mean_removed"], scaled(centred, e), rtol=1e-12, atol=0)
    torch.testing.assert_close(shaped["mean_only"], scaled(e - centred, e), rtol=1e-12, atol=0)


def check_constant(errors: Errors) -> None:
    for _, _, e, applied, rounding in errors.rows():
        assert close(applied, torch.full_like(e, float(e.norm() / e.numel() ** 0.5)), rounding)


def check_rank_one(errors: Errors) -> None:
    for step, name, e, applied, rounding in errors.rows():
        first = errors.after[0][name]
        assert float(torch.linalg.svdvals(applied)[1]) < 30 * rounding
        assert close(applied, scaled(first, e), 10 * rounding * (1 + float(e.norm() / first.norm())))
        assert step > 0 or abs(float(applied.mean())) < 0.3 * float(e.norm()) / e.numel() ** 0.5
    assert len({round(float(x[0, 0] / x[1, 0]), 3) for x in errors.after[0].values()}) == 4


def check_gaussian(errors: Errors) -> None:
    normed = [applied / applied.square().mean().sqrt() for *_, applied, _ in errors.rows()]
    every = torch.cat([x.flatten() for x in normed])
    assert float((every.abs() < 1).double().mean()) == pytest.approx(0.683, abs=0.02)
    assert float((every.abs() < 2).double().mean()) == pytest.approx(0.954, abs=0.01)
    for name in errors.after[0]:
        assert 0.3 < agreement(errors, 0, 1, name) < 0.7
    same = [(x, y) for at, x in enumerate(normed[:4]) for y in normed[:at] if x.shape == y.shape]  # of the first step
    assert same and max(abs(float((x * y).mean())) for x, y in same) < 0.3


def check_time_shuffled(errors: Errors, window: int = 3) -> None:
    sources = []
    for step, errors_now in enumerate(errors.before):
        fits = []
        for name, e in errors_now.items():
            rounding = 1e-6 * float(errors.clean[step][name].abs().max())
            fits.append(
                {
                    s
                    for s in range(step + 1)
                    if close(errors.after[step][name], scaled(errors.before[s][name], e), rounding)
                }
            )
        (source,) = set.intersection(*fits)
        assert step - window < source <= step
        sources.append(source)
    assert len({step - source for step, source in enumerate(sources) if step >= window - 1}) > 1


SHAPE_CHECKS: dict[str, Any] = {mode: globals()[f"check_{mode}"] for mode in MODES}


@pytest.mark.parametrize("mode", MADE_UP)
def test_an_error_can_be_put_where_the_run_has_none(tmp_path: Path, mode: Any) -> None:
    """In a healthy run, and on a route that the fault does not touch."""
    for plugin in (FaultPrecision(base="fp32"), MXGradient(route="mlp", base="fp32")):
        errors = run(tmp_path, ErrorShaping(mode, "qk", relative_magnitude=0.3), plugin, max_steps=3)
        for step, name, e, applied, rounding in errors.rows():
            assert not e.any()
            expected = 0.3 * float(errors.clean[step][name].norm())
            assert float(applied.norm()) == pytest.approx(expected, rel=1e-4)
            if mode.endswith("signs"):
                assert close(applied.abs(), torch.full_like(e, expected / e.numel() ** 0.5), rounding)
    first, second = (torch.stack([x.sign() for x in errors.after[step].values()]) for step in (0, 1))
    assert torch.equal(first, second) == (mode in ("frozen_signs", "constant", "rank_one"))


@pytest.mark.parametrize(("mode", "factor"), [("frozen_signs", 2.5), ("itself", 0.0), ("time_shuffled", 2.5)])
def test_magnitude_is_a_factor(tmp_path: Path, mode: Any, factor: float) -> None:
    errors = run(tmp_path, ErrorShaping(mode, magnitude=factor), max_steps=2)
    for _, _, e, applied, rounding in errors.rows():
        assert float(applied.norm()) == pytest.approx(factor * float(e.norm()), rel=1e-4, abs=16 * rounding)


def test_a_relative_magnitude_goes_before_the_runs_own_error(tmp_path: Path) -> None:
    errors = run(tmp_path, ErrorShaping("itself", relative_magnitude=0.5), max_steps=2)
    for step, name, e, applied, rounding in errors.rows():
        size = 0.5 * float(errors.clean[step][name].norm())
        assert close(applied, e * (size / float(e.norm())), rounding) and float(e.norm()) != pytest.approx(
            size, rel=0.1
        )


@pytest.mark.parametrize("plugin", [fault, lambda: MXGradient(route="all", base="bf16")], ids=["carry", "mxfp4"])
def test_the_monitor_changes_nothing(tmp_path: Path, plugin: Any) -> None:
    (watched, recording), (plain, _) = (
        fit(tmp_path, callbacks, plugin(), model(), max_steps=4, accumulate_grad_batches=2)
        for callbacks in ([ErrorShaping("itself", "all", coherence_window=2)], [])
    )
    assert_same(weights(watched), weights(plain))
    assert recording.logged[-1]["error/magnitude"] > 0


@pytest.mark.parametrize("mode", ["itself", "random_signs", "frozen_signs", "constant"])
def test_what_it_logs_is_what_it_applied(tmp_path: Path, mode: Any) -> None:
    window, steps = 4, 9
    shaping = ErrorShaping(mode, coherence_window=window)
    logger = TensorBoardLogger(tmp_path, name="arm", version="seed_0", default_hp_metric=False)
    errors = run(tmp_path, shaping, max_steps=steps, accumulate_grad_batches=2, logger=logger)
    found = read_scalars(tmp_path / "arm" / "seed_0")
    applied, clean = (
        torch.stack([torch.cat([x.flatten() for x in step.values()]) for step in rows])
        for rows in (errors.after, errors.clean)
    )
    expected = {
        "error/magnitude": applied.norm(dim=1),
        "error/relative": applied.norm(dim=1) / clean.norm(dim=1),
        "error/mean": applied.mean(1),
    }
    for tag, values in expected.items():
        assert found[tag].steps.tolist() == list(range(steps))
        assert found[tag].values == pytest.approx(values.numpy(), rel=1e-4, abs=1e-10)
    coherence = [float(applied[i : i + window].sign().mean(0).abs().mean()) for i in (0, 4)]
    assert found["error/coherence"].steps.tolist() == [3, 7]
    assert found["error/coherence"].values == pytest.approx(coherence, rel=1e-6)
    assert errors.recording.logged[-1]["error/coherence"] == pytest.approx(coherence[-1], rel=1e-6)
    size = {"error_magnitude": shaping.magnitude, "error_relative_magnitude": shaping.relative_magnitude}
    assert shaping.verdict_fields() == {"error_coherence": pytest.approx(sum(coherence) / 2), **size}
    if mode == "random_signs":
        assert coherence == pytest.approx([0.375, 0.375], abs=0.03)  # E|mean of four signs|; sqrt(2 / 4 pi) is 0.40
    if mode in ("frozen_signs", "constant"):
        assert min(coherence) > 0.95
    assert ErrorShaping().verdict_fields()["error_coherence"] is None


def test_random_signs_have_the_coherence_that_is_documented(tmp_path: Path) -> None:
    window = 50
    shaping = ErrorShaping("random_signs", relative_magnitude=0.5)
    run(tmp_path, shaping, FaultPrecision(base="fp32"), max_steps=window)
    assert shaping.coherences == [pytest.approx(math.sqrt(2 / (math.pi * window)), abs=0.005)]


@pytest.mark.parametrize("mode", ["time_shuffled", "random_signs", "rank_one"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, mode: Any) -> None:
    """The checkpoint lies inside a window of coherence and after the window of errors has begun to slide."""
    runs = {}
    for seed in (0, 1):
        saver = ModelCheckpoint(tmp_path / str(seed), filename="{step}", every_n_train_steps=3, save_top_k=-1)
        shaping = ErrorShaping(mode, shuffle_window=2, coherence_window=4, seed=seed)
        runs[seed] = fit(tmp_path, [shaping, saver], fault(), model(), max_steps=8, enable_checkpointing=True)
        runs[seed] = (*runs[seed], shaping)
    whole, recording, shaped = runs[0]
    saved = tmp_path / "0" / "step=3.ckpt"
    assert "callbacks" in torch.load(saved, weights_only=True)
    again = ErrorShaping(mode, shuffle_window=2, coherence_window=4)
    resumed, rest = fit(tmp_path, [again], fault(), model(), ckpt_path=saved, max_steps=8)
    assert rest.losses == recording.losses[3:] != runs[1][1].losses[3:]
    assert_same(weights(resumed), weights(whole))
    assert again.coherences == shaped.coherences and len(again.coherences) == 2
    assert rest.logged[-1] == recording.logged[-1]


def test_ranks_keep_equal_weights(tmp_path: Path) -> None:
    for mode in ("gaussian", "time_shuffled"):
        shaping = ErrorShaping(mode, coherence_window=2, magnitude=3.0)  # type: ignore[arg-type]
        settings: dict[str, Any] = dict(max_steps=3, accumulate_grad_batches=2)
        first, second = two_ranks(tmp_path / mode, [shaping], **settings)
        assert_same(first["weights"], second["weights"])
        assert first["losses"] != second["losses"]
        tags = [tag for tag in first["logged"] if tag.startswith("error/")]
        assert len(tags) == 4 and all(first["logged"][tag] == second["logged"][tag] for tag in tags)


def test_two_of_them_keep_their_states_apart(tmp_path: Path) -> None:
    both = [ErrorShaping("time_shuffled", route) for route in ("qk", "mlp")]
    runner = trainer(tmp_path, both, fault(), max_steps=1)
    runner.fit(module(), data())
    runner.save_checkpoint(tmp_path / "last.ckpt")
    states = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]
    for shaping in both:
        names = set(route_parameters(module(), shaping.route))
        assert set(states[shaping.state_key]["past"]) == set(states[shaping.state_key]["signs"]) == names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "loud"}, "mode='loud' is not one of itself, mean_removed"),
        ({"magnitude": -1.0}, "magnitude=-1.0 .* must be at least 0"),
        ({"relative_magnitude": -1.0}, "relative_magnitude=-1.0 must be"),
        ({"relative_magnitude": 0.3, "magnitude": 2.0}, "give one of them"),
        ({"coherence_window": 0}, "coherence_window=0"),
        ({"shuffle_window": 0}, "shuffle_window=0"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ErrorShaping(**arguments)


@pytest.mark.parametrize("arguments", [{"mode": "random_signs"}, {"mode": "itself", "relative_magnitude": 0.3}])
def test_an_error_that_nobody_makes_is_refused(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(MisconfigurationException, match=r"has no fault.*set relative_magnitude"):
        fit(tmp_path, [ErrorShaping(**arguments)], fault("fp32", None), max_steps=1)
    with pytest.raises(MisconfigurationException, match=r"ErrorShaping needs a plugin"):
        fit(tmp_path, [ErrorShaping(**arguments)], None, max_steps=1)


def test_two_routes_have_tags_of_their_own(tmp_path: Path) -> None:
    shapings = [ErrorShaping("frozen_signs", route, coherence_window=2) for route in ("q", "k")]
    _, recording = fit(tmp_path, shapings, fault(), model(), max_steps=2)
    row = recording.logged[-1]
    assert row["error/magnitude/q"] != row["error/magnitude/k"] and "error/magnitude" not in row
    fields = [shaping.verdict_fields() for shaping in shapings]
    assert [next(iter(one)) for one in fields] == ["error_coherence/q", "error_coherence/k"]


def test_the_draws_are_the_runs_own_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    assert (ErrorShaping().seed, ErrorShaping(seed=3).seed) == (7, 3)
    monkeypatch.delenv("PL_GLOBAL_SEED")
    assert ErrorShaping().seed == 0
