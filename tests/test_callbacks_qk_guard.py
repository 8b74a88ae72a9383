"""QKGuard: when it fires, what it then changes, and what a resumed run knows of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny import Recording, assert_same, data, fault, fit, module, trainer, weights

from callbacks import QKGuard, RandomState, SpectralMonitor
from lightning_qk.attention import SDPACore
from lightning_qk.module import GPTModule
from lightning_qk.routes import attention_sites

STEPS = 10


class Watch(Callback):
    """Every layer's largest logit, and whether QK-norm was on while it arose, for each micro-batch."""

    def __init__(self) -> None:
        self.logits: list[list[float]] = []
        self.on: list[list[bool]] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.on.append([site.qk_norm_on for site in attention_sites(pl_module)])

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.logits.append([float(site.core.max_logit_H.max()) for site in attention_sites(pl_module)])


def run(
    tmp_path: Path, guard: QKGuard | None, steps: int = STEPS, plugin: Any = None, **settings: Any
) -> tuple[GPTModule, Recording, Watch]:
    watch = Watch()
    callbacks = [watch] if guard is None else [guard, watch]
    model, recording = fit(
        tmp_path,
        [*callbacks, SpectralMonitor(1)],
        fault() if plugin is None else plugin,
        settings.pop("model", None),
        max_steps=steps,
        **settings,
    )
    return model, recording, watch


def uneven() -> GPTModule:
    """A model whose logits are larger in layer 1 than in layer 0."""
    model = module(lr=3e-2)
    for layer, site in enumerate(attention_sites(model)):
        torch.nn.init.normal_(site.q_proj.weight, std=0.2 + 0.4 * layer)
        torch.nn.init.normal_(site.k_proj.weight, std=0.2 + 0.4 * layer)
    return model


def between(watch: Watch, step: int) -> float:
    """A threshold that step ``step`` is the first to exceed."""
    largest = [max(row) for row in watch.logits]
    before = max(largest[: step - 1])
    assert largest[step - 1] > before, "the logits of this run do not grow here"
    return (before + largest[step - 1]) / 2


def rising_step(watch: Watch, at_least: int = 3) -> int:
    largest = [max(row) for row in watch.logits]
    return next(i + 1 for i in range(at_least - 1, len(largest)) if largest[i] > max(largest[:i]))


CORES = pytest.mark.parametrize(
    "plugin", [None, fault("fp32", None, core="sdpa")], ids=["streaming (faulty)", "sdpa (healthy)"]
)


@CORES
def test_dormant_it_changes_nothing(tmp_path: Path, plugin: Any) -> None:
    guard = QKGuard(threshold=1e9)
    guarded, with_guard, _ = run(tmp_path, guard, plugin=plugin)
    alone, without, _ = run(tmp_path, None, plugin=plugin)
    assert with_guard.losses == without.losses
    assert_same(weights(guarded), weights(alone))
    assert guard.verdict_fields() == {"guard": "dormant", "guard_step": None, "guard_logit": None}
    assert {row["guard/fired"] for row in with_guard.logged} == {0.0}


@CORES
def test_it_fires_after_the_first_step_over_the_threshold_and_acts_from_the_next(tmp_path: Path, plugin: Any) -> None:
    _, plain, watch = run(tmp_path, None, plugin=plugin)
    step = rising_step(watch)
    guard = QKGuard(threshold=between(watch, step))
    _, guarded, seen = run(tmp_path, guard, plugin=plugin)
    assert guard.fired_step == step
    assert seen.on == [[False, False]] * step + [[True, True]] * (STEPS - step)
    assert guarded.losses[:step] == plain.losses[:step]
    assert guarded.losses[step] != plain.losses[step]
    # sqrt(8) = 2.83 is the bound on exact logits; the fault rounds them to 2 mantissa bits, 2.5 or 3
    assert max(map(max, seen.logits[step:])) <= 3.0
    assert guard.history == [{"step": step, "layers": [0, 1], "logit": pytest.approx(max(watch.logits[step - 1]))}]
    logit = guard.history[0]["logit"]
    assert guard.verdict_fields() == {"guard": "fired", "guard_step": step, "guard_logit": logit}
    assert [row["guard/fired"] for row in guarded.logged] == [0.0] * step + [1.0] * (STEPS - step)


def test_a_threshold_that_is_reached_is_not_exceeded(tmp_path: Path) -> None:
    _, _, watch = run(tmp_path, None, steps=3)
    guard = QKGuard(threshold=max(map(max, watch.logits)))
    run(tmp_path, guard, steps=3)
    assert not guard.fired


def test_accumulated_micro_batches_are_all_looked_at(tmp_path: Path) -> None:
    """The threshold lies between the first micro-batch of a step and its last, which is the smaller one."""
    settings: dict[str, Any] = dict(accumulate_grad_batches=3, steps=4)
    _, _, watch = run(tmp_path, None, **settings)
    largest = [max(row) for row in watch.logits]
    step = next(i for i in range(4) if max(largest[3 * i : 3 * i + 2]) > largest[3 * i + 2])
    threshold = (max(largest[3 * step : 3 * step + 2]) + largest[3 * step + 2]) / 2
    guard = QKGuard(threshold=threshold)
    _, _, seen = run(tmp_path, guard, **settings)
    expected = next(i for i in range(4) if max(largest[3 * i : 3 * i + 3]) > threshold)
    assert guard.fired_step == expected + 1
    assert [row[0] for row in seen.on] == [False] * 3 * (expected + 1) + [True] * 3 * (3 - expected)


def test_it_looks_every_nth_step_only(tmp_path: Path) -> None:
    guard = QKGuard(threshold=1e-9, every_n_steps=4)
    senses: list[int] = []
    sense = guard._sense

    def counted(sites: list[Any]) -> None:
        senses.append(1)
        sense(sites)

    guard._sense = counted  # type: ignore[method-assign]
    _, _, watch = run(tmp_path, guard, steps=6, accumulate_grad_batches=2)
    assert guard.fired_step == 4 and len(senses) == 2
    assert guard.history[0]["logit"] == max(max(row) for row in watch.logits[6:8])


def test_scope_layer_acts_where_the_logits_are(tmp_path: Path) -> None:
    _, _, watch = run(tmp_path, None, model=uneven())
    threshold = (max(row[0] for row in watch.logits) + max(row[1] for row in watch.logits)) / 2
    assert max(row[0] for row in watch.logits) < threshold < max(row[1] for row in watch.logits)
    guard = QKGuard(threshold=threshold, scope="layer")
    model, _, seen = run(tmp_path, guard, model=uneven())
    assert [site.qk_norm_on for site in attention_sites(model)] == [False, True]
    assert [event["layers"] for event in guard.history] == [[1]]
    assert seen.on[-1] == [False, True]
    both = QKGuard(threshold=1e-9, scope="layer")
    run(tmp_path, both, steps=3)
    assert sorted(layer for event in both.history for layer in event["layers"]) == [0, 1]


def test_always_on_is_qk_norm_from_the_first_step(tmp_path: Path) -> None:
    guard = QKGuard(mode="always_on")
    twin, recording, watch = run(tmp_path, guard, steps=4)
    by_hand = module()
    for site in attention_sites(by_hand):
        site.set_qk_norm(True)
    expected, plain = fit(tmp_path, [], fault(), by_hand, max_steps=4)
    assert watch.on == [[True, True]] * 4
    assert recording.losses == plain.losses
    assert_same(weights(twin), weights(expected))
    assert guard.verdict_fields() == {"guard": "always on", "guard_step": None}
    assert {row["guard/fired"] for row in recording.logged} == {1.0}


def test_fire_at_step_fires_whatever_the_logits(tmp_path: Path) -> None:
    guard = QKGuard(threshold=1e-9, mode="fire_at_step", fire_step=3)
    _, _, watch = run(tmp_path, guard, steps=5)
    assert watch.on == [[False, False]] * 3 + [[True, True]] * 2
    assert guard.history == [{"step": 3, "layers": [0, 1], "logit": None}]


class PoisonQuery(Callback):
    def __init__(self, batch_idx: int, value: float) -> None:
        self.batch_idx, self.value = batch_idx, value

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch_idx:
            with torch.no_grad():
                attention_sites(pl_module)[1].q_proj.weight.fill_(self.value)


@CORES
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_fire(tmp_path: Path, plugin: Any, value: float) -> None:
    guard = QKGuard(threshold=1e6)
    fit(tmp_path, [PoisonQuery(1, value), guard], fault() if plugin is None else plugin, max_steps=2)
    assert guard.fired_step == 2
    assert not math.isfinite(guard.history[0]["logit"])


def test_sdpa_is_asked_for_the_exact_maximum_only_when_its_bound_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    bounds: list[float] = []
    exact, bound = (vars(SDPACore)[name].fget for name in ("max_logit_H", "logit_bound_H"))

    def counted_exact(core: SDPACore) -> torch.Tensor:
        asked.append(1)
        return exact(core)

    def kept_bound(core: SDPACore) -> torch.Tensor:
        bounds.append(float(bound(core).max()))
        return bound(core)

    monkeypatch.setattr(SDPACore, "max_logit_H", property(counted_exact))
    monkeypatch.setattr(SDPACore, "logit_bound_H", property(kept_bound))

    def bound_and_exact(threshold: float) -> tuple[QKGuard, int]:
        asked.clear()
        guard = QKGuard(threshold)
        fit(tmp_path, [guard], fault("fp32", None, core="sdpa"), max_steps=1)
        return guard, len(asked)

    assert bound_and_exact(1e6)[1] == 0
    largest_bound = max(bounds)
    guard, calls = bound_and_exact(largest_bound * 0.999)
    assert calls == 1 and not guard.fired  # in that layer; the bound is loose, the maximum below it
    guard, calls = bound_and_exact(1e-9)
    assert calls == 2 and guard.fired
    assert guard.history[0]["logit"] < largest_bound


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"mode": "sometimes"}, "mode='sometimes'"),
        ({"scope": "block"}, "scope='block'"),
        ({"mode": "fire_at_step"}, "fire_step=None"),
        ({"fire_step": 3}, "fire_step=3 goes with"),
        ({"mode": "fire_at_step", "fire_step": 0}, "fire_step=0"),
        ({"mode": "fire_at_step", "fire_step": 1, "scope": "layer"}, "scope='all'"),
        ({"threshold": 0}, "threshold=0"),
        ({"every_n_steps": 0}, "every_n_steps=0"),
    ],
)
def test_argument_errors_name_the_argument(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        QKGuard(**settings)


# resume


def checkpointed(tmp_path: Path, callbacks: list[Callback], steps: int = 4, **settings: Any) -> Path:
    checkpoint = ModelCheckpoint(tmp_path, filename="at_{step}", auto_insert_metric_name=False, every_n_train_steps=2)
    checkpoint.save_top_k = -1
    plugin = settings.pop("plugin", fault())
    fit(tmp_path, [*callbacks, checkpoint], plugin, max_steps=steps, enable_checkpointing=True, **settings)
    return tmp_path


@pytest.mark.parametrize("fire_step", [1, 2, 3])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, fire_step: int) -> None:
    """Fired before the checkpoint, at it, and after it."""

    def callbacks() -> list[Callback]:
        return [QKGuard(mode="fire_at_step", fire_step=fire_step), SpectralMonitor(1), RandomState()]

    whole = callbacks()
    expected, recording = fit(tmp_path, whole, fault(), module({"dropout": 0.2}), max_steps=5)
    checkpointed(tmp_path, callbacks(), model=module({"dropout": 0.2}))
    state = torch.load(tmp_path / "at_2.ckpt", weights_only=True)
    assert state["state_dict"]["model.blocks.0.attention.qk_norm"].tolist() == [fire_step <= 2] * 2
    again = callbacks()
    resumed, second = fit(
        tmp_path, again, fault(), module({"dropout": 0.2}), max_steps=5, ckpt_path=tmp_path / "at_2.ckpt"
    )
    assert second.losses == recording.losses[2:]
    assert_same(weights(resumed), weights(expected))
    assert again[0].state_dict() == whole[0].state_dict()
    assert again[0].fired_step == fire_step  # type: ignore[attr-defined]


def test_a_fired_model_is_not_resumed_without_a_guard(tmp_path: Path) -> None:
    path = checkpointed(tmp_path, [QKGuard(threshold=1e-9)]) / "at_2.ckpt"
    with pytest.raises(ValueError, match=r"guard that fired .*qk_norm and 2 more.* no QKGuard"):
        fit(tmp_path, [], fault(), max_steps=5, ckpt_path=path)
    loaded = GPTModule.load_from_checkpoint(path)  # evaluation needs no guard: the buffer is the model's
    assert all(site.qk_norm_on for site in attention_sites(loaded))


def test_buffers_and_history_that_disagree_are_refused(tmp_path: Path) -> None:
    path = checkpointed(tmp_path, [QKGuard(threshold=1e-9)]) / "at_2.ckpt"
    content = torch.load(path, weights_only=True)
    del content["callbacks"]["QKGuard"]
    torch.save(content, tmp_path / "no_history.ckpt")
    with pytest.raises(ValueError, match=r"is on in layers \[0, 1\] but the guard's history says \[\]"):
        fit(tmp_path, [QKGuard(threshold=1e-9)], fault(), max_steps=5, ckpt_path=tmp_path / "no_history.ckpt")
    content = torch.load(path, weights_only=True)
    content["state_dict"]["model.blocks.1.attention.qk_norm"].fill_(False)
    torch.save(content, tmp_path / "half.ckpt")
    with pytest.raises(ValueError, match=r"is on in layers \[0\] but the guard's history says \[0, 1\]"):
        fit(tmp_path, [QKGuard(threshold=1e-9)], fault(), max_steps=5, ckpt_path=tmp_path / "half.ckpt")


def test_validation_of_a_fired_checkpoint_runs_with_qk_norm(tmp_path: Path) -> None:
    path = checkpointed(tmp_path, [QKGuard(threshold=1e-9)]) / "at_4.ckpt"
    model = module()
    runner = trainer(tmp_path, plugin=fault(), limit_val_batches=1.0)
    (with_norm,) = runner.validate(model, data(), ckpt_path=path, verbose=False)
    assert all(site.qk_norm_on for site in attention_sites(model))
    for site in attention_sites(model):
        site.set_qk_norm(False)
    (without,) = runner.validate(model, data(), verbose=False)
    assert with_norm["loss/val"] != without["loss/val"]
