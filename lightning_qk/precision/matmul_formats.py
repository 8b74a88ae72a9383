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
from lightning_qk.mx_linear import MXLinear
from lightning_qk.mx_policy import MXPolicy
from lightning_qk.mx_vector import MXLayerNorm, VectorOperation
from lightning_qk.operand_format import RELEASED_BUMP
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
        products: what the products run on, in words, once the model has been converted.
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
        self.native = native
        self.products = ""

    def convert(self, module: nn.Module, switch: object) -> None:
        """Gives the layers their arithmetic, in place; idempotent.

        Raises:
            ValueError: the model has no such route, layer or head.
        """
        linears = route_linears(module, self.route, self.layers)
        if self.head:
            linears |= head_linear(module)
        for name, linear in linears.items():
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
        """Decides for native products or emulation, and logs which and why; call once the device is known."""
        obstacle = "native: false" if not self.native else self._obstacle(device)
        self.native = obstacle is None
        products = "native scaled products" if obstacle is None else f"emulated ({obstacle})"
        if products != self.products:
            self.products = products
            rank_zero_info(f"MX products: {products}")

    def _obstacle(self, device: torch.device) -> str | None:
        policy = self.policy
        pairs = ((policy.x, policy.w), (policy.dy_wgrad, policy.x_wgrad), (policy.dy_dgrad, policy.w_dgrad))
        quantised = [(a, b) for a, b in pairs if a is not None and b is not None]
        if any(operand.scale == RELEASED_BUMP for pair in quantised for operand in pair):
            return "the released bump has a scale for every element"
        obstacles = [format_obstacle(a.fmt, b.fmt) for a, b in quantised]
        if not quantised or all(obstacles):
            return obstacles[0] if obstacles else "no product of two quantised operands"
        return device_obstacle(device)

    def verdict_fields(self) -> dict[str, Any]:
        """What the run's verdict takes from here."""
        return {"mx_products": self.products}


def _stream(name: str) -> int:
    return zlib.crc32(name.encode())
