"""Saves the random state, so that a resumed run draws the dropout masks the uninterrupted one would have drawn."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class RandomState(Callback):
    """Keeps torch's CPU and CUDA generator states in the checkpoint and puts them back as training starts.

    Ranks share rank zero's state, as they share the seed when Lightning sets processes up.
    """

    def __init__(self) -> None:
        self._restored: dict[str, Any] | None = None

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "cpu": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # not earlier: building the loader's iterator draws from the global generator
        if self._restored is None:
            return
        torch.set_rng_state(self._restored["cpu"])
        if self._restored["cuda"]:
            torch.cuda.set_rng_state_all(self._restored["cuda"])
        self._restored = None
