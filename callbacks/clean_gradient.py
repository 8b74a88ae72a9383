"""What callbacks share that compare the faulty gradient with the clean one of the same batch and weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from typing_extensions import override

from lightning_qk.precision import FaultPrecision
from lightning_qk.precision.clean_gradients import Request
from lightning_qk.routes import ROUTES, route_parameters
from lightning_qk.strategies import refuse_strategy


class CleanGradientCallback(Callback):
    """Asks the plugin for the clean gradient of a route.

    Subclasses that change the gradient do so in ``on_before_optimizer_step``; those that only look, in :meth:`compare`,
    which comes before, wherever the callback stands in ``trainer.callbacks``.

    Args:
        route: a route of :func:`lightning_qk.routes.route_parameters`.
        layers: its layers; None is all.

    Raises:
        ValueError: there is no such route.
    """

    def __init__(self, route: str, layers: list[int] | None = None) -> None:
        if route not in ROUTES:
            raise ValueError(f"{type(self).__name__}: route={route!r} is not one of {', '.join(ROUTES)}.")
        self.route, self.layers = route, layers

    @property
    def scope(self) -> str:
        """The route, and the layers where they are not all, for names of readings."""
        return self.route if self.layers is None else f"{self.route}/layers_" + "_".join(map(str, self.layers))

    @staticmethod
    def plugin(trainer: Trainer) -> FaultPrecision:
        """The run's fault plugin, which :meth:`setup` has checked for."""
        plugin: Any = trainer.precision_plugin
        return plugin

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        refuse_strategy(trainer)
        if not isinstance(trainer.precision_plugin, FaultPrecision):
            raise MisconfigurationException(
                f"{type(self).__name__} needs a plugin that can do without its faults, got "
                f"{type(trainer.precision_plugin).__name__}: set trainer.plugins to a FaultPrecision such as "
                "BF16CarryAttention."
            )
        route_parameters(pl_module, self.route, self.layers)
        if stage == "fit":
            trainer.precision_plugin.clean.request(self.request(trainer))

    def request(self, trainer: Trainer) -> Request:
        """What is asked of the plugin."""
        return Request(self.wanted, self.is_due, self.compare)

    def is_due(self, step: int) -> bool:
        """Whether the clean gradient of this optimizer step, counted from 1, is wanted; else none is made."""
        return True

    def compare(self, pl_module: LightningModule) -> None:
        """Looks at both gradients of a step that is due, which are complete and as the plugin left them."""

    def edited(self, pl_module: LightningModule) -> Iterable[nn.Parameter]:
        """The weights whose gradient the callback writes; none, unless a subclass says so."""
        return ()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        mine = {id(p) for p in self.edited(pl_module)}
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for at, other in enumerate(callbacks):
            if isinstance(other, CleanGradientCallback):
                twice = other is not self and any(id(p) in mine for p in other.edited(pl_module))
                problem = "writes the gradient of the same weights" if twice else None
            else:
                early = mine and getattr(other, "edits_gradient", False) and at < callbacks.index(self)
                problem = "edits the gradient before it, which would be undone" if early else None
            if problem:
                raise MisconfigurationException(
                    f"{type(self).__name__} (route {self.route}): {type(other).__name__} {problem}. Keep their routes "
                    "apart, and list guards after it in trainer.callbacks."
                )

    def wanted(self, pl_module: nn.Module) -> Iterable[nn.Parameter]:
        """The parameters whose clean gradient is asked for; the route's, unless a subclass wants more."""
        return route_parameters(pl_module, self.route, self.layers).values()

    def parameters(self, pl_module: LightningModule) -> dict[str, nn.Parameter]:
        """The weights of the route that have a gradient."""
        chosen = route_parameters(pl_module, self.route, self.layers)
        return {name: p for name, p in chosen.items() if p.grad is not None}

    def clean(self, trainer: Trainer, p: nn.Parameter) -> Tensor:
        """The clean gradient of a weight of the route, sharded as its gradient is."""
        return self.plugin(trainer).clean[p]

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.plugin(trainer).clean.remember(batch, pl_module)

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.plugin(trainer).clean.run(pl_module)
