"""Watches whether the inputs of a projection all come to lie on one side of its leading direction.

With v the leading right singular vector of W, ``cos(x_i, v)`` of the tokens has both signs in a healthy layer. When the
inputs collapse towards v, one sign takes over, and the layer's output goes one way for all tokens (Qiu et al. 2025,
arXiv 2510.04202: the loss of the signs' diversity comes before the loss explodes).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from callbacks.early_warning import Limit
from callbacks.input_monitor import InputMonitor
from kernels import TopSingular
from lightning_qk.module import full
from lightning_qk.routes import attention_sites

_TINY = torch.finfo(torch.float32).tiny


class SpectralAlignmentMonitor(InputMonitor):
    """Reads ``sign_majority`` and ``alignment`` of the cosines between tokens and a projection's leading direction.

    ``sign_majority`` is the fraction of the tokens whose cosine has the more frequent sign: 0.5 where both are equally
    frequent, 1 where there is one only; a cosine of 0 counts half. ``alignment`` is the mean of ``|cos|``: about
    ``sqrt(2 / (pi n))`` for directions at random. Both are the largest over projections and layers. All tokens of the
    step's last micro-batch count, of all ranks; weights are those after the step. NaN where a weight or a token is not
    finite.

    Args:
        every_n_steps: see :class:`EarlyWarning`, as the next three.
        thresholds: limits by reading's name; there are none without. Small healthy models reach a majority of 1.
        patience: consecutive readings beyond a limit that make an alarm.
        first_step: no alarm before this optimizer step.
        projections: of ``q``, ``k``, ``v`` and ``o``.

    Raises:
        ValueError: an argument that cannot be.
    """

    limits: ClassVar[Mapping[str, Limit]] = {"sign_majority": Limit(), "alignment": Limit()}

    def __init__(
        self,
        every_n_steps: int = 10,
        thresholds: dict[str, float | None] | None = None,
        patience: int = 1,
        first_step: int = 0,
        projections: list[str] | None = None,
    ) -> None:
        super().__init__(every_n_steps, thresholds, patience, first_step)
        self.projections = ("q", "k") if projections is None else tuple(projections)
        if not self.projections or not set(self.projections) <= set("qkvo"):
            raise ValueError(f"SpectralAlignmentMonitor: projections={projections} must be some of q, k, v, o.")
        self._top = {name: TopSingular(k=1) for name in self.projections}

    @override
    def read(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        sites, sums = attention_sites(pl_module), []
        for name, top in self._top.items():
            v_Ln = top(torch.stack([full(site.weight(name).detach()) for site in sites])).v[:, :, 0]
            sums += [_sums(tokens[name].float(), v_n) for tokens, v_n in zip(self.tokens, v_Ln, strict=True)]
        signs_N, sizes_N, count_N = trainer.strategy.reduce(torch.stack(sums, 1), reduce_op="sum")
        readings = 0.5 + 0.5 * (signs_N / count_N).abs(), sizes_N / count_N
        return {name: float(values_N.max()) for name, values_N in zip(self.limits, readings, strict=True)}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "trial_NnB": {name: top.trial_NnB for name, top in self._top.items()}}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for name, top in self._top.items():
            top.trial_NnB = state_dict["trial_NnB"][name]


def _sums(tokens_Tn: Tensor, v_n: Tensor) -> Tensor:
    """Over the tokens, of the sign of the cosine, of its size, and of 1: float64 [3]."""
    cosine_T = tokens_Tn @ v_n / torch.linalg.vector_norm(tokens_Tn, dim=1).clamp_min(_TINY)
    sign_T = cosine_T.sign().where(cosine_T.isfinite(), torch.nan)  # that of NaN is 0
    return torch.stack([x_T.sum(dtype=torch.float64) for x_T in (sign_T, cosine_T.abs(), torch.ones_like(cosine_T))])
