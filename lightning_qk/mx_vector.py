"""Vector operations that an MX run computes in bfloat16: activation functions, sums and LayerNorms.

What an MX matmul does not multiply is computed elementwise in bfloat16: every primitive, such as a product of two
vectors or a mean, is rounded, and so is every gradient of one; only the sum of a LayerNorm's variance and its eps goes
into its root unrounded. Here tensors stay in their own dtype and pass through :func:`round_both_ways`, so that the
roundings are those and no others. Which of them are on is the policy's to say
(:class:`~lightning_qk.mx_policy.MXPolicy`), read at every call. A module without a policy is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_qk.mx_linear import HasPolicy, bf16
from lightning_qk.mx_policy import MXPolicy

Round = Callable[[Tensor], Tensor]
ACTIVATIONS = ("gelu", "relu", "swiglu", "linear")


class _RoundBothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, backward: bool) -> Tensor:
        ctx.rounded = backward
        return x.bfloat16().to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return bf16(grads[0], ctx.rounded), None


def round_both_ways(x: Tensor, backward: bool = True) -> Tensor:
    """``x`` rounded to bfloat16 in its own dtype, and its gradient too if ``backward``."""
    return x if x.dtype is torch.bfloat16 else _RoundBothWays.apply(x, backward)


class VectorOperation(nn.Module):
    """An operation without parameters that a policy may round.

    Attributes:
        switch: has ``on``; read at every call.
        arithmetic: has the policy; None is exact.
    """

    switch: Any = None
    arithmetic: HasPolicy | None = None

    def rounding(self, wanted: Callable[[MXPolicy], bool]) -> Round | None:
        """How primitives are rounded in this call; None if they are not."""
        if self.arithmetic is None or not self.switch.on or not wanted(self.arithmetic.policy):
            return None
        backward = self.arithmetic.policy.vector_backward == "bf16"
        return lambda x: round_both_ways(x, backward)


class Sum(VectorOperation):
    """The sum of two tensors."""

    @override
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """a + b."""
        r = self.rounding(lambda policy: policy.vector == "bf16")
        return a + b if r is None else r(r(a) + r(b))


class Activation(VectorOperation):
    """An activation function.

    Args:
        name: ``gelu`` (exact, by erf), ``relu``, ``linear``, or ``swiglu``: ``a * silu(b)`` of the two halves a, b.

    Raises:
        ValueError: another name.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        if name not in ACTIVATIONS:
            raise ValueError(f"activation {name!r} is not one of {', '.join(ACTIVATIONS)}.")
        self.name = name

    @override
    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to the same shape, or to half the width (swiglu)."""
        r = self.rounding(lambda policy: policy.rounds_activation(self.name))
        if r is None or self.arithmetic is None:
            return activate(self.name, x)
        if self.arithmetic.policy.as_released:  # SwiGLU, of which the released code rounds what F.silu computes
            a, b = x.chunk(2, -1)
            return a * _silu_rounded(r(b), r)
        return _activate_rounded(self.name, r(x), r)

    @override
    def extra_repr(self) -> str:
        return self.name


def activate(name: str, x: Tensor) -> Tensor:
    """One of :data:`ACTIVATIONS`, unrounded."""
    if name == "gelu":
        return F.gelu(x)
    if name == "relu":
        return F.relu(x)
    if name == "swiglu":
        a, b = x.chunk(2, -1)
        return a * F.silu(b)
    return x


def _activate_rounded(name: str, x: Tensor, r: Round) -> Tensor:
    if name == "gelu":
        return r(r(0.5 * x) * r(1.0 + r(torch.erf(r(x * math.sqrt(0.5))))))
    if name == "relu":
        return F.relu(x)  # of rounded numbers, exact
    if name == "swiglu":
        a, b = x.chunk(2, -1)
        return r(a * _silu_rounded(b, r))
    return x


def _silu_rounded(x: Tensor, r: Round) -> Tensor:
    return r(x * r(1.0 / r(1.0 + r(torch.exp(-x)))))


class MXLayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` whose gain, bias and primitives a policy may round.

    Never constructed: :meth:`take_over` turns a layer into one.

    Attributes:
        switch: has ``on`` and ``seed``; read at every call.
        arithmetic: has the policy.
        stream: keeps the random streams of layers apart.
    """

    switch: Any
    arithmetic: HasPolicy
    stream: int

    @classmethod
    def take_over(cls, norm: nn.LayerNorm, switch: Any, arithmetic: HasPolicy, stream: int) -> None:
        """Makes ``norm`` an MXLayerNorm in place.

        Raises:
            TypeError: it is a subclass of ``nn.LayerNorm``, or normalises over more than the last axis.
        """
        if type(norm) not in (nn.LayerNorm, cls) or len(norm.normalized_shape) != 1:
            raise TypeError(f"{norm} is not a plain nn.LayerNorm over the last axis; it cannot be rounded.")
        norm.__class__ = cls
        assert isinstance(norm, cls)
        norm.switch, norm.arithmetic, norm.stream = switch, arithmetic, stream

    @override
    def forward(self, input: Tensor) -> Tensor:
        """As ``nn.LayerNorm``, in the same dtype."""
        policy = self.arithmetic.policy
        plain = policy.ln_affine == "fp32" and not (policy.as_released and policy.vector == "bf16")
        if not self.switch.on or plain:
            return super().forward(input)
        gain, bias = self._affine(policy)
        if policy.vector == "fp32":
            return F.layer_norm(input, self.normalized_shape, gain, bias, self.eps)
        backward = policy.vector_backward == "bf16"
        with torch.autocast(input.device.type, enabled=False):
            return self._rounded(input, gain, bias, lambda x: round_both_ways(x, backward)).to(input.dtype)

    def _affine(self, policy: MXPolicy) -> tuple[Tensor | None, Tensor | None]:
        """Gain and bias as the policy has them."""
        rounded: list[Tensor | None] = []
        for i, parameter in enumerate((self.weight, self.bias)):
            p: Tensor | None = parameter
            if p is not None and i == 1 and policy.as_released:
                p = p.detach()  # the released backward pass returns none for it
            if p is not None and policy.ln_affine != "fp32":
                p = round_both_ways(p, policy.vector_backward == "bf16")
                if policy.ln_affine == "mx" and not policy.as_released:
                    p = self._quantised(p, i)
            rounded.append(p)
        return rounded[0], rounded[1]

    @torch.compiler.disable  # the seed is new at every step, as in MXLinear
    def _quantised(self, p: Tensor, i: int) -> Tensor:
        gain = self.arithmetic.policy.gain
        assert gain is not None  # the policy has checked
        return gain(p, -1, self.switch.seed * 1_000_003 + self.stream + i)

    def _rounded(self, x: Tensor, gain: Tensor | None, bias: Tensor | None, r: Round) -> Tensor:
        x = r(x)
        centred = r(x - r(x.mean(-1, keepdim=True)))
        variance = r(r(centred * centred).mean(-1, keepdim=True))
        y = r(centred * r(1.0 / r((variance + self.eps).sqrt())))
        if gain is not None:
            y = r(gain * y)
        return y if bias is None else r(y + bias)
