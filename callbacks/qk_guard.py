"""QK-Guard (arXiv 2608.02091): dormant until attention logits saturate, then switches QK normalisation on for good."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from callbacks.step import OptimizerStepClock
from lightning_qk.module import logging_is_due
from lightning_qk.routes import attention_sites


class QKGuard(Callback):
    """Watches the maximum attention logit and, once it exceeds ``threshold``, turns on parameter-free QK-norm.

    The decision falls after an optimizer step, is the same on every rank (a MAX reduction) and acts from the next
    step on. Whether a layer's QK-norm is on is a persistent buffer of the model, so it survives checkpoints,
    validation and export; the history of the decision is this callback's state. Logits are read from the attention
    core; where the exact maximum costs a product (SDPA), an upper bound is read first and the maximum only when the
    bound exceeds the threshold.

    Args:
        threshold: scaled, signed, masked logit above which the guard fires. 30 is the paper's; small proxies are
            healthy above it and state their own.
        mode: ``logit`` (the guard), ``fire_at_step`` (a control: fires at ``fire_step`` whatever the logits) or
            ``always_on`` (the twin: QK-norm from the first step).
        fire_step: optimizer step after which ``fire_at_step`` fires.
        scope: ``all`` layers act when one fires, or only the ``layer`` that exceeds the threshold.
        every_n_steps: optimizer steps between two looks; what happens between them goes unseen.

    Raises:
        ValueError: an argument that cannot be, or a checkpoint whose guard has fired without its buffers.
    """

    controls_qk_norm = True  # without such a callback, GPTModule refuses to resume a model whose QK-norm is on

    def __init__(
        self,
        threshold: float = 30.0,
        mode: Literal["logit", "fire_at_step", "always_on"] = "logit",
        fire_step: int | None = None,
        scope: Literal["all", "layer"] = "all",
        every_n_steps: int = 1,
    ) -> None:
        if mode not in ("logit", "fire_at_step", "always_on") or scope not in ("all", "layer"):
            raise ValueError(
                f"QKGuard: mode={mode!r} (logit, fire_at_step, always_on) or scope={scope!r} (all, layer)."
            )
        if (mode == "fire_at_step") != (fire_step is not None):
            raise ValueError(f"QKGuard: fire_step={fire_step} goes with mode='fire_at_step', got mode={mode!r}.")
        if mode == "fire_at_step" and scope == "layer":
            raise ValueError("QKGuard: mode='fire_at_step' has no firing layer; use scope='all'.")
        if threshold <= 0 or every_n_steps < 1 or (fire_step is not None and fire_step < 1):
            raise ValueError(
                f"QKGuard: threshold={threshold} must be positive, every_n_steps={every_n_steps} and "
                f"fire_step={fire_step} at least 1."
            )
        self.threshold, self.mode, self.fire_step = threshold, mode, fire_step
        self.scope, self.every_n_steps = scope, every_n_steps
        self._clock = OptimizerStepClock()
        self._seen_L: Tensor | None = None
        self.fired_step: int | None = None
        self.history: list[dict[str, Any]] = []

    @property
    def fired(self) -> bool:
        """Whether QK-norm has been switched on by this guard."""
        return self.fired_step is not None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock.start(trainer)
        sites = attention_sites(pl_module)
        for site in sites:
            site.core.observed = True
        on = [layer for layer, site in enumerate(sites) if site.qk_norm_on]
        recorded = sorted(layer for event in self.history for layer in event["layers"])
        if on != recorded:
            raise ValueError(
                f"QKGuard: the model's QK-norm is on in layers {on} but the guard's history says {recorded}. Resume "
                "from the checkpoint of a run that had this callback."
            )
        if self.mode == "always_on" and not self.fired:
            self._fire(pl_module, list(range(len(sites))), step=0, logit=None)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        stepped = self._clock.stepped(trainer)
        step = trainer.global_step + (0 if stepped else 1)  # the step that this micro-batch belongs to
        looking = step % self.every_n_steps == 0  # nothing is kept between looks, so a checkpoint misses nothing
        sites = attention_sites(pl_module)
        dormant = [layer for layer, site in enumerate(sites) if not site.qk_norm_on]
        if self.mode == "logit" and dormant and looking:
            self._sense(sites)
        if not stepped:
            return
        if logging_is_due(trainer):
            pl_module.log("guard/fired", float(self.fired))
        if not dormant:
            return
        if self.mode == "fire_at_step" and self.fire_step is not None and step >= self.fire_step:
            self._fire(pl_module, dormant, step, logit=None)
        elif self.mode == "logit" and looking:
            self._decide(trainer, pl_module, dormant, step)

    def _sense(self, sites: list[Any]) -> None:
        """Keeps the maximum logit per layer over the micro-batches of a step."""
        bound_L = torch.stack([site.core.logit_bound_H.amax() for site in sites]).float()
        # a NaN logit is not below the threshold either
        if not bool((bound_L <= self.threshold).all()):
            bound_L = torch.stack([site.core.max_logit_H.amax() for site in sites]).float()
        self._seen_L = bound_L if self._seen_L is None else torch.maximum(self._seen_L, bound_L)

    def _decide(self, trainer: Trainer, pl_module: LightningModule, dormant: list[int], step: int) -> None:
        assert self._seen_L is not None
        seen_L, self._seen_L = self._seen_L, None
        if trainer.world_size > 1:
            torch.distributed.all_reduce(seen_L, op=torch.distributed.ReduceOp.MAX)
        logits = seen_L.tolist()
        over = [layer for layer in dormant if not logits[layer] <= self.threshold]
        if over:
            layers = dormant if self.scope == "all" else over
            self._fire(pl_module, layers, step, logit=max((logits[layer] for layer in over), key=_nan_largest))

    def _fire(self, pl_module: LightningModule, layers: list[int], step: int, logit: float | None) -> None:
        sites = attention_sites(pl_module)
        for layer in layers:
            sites[layer].set_qk_norm(True)
        self.fired_step = step if self.fired_step is None else self.fired_step
        self.history.append({"step": step, "layers": layers, "logit": logit})
        if self.mode != "always_on":
            rank_zero_info(f"QKGuard fired after step {step}: QK-norm on in layers {layers}, max logit {logit}")

    def verdict_fields(self) -> dict[str, Any]:
        """What the run's verdict takes from here."""
        logit = self.history[0]["logit"] if self.history else None
        if self.mode == "always_on":
            return {"guard": "always on", "guard_step": None}
        return {"guard": "fired" if self.fired else "dormant", "guard_step": self.fired_step, "guard_logit": logit}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"fired_step": self.fired_step, "history": [dict(event) for event in self.history]}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.fired_step = state_dict["fired_step"]
        self.history = [dict(event) for event in state_dict["history"]]


def _nan_largest(x: float) -> float:
    return float("inf") if x != x else x
