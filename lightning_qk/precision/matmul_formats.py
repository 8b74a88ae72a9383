"""The matmul part of a run's arithmetic: which layers compute in microscaling (MX) formats, and in which."""

from __future__ import annotations

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
from lightning_qk.operand_format import OperandFormat
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
        self.policy = self._initial = policy
        self.changes: list[str] = []
        self.route, self.layers, self.head = route, layers, head
        self.native = self._wanted = native
        self.products = ""

    def convert(self, module: nn.Module, switch: object) -> None:
        """Gives the layers their arithmetic, in place; idempotent.

        Raises:
            ValueError: the model has no such route, layer or head, or a layer's sides no Hadamard transform.
        """
        linears = route_linears(module, self.route, self.layers)
        if self.head:
            linears |= head_linear(module)
        for name, linear in linears.items():
            _check_hadamard(self.policy, name, linear)
            MXLinear.take_over(linear, switch, stream=_stream(name), arithmetic=self)
        for name, part in module.named_modules():
            if isinstance(part, VectorOperation):
                part.switch, part.arithmetic = switch, self
            elif isinstance(part, nn.LayerNorm):
                MXLayerNorm.take_over(part, switch, self, _stream(name))

    def change(self, changes: Iterable[str]) -> None:
        """Changes the policy from the next pass on: names of :data:`lightning_qk.mx_policy.CHANGES`."""
        for change in changes:
            self.policy = self.policy.changed(change)
            self.changes.append(change)
        self.products = ""  # chosen anew in the next step

    def restore(self, changes: Iterable[str]) -> None:
        """The policy after these changes of the one that the run began with."""
        self.policy, self.changes = self._initial, []
        self.change(changes)

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


def _check_hadamard(policy: MXPolicy, name: str, linear: nn.Linear) -> None:
    """Of the axes that a layer's shape tells; the number of tokens is the batch's."""
    if policy.hadamard != "all":
        return
    for side, a, b in (("in", policy.x, policy.w), ("out", policy.dy_dgrad, policy.w_dgrad)):
        block, length = hadamard_block(a, b), getattr(linear, f"{side}_features")
        if block is not None and length % block:
            raise ValueError(
                f"hadamard: 'all': {name} has {side}_features={length}, no multiple of the block of {block}. Leave the "
                "layer out by route, layers or head, or set hadamard to weight_gradient."
            )


def _stream(name: str) -> int:
    return zlib.crc32(name.encode())
