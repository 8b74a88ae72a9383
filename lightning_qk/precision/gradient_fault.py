"""The gradient part of a run's arithmetic: weight gradients that pass through a microscaling (MX) format."""

from __future__ import annotations

import dataclasses
import math
import zlib
from typing import Literal

import torch
from torch import Tensor, nn

from kernels import mx_quantize
from lightning_qk.module import full, write_full
from lightning_qk.mx_linear import MXLinear
from lightning_qk.operand_format import OperandFormat
from lightning_qk.routes import ROUTES, route_linears, route_parameters


@dataclasses.dataclass
class GradientFault:
    """MX quantisation of the weight gradients of a route, either of two different faults.

    ``where="gradient"`` quantises the finished gradient, once an optimizer step, after reduction and accumulation (the
    fault of arXiv 2608.02091). ``where="product"`` quantises the two operands of the product that makes it, dY' X,
    along the tokens that it sums over, in every backward pass, as a low-precision matmul would (arXiv 2605.09825).

    Args:
        route: a route of :func:`lightning_qk.routes.route_parameters`.
        layers: its layers; None is all.
        fmt: a format of :func:`kernels.mx_quantize`, as are the next three.
        scale: how the shared scale is chosen.
        rounding: of the elements; ``sr`` draws by (seed, step, name of the weight).
        block: elements that share a scale; None is a whole row.
        axis: along which a finished gradient [out, in] is cut into blocks; a product is always cut along its tokens.
        error_gain: factor on the error, quantised less clean. 1 is the real fault; anything else is an amplified one.
        where: ``gradient`` or ``product``.

    Raises:
        ValueError: naming the argument.
    """

    route: str = "mlp"
    layers: list[int] | None = None
    fmt: str = "mxfp4_e2m1"
    scale: str = "floor"
    rounding: str = "rne"
    block: int | None = 32
    axis: int = -1
    error_gain: float = 1.0
    where: Literal["gradient", "product"] = "gradient"

    def __post_init__(self) -> None:
        if self.route not in ROUTES:
            raise ValueError(f"gradient: route={self.route!r} is not one of {', '.join(ROUTES)}.")
        if self.where not in ("gradient", "product"):
            raise ValueError(f"gradient: where={self.where!r} must be 'gradient' or 'product'.")
        if self.axis not in (-2, -1, 0, 1):
            raise ValueError(f"gradient: axis={self.axis} must be 0 or 1 (a weight has two axes), or negative.")
        if not math.isfinite(self.error_gain):
            raise ValueError(f"gradient: error_gain={self.error_gain} must be finite.")
        if self.where == "product" and (self.error_gain != 1.0 or self.axis != -1):
            raise ValueError("gradient: where='product' has no finished error: leave error_gain=1 and axis=-1.")
        self.quantise(torch.zeros(1, 1), 0)  # the format's own arguments complain here, not in the first step

    def quantise(self, gradient: Tensor, seed: int) -> Tensor:
        """The finished gradient in the format, error times ``error_gain``."""
        quantised = mx_quantize(gradient, self.fmt, self.axis, self.block, self.scale, self.rounding, seed)
        return quantised if self.error_gain == 1.0 else gradient + self.error_gain * (quantised - gradient)

    def convert(self, module: nn.Module, switch: object) -> None:
        """Gives the route's layers quantised products, in place, if that is where the fault is.

        Raises:
            ValueError: the model has no such layer or route.
        """
        route_parameters(module, self.route, self.layers)  # complains here, not in the first step
        if self.where == "product":
            operand = OperandFormat(self.fmt, self.scale, self.rounding, self.block)
            for name, linear in route_linears(module, self.route, self.layers).items():
                MXLinear.take_over(linear, switch, weight_gradient=operand, stream=zlib.crc32(name.encode()))

    @torch.no_grad()
    def perturb(self, module: nn.Module, seed: int) -> None:
        """Quantises the finished gradients of the route in place, if that is where the fault is.

        Args:
            module: holds the route.
            seed: of this optimizer step, for stochastic rounding.
        """
        if self.where == "product":
            return
        for name, p in route_parameters(module, self.route, self.layers).items():
            if p.grad is not None:
                # whole: a block may lie across the shards of FSDP2
                write_full(p.grad, self.quantise(full(p.grad), seed ^ zlib.crc32(name.encode())))
