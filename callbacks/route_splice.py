"""Puts the clean gradient into one route while the fault stays on everywhere: which route is the failure's channel?"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_qk.module import full, logging_is_due
from lightning_qk.precision import FaultPrecision
from lightning_qk.routes import route_parameters


class RouteSplice(Callback):
    """Replaces the gradient of ``route`` by that of a clean pass over the same batch, before clipping.

    The clean pass runs right after the faulty backward pass of every micro-batch, through ``trainer.model`` (so DDP and
    FSDP2 reduce it like any other), under the plugin's ``reference()`` context, with the random state the faulty pass
    began with (dropout masks agree). Its gradients accumulate over micro-batches in their own buffers; the faulty
    gradients of all other routes are untouched.

    Logs ``grad/norm_faulty`` and ``grad/norm_clean`` with their clip coefficients (global-norm clipping couples
    routes), and ``splice/cosine`` and ``splice/relative_error`` of faulty against clean gradient on the route.

    Args:
        route: a route of :func:`lightning_qk.routes.route_parameters`.
        layers: its layers; None is all.
    """

    def __init__(self, route: str = "qk", layers: list[int] | None = None) -> None:
        self.route, self.layers = route, layers
        self._clean: dict[nn.Parameter, Tensor] = {}
        self._batch: Any = None
        self._rng: dict[str, Any] = {}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(trainer.precision_plugin, FaultPrecision):
            raise MisconfigurationException(
                f"RouteSplice needs a plugin that can run a clean pass, got {type(trainer.precision_plugin).__name__}: "
                "set trainer.plugins to a FaultPrecision such as BF16CarryAttention."
            )
        route_parameters(pl_module, self.route, self.layers)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batch = batch
        self._rng = {"cpu": torch.get_rng_state()}
        if pl_module.device.type == "cuda":
            self._rng["cuda"] = torch.cuda.get_rng_state(pl_module.device)

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # swap-and-rerun: .grad is what DDP and FSDP2 reduce into, so the clean pass gets accumulators of its own there
        parameters = [p for p in pl_module.parameters() if p.requires_grad]
        faulty = [p.grad for p in parameters]
        for p in parameters:
            p.grad = self._clean.get(p)
        plugin: Any = trainer.precision_plugin
        try:
            with isolate_rng(), plugin.reference(), torch.enable_grad():
                torch.set_rng_state(self._rng["cpu"])
                if "cuda" in self._rng:
                    torch.cuda.set_rng_state(self._rng["cuda"], pl_module.device)
                with plugin.forward_context():
                    loss = trainer.model(*self._batch)  # type: ignore[misc]
                (loss / trainer.accumulate_grad_batches).backward()
            self._clean = {p: p.grad for p in parameters if p.grad is not None}
        finally:
            for p, gradient in zip(parameters, faulty, strict=True):
                p.grad = gradient

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        with torch.no_grad():
            if logging_is_due(trainer):
                self._log(trainer, pl_module)
            for p in route_parameters(pl_module, self.route, self.layers).values():
                assert p.grad is not None
                p.grad.copy_(self._clean[p])  # in place: DDP may view it in a bucket
        self._clean = {}

    def _log(self, trainer: Trainer, pl_module: LightningModule) -> None:
        route = list(route_parameters(pl_module, self.route, self.layers).values())
        dot, faulty_square, clean_square, error_square = self._moments(route)
        pl_module.log("splice/cosine", dot / (faulty_square * clean_square).sqrt().clamp_min(1e-30))
        pl_module.log("splice/relative_error", (error_square / clean_square.clamp_min(1e-30)).sqrt())
        limit = trainer.gradient_clip_val
        for name, gradients in (
            ("faulty", [p.grad for p in self._clean]),
            ("clean", list(self._clean.values())),
        ):
            norm = full(nn.utils.get_total_norm([g for g in gradients if g is not None]))
            pl_module.log(f"grad/norm_{name}", norm)
            if limit:
                pl_module.log(f"grad/clip_coef_{name}", (limit / (norm + 1e-6)).clamp(max=1.0))

    def _pair(self, p: nn.Parameter) -> tuple[Tensor, Tensor]:
        assert p.grad is not None
        return full(p.grad), full(self._clean[p])

    def _moments(self, route: list[nn.Parameter]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sums over the route of faulty*clean, faulty^2, clean^2 and (faulty - clean)^2."""
        rows = []
        for p in route:
            faulty, clean = self._pair(p)
            rows.append(
                torch.stack(
                    [
                        (faulty * clean).sum(),
                        faulty.square().sum(),
                        clean.square().sum(),
                        (faulty - clean).square().sum(),
                    ]
                )
            )
        dot, faulty_square, clean_square, error_square = torch.stack(rows).sum(0)
        return dot, faulty_square, clean_square, error_square
