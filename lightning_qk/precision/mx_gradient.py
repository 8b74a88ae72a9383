"""The gradient fault: weight gradients of a route that pass through a microscaling (MX) format."""

from __future__ import annotations

from typing import Literal

from lightning_qk.precision.attention_fault import AttentionFault
from lightning_qk.precision.fault import FaultPrecision
from lightning_qk.precision.gradient_fault import GradientFault


class MXGradient(FaultPrecision):
    """Quantises the weight gradients of a route; attention is the model's own unless ``attention`` says otherwise.

    Example (YAML)::

        trainer:
          plugins:
            class_path: MXGradient
            init_args: {route: mlp, fmt: mxfp4_e2m1, attention: {sites: bf16_carry, carry: 2}}

    Args:
        route: this and the next eight: see :class:`~lightning_qk.precision.gradient_fault.GradientFault`.
        layers: its layers; None is all.
        fmt: a format of :func:`kernels.mx_quantize`.
        scale: how the shared scale is chosen.
        rounding: of the elements.
        block: elements that share a scale; None is a whole row.
        axis: along which a finished gradient is cut into blocks.
        error_gain: factor on the error; 1 is the real fault.
        where: ``gradient`` (finished) or ``product`` (operands of the product that makes it).
        attention: roundings inside attention besides.
        base: see :class:`FaultPrecision`, as the next two.
        faults_in_validation: keep faults of the passes on there.
        seed: base seed of stochastic roundings.

    Raises:
        ValueError: naming the argument and the remedy.
    """

    def __init__(
        self,
        route: str = "mlp",
        layers: list[int] | None = None,
        fmt: str = "mxfp4_e2m1",
        scale: str = "floor",
        rounding: str = "rne",
        block: int | None = 32,
        axis: int = -1,
        error_gain: float = 1.0,
        where: Literal["gradient", "product"] = "gradient",
        attention: AttentionFault | None = None,
        base: Literal["bf16", "fp32"] = "bf16",
        faults_in_validation: bool = False,
        seed: int = 0,
    ) -> None:
        gradient = GradientFault(route, layers, fmt, scale, rounding, block, axis, error_gain, where)
        super().__init__(attention, gradient, base, faults_in_validation, seed)
