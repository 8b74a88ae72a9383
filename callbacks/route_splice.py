"""Puts the clean gradient into one route while the fault stays on everywhere: which route is the failure's channel?"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from callbacks.clean_gradient import CleanGradientCallback
from lightning_qk.module import full, logging_is_due
from lightning_qk.routes import route_parameters


class RouteSplice(CleanGradientCallback):
    """Replaces the gradient of a route by the clean one, before clipping; or of every other weight (``invert``).

    The clean gradient is that of the same batch and weights without the plugin's faults: see
    :class:`lightning_qk.precision.clean_gradients.CleanGradients`. For a fault of the finished gradient on the spliced
    route the run equals one without the fault, bit for bit.

    Logs ``grad/norm_faulty`` and ``grad/norm_clean`` with their clip coefficients (global-norm clipping couples
    routes), and ``splice/cosine/<route>`` and ``splice/relative_error/<route>`` of faulty against clean gradient there,
    all of gradients that no callback has edited yet.

    Args:
        route: a route of :func:`lightning_qk.routes.route_parameters`.
        layers: its layers; None is all.
        invert: splice every weight that is not on the route (embeddings, norms and biases too), so that the fault acts
            on the route alone.
    """

    def __init__(self, route: str = "qk", layers: list[int] | None = None, invert: bool = False) -> None:
        super().__init__(route, layers)
        self.invert = invert
        self._readings: dict[str, Tensor] = {}

    @override
    def wanted(self, pl_module: nn.Module) -> Iterable[nn.Parameter]:
        return pl_module.parameters() if self.invert else super().wanted(pl_module)

    @override
    def edited(self, pl_module: LightningModule) -> Iterable[nn.Parameter]:
        route = list(route_parameters(pl_module, self.route, self.layers).values())
        inside = {id(p) for p in route}
        return [p for p in pl_module.parameters() if id(p) not in inside] if self.invert else route

    @override
    def compare(self, pl_module: LightningModule) -> None:
        if logging_is_due(pl_module.trainer):
            self._readings = self._read(pl_module.trainer, pl_module)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        for name, value in self._readings.items():
            pl_module.log(name, value)
        self._readings = {}
        with torch.no_grad():
            for p in self.edited(pl_module):
                if p.grad is not None:
                    p.grad.copy_(self.clean(trainer, p))  # in place: DDP may view it in a bucket

    def _read(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Tensor]:
        """Before any callback has edited a gradient."""
        dot, faulty_square, clean_square, error_square = self._moments(trainer, pl_module)
        readings = {
            f"splice/cosine/{self.scope}": dot / (faulty_square * clean_square).sqrt().clamp_min(1e-30),
            f"splice/relative_error/{self.scope}": (error_square / clean_square.clamp_min(1e-30)).sqrt(),
        }
        faulty = nn.utils.get_total_norm([p.grad for p in pl_module.parameters() if p.grad is not None])
        for name, norm in (("faulty", full(faulty)), ("clean", full(self.plugin(trainer).clean.norm))):
            readings[f"grad/norm_{name}"] = norm
            limit = trainer.gradient_clip_val
            if limit:
                readings[f"grad/clip_coef_{name}"] = (limit / (norm + 1e-6)).clamp(max=1.0)
        return readings

    def _moments(self, trainer: Trainer, pl_module: LightningModule) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sums over the route of faulty*clean, faulty^2, clean^2 and (faulty - clean)^2."""
        rows = []
        for p in self.parameters(pl_module).values():
            assert p.grad is not None
            faulty, clean = full(p.grad), full(self.clean(trainer, p))
            products = faulty * clean, faulty.square(), clean.square(), (faulty - clean).square()
            rows.append(torch.stack([product.sum() for product in products]))
        dot, faulty_square, clean_square, error_square = torch.stack(rows).sum(0)
        return dot, faulty_square, clean_square, error_square
