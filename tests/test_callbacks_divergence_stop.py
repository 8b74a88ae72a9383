"""The divergence criterion: the moving average's change, in numbers and in runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from student import fit_student, mx, student

from callbacks import CollapseStop, DivergenceStop


def judged(losses: list[float], **arguments: Any) -> int | None:
    rule = DivergenceStop(**arguments)
    for step, loss in enumerate(losses, 1):
        rule.judge(loss, step)
    return rule.divergence_step


def by_definition(losses: list[float], rise: float, window: int) -> int | None:
    means = np.convolve(losses, np.ones(window) / window, "valid")
    above = np.flatnonzero(np.diff(means) > rise)
    return int(above[0]) + window + 1 if len(above) else None


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("rise", "window"), [(0.008, 100), (0.05, 10), (0.2, 1)])
def test_it_is_its_definition(seed: int, rise: float, window: int) -> None:
    draw = np.random.default_rng(seed)
    losses = (2.0 - np.linspace(0, 1, 400) + 0.02 * draw.standard_normal(400)).tolist()
    start = int(draw.integers(150, 380))
    losses[start:] = [loss + 0.02 * seed * i for i, loss in enumerate(losses[start:])]
    assert judged(losses, rise=rise, window=window) == by_definition(losses, rise, window)


def test_the_first_step_counts_and_a_recovery_does_not_undo_it() -> None:
    losses = [1.0] * 150 + [2.0] * 3 + [1.0] * 50
    assert judged(losses) == 151
    assert judged([1.0] * 150 + [1.79] * 50) is None and judged([1.0] * 150 + [1.81] * 50) == 151
    assert judged([3.0, 2.0]) is None


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_diverges(loss: float) -> None:
    assert judged([1.0, loss, 1.0]) == 2


def test_beside_the_crash_rule_in_a_run(tmp_path: Path) -> None:
    rule, crash = DivergenceStop(rise=1e-3, window=2), CollapseStop(stop=False)
    _, recording = fit_student(tmp_path, [rule, crash], mx(), student(lr=0.3), max_steps=12)
    assert rule.divergence_step == by_definition(recording.losses, 1e-3, 2) is not None
    assert rule.verdict_fields() == {"divergence_step": rule.divergence_step}
    changes = [logged["divergence/change"] for logged in recording.logged if "divergence/change" in logged]
    expected = np.diff(np.convolve(recording.losses, np.ones(2) / 2, "valid"))
    assert changes == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-5)


def test_it_stops_when_told_to(tmp_path: Path) -> None:
    rule = DivergenceStop(rise=1e-3, window=2, stop=True, patience=3)
    module, _ = fit_student(tmp_path, [rule], mx(), student(lr=0.3), max_steps=30)
    assert rule.divergence_step is not None
    assert module.trainer.global_step == rule.divergence_step + 3


def test_its_state_is_all_it_knows() -> None:
    losses = [1.0] * 110 + [3.0]
    whole, first = DivergenceStop(), DivergenceStop()
    for step, loss in enumerate(losses, 1):
        whole.judge(loss, step)
        if step <= 60:
            first.judge(loss, step)
    second = DivergenceStop()
    second.load_state_dict(first.state_dict())
    for step, loss in enumerate(losses[60:], 61):
        second.judge(loss, step)
    assert second.divergence_step == whole.divergence_step == 111
    assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize("arguments", [{"rise": 0.0}, {"window": 0}, {"patience": -1}])
def test_argument_errors(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="DivergenceStop"):
        DivergenceStop(**arguments)
