"""How much of weights, LayerNorm gains and activations an MX format squeezes into its largest number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from callbacks.early_warning import EarlyWarning, Limit
from kernels.mx_formats import FORMATS, SCALES
from kernels.mx_saturation import Saturation, mx_saturation
from lightning_qk.module import full
from lightning_qk.mx_policy import MXPolicy
from lightning_qk.operand_format import OperandFormat
from lightning_qk.precision.matmul_formats import MatmulFormats
from lightning_qk.routes import head_linear, route_linears

_KINDS = {"weights": "w", "gains": "gain", "activations": "x"}  # to the operand of a policy


class LastBinMonitor(EarlyWarning):
    """Reads the fractions of elements in the last bin and beyond it, every ``every_n_steps`` optimizer steps.

    ``last_bin_weights`` is of the weights of the route, in blocks along their inputs; ``last_bin_gains`` of all
    LayerNorm gains; ``last_bin_activations`` of what those layers are given in training passes on all ranks, in blocks
    along the last axis, over the micro-batches of the step; all rounded to bfloat16 first. ``overflow_weights`` and so
    on are the parts of them that saturate. Weights and gains are read after the step, activations are those of its
    forward passes; see :mod:`kernels.mx_saturation` for the definitions. The clustered gains of arXiv 2506.20752 show
    in ``last_bin_gains``, and with ``per_tensor`` in which layer.

    Works without an MX plugin too: to ask what a format would do to a healthy run.

    Args:
        route: a route of :func:`lightning_qk.routes.route_parameters`.
        head: the output layer too.
        fmt: format; None is that of the plugin's policy at the time, of the operand in question or else of any, or E4M3
            without.
        scale: rule of the scale; None is the policy's at the time, or ``floor``.
        per_tensor: also log the last bin of every weight, gain and layer (``warning/last_bin/<name>``).
        every_n_steps: see :class:`EarlyWarning`, as the next three.
        thresholds: limits by reading's name.
        patience: consecutive readings beyond a limit that make an alarm.
        first_step: no alarm before this optimizer step.

    Raises:
        ValueError: an argument that cannot be.
    """

    limits: ClassVar[Mapping[str, Limit]] = {
        f"{quantity}_{kind}": Limit() for quantity in ("last_bin", "overflow") for kind in _KINDS
    }

    def __init__(
        self,
        route: str = "mlp",
        head: bool = False,
        fmt: str | None = None,
        scale: str | None = None,
        per_tensor: bool = False,
        every_n_steps: int = 100,
        thresholds: dict[str, float | None] | None = None,
        patience: int = 1,
        first_step: int = 0,
    ) -> None:
        super().__init__(every_n_steps, thresholds, patience, first_step)
        if fmt is not None and fmt not in FORMATS:
            raise ValueError(f"LastBinMonitor: fmt={fmt!r} is not one of {', '.join(FORMATS)}.")
        self.route, self.head, self.fmt, self.scale, self.per_tensor = route, head, fmt, scale, per_tensor
        self._linears: dict[str, nn.Linear] = {}
        self._handles: list[RemovableHandle] = []
        self._matmul: MatmulFormats | None = None
        self._counting = False
        self._activations: dict[str, Saturation] = {}

    @override
    def prepare(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._linears = route_linears(pl_module, self.route)
        if self.head:
            self._linears |= head_linear(pl_module)
        self._matmul = getattr(trainer.precision_plugin, "matmul", None)
        for kind in _KINDS:
            self._format(kind)  # complains here, not in the first reading
        self._handles = [
            linear.register_forward_pre_hook(self._counter(name)) for name, linear in self._linears.items()
        ]

    def _format(self, kind: str) -> OperandFormat:
        """What was asked for, else what the policy of the moment has for the operand, or its first, or E4M3."""
        policy = MXPolicy() if self._matmul is None else self._matmul.policy
        others = [one for one in policy.operands.values() if one is not None]
        found: OperandFormat = getattr(policy, _KINDS[kind]) or next(iter(others), OperandFormat("mxfp8_e4m3"))
        fmt = self.fmt or found.fmt
        if fmt not in FORMATS:
            raise MisconfigurationException(
                f"LastBinMonitor: {fmt} has no largest number of a block; set fmt to one of {', '.join(FORMATS)}."
            )
        rounding = "rne" if found.rounding == "sr" else found.rounding
        return OperandFormat(
            fmt, self.scale or (found.scale if found.scale in SCALES else "floor"), rounding, found.block
        )

    def _counter(self, name: str) -> Any:
        def count(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            if self._counting and module.training:
                now, before = self._count("activations", args[0]), self._activations.get(name)
                self._activations[name] = now if before is None else _total([before, now])

        return count

    def _count(self, kind: str, x: Tensor) -> Saturation:
        one = self._format(kind)  # now: a switch may have changed it
        return mx_saturation(x.detach().bfloat16(), one.fmt, -1, one.block, one.scale, one.rounding)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._counting = self.is_due(trainer.global_step + 1)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._counting = False  # neither recomputation nor another pass over the batch counts

    @override
    def read(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        norms = {name: part for name, part in pl_module.named_modules() if isinstance(part, nn.LayerNorm)}
        counts = {
            "weights": {name: self._count("weights", full(one.weight)) for name, one in self._linears.items()},
            "gains": {
                name: self._count("gains", full(one.weight)) for name, one in norms.items() if one.weight is not None
            },
            "activations": self._over_ranks(trainer),
        }
        self._activations = {}
        readings: dict[str, float] = {}
        for kind, found in counts.items():
            if found:
                total = _total(list(found.values()))
                readings[f"last_bin_{kind}"] = float(total.last_bin) / total.elements
                readings[f"overflow_{kind}"] = float(total.overflow) / total.elements
            if self.per_tensor:
                suffix = ".input" if kind == "activations" else ".weight"
                one_by_one = {f"last_bin/{name}{suffix}": float(c.last_bin) / c.elements for name, c in found.items()}
                self.write(trainer, one_by_one)
        return readings

    def _over_ranks(self, trainer: Trainer) -> dict[str, Saturation]:
        """The counts of activations, of which every rank has seen its own."""
        if not self._activations:
            return {}
        own = [
            torch.stack([one.last_bin, one.overflow, one.overflow.new_tensor(one.elements)])
            for one in self._activations.values()
        ]
        total = trainer.strategy.reduce(torch.stack(own), reduce_op="sum")
        return {
            name: Saturation(last, over, int(elements))
            for name, (last, over, elements) in zip(self._activations, total, strict=True)
        }

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)


def _total(counts: list[Saturation]) -> Saturation:
    last, over = (torch.stack([getattr(one, field) for one in counts]).sum() for field in ("last_bin", "overflow"))
    return Saturation(last, over, sum(one.elements for one in counts))
