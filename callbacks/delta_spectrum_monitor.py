"""Watches the spectrum of what some optimizer steps together did to the bilinear form of every head's logits.

Updates of a healthy run spread over many directions; an error that repeats itself adds up along one (arXiv 2606.28116).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from callbacks.early_warning import EarlyWarning, Limit
from callbacks.head_weights import head_weights
from kernels.delta_spectra import delta_spectra
from lightning_qk.routes import attention_sites


class DeltaSpectrumMonitor(EarlyWarning):
    """Reads the change of ``M = W_Q' W_K`` of every head over ``stride`` optimizer steps, whatever made it.

    With dW_Q and dW_K the change of the weights, ``delta2 = dW_Q' W_K + W_Q' dW_K`` (weights from before) is its part
    of first order and ``delta3 = dW_Q' dW_K`` the rest. Of each the readings are

    ======================  ================================================  ==============
    delta2_norm             Frobenius norm                                    largest head
    delta2_stable_rank      ``|.|_F^2 / |.|_2^2``                             smallest head
    delta2_effective_rank   ``exp(-sum p log p)``, ``p = s^2 / sum s^2``      smallest head
    ======================  ================================================  ==============

    and the same for delta3. A head whose delta is exactly 0 has no ranks, and a weight that is not finite reads NaN.
    All depend on the model and the learning rate: thresholds must come from healthy runs. Biases do not enter. The
    weights of the last reading are kept whole on every rank and are in the checkpoint, 4 bytes an element of W_Q and
    W_K (GPT-2 small: 57 MB).

    Args:
        every_n_steps: see :class:`EarlyWarning`, as the next three.
        thresholds: limits by reading's name; there are none without. Those on ranks are lower limits.
        patience: consecutive readings beyond a limit that make an alarm.
        first_step: no alarm before this optimizer step.
        stride: optimizer steps that a reading looks back, at most ``every_n_steps``; None is as many.

    Raises:
        ValueError: an argument that cannot be.
    """

    limits: ClassVar[Mapping[str, Limit]] = {
        f"{delta}_{reading}": Limit(below=reading != "norm")
        for delta in ("delta2", "delta3")
        for reading in ("norm", "stable_rank", "effective_rank")
    }

    def __init__(
        self,
        every_n_steps: int = 10,
        thresholds: dict[str, float | None] | None = None,
        patience: int = 1,
        first_step: int = 0,
        stride: int | None = None,
    ) -> None:
        super().__init__(every_n_steps, thresholds, patience, first_step)
        self.stride = every_n_steps if stride is None else stride
        if not 1 <= self.stride <= every_n_steps:
            raise ValueError(
                f"DeltaSpectrumMonitor: stride={stride} must be from 1 to every_n_steps={every_n_steps}: one snapshot "
                "is kept at a time."
            )
        self._snapshot: tuple[Tensor, Tensor] | None = None
        self._taken_at = -1  # the optimizer step after which

    @override
    def prepare(self, trainer: Trainer, pl_module: LightningModule) -> None:
        step = trainer.global_step
        if self._opens(step) and self._taken_at != step:
            self._snapshot, self._taken_at = head_weights(attention_sites(pl_module)), step

    @override
    def is_due(self, step: int) -> bool:
        return super().is_due(step) or self._opens(step)

    def _opens(self, step: int) -> bool:
        """Whether the reading to come looks back to this step."""
        return (step + self.stride) % self.every_n_steps == 0

    @override
    def read(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        step, now, readings = trainer.global_step, head_weights(attention_sites(pl_module)), {}
        if super().is_due(step) and self._snapshot is not None and step - self._taken_at == self.stride:
            before = [weight.to(now[0].device) for weight in self._snapshot]
            changes = [new.float() - old.float() for new, old in zip(now, before, strict=True)]
            for delta, spectrum in zip(("delta2", "delta3"), delta_spectra(*before, *changes), strict=True):
                readings[f"{delta}_norm"] = float(spectrum.norm.max())  # NaN propagates
                moved = spectrum.norm != 0
                if bool(moved.any()):
                    readings[f"{delta}_stable_rank"] = float(spectrum.stable_rank[moved].min())
                    readings[f"{delta}_effective_rank"] = float(spectrum.effective_rank[moved].min())
        if self._opens(step):
            self._snapshot, self._taken_at = now, step
        return readings

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "snapshot": self._snapshot, "taken_at": self._taken_at}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._snapshot, self._taken_at = state_dict["snapshot"], state_dict["taken_at"]
