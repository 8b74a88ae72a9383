"""Keeps a resumed run from saving what cannot be gone on from, and from leaving its checkpoints beside old ones."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override


class ResumedCheckpoints(Callback):
    """Tells every ``ModelCheckpoint`` which step a resumed run begins with, and to write over files of that name.

    Lightning's has no memory of the step that it saved last. With gradient accumulation it would save it again after
    the next micro-batch, whose gradient is in no checkpoint: a run that goes on from there trains on other gradients.
    Nor does it know of files that are newer than the checkpoint it goes on from, so it would write ``last-v1.ckpt`` and
    leave an old ``last.ckpt`` for good; nor that there is one, so that where no step was left to save it would save the
    end of training, as the run that was not killed does not.
    """

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for one in trainer.checkpoint_callbacks:
            if isinstance(one, ModelCheckpoint):
                one._last_global_step_saved = trainer.global_step
                one._enable_version_counter = False
                if trainer.ckpt_path is not None and Path(trainer.ckpt_path).resolve() == _last_file(one):
                    one._last_checkpoint_saved = str(trainer.ckpt_path)


def _last_file(callback: ModelCheckpoint) -> Path | None:
    name = f"{callback.CHECKPOINT_NAME_LAST}{callback.FILE_EXTENSION}"
    return None if callback.dirpath is None else (Path(callback.dirpath) / name).resolve()
