"""Makes up for a validation that a killed run still owed."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class ResumedValidation(Callback):
    """Validates before a resumed run goes on, if its checkpoint was saved at a step that validates.

    Such a checkpoint is saved before the validation, and Lightning takes that one for done when it resumes. Whether it
    was is not known, nor would its result be in the checkpoint; the same numbers at the same step do no harm.
    """

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop = trainer.fit_loop.epoch_loop
        if not loop.restarted_on_train_batch_end or trainer.check_val_every_n_epoch is not None:
            return
        interval = trainer.val_check_batch
        if not trainer.enable_validation or interval is None or (loop.total_batch_idx + 1) % interval:
            return
        # then leave the loop as it was found: Lightning has not begun to go on yet
        loop.val_loop.restarting = False
        trainer.validating = True
        loop.val_loop.run()
        trainer.training = True
        loop.val_loop.restarting, loop.val_loop._has_run = True, False
