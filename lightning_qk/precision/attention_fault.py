"""The attention part of a run's arithmetic: which roundings, in which layers and heads, by which backend."""

from __future__ import annotations

import dataclasses
from typing import Literal

from kernels import RoundingSites
from kernels.sites import PRESETS
from lightning_qk.attention import AttentionCore, FaultSwitch, FlashCore, SDPACore, StreamingCore

_STOCK = {"sdpa": SDPACore, "flash": FlashCore}


@dataclasses.dataclass
class AttentionFault:
    """A streaming softmax whose running output and statistics are narrower than float32.

    Args:
        sites: a preset of :class:`kernels.RoundingSites`; ``fp32`` is the healthy control.
        carry: the rounding at those carries and statistics (scores, running sums, saved statistics) that the preset
            rounds: mantissa bits or ``bf16``, with a mode after a colon. None leaves the preset's own.
        overrides: single sites and variants by name, over both.
        tile: keys after which the running statistics are rounded.
        q_tile: queries per tile; None is ``tile``. Part of the fault only where dk or dv round.
        layers: indices of the layers that carry the fault; None is all.
        heads: indices of the heads that carry it; None is all.
        clean_sites: preset of the reference pass, of validation and of layers and heads outside the scope.
        core: ``streaming``, or PyTorch's own attention, in which no site rounds: ``sdpa``, by whichever kernel, or
            ``flash``, by FlashAttention or an error.
        backend: of :func:`kernels.streaming_attention`.

    Raises:
        ValueError: naming the argument and the remedy.
    """

    sites: str = "bf16_carry"
    carry: int | str | None = None
    overrides: dict[str, int | float | str | bool] | None = None
    tile: int = 512
    q_tile: int | None = None
    layers: list[int] | None = None
    heads: list[int] | None = None
    clean_sites: str = "fp32"
    core: Literal["streaming", "sdpa", "flash"] = "streaming"
    backend: Literal["auto", "triton", "cpu", "reference"] = "auto"

    def __post_init__(self) -> None:
        for key in ("sites", "clean_sites"):
            if getattr(self, key) not in PRESETS:
                raise ValueError(f"attention: {key}={getattr(self, key)!r} is not one of {', '.join(PRESETS)}.")
        self.faulty = RoundingSites.build(self.sites, self.overrides, self.carry)
        self.clean = RoundingSites.preset(self.clean_sites)
        if self.tile < 1 or (self.q_tile is not None and self.q_tile < 1):
            raise ValueError(f"attention: tile={self.tile} and q_tile={self.q_tile} must be at least 1.")
        if self.core not in ("streaming", *_STOCK):
            raise ValueError(f"attention: core={self.core!r} is not one of streaming, {', '.join(_STOCK)}.")
        if self.core in _STOCK and not self.faulty.is_exact:
            raise ValueError(f"attention: core={self.core!r} cannot round inside attention; set sites: fp32, no carry.")
        if self.core in _STOCK and (self.layers is not None or self.heads is not None):
            raise ValueError(f"attention: core={self.core!r} carries no fault, so layers and heads have no meaning.")

    @property
    def is_faulty(self) -> bool:
        """Whether a pass with the fault on differs from a clean one."""
        return self.core == "streaming" and self.faulty != self.clean

    def make_core(self, switch: FaultSwitch, layer: int, n_layers: int, n_heads: int) -> AttentionCore:
        """The core of one layer.

        Raises:
            ValueError: the scope names a layer or head that the model does not have.
        """
        for name, chosen, count in (("layers", self.layers, n_layers), ("heads", self.heads, n_heads)):
            wrong = [index for index in chosen or [] if not 0 <= index < count]
            if wrong:
                raise ValueError(f"attention: {name}={chosen} but the model has {name} 0 to {count - 1}.")
        if self.core in _STOCK:
            return _STOCK[self.core]()
        inside = self.layers is None or layer in self.layers
        return StreamingCore(
            sites=self.faulty if inside else self.clean,
            clean_sites=self.clean,
            tile=(self.tile if self.q_tile is None else self.q_tile, self.tile),
            switch=switch,
            backend=self.backend,
            heads=None if self.heads is None else tuple(sorted(set(self.heads))),
            layer=layer,
        )
