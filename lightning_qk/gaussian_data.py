"""Gaussian inputs and label noise for the student-teacher proxy, drawn and never stored.

**A batch is a pure function of (seed, batch index, rank, world size):** rank ``r`` of ``w`` draws micro-batch
``g = b * w + r`` from a Philox stream of its own, keyed by (seed, g) through NumPy's SeedSequence. So runs of a seed
have the same batches, whatever their arithmetic, and a resumed one goes on exactly.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_qk.counted_loader import Batch, CountedLoader

_TRAIN, _VAL = 0, 1


def draw(batch_size: int, width: int, noise_std: float, *key: int) -> Batch:
    """Inputs and label noise, float32 [batch_size, width] each, standard normal and ``noise_std`` times it."""
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
    x, noise = (generator.standard_normal((batch_size, width), dtype=np.float32) for _ in range(2))
    return torch.from_numpy(x), torch.from_numpy(noise) * noise_std


class GaussianLoader(CountedLoader):
    """Training batches of one rank, by their index."""

    def __init__(
        self, seed: int, batch_size: int, width: int, noise_std: float, length: int, rank: int = 0, world: int = 1
    ) -> None:
        super().__init__(length)
        self.seed, self.batch_size, self.width, self.noise_std = seed, batch_size, width, noise_std
        self.rank, self.world = rank, world

    @override
    def __getitem__(self, batch_idx: int) -> Batch:
        key = (self.seed, _TRAIN, batch_idx * self.world + self.rank)
        return draw(self.batch_size, self.width, self.noise_std, *key)


class GaussianValidation:
    """Batches without noise, the same every time and for every seed."""

    def __init__(self, batch_size: int, width: int, length: int, rank: int = 0, world: int = 1) -> None:
        self.batch_size, self.width, self.length, self.rank, self.world = batch_size, width, length, rank, world

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Batch]:
        for batch in range(self.length):
            x_BD, _ = draw(self.batch_size, self.width, 1.0, 0, _VAL, batch * self.world + self.rank)
            yield x_BD, torch.zeros_like(x_BD)


class GaussianData(LightningDataModule):
    """Batches ``(x, noise)``, both [batch_size, width]: x standard normal, fresh at every step.

    Args:
        batch_size: samples per rank per micro-batch.
        width: numbers in a sample. None takes the ``width`` of the LightningModule.
        noise_std: standard deviation of the label noise: 1e-3 in the paper, 5e-3 in the released code.
        seed: selects the batches. None takes the seed that ``seed_everything`` set.
        val_batches: validation batches per rank; they have no noise.

    Raises:
        ValueError: naming the argument.
    """

    def __init__(
        self,
        batch_size: int = 2048,
        width: int | None = None,
        noise_std: float = 1e-3,
        seed: int | None = None,
        val_batches: int = 4,
    ) -> None:
        super().__init__()
        for key, value in (("batch_size", batch_size), ("width", width), ("val_batches", val_batches)):
            if value is not None and value < 1:
                raise ValueError(f"GaussianData: {key}={value} must be at least 1.")
        if not 0 <= noise_std < math.inf:
            raise ValueError(f"GaussianData: noise_std={noise_std} must be at least 0 and finite.")
        self.batch_size, self.width, self.noise_std = batch_size, width, noise_std
        self.seed, self.val_batches = seed, val_batches

    def describe(self) -> dict[str, str | int | float]:
        """Plain values for a logger's hyper-parameters."""
        return {"data": "GaussianData", "width": self._width(), "noise_std": self.noise_std}

    @override
    def train_dataloader(self) -> GaussianLoader:
        trainer = self.trainer
        if trainer is None or trainer.max_steps == -1:
            raise MisconfigurationException("GaussianData has no end of its own: set trainer.max_steps.")
        length = trainer.max_steps * trainer.accumulate_grad_batches
        ranks = (trainer.global_rank, trainer.world_size)
        return GaussianLoader(self._seed(), self.batch_size, self._width(), self.noise_std, length, *ranks)

    @override
    def val_dataloader(self) -> GaussianValidation:
        ranks = (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)
        return GaussianValidation(self.batch_size, self._width(), self.val_batches, *ranks)

    @override
    def test_dataloader(self) -> GaussianValidation:
        return self.val_dataloader()

    @override
    def state_dict(self) -> dict[str, int | float]:
        world = 1 if self.trainer is None else self.trainer.world_size
        batch = {"batch_size": self.batch_size, "ranks": world}
        return {"seed": self._seed(), "width": self._width(), "noise_std": self.noise_std, **batch}

    @override
    def load_state_dict(self, state_dict: dict[str, int | float]) -> None:
        if self.trainer is None or self.trainer.state.fn != "fit":
            return  # evaluation does not depend on it
        now = self.state_dict()
        changed = [f"{key} {state_dict.get(key)} -> {now[key]}" for key in now if state_dict.get(key) != now[key]]
        if changed:
            rank_zero_warn(f"The data is not that of the checkpoint, so the resume is not exact: {', '.join(changed)}.")

    def _width(self) -> int:
        width = self.width
        if width is None and self.trainer is not None:
            width = getattr(self.trainer.lightning_module, "width", None)
        if width is None:
            raise MisconfigurationException(
                "GaussianData: width=None takes the `width` of the LightningModule, which has none. Set data.width."
            )
        return int(width)

    def _seed(self) -> int:
        seed = self.seed if self.seed is not None else os.environ.get("PL_GLOBAL_SEED")
        if seed is None:
            raise MisconfigurationException(
                "GaussianData: seed=None takes the seed of `seed_everything`, which was not called. Set data.seed."
            )
        return int(seed)
