"""The attention fault: a streaming softmax whose running output and statistics are narrower than float32."""

from __future__ import annotations

from typing import Literal

from lightning_qk.precision.attention_fault import AttentionFault
from lightning_qk.precision.fault import FaultPrecision
from lightning_qk.precision.gradient_fault import GradientFault


class BF16CarryAttention(FaultPrecision):
    """Runs attention through the streaming-softmax emulator with chosen roundings, or through SDPA as a control.

    Example (YAML)::

        trainer:
          plugins:
            class_path: BF16CarryAttention
            init_args: {sites: bf16_carry, tile: 64, carry: 2, overrides: {s: fp32}}

    Args:
        sites: this and the next nine: see :class:`~lightning_qk.precision.attention_fault.AttentionFault`.
        carry: mantissa bits or ``bf16`` at the carries that ``sites`` rounds.
        overrides: single sites and variants by name.
        tile: keys after which the running statistics are rounded.
        q_tile: queries per tile; None is ``tile``.
        layers: layers that carry the fault; None is all.
        heads: heads that carry it; None is all.
        clean_sites: preset of clean passes, and outside the scope.
        core: ``streaming``, or PyTorch's own attention: ``sdpa``, or ``flash``.
        backend: of :func:`kernels.streaming_attention`.
        gradient: a fault of weight gradients besides.
        base: see :class:`FaultPrecision`, as the next two.
        faults_in_validation: keep the fault on there.
        seed: base seed of stochastic roundings.

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
        core: Literal["streaming", "sdpa", "flash"] = "streaming",
        backend: Literal["auto", "triton", "cpu", "reference"] = "auto",
        gradient: GradientFault | None = None,
        base: Literal["bf16", "fp32"] = "bf16",
        faults_in_validation: bool = False,
        seed: int = 0,
    ) -> None:
        attention = AttentionFault(sites, carry, overrides, tile, q_tile, layers, heads, clean_sites, core, backend)
        super().__init__(attention, gradient, base, faults_in_validation, seed)
