"""The configuration files of a run's directory, written whole or not at all; Lightning writes them in place."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.core.saving import save_hparams_to_yaml
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from lightning_qk.verdict import VERDICT_FILE, remove_stale, write_text_atomic

CONFIG_FILE = "config.yaml"


class SaveConfig(SaveConfigCallback):
    """Saves ``config.yaml`` into the run's directory; to be given ``save_to_log_dir=False``."""

    @override
    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        text = self.parser.dump(self.config, skip_none=False)
        write_text_atomic(Path(trainer.default_root_dir) / CONFIG_FILE, text)


class RunLogger(TensorBoardLogger):
    """TensorBoard's logger; a ``hparams.yaml`` that a kill cut short would stay so, for it is written only once."""

    @override
    @rank_zero_only
    def save(self) -> None:
        file = Path(self.log_dir) / self.NAME_HPARAMS_FILE
        if file.parent.is_dir() and not file.exists():
            temporary = file.with_name(f".{file.name}.tmp")
            save_hparams_to_yaml(temporary, self.hparams)
            temporary.replace(file)
        super().save()


def remove_remains(run_dir: Path) -> None:
    """Removes what a killed process left of the files that only the training process writes."""
    remove_stale(run_dir, CONFIG_FILE, TensorBoardLogger.NAME_HPARAMS_FILE, "progress.json", VERDICT_FILE)
