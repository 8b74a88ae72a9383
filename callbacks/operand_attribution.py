"""Which operand the error of the gradient comes from: the paired gradient with one of them quantised at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from callbacks.bias_monitor import ratio
from callbacks.clean_gradient import CleanGradientCallback
from callbacks.early_warning import EarlyWarning, Limit
from kernels import TopSingular
from lightning_qk.module import full
from lightning_qk.mx_policy import CAUSES
from lightning_qk.precision.clean_gradients import Request


class OperandAttribution(EarlyWarning, CleanGradientCallback):
    """Measures the gradient's error with one cause of the policy at a time, every ``every_n_steps`` optimizer steps.

    With c the exact gradient of the route at these weights and this batch and e the error of another one, the readings
    are

    ==============  ==========================================================================================
    zeta            ``|e| / |c|`` of the policy as it is; with g = (1 + Z) c, a bound from below on the operator
                    norm of the noise Z of arXiv 2506.20752
    zeta_op         the same bound where Z does not mix weights: the largest ``|e_W| / |c_W|`` of any weight W
    spectral        the largest ``sigma_1(e_W) / sigma_1(c_W)``, of the leading singular values of the two matrices
    zeta_<cause>    ``|e| / |c|`` with that cause alone: ``x``, ``w``, ``dy`` (an operand in both of its products),
                    ``ln`` (gain and bias of LayerNorms), ``vector`` (bfloat16 in between, these two included), or
                    a single operand of one product, ``x_alone`` to ``w_dgrad_alone``
    ==============  ==========================================================================================

    Errors of different causes are nearly orthogonal while they are small, so that the squares of ``zeta_<cause>`` add
    up to about that of ``zeta``; where they do not, causes interact. A gradient that is not finite reads NaN, an error
    of a clean gradient that is zero infinity. Training is unchanged. A reading costs a pass over the batch for every
    cause and one for the exact gradient, and as many copies of the gradient while it is taken.
    Other monitors of the clean gradient share the exact pass. It is not taken while the policy rounds nothing.

    It needs an ``MXTraining`` plugin without attention or gradient faults, which would be in every one of these passes.

    Args:
        route: a route of :func:`lightning_qk.routes.route_parameters`.
        layers: its layers; None is all.
        causes: of :data:`lightning_qk.mx_policy.CAUSES`.
        every_n_steps: see :class:`EarlyWarning`, as the next three.
        thresholds: limits by reading's name.
        patience: consecutive readings beyond a limit that make an alarm.
        first_step: no alarm before this optimizer step.

    Raises:
        ValueError: an argument that cannot be.
    """

    limits: ClassVar[Mapping[str, Limit]] = {
        **dict.fromkeys(("zeta", "zeta_op", "spectral"), Limit()),
        **{f"zeta_{cause}": Limit() for cause in CAUSES},
    }

    def __init__(
        self,
        route: str = "mlp",
        layers: list[int] | None = None,
        causes: list[str] | None = None,
        every_n_steps: int = 100,
        thresholds: dict[str, float | None] | None = None,
        patience: int = 1,
        first_step: int = 0,
    ) -> None:
        EarlyWarning.__init__(self, every_n_steps, thresholds, patience, first_step)
        CleanGradientCallback.__init__(self, route, layers)
        self.causes = ["x", "w", "dy", "ln", "vector"] if causes is None else list(causes)
        unknown = [cause for cause in self.causes if cause not in CAUSES]
        if unknown:
            raise ValueError(f"OperandAttribution: causes: {unknown[0]!r} is not one of {', '.join(CAUSES)}.")
        taken = {"zeta", "zeta_op", "spectral", *(f"zeta_{cause}" for cause in self.causes)}
        self._limits = {name: limit for name, limit in self._limits.items() if name in taken}
        self._now: dict[str, float] = {}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        plugin: Any = trainer.precision_plugin
        if getattr(plugin, "matmul", None) is None or plugin.attention is not None or plugin.gradient is not None:
            raise MisconfigurationException(
                "OperandAttribution needs an MXTraining plugin without attention and gradient, to have one cause at a "
                f"time; got {type(plugin).__name__}."
            )
        EarlyWarning.setup(self, trainer, pl_module, stage)
        CleanGradientCallback.setup(self, trainer, pl_module, stage)

    @override
    def request(self, trainer: Trainer) -> Request:
        passes = {cause: partial(self._alone, trainer, cause) for cause in self.causes}
        return super().request(trainer)._replace(passes=passes)

    def _alone(self, trainer: Trainer, cause: str) -> Any:
        plugin = self.plugin(trainer)
        assert plugin.matmul is not None
        return plugin.under(plugin.matmul.policy.only(cause))

    @override
    def compare(self, pl_module: LightningModule) -> None:
        plugin = self.plugin(pl_module.trainer)
        self._now = {}
        if not plugin.faults_in_passes:
            return
        parameters = self.parameters(pl_module)
        clean = {name: full(plugin.clean[p]).double() for name, p in parameters.items()}
        faulty = {name: full(p.grad).double() for name, p in parameters.items() if p.grad is not None}
        errors = {name: faulty[name] - clean[name] for name in clean}
        self._now = {
            "zeta": _ratio(errors.values(), clean.values()),
            "zeta_op": _largest(_ratio([errors[name]], [clean[name]]) for name in clean),
            "spectral": _largest(ratio(_sigma(errors[name]), _sigma(clean[name])) for name in clean),
        }
        for cause in self.causes:
            alone = plugin.clean.under(cause)
            off = [full(alone[p]).double() - clean[name] for name, p in parameters.items()]
            self._now[f"zeta_{cause}"] = _ratio(off, clean.values())

    @override
    def read(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        return self._now

    @override
    def label(self, name: str) -> str:
        return f"attribution/{name}/{self.scope}"

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(route=self.route, layers=self.layers)


def _sigma(matrix: Tensor) -> float:
    """The largest singular value, to a hundredth; NaN of a matrix that is not finite."""
    return float(TopSingular(k=1)(matrix.float()).s[0, 0]) if bool(matrix.isfinite().all()) else math.nan


def _ratio(errors: Iterable[Tensor], clean: Iterable[Tensor]) -> float:
    """|e| / |c| over several tensors; NaN unless both are finite."""
    squares = [torch.stack([x.square().sum() for x in part]).sum() for part in (errors, clean)]
    return math.sqrt(ratio(*squares)) if all(math.isfinite(square) for square in squares) else math.nan


def _largest(values: Iterable[float]) -> float:
    """The largest of them, NaN if one is, which ``max`` would pass over."""
    return float(torch.tensor(list(values), dtype=torch.float64).max())
