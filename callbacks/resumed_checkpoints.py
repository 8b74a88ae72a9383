"""Keeps a resumed run from saving what cannot be gone on from, and from leaving its checkpoints beside old ones."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override


class ResumedCheckpoints(Callback):
    """Tells every ``ModelCheckpoint`` which step a resumed run begins with, and to write over files of that name.

    Lightning's has no memory of the step that it saved last. With gradient accumulation it would save it again after
    the next micro-batch, whose gradient is in no checkpoint: a run that goes on from there trains on other gradients.
    Nor does it know of files that are newer than the checkpoint it goes on from, so it would write ``last-v1.ckpt`` and
    leave an old ``last.ckpt`` for good.
    """

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for one in trainer.checkpoint_callbacks:
            if isinstance(one, ModelCheckpoint):
                one._last_global_step_saved = trainer.global_step
                one._enable_version_counter = False
