"""The attention fault: a streaming softmax whose running output and statistics are narrower than float32."""

from __future__ import annotations

from typing import Literal

from typing_extensions import override

from kernels import RoundingSites
from lightning_qk.attention import AttentionCore, SDPACore, StreamingCore
from lightning_qk.precision.fault import FaultPrecision


class BF16CarryAttention(FaultPrecision):
    """Runs attention through the streaming-softmax emulator with chosen roundings, or through SDPA as a control.

    Example (YAML)::

        trainer:
          plugins:
            class_path: BF16CarryAttention
            init_args: {sites: bf16_carry, tile: 64, carry: 2, overrides: {s: fp32}}

    Args:
        sites: a preset of :class:`kernels.RoundingSites`; ``fp32`` is the healthy control.
        carry: the rounding at those carries and statistics (scores, running sums, saved statistics) that the preset
            rounds: mantissa bits or ``bf16``, with a mode after a colon. None leaves the preset's own.
        overrides: single sites by name, over both.
        tile: keys after which the running statistics are rounded.
        q_tile: queries per tile; None is ``tile``. Part of the fault only where dk or dv round.
        layers: indices of the layers that carry the fault; None is all.
        heads: indices of the heads that carry it; None is all.
        clean_sites: preset of the reference pass, of validation and of layers and heads outside the scope.
        core: ``streaming``, or ``sdpa`` for PyTorch's own attention (then no site may round).
        backend: of :func:`kernels.streaming_attention`.
        base: see :class:`FaultPrecision`.
        faults_in_validation: see :class:`FaultPrecision`.
        seed: see :class:`FaultPrecision`.

    Raises:
        ValueError: naming the argument and the remedy.
    """

    def __init__(
        self,
        sites: str = "bf16_carry",
        carry: int | str | None = None,
        overrides: dict[str, int | float | str | bool] | None = None,
        tile: int = 512,
        q_tile: int | None = None,
        layers: list[int] | None = None,
        heads: list[int] | None = None,
        clean_sites: str = "fp32",
        core: Literal["streaming", "sdpa"] = "streaming",
        backend: Literal["auto", "cpu", "reference"] = "auto",
        base: Literal["bf16", "fp32"] = "bf16",
        faults_in_validation: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(base, faults_in_validation, seed)
        self.sites = RoundingSites.build(sites, overrides, carry)
        self.clean_sites = RoundingSites.preset(clean_sites)
        if tile < 1 or (q_tile is not None and q_tile < 1):
            raise ValueError(f"BF16CarryAttention: tile={tile} and q_tile={q_tile} must be at least 1.")
        if core == "sdpa" and not self.sites.is_exact:
            raise ValueError(
                "BF16CarryAttention: core='sdpa' cannot round inside attention; set sites: fp32 and no carry."
            )
        if core == "sdpa" and (layers is not None or heads is not None):
            raise ValueError("BF16CarryAttention: core='sdpa' carries no fault, so layers and heads have no meaning.")
        self.tile = (tile if q_tile is None else q_tile, tile)
        self.layers, self.heads, self.core, self.backend = layers, heads, core, backend

    @override
    def make_core(self, layer: int, n_layers: int, n_heads: int) -> AttentionCore:
        for name, chosen, count in (("layers", self.layers, n_layers), ("heads", self.heads, n_heads)):
            wrong = [index for index in chosen or [] if not 0 <= index < count]
            if wrong:
                raise ValueError(f"BF16CarryAttention: {name}={chosen} but the model has {name} 0 to {count - 1}.")
        if self.core == "sdpa":
            return SDPACore()
        inside = self.layers is None or layer in self.layers
        return StreamingCore(
            sites=self.sites if inside else self.clean_sites,
            clean_sites=self.clean_sites,
            tile=self.tile,
            switch=self.switch,
            backend=self.backend,
            heads=None if self.heads is None else tuple(sorted(set(self.heads))),
            layer=layer,
        )
