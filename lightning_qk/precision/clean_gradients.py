"""The gradient as it would be without the faults, on the same batch and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

if TYPE_CHECKING:
    from lightning_qk.precision.fault import FaultPrecision


class Request(NamedTuple):
    """What one callback asks for.

    Attributes:
        parameters: picks them from the LightningModule; a function, for FSDP2 replaces parameters after setup.
        is_due: whether it wants an optimizer step, counted from 1.
        compare: called with the LightningModule at such a step once faulty and clean gradient are both complete, before
            any callback can have edited one.
        passes: further passes over the batch at such a step, by name: the context that each runs in, backward included.
    """

    parameters: Callable[[nn.Module], Iterable[nn.Parameter]]
    is_due: Callable[[int], bool]
    compare: Callable[[LightningModule], None]
    passes: Mapping[str, Callable[[], AbstractContextManager]] = {}


class CleanGradients:
    """Keeps what callbacks asked for, from the backward pass to the end of the optimizer step.

    A fault of the finished gradient leaves the clean one behind: it is copied before the fault acts. A fault in the
    passes does not, so a clean pass over the same batch follows the faulty one of every micro-batch: through
    ``trainer.model`` (DDP and FSDP2 reduce it like any other), under the plugin's ``reference()``, with the random
    state and the module buffers that the faulty pass began with (dropout masks and running estimates agree). Its
    gradients accumulate apart; faulty ones and buffers are untouched. Copy and pass are made only at optimizer steps
    that some callback wants.

    Callbacks use :class:`callbacks.clean_gradient.CleanGradientCallback`, which calls these in order.
    """

    def __init__(self, plugin: FaultPrecision) -> None:
        self._plugin = plugin
        self._requests: list[Request] = []
        self._kept: dict[nn.Parameter, Tensor] = {}
        self._accumulated: dict[nn.Parameter, Tensor] = {}
        self._others: dict[str, dict[nn.Parameter, Tensor]] = {}  # of further passes, by name
        self._norm: Tensor | None = None
        self._batch: Any = None
        self._rng: dict[str, Tensor] = {}
        self._buffers: list[Tensor] = []

    def request(self, request: Request) -> None:
        """Asks for the clean gradient of some parameters at some optimizer steps."""
        self._requests.append(request)

    def forget(self) -> None:
        """Called by the plugin at the end of a run: the callbacks of the next one ask anew."""
        self._requests.clear()
        self.clear()

    def _due(self, module: LightningModule) -> list[Request]:
        step = module.trainer.global_step + 1  # the one under way
        return [request for request in self._requests if request.is_due(step)]

    def remember(self, batch: Any, module: LightningModule) -> None:
        """Call before the faulty pass of a micro-batch; the first caller counts."""
        if self._batch is None and self._plugin.faults_in_passes and self._due(module):
            self._batch, self._rng = batch, {"cpu": torch.get_rng_state()}
            if module.device.type == "cuda":
                self._rng["cuda"] = torch.cuda.get_rng_state(module.device)
            self._buffers = [buffer.clone() for buffer in module.buffers()]

    def run(self, module: LightningModule) -> None:
        """Call after the faulty backward pass of a micro-batch; the first caller runs the clean pass, if one is due."""
        if self._batch is None:
            return
        batch, self._batch = self._batch, None
        self._accumulated = self._rerun(module, batch, self._plugin.reference(), self._accumulated)
        # one pass a name, whoever asks for it
        passes = {name: context for request in self._due(module) for name, context in request.passes.items()}
        for name, context in passes.items():
            self._others[name] = self._rerun(module, batch, context(), self._others.get(name, {}))

    def _rerun(
        self,
        module: LightningModule,
        batch: Any,
        context: AbstractContextManager,
        accumulated: Mapping[nn.Parameter, Tensor],
    ) -> dict[nn.Parameter, Tensor]:
        """Gradients accumulated over one more pass, in a context; those of the faulty pass and buffers stay."""
        trainer = module.trainer
        # swap-and-rerun: .grad is what DDP and FSDP2 reduce into, so the clean pass gets accumulators of its own there
        parameters = [p for p in module.parameters() if p.requires_grad]
        faulty = [p.grad for p in parameters]
        for p in parameters:
            p.grad = accumulated.get(p)
        after = [buffer.clone() for buffer in module.buffers()]
        self._set_buffers(module, self._buffers)
        try:
            with isolate_rng(), context, torch.enable_grad():
                torch.set_rng_state(self._rng["cpu"])
                if "cuda" in self._rng:
                    torch.cuda.set_rng_state(self._rng["cuda"], module.device)
                with self._plugin.forward_context():
                    loss = self._loss(trainer.model, batch)
                (loss / trainer.accumulate_grad_batches).backward()
            return {p: p.grad for p in parameters if p.grad is not None}
        finally:
            for p, gradient in zip(parameters, faulty, strict=True):
                p.grad = gradient
            self._set_buffers(module, after)

    @staticmethod
    def _loss(model: Any, batch: Any) -> Tensor:
        """The loss by the module's forward, which DDP and FSDP2 wrap; its training_step would log everything twice."""
        loss = model(*batch) if isinstance(batch, (tuple, list)) else None
        if not isinstance(loss, Tensor) or loss.ndim:
            raise TypeError(
                "A clean pass calls forward(*batch) of the LightningModule and takes what comes back for the loss; got "
                f"a {type(batch).__name__} for a batch and a {type(loss).__name__} for the loss. Give the module a "
                "forward that takes the batch's tensors and returns the loss (see lightning_qk.loss_module.LossModule)."
            )
        return loss

    @staticmethod
    def _set_buffers(module: nn.Module, values: list[Tensor]) -> None:
        for buffer, value in zip(module.buffers(), values, strict=True):
            buffer.copy_(value)

    def keep(self, module: LightningModule) -> None:
        """Called by the plugin when gradients are complete, before a fault of the finished gradient acts."""
        due = self._due(module)
        if not due:
            return
        if self._accumulated:
            self._kept, self._accumulated = self._accumulated, {}
            self._norm = nn.utils.get_total_norm(list(self._kept.values()))
            return
        if self._plugin.faults_in_passes:
            raise RuntimeError(
                "The clean gradient of this optimizer step is due, but no clean pass was made: the plugin's faults "
                "came on within the step. Change its policy between optimizer steps only."
            )
        self._norm = nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
        for request in due:
            for p in request.parameters(module):
                if p.grad is not None and p not in self._kept:
                    self._kept[p] = p.grad.detach().clone()

    @torch.no_grad()
    def compare(self, module: LightningModule) -> None:
        """Called by the plugin after that fault: lets callbacks see both gradients while no callback has edited any."""
        for request in self._due(module):
            request.compare(module)

    def clear(self) -> None:
        """Called by the plugin after the optimizer step."""
        self._kept, self._others, self._norm = {}, {}, None

    def __getitem__(self, p: nn.Parameter) -> Tensor:
        """The clean gradient of a parameter that was asked for, sharded as its gradient is."""
        return self._kept[p]

    def under(self, name: str) -> Mapping[nn.Parameter, Tensor]:
        """The gradients of a further pass that was asked for; empty where faults are off, so that there was none."""
        return self._others.get(name, {})

    @property
    def norm(self) -> Tensor:
        """Total norm of the clean gradient over all parameters."""
        assert self._norm is not None
        return self._norm
