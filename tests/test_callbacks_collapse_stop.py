"""CollapseStop: the rule on made-up losses, and what a Trainer makes of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from tiny import fault, fit, module
from torch import Tensor

from callbacks import CollapseStop, RouteSplice
from callbacks.collapse_stop import _finite_gradient
from lightning_qk.precision import FaultPrecision, GradientFault


def judged(losses: Iterable[float], ended: bool = True, **settings: Any) -> CollapseStop:
    """The verdict on one loss a step; with the window of one step unless told otherwise."""
    stop = CollapseStop(**{"window": 1, "patience": 5, **settings})
    for step, loss in enumerate(losses, start=1):
        stop.judge(loss, step)
    if ended:
        stop.on_train_end(None, None)  # type: ignore[arg-type]
    return stop


def verdict(losses: Iterable[float], **settings: Any) -> tuple[str, int | None, int]:
    fields = judged(losses, **settings).verdict_fields()
    return fields["status"], fields["collapse_step"], fields["recovered_spikes"]


def test_falling_and_noisy_losses_are_healthy() -> None:
    assert verdict([5, 4, 3, 2, 3.4, 2, 1.9, 3.3]) == ("completed", None, 0)


def test_a_divergence_that_stays_is_a_collapse_from_its_onset() -> None:
    assert verdict([4, 3, 2, 3.6, 4, 4, 4, 4, 4, 4]) == ("collapsed", 4, 0)


@pytest.mark.parametrize(("loss", "status"), [(3.5, "completed"), (3.5001, "collapsed")])
def test_the_excess_is_exceeded_not_reached(loss: float, status: str) -> None:
    assert verdict([2, *[loss] * 9])[0] == status


@pytest.mark.parametrize(("back", "expected"), [(2.75, ("completed", None, 1)), (2.76, ("collapsed", 2, 0))])
def test_coming_back_to_within_the_margin_is_recovery(back: float, expected: tuple[str, int | None, int]) -> None:
    assert verdict([2, 4, 4, back, *[back] * 9]) == expected


def test_a_second_spike_is_judged_anew() -> None:
    assert verdict([2, 4, 2, 2, 4, 4, 2, 4, *[4] * 6]) == ("collapsed", 8, 2)


def test_excess_at_the_end_counts_without_waiting() -> None:
    losses = [2.0, 2.0, 2.0, 4.0, 4.0]
    assert verdict(losses) == ("collapsed", 4, 0)


@pytest.mark.parametrize(("patience", "confirmed"), [(0, 2), (3, 5), (7, 9)])
def test_patience_is_the_steps_until_training_is_ended(patience: int, confirmed: int) -> None:
    losses = [2.0, *[4.0] * 20]
    for n, ended in ((confirmed - 1, False), (confirmed, True)):
        assert judged(losses[:n], patience=patience).state_dict()["ended"] is ended
        assert judged(losses[:n], patience=patience, stop=False).state_dict()["ended"] is False


def test_a_run_that_goes_on_is_judged_at_its_end() -> None:
    fields = judged([2, *[4] * 60, *[1] * 9], stop=False).verdict_fields()
    assert (fields["status"], fields["collapse_step"], fields["recovered_spikes"]) == ("completed", None, 1)
    assert judged([2, *[4] * 60], stop=False).verdict_fields()["collapse_step"] == 2


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_ends_it_at_once(loss: float) -> None:
    assert verdict([2, 2, loss]) == ("nonfinite", 3, 0)
    assert verdict([loss, 2, 2]) == ("nonfinite", 1, 0)
    fields = judged([2, 4, loss, 2]).verdict_fields()
    assert (fields["status"], fields["collapse_step"]) == ("nonfinite", 2)  # where the divergence began
    assert fields["loss"] == 3 and fields["min_loss"] == 2


def test_the_window_averages_and_waits_to_be_full() -> None:
    assert verdict([9, 1, 1, 1], window=4, excess=1.0, margin=0.5)[0] == "completed"  # no minimum before step 4
    single = [2, 2, 2, 2, 6, 2, 2, 2, 2, 2, 2, 2]
    assert verdict(single, window=4) == ("completed", None, 0)  # the mean is up by 1 only
    assert verdict(single, window=2) == ("completed", None, 1)
    fields = judged(range(10), window=4, excess=100, margin=1).verdict_fields()
    assert fields["min_loss"] == 1.5  # 0, 1, 2, 3
    assert judged(range(100), window=4, excess=1000, margin=1).verdict_fields()["loss"] == sum(range(50, 100)) / 50


@pytest.mark.parametrize("cut", range(1, 14))
def test_state_round_trip_anywhere_changes_no_verdict(cut: int) -> None:
    losses = [3, 2, 2, 4, 2, 2, 4, 4, 4, 4, 4, 4, math.nan, 2]
    whole = judged(losses, window=2)
    first = judged(losses[:cut], window=2, ended=False)
    second = CollapseStop(window=2, patience=5)
    second.load_state_dict(first.state_dict())
    for step, loss in enumerate(losses[cut:], start=cut + 1):
        second.judge(loss, step)
    assert second.verdict_fields() == whole.verdict_fields()
    assert second.state_dict() == whole.state_dict()


def test_state_can_be_loaded_with_weights_only(tmp_path: Path) -> None:
    state = judged([2.0, 4.0, 4.0], ended=False).state_dict()
    torch.save(state, tmp_path / "state")
    assert torch.load(tmp_path / "state", weights_only=True) == state


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"margin": 2.0}, "margin=2.0"),
        ({"margin": -0.1}, "margin=-0.1"),
        ({"window": 0}, "window=0"),
        ({"patience": -1}, "patience=-1"),
    ],
)
def test_argument_errors_name_the_argument(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        CollapseStop(**settings)


class Diverge(Callback):
    """From a step on, adds to the loss that others see; the loss of the module is a tensor they share."""

    def __init__(self, after: int, by: float) -> None:
        self.after, self.by = after, by

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step > self.after:
            outputs["loss"] += self.by / trainer.accumulate_grad_batches


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("stop", "steps"), [(True, 7), (False, 10)])
def test_a_trainer_stops_when_told_to_and_says_so(
    tmp_path: Path, stop: bool, steps: int, accumulate: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    judge = CollapseStop(window=1, patience=3, stop=stop)
    _, recording = fit(tmp_path, [Diverge(3, 9.0), judge], fault(), max_steps=10, accumulate_grad_batches=accumulate)
    fields = judge.verdict_fields()
    assert (fields["status"], fields["collapse_step"]) == ("collapsed", 4)
    assert len(recording.losses) == steps * accumulate
    assert recording.logged[-1]["collapse/excess"] == pytest.approx(9, abs=1)
    assert recording.logged[2 * accumulate]["collapse/excess"] < 1
    said = [message for message in caplog.messages if message.startswith("CollapseStop")]
    assert said == ["CollapseStop: collapsed at step 4; training ends at step 7."] * stop


@pytest.mark.parametrize("stop", [True, False])
def test_a_trainer_always_stops_at_a_loss_that_is_not_finite(tmp_path: Path, stop: bool) -> None:
    judge = CollapseStop(stop=stop)
    _, recording = fit(tmp_path, [Diverge(1, math.nan), judge], max_steps=5)
    assert len(recording.losses) == 2
    assert judge.verdict_fields()["status"] == "nonfinite" and judge.verdict_fields()["collapse_step"] == 2


class Poison(Callback):
    """Makes one element of one gradient of a step something else, before clipping."""

    def __init__(self, step: int, value: float) -> None:
        self.step, self.value = step, value

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if trainer.global_step + 1 == self.step:
            p = next(p for p in pl_module.parameters() if p.grad is not None)
            p.grad.view(-1)[-1] = self.value  # type: ignore[union-attr]


@pytest.mark.parametrize("stop", [True, False])
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize(("value", "steps"), [(math.nan, 2), (math.inf, 2), (1e15, 3)])
def test_a_gradient_that_is_not_finite_ends_it_in_its_own_step(
    tmp_path: Path, value: float, steps: int, clip: float | None, stop: bool
) -> None:
    """The last step's too, of which no loss tells; one that is only large does not."""
    for last in (2, 3):
        judge = CollapseStop(stop=stop)
        model = module(optimizer="sgd", lr=1e-30)
        settings: dict[str, Any] = dict(max_steps=last, gradient_clip_val=clip)
        _, recording = fit(tmp_path, [Poison(2, value), judge], model=model, **settings)
        assert len(recording.losses) == min(steps, last)
        fields = judge.verdict_fields()
        expected = ("completed", None) if math.isfinite(value) else ("nonfinite", 2)
        assert (fields["status"], fields["collapse_step"]) == expected


def test_a_gradient_that_a_splice_cleans_is_not_held_against_the_run(tmp_path: Path) -> None:
    class PoisonsFinished(GradientFault):
        def quantise(self, gradient: Tensor, seed: int) -> Tensor:
            return gradient * math.nan

    for splice, status in (([RouteSplice("qk")], "completed"), ([], "nonfinite")):
        judge, plugin = CollapseStop(), FaultPrecision(gradient=PoisonsFinished("qk"), base="fp32")
        fit(tmp_path, [judge, *splice], plugin)
        assert judge.status == status


def test_sparse_gradients_are_looked_at(tmp_path: Path) -> None:
    for value, status in ((1.0, "completed"), (math.nan, "nonfinite")):
        embedding, judge = torch.nn.Embedding(4, 2, sparse=True), CollapseStop()
        (embedding(torch.tensor([1, 2])) * torch.tensor([1.0, value])).sum().backward()
        embedding.device = torch.device("cpu")  # type: ignore[assignment]
        judge.judge(1.0, 1, _finite_gradient(SimpleNamespace(world_size=1), embedding))  # type: ignore[arg-type]
        assert judge.status == status


def test_the_loss_judged_is_the_mean_of_the_micro_batches(tmp_path: Path) -> None:
    judge = CollapseStop(window=1)
    _, recording = fit(tmp_path, [judge], max_steps=3, accumulate_grad_batches=2)
    means = [(a + b) / 2 for a, b in zip(recording.losses[::2], recording.losses[1::2], strict=True)]
    assert list(judge._tail) == pytest.approx(means, rel=1e-6)


def test_a_resumed_run_that_had_collapsed_does_not_go_on(tmp_path: Path) -> None:
    judge = CollapseStop(window=1, patience=0)
    judge.load_state_dict(judged([2, 9, 9, 9, 9, 9, 9, 9]).state_dict())
    _, recording = fit(tmp_path, [judge], max_steps=5)
    assert recording.losses == []
    going_on = CollapseStop(window=1, patience=0, stop=False)
    going_on.load_state_dict(judge.state_dict())
    assert len(fit(tmp_path, [going_on], max_steps=5)[1].losses) == 5
