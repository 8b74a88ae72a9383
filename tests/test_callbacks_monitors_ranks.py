"""Early-warning monitors on two ranks, whole and sharded, and all together from YAML."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from ranks import Case, ddp, fsdp, on_two_ranks, run
from test_configs import merged

from callbacks import (
    DeltaSpectrumMonitor,
    EarlyWarning,
    HeadSpectrumMonitor,
    LogitBoundMonitor,
    SpectralAlignmentMonitor,
    TiedRowMonitor,
)
from lightning_qk.routes import attention_sites

CONFIGS = Path(__file__).parents[1] / "configs"
MONITORS: tuple[type[EarlyWarning], ...] = (
    DeltaSpectrumMonitor,
    HeadSpectrumMonitor,
    LogitBoundMonitor,
    SpectralAlignmentMonitor,
    TiedRowMonitor,
)


class Own(Callback):
    """What this rank alone would have read, where that is not what all read together."""

    def __init__(self) -> None:
        self.tied = 0.0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.tied = max(float(site.core.tied_fraction_H.max()) for site in attention_sites(pl_module))  # type: ignore[attr-defined]

    def verdict_fields(self) -> dict[str, float]:
        return {"tied": self.tied}


def case(steps: int) -> Case:
    settings = {"gradient_clip_val": None, "max_steps": steps}
    return Case(lambda: [Own(), *(kind(1) for kind in MONITORS)], fields={"bias": True}, settings=settings)


def last(result: dict[str, Any]) -> dict[str, float]:
    readings = {}
    for kind in MONITORS:
        found = result["fields"][kind.__name__]["warnings"]
        readings |= {name: warning["last"] for name, warning in found.items()}
    return readings


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@pytest.mark.parametrize("steps", [1, 3])
def test_both_ranks_read_what_one_process_reads(tmp_path: Path, steps: int) -> None:
    work = {s.__name__: partial(lambda s: run(tmp_path / s.__name__, case(steps), s()), s) for s in (ddp, fsdp)}
    found = on_two_ranks(tmp_path, work)
    single = run(tmp_path / "single", case(steps))
    expected = last(single)
    assert len(expected) == 12 and all(value > 0 for value in expected.values())
    for left, right in found.values():
        readings, own = last(left), [rank["fields"]["Own"]["tied"] for rank in (left, right)]
        assert readings == last(right)
        assert readings.pop("tied_rows") == max(own) >= single["fields"]["Own"]["tied"] > 0
        assert own[0] != own[1]
        for name, value in readings.items():
            assert value == pytest.approx(expected[name], rel=1e-2), name
    assert last(found["ddp"][0]) == last(found["fsdp"][0])


@pytest.mark.parametrize("arm", ["fp32", "fault", "guard"])
def test_the_overlay_adds_every_monitor_and_nothing_else(arm: str) -> None:
    files = [CONFIGS / "base.yaml", CONFIGS / "proxy.yaml", CONFIGS / "arms" / f"{arm}.yaml"]
    without, with_monitors = merged(*files), merged(*files, CONFIGS / "monitors" / "all.yaml")
    before, after = without.pop("trainer.callbacks"), with_monitors.pop("trainer.callbacks")
    assert without == with_monitors and after[: len(before)] == before
    added = [one["class_path"].split(".")[-1] for one in after[len(before) :]]
    assert sorted(added) == [kind.__name__ for kind in MONITORS]
    assert not any(one["init_args"]["thresholds"] for one in after[len(before) :])
