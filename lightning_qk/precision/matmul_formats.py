"""The matmul part of a run's arithmetic: which layers compute in microscaling (MX) formats, and in which."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from kernels.scaled_products import device_obstacle, format_obstacle
from lightning_qk.mx_linear import MXLinear, hadamard_block
from lightning_qk.mx_policy import MXPolicy
from lightning_qk.mx_vector import MXLayerNorm, VectorOperation
from lightning_qk.operand_format import RELEASED_BUMP, OperandFormat
from lightning_qk.routes import head_linear, route_linears


class MatmulFormats:
    """A policy, and the linear layers whose products follow it; LayerNorms and vector operations of the model do too.

    Layers read :attr:`policy` at every call, so a change needs no rebuild. Nothing is rounded while the plugin's switch
    is off: in the reference pass, and by default in validation.

    Args:
        policy: what the run begins with.
        route: linear layers by route, see :func:`lightning_qk.routes.route_parameters`.
        layers: indices of the blocks; None is all.
        head: the output layer too.
        native: use the hardware's own scaled products where there are any.

    Attributes:
        initial: the policy that the run begins with.
        policy: the policy of the moment; :meth:`change` it, or lend another by :meth:`instead`.
        changes: what has been changed since the run began, in order; the plugin saves it.
        native: whether to look for a scaled product of the hardware.
        products: what the products run on, in words, from the first step on.
    """

    def __init__(
        self,
        policy: MXPolicy,
        route: str = "all",
        layers: list[int] | None = None,
        head: bool = False,
        native: bool = True,
    ) -> None:
        self.policy = self.initial = policy
        self.changes: list[str] = []
        self.route, self.layers, self.head = route, layers, head
        self.native = self._wanted = native
        self.products = ""

    def convert(self, module: nn.Module, switch: object) -> None:
        """Gives the layers their arithmetic, in place; idempotent.

        Raises:
            ValueError: as :meth:`check`.
        """
        self.check(module, self.policy)
        for name, linear in self._linears(module).items():
            MXLinear.take_over(linear, switch, stream=_stream(name), arithmetic=self)
        for name, part in module.named_modules():
            if isinstance(part, VectorOperation):
                part.switch, part.arithmetic = switch, self
            elif isinstance(part, nn.LayerNorm):
                MXLayerNorm.take_over(part, switch, self, _stream(name))

    def check(self, module: nn.Module, policy: MXPolicy) -> None:
        """Whether the layers could have a policy, as far as their shapes tell; the number of tokens is the batch's.

        Raises:
            ValueError: the model has no such route, layer or head, or a layer's sides no blocks for the policy.
        """
        for name, linear in self._linears(module).items():
            _check_sides(policy, name, linear)

    def _linears(self, module: nn.Module) -> dict[str, nn.Linear]:
        head = head_linear(module) if self.head else {}
        return route_linears(module, self.route, self.layers) | head

    def change(self, changes: Iterable[str]) -> None:
        """Changes the policy from the next pass on: names of :data:`lightning_qk.mx_policy.CHANGES`."""
        self.restore([*self.changes, *changes])

    def restore(self, changes: Iterable[str]) -> None:
        """The policy after these changes of the one that the run began with."""
        self.changes = list(changes)
        self.policy = functools.reduce(MXPolicy.changed, self.changes, self.initial)
        self.products = ""  # chosen anew in the next step

    @contextmanager
    def instead(self, policy: MXPolicy) -> Generator[None]:
        """Another policy for a pass."""
        before, self.policy = self.policy, policy
        try:
            yield
        finally:
            self.policy = before

    def choose_products(self, device: torch.device) -> None:
        """Decides for native products or emulation, each of the three, and logs which and why; the device is known."""
        policy = self.policy
        pairs = {
            "Y": (policy.x, policy.w),
            "dW": (policy.dy_wgrad, policy.x_wgrad),
            "dX": (policy.dy_dgrad, policy.w_dgrad),
        }
        obstacles = {product: self._obstacle(*pair, device) for product, pair in pairs.items()}
        self.native = None in obstacles.values()
        said = {product: "native" if why is None else f"emulated ({why})" for product, why in obstacles.items()}
        alike = len(set(said.values())) == 1
        self.products = said["Y"] if alike else ", ".join(f"{product} {how}" for product, how in said.items())
        rank_zero_info(f"MX products: {self.products}")

    def _obstacle(self, a: OperandFormat | None, b: OperandFormat | None, device: torch.device) -> str | None:
        if not self._wanted:
            return "native: false"
        if a is None or b is None:
            return "not two quantised operands"
        return format_obstacle(a, b) or device_obstacle(device)

    def verdict_fields(self) -> dict[str, Any]:
        """What the run's verdict takes from here."""
        return {"mx_products": self.products}


def _check_sides(policy: MXPolicy, name: str, linear: nn.Linear) -> None:
    for side, a, b in (("in", policy.x, policy.w), ("out", policy.dy_dgrad, policy.w_dgrad)):
        length = getattr(linear, f"{side}_features")
        block = hadamard_block(a, b) if policy.hadamard == "all" else None
        if block is not None and length % block:
            raise ValueError(
                f"hadamard: 'all': {name} has {side}_features={length}, no multiple of the block of {block}. Leave the "
                "layer out by route, layers or head, or set hadamard to weight_gradient."
            )
        for one in (a, b):
            if one is not None and one.scale == RELEASED_BUMP and length % (one.block or length):
                raise ValueError(
                    f"scale='bump_released': {name} has {side}_features={length}, no multiple of block={one.block}. "
                    "Leave the layer out by route, layers or head, set another block, or leave out as_released or the "
                    "change bump."
                )


def _stream(name: str) -> int:
    return zlib.crc32(name.encode())
