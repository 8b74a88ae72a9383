"""A linear layer whose three products run on quantised operands.

For ``Y = X W'`` the gradients are ``dX = dY W`` and ``dW = dY' X``. Low-precision hardware multiplies blocks of
numbers that share a scale and lie along the axis that the product sums over: the inputs of Y, the outputs of dX, the
tokens of dW. So each operand is quantised along that axis; the sum itself is exact up to the accumulator. Which of the
six operands, and how, is the :class:`~lightning_qk.mx_policy.MXPolicy`'s to say.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from kernels import random_hadamard
from kernels.scaled_products import ScaledOperand, native_obstacle, native_product, shape_obstacle
from lightning_qk.mx_policy import MXPolicy
from lightning_qk.operand_format import NVFP4, OperandFormat

__all__ = ["HasPolicy", "MXLinear", "OperandFormat"]
_NVFP4_BLOCK = 16


class HasPolicy(Protocol):
    """Where layers read the policy of the moment, so that a change of it needs no rebuild."""

    policy: MXPolicy
    native: bool


class MXLinear(nn.Linear):
    """``nn.Linear`` with quantised operands while a switch is on.

    Never constructed: :meth:`take_over` turns a layer into one, so that parameters, hooks, names and checkpoints stay.

    Attributes:
        switch: has ``on`` and ``seed``; read at every call.
        weight_gradient: format of both operands of dW, over the policy's; None leaves them to the policy.
        arithmetic: has the policy; None rounds nothing besides.
        stream: keeps the random streams of layers apart.
    """

    switch: Any
    stream: int
    weight_gradient: OperandFormat | None = None
    arithmetic: HasPolicy | None = None

    @classmethod
    def take_over(
        cls,
        linear: nn.Linear,
        switch: Any,
        weight_gradient: OperandFormat | None = None,
        stream: int = 0,
        arithmetic: HasPolicy | None = None,
    ) -> None:
        """Makes ``linear`` an MXLinear in place; what an earlier call gave and this one does not, stays.

        Raises:
            TypeError: it is a subclass of ``nn.Linear`` with a forward pass of its own.
        """
        if type(linear) not in (nn.Linear, cls):
            raise TypeError(f"{type(linear).__name__} is not a plain nn.Linear; its products cannot be quantised.")
        linear.__class__ = cls
        assert isinstance(linear, cls)
        linear.switch, linear.stream = switch, stream
        linear.weight_gradient = linear.weight_gradient if weight_gradient is None else weight_gradient
        linear.arithmetic = linear.arithmetic if arithmetic is None else arithmetic

    @property
    def policy(self) -> MXPolicy:
        """Of this call."""
        policy = MXPolicy() if self.arithmetic is None else self.arithmetic.policy
        if self.weight_gradient is None:
            return policy
        return dataclasses.replace(policy, x_wgrad=self.weight_gradient, dy_wgrad=self.weight_gradient)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """As ``nn.Linear``, under autocast too."""
        return self._multiply(x) if self.switch.on else super().forward(x)

    @torch.compiler.disable  # the seed is new at every step: a graph guarded on it would be compiled anew each time
    def _multiply(self, x: Tensor) -> Tensor:
        policy = self.policy
        if policy.linear_is_exact or (policy.forward_is_exact and not torch.is_grad_enabled()):
            return super().forward(x)
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        seed = self.switch.seed * 1_000_003 + self.stream
        native = self.arithmetic is not None and self.arithmetic.native
        return _Products.apply(x.to(dtype), self.weight.to(dtype), bias, policy, seed, native)


def bf16(x: Tensor, on: bool) -> Tensor:
    """``x`` rounded to bfloat16 (nearest even) in its own dtype, if ``on``."""
    return x.bfloat16().to(x.dtype) if on else x


class _Operand(NamedTuple):
    """A tensor, the axis that the product sums over, its format and the seed of its draws."""

    x: Tensor
    axis: int
    fmt: OperandFormat | None
    seed: int

    def quantised(self) -> Tensor:
        return self.x if self.fmt is None else self.fmt(self.x, self.axis, self.seed)

    def transformed(self, block: int, seed: int) -> _Operand:
        return self._replace(x=random_hadamard(self.x, self.axis, block, seed))

    def scaled(self) -> ScaledOperand:
        assert self.fmt is not None
        return ScaledOperand(self.x, self.axis, **dataclasses.asdict(self.fmt), seed=self.seed)


def hadamard_block(a: OperandFormat | None, b: OperandFormat | None) -> int | None:
    """Length of the blocks that a product's operands are transformed in; None where neither is quantised."""
    fmt = a or b
    return None if fmt is None else _NVFP4_BLOCK if fmt.fmt == NVFP4 else fmt.block or 32


def _product(
    a: _Operand, b: _Operand, multiply: Callable[[Tensor, Tensor], Tensor], hadamard: bool, native: bool
) -> Tensor:
    """``multiply`` of the quantised operands; the hardware's own scaled product where it is wanted and there is one."""
    block = hadamard_block(a.fmt, b.fmt) if hadamard else None
    if block is not None:
        a, b = a.transformed(block, b.seed), b.transformed(block, b.seed)  # the same signs, so the product stays
    if native and a.fmt and b.fmt:
        obstacle = native_obstacle(a.scaled(), b.scaled())
        if obstacle is None:
            return native_product(a.scaled(), b.scaled())
        if obstacle == shape_obstacle(a.scaled(), b.scaled()):  # other obstacles are the whole run's, which has told
            _tell_once(obstacle)
    return multiply(a.quantised(), b.quantised())


@functools.cache
def _tell_once(obstacle: str) -> None:
    from lightning.pytorch.utilities import rank_zero_info  # here: a model without Lightning needs none of it

    rank_zero_info(f"MX products: emulated in some layers ({obstacle})")


class _Products(torch.autograd.Function):
    """Y = X W' + b and its gradients, each product of quantised operands."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, policy: MXPolicy, seed: int, native: bool
    ) -> Tensor:
        rounded = policy.vector == "bf16"
        x_in, w_in = bf16(x, rounded), bf16(w, rounded)
        ctx.save_for_backward(*((x_in, w_in) if policy.vector_backward == "bf16" else (x, w)))
        ctx.policy, ctx.seed, ctx.native, ctx.has_bias = policy, seed, native, bias is not None
        with torch.autocast(x.device.type, enabled=False):
            if policy.forward_is_exact:
                return F.linear(x, w, bias)
            x_op, w_op = _Operand(x_in, -1, policy.x, seed + 2), _Operand(w_in, -1, policy.w, seed + 3)
            y = bf16(_product(x_op, w_op, F.linear, policy.hadamard == "all", native), rounded)
            return y if bias is None else bf16(y + bf16(bias, rounded), rounded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, w = ctx.saved_tensors
        policy, seed, native = ctx.policy, ctx.seed, ctx.native
        rounded = policy.vector_backward == "bf16"
        dy = bf16(grads[0], rounded)
        dx = dw = None
        with torch.autocast(x.device.type, enabled=False):
            dy_NO, x_NI = dy.flatten(0, -2), x.flatten(0, -2)
            if ctx.needs_input_grad[0]:
                dy_op, w_op = _Operand(dy, -1, policy.dy_dgrad, seed + 4), _Operand(w, 0, policy.w_dgrad, seed + 5)
                dx = bf16(_product(dy_op, w_op, torch.matmul, policy.hadamard == "all", native), rounded)
            if ctx.needs_input_grad[1]:
                dy_op = _Operand(dy_NO, 0, policy.dy_wgrad, seed)
                x_op = _Operand(x_NI, 0, policy.x_wgrad, seed + 1)
                dw = bf16(_product(dy_op, x_op, _transposed_product, policy.hadamard != "none", native), rounded)
            db = bf16(dy_NO.sum(0), rounded) if ctx.has_bias else None
            return dx, dw, db, None, None, None


def _transposed_product(dy_NO: Tensor, x_NI: Tensor) -> Tensor:
    return dy_NO.T @ x_NI
