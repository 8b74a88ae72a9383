"""A loader whose batches are functions of their index, so that its whole state is one number."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor

Batch = tuple[Tensor, Tensor]


class CountedLoader(ABC):
    """Training batches of one rank. Lightning saves and restores its state: the index of the next batch.

    Iterating goes on from that index, so a resumed run gets the batches that an uninterrupted one would, and a second
    epoch gets new ones. The loader has a length on purpose: without one Lightning fetches a batch ahead, and the saved
    state would be one too far.

    Args:
        length: batches in an epoch.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.batch = 0

    @abstractmethod
    def __getitem__(self, batch_idx: int) -> Batch:
        """The batch of an index, the same at every call."""

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Batch]:
        # Lightning stops by count and drops the iterator, so nothing may be left to do after the last batch
        for _ in range(self.length):
            self.batch += 1
            yield self[self.batch - 1]

    def state_dict(self) -> dict[str, int]:
        """The index of the next batch."""
        return {"batch": self.batch}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Goes on from there."""
        self.batch = state_dict["batch"]
