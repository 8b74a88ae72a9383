"""Strategies under which a route has its matrices, and those under which it has not."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

SPLITS_WEIGHTS = (
    "flattens or splits the weights, so that faults, monitors and guards would not find the matrices of a route. DDP "
    "(configs/hardware/ddp.yaml, DDPStrategy) and FSDP2 (configs/hardware/fsdp2.yaml, ModelParallelStrategy) work."
)


def refuse_strategy(trainer: Trainer) -> None:
    """Refuses what only looks at weights or edits them whole; call it before anything is sharded.

    Raises:
        MisconfigurationException: the strategy is FSDP1 or DeepSpeed.
    """
    if isinstance(trainer.strategy, FSDPStrategy | DeepSpeedStrategy):
        raise MisconfigurationException(f"trainer.strategy: {type(trainer.strategy).__name__} {SPLITS_WEIGHTS}")
