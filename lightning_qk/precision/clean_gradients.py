"""The gradient as it would be without the faults, on the same batch and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

if TYPE_CHECKING:
    from lightning_qk.precision.fault import FaultPrecision


class CleanGradients:
    """Keeps what callbacks asked for, from the backward pass to the end of the optimizer step.

    A fault of the finished gradient leaves the clean one behind: it is copied before the fault acts. A fault in the
    passes does not, so a clean pass over the same batch follows the faulty one of every micro-batch: through
    ``trainer.model`` (DDP and FSDP2 reduce it like any other), under the plugin's ``reference()``, with the random
    state that the faulty pass began with (dropout masks agree). Its gradients accumulate in buffers of their own; the
    faulty ones are untouched.

    Callbacks use :class:`callbacks.clean_gradient.CleanGradientCallback`, which calls these in order.
    """

    def __init__(self, plugin: FaultPrecision) -> None:
        self._plugin = plugin
        self._requests: list[Callable[[nn.Module], Iterable[nn.Parameter]]] = []
        self._kept: dict[nn.Parameter, Tensor] = {}
        self._accumulated: dict[nn.Parameter, Tensor] = {}
        self._norm: Tensor | None = None
        self._batch: Any = None
        self._rng: dict[str, Tensor] = {}

    def request(self, parameters: Callable[[nn.Module], Iterable[nn.Parameter]]) -> None:
        """Asks for the clean gradient of some parameters at every optimizer step.

        Args:
            parameters: picks them from the LightningModule; a function, for FSDP2 replaces parameters after setup.
        """
        self._requests.append(parameters)

    def remember(self, batch: Any, device: torch.device) -> None:
        """Call before the faulty pass of a micro-batch; the first caller counts."""
        if self._batch is None and self._plugin.faults_in_passes:
            self._batch, self._rng = batch, {"cpu": torch.get_rng_state()}
            if device.type == "cuda":
                self._rng["cuda"] = torch.cuda.get_rng_state(device)

    def run(self, module: LightningModule) -> None:
        """Call after the faulty backward pass of a micro-batch; the first caller runs the clean pass, if one is due."""
        if self._batch is None:
            return
        batch, self._batch = self._batch, None
        trainer = module.trainer
        # swap-and-rerun: .grad is what DDP and FSDP2 reduce into, so the clean pass gets accumulators of its own there
        parameters = [p for p in module.parameters() if p.requires_grad]
        faulty = [p.grad for p in parameters]
        for p in parameters:
            p.grad = self._accumulated.get(p)
        try:
            with isolate_rng(), self._plugin.reference(), torch.enable_grad():
                torch.set_rng_state(self._rng["cpu"])
                if "cuda" in self._rng:
                    torch.cuda.set_rng_state(self._rng["cuda"], module.device)
                with self._plugin.forward_context():
                    loss = trainer.model(*batch)  # type: ignore[misc]
                (loss / trainer.accumulate_grad_batches).backward()
            self._accumulated = {p: p.grad for p in parameters if p.grad is not None}
        finally:
            for p, gradient in zip(parameters, faulty, strict=True):
                p.grad = gradient

    def keep(self, module: LightningModule) -> None:
        """Called by the plugin when gradients are complete, before a fault of the finished gradient acts."""
        if not self._requests:
            return
        if self._accumulated:
            self._kept, self._accumulated = self._accumulated, {}
            self._norm = nn.utils.get_total_norm(list(self._kept.values()))
            return
        self._norm = nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
        for parameters in self._requests:
            for p in parameters(module):
                if p.grad is not None and p not in self._kept:
                    self._kept[p] = p.grad.detach().clone()

    def clear(self) -> None:
        """Called by the plugin after the optimizer step."""
        self._kept, self._norm = {}, None

    def __getitem__(self, p: nn.Parameter) -> Tensor:
        """The clean gradient of a parameter that was asked for, sharded as its gradient is."""
        return self._kept[p]

    @property
    def norm(self) -> Tensor:
        """Total norm of the clean gradient over all parameters."""
        assert self._norm is not None
        return self._norm
