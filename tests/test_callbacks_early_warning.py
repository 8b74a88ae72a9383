"""The early-warning monitors' common part: when an alarm is one, and what the verdict says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from tiny import fit, module
from typing_extensions import override

from callbacks import CollapseStop, EarlyWarning, Limit, RunRecorder
from lightning_qk.verdict import read_verdict


class Counter(EarlyWarning):
    """Reads the optimizer step itself."""

    limits: ClassVar = {"up": Limit(), "down": Limit(-2.0, below=True)}

    @override
    def read(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        return {"up": float(trainer.global_step), "down": -float(trainer.global_step)}


class Crash(Callback):
    """Tells CollapseStop of a loss that runs away at a step."""

    def __init__(self, judge: CollapseStop, step: int) -> None:
        self.judge, self.step = judge, step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.judge.judge(0.0 if trainer.global_step < self.step else 1e9, trainer.global_step)


def alarms(monitor: EarlyWarning) -> dict[str, int | None]:
    return {name: warning["alarm_step"] for name, warning in monitor.verdict_fields()["warnings"].items()}


def test_an_alarm_is_the_first_of_patience_readings_in_a_row() -> None:
    monitor = Counter(patience=3, thresholds={"up": 1.0})
    for step, value in enumerate([2, 2, 0, 2, 2, 2, 2, 0, 2, 2, 2]):
        monitor.note({"up": float(value)}, step)
    assert alarms(monitor) == {"up": 3, "down": None}


@pytest.mark.parametrize("value, crossed", [(-2.0, False), (-2.1, True), (0.0, False), (float("nan"), True)])
def test_below_and_not_a_number(value: float, crossed: bool) -> None:
    assert Limit(-2.0, below=True).crossed(value) is crossed


def test_nothing_is_crossed_without_a_threshold() -> None:
    monitor = Counter(thresholds={"down": None})
    monitor.note({"up": float("inf"), "down": float("nan")}, 10)
    assert alarms(monitor) == {"up": None, "down": None}


def test_warm_up_raises_no_alarm() -> None:
    monitor = Counter(thresholds={"up": 0.5}, first_step=4)
    for step in range(1, 7):
        monitor.note({"up": 1.0}, step)
    assert alarms(monitor)["up"] == 4


@pytest.mark.parametrize(
    "arguments", [{"every_n_steps": 0}, {"patience": 0}, {"first_step": -1}, {"thresholds": {"sideways": 1.0}}]
)
def test_arguments_that_cannot_be(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"Counter: .*{next(iter(arguments))}"):
        Counter(**arguments)


def test_the_verdict_has_the_lead(tmp_path: Path) -> None:
    judge = CollapseStop(excess=0.5, margin=0.2, window=1, stop=False)
    judge.on_train_batch_end = lambda *_: None  # type: ignore[method-assign]
    monitor = Counter(every_n_steps=2, thresholds={"up": 3.0})
    fit(tmp_path, [judge, Crash(judge, 7), monitor, RunRecorder()], model=module(), max_steps=8)
    verdict = read_verdict(tmp_path)
    assert verdict is not None and verdict["collapse_step"] == 7
    assert verdict["warnings"]["up"] == {
        "threshold": 3.0,
        "below": False,
        "first_step": 0,
        "alarm_step": 4,
        "last": 8.0,
        "lead_steps": 3,
    }
    assert verdict["warnings"]["down"] == {
        "threshold": -2.0,
        "below": True,
        "first_step": 0,
        "alarm_step": 4,
        "last": -8.0,
        "lead_steps": 3,
    }


def test_no_collapse_no_lead(tmp_path: Path) -> None:
    fit(tmp_path, [CollapseStop(), Counter(every_n_steps=2), RunRecorder()], model=module(), max_steps=4)
    verdict = read_verdict(tmp_path)
    assert verdict is not None
    assert verdict["warnings"]["down"]["alarm_step"] == 4 and verdict["warnings"]["down"]["lead_steps"] is None


def test_a_streak_survives_a_resume() -> None:
    before, after = (Counter(patience=2, thresholds={"up": 1.0}) for _ in range(2))
    before.note({"up": 5.0}, 10)
    after.load_state_dict(before.state_dict())
    after.note({"up": 5.0}, 20)
    assert alarms(after)["up"] == 10
