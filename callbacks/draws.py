"""Random tensors that are a function of a key, so that they are the same on every rank and after a resume."""

from __future__ import annotations

import os
import zlib

import torch
from torch import Tensor


def generator(*key: int | str) -> torch.Generator:
    """A CPU generator whose stream depends on ``key`` alone."""
    # hashed to 32 bits: torch's CPU generator drops the upper half of a seed
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def run_seed(seed: int | None) -> int:
    """The seed given, or else that of ``seed_everything``; 0 if that was not called either."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed


def normal(shape: tuple[int, ...], device: torch.device, draw: torch.Generator) -> Tensor:
    """Independent standard normal numbers in float64, drawn on the CPU whatever the device."""
    return torch.randn(shape, generator=draw, dtype=torch.float64).to(device)
