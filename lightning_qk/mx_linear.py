"""A linear layer whose weight-gradient product runs on MX-quantised operands.

For ``Y = X W'`` the gradients are ``dX = dY W`` and ``dW = dY' X``, the latter a sum over tokens. Low-precision
hardware multiplies blocks of 32 consecutive tokens that share a scale, so both operands are quantised along that axis;
the sum itself is exact up to the accumulator.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from kernels import mx_quantize


@dataclasses.dataclass(frozen=True)
class OperandFormat:
    """The format of one operand of a product; the fields are arguments of :func:`kernels.mx_quantize`."""

    fmt: str = "mxfp4_e2m1"
    scale: str = "floor"
    rounding: str = "rne"
    block: int | None = 32

    def __call__(self, x: Tensor, axis: int, seed: int) -> Tensor:
        return mx_quantize(x, self.fmt, axis, self.block, self.scale, self.rounding, seed)


class MXLinear(nn.Linear):
    """``nn.Linear`` with quantised operands of the weight gradient while a switch is on.

    Never constructed: :meth:`take_over` turns a layer into one, so that parameters, hooks, names and checkpoints stay.

    Attributes:
        switch: has ``on`` and ``seed``; read at every call.
        weight_gradient: format of both operands of dW.
        stream: keeps the random streams of layers apart.
    """

    switch: Any
    weight_gradient: OperandFormat
    stream: int

    @classmethod
    def take_over(cls, linear: nn.Linear, switch: Any, weight_gradient: OperandFormat, stream: int) -> None:
        """Makes ``linear`` an MXLinear in place.

        Raises:
            TypeError: it is a subclass of ``nn.Linear`` with a forward pass of its own.
        """
        if type(linear) not in (nn.Linear, cls):
            raise TypeError(f"{type(linear).__name__} is not a plain nn.Linear; its products cannot be quantised.")
        linear.__class__ = cls
        assert isinstance(linear, cls)
        linear.switch, linear.weight_gradient, linear.stream = switch, weight_gradient, stream

    @override
    def forward(self, x: Tensor) -> Tensor:
        """As ``nn.Linear``, under autocast too."""
        if not self.switch.on or not torch.is_grad_enabled():
            return super().forward(x)
        return self._multiply(x)

    @torch.compiler.disable  # the seed is new at every step: a graph guarded on it would be compiled anew each time
    def _multiply(self, x: Tensor) -> Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        seed = self.switch.seed * 1_000_003 + self.stream
        return _Product.apply(x.to(dtype), self.weight.to(dtype), bias, self.weight_gradient, seed)


class _Product(torch.autograd.Function):
    """Y = X W' + b whose dW is made of quantised dY and X."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, operand: OperandFormat, seed: int) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.operand, ctx.seed, ctx.has_bias = operand, seed, bias is not None
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, w, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (dy,) = grads
        x, w = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            dx = dy @ w
            dy_NO, x_NI = dy.flatten(0, -2), x.flatten(0, -2)
            dw = ctx.operand(dy_NO, 0, ctx.seed).T @ ctx.operand(x_NI, 0, ctx.seed + 1)
            return dx, dw, dy_NO.sum(0) if ctx.has_bias else None, None, None
