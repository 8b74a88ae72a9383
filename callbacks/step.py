"""Lightning has no hook after an optimizer step (lightning#11688); this tells whether the batch that ended took one."""

from __future__ import annotations

from lightning.pytorch import Trainer


class OptimizerStepClock:
    """Answers, once per ``on_train_batch_end``, whether ``trainer.global_step`` has moved since it was last asked."""

    def __init__(self) -> None:
        self._seen = 0

    def start(self, trainer: Trainer) -> None:
        """Call in ``on_train_start``: resumed steps are not new ones."""
        self._seen = trainer.global_step

    def stepped(self, trainer: Trainer) -> bool:
        """Whether this batch completed an optimizer step."""
        moved = trainer.global_step > self._seen
        self._seen = trainer.global_step
        return moved
