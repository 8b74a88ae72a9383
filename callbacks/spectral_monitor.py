"""Watches the query-key channel: singular values of W_Q and W_K, and the attention logits."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from callbacks.step import OptimizerStepClock
from kernels import TopSingular
from lightning_qk.guarded import refuse_unguarded
from lightning_qk.module import full
from lightning_qk.routes import attention_sites
from lightning_qk.strategies import refuse_strategy


class SpectralMonitor(Callback):
    """Logs ``sigma/q``, ``sigma/k``, ``logit/max``, each as the maximum over layers and per layer, and ``logit/peak``.

    ``sigma/q`` is the largest singular value of the query projection's weight after the step (healthy GPT-2 small:
    about 11; runaway: 237). ``logit/max`` is the largest scaled, signed, masked attention logit of that step's
    micro-batches, as the attention core reports it, over all ranks; ``logit/peak`` is the largest of all steps since
    the reading before. The first reading with one that is not finite is warned of, and in the verdict as
    ``nonfinite_step``; ``max_logit_peak`` there is the largest logit of all steps.

    Args:
        every_n_steps: optimizer steps between two readings; logits are looked at in every step.
        per_layer: also log every layer (``sigma/q/layer_00``, ...).
        entropy: also log ``attention/entropy``, the mean entropy in nats of the attention rows of the step's last
            micro-batch on rank zero: the least over layers and heads (a collapsed head) and, per layer, over heads.
        tied_rows: also log ``logit/tied_rows``, the rows whose maximum is reached more than once (streaming core only).

    Raises:
        ValueError: ``every_n_steps`` below 1.
    """

    def __init__(
        self, every_n_steps: int = 10, per_layer: bool = True, entropy: bool = False, tied_rows: bool = False
    ) -> None:
        if every_n_steps < 1:
            raise ValueError(f"SpectralMonitor: every_n_steps={every_n_steps} must be at least 1.")
        self.every_n_steps, self.per_layer, self.entropy, self.tied_rows = every_n_steps, per_layer, entropy, tied_rows
        self._clock = OptimizerStepClock()
        self._top = TopSingular(k=1)
        self._max_logit_L: Tensor | None = None
        self._last: dict[str, float] = {}
        self._unread_logit: Tensor | None = None  # the largest since the last reading
        self._peak_logit = -math.inf
        self._nonfinite_step: int | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        refuse_strategy(trainer)
        attention_sites(pl_module)  # before weights are restored

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        refuse_unguarded(trainer, checkpoint)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for site in attention_sites(pl_module):
            site.core.observed, site.core.keep_qk = True, site.core.keep_qk or self.entropy
            if self.tied_rows and not hasattr(type(site.core), "tied_rows_H"):
                raise ValueError(
                    f"SpectralMonitor: tied_rows=true needs a streaming core, got {type(site.core).__name__}; set it "
                    "to false, or core: streaming in the plugin."
                )
        self._clock.start(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        sites = attention_sites(pl_module)
        logits_L = torch.stack([site.core.max_logit_H.amax() for site in sites]).float()
        self._max_logit_L = logits_L if self._max_logit_L is None else torch.maximum(self._max_logit_L, logits_L)
        if not self._clock.stepped(trainer):
            return
        if trainer.world_size > 1:
            torch.distributed.all_reduce(self._max_logit_L, op=torch.distributed.ReduceOp.MAX)
        logits_L, self._max_logit_L = self._max_logit_L, None
        largest = logits_L.max()
        if self._unread_logit is not None:
            largest = torch.maximum(self._unread_logit.to(largest.device), largest)  # a checkpoint's is on the CPU
        self._unread_logit = largest
        if trainer.global_step % self.every_n_steps and trainer.global_step != 1:
            return
        readings = {"logit/max": logits_L}
        weights = [full(site.q_weight.detach()) for site in sites]
        rows = weights[0].shape[0]
        for key in (full(site.k_weight.detach()) for site in sites):
            weights.append(F.pad(key, (0, 0, 0, rows - key.shape[0])))  # grouped keys: zeros change no singular value
        readings["sigma/q"], readings["sigma/k"] = self._top(torch.stack(weights)).s[:, 0].chunk(2)
        self._last = {name: float(values_L.max()) for name, values_L in readings.items()}  # NaN propagates
        self._last["logit/peak"] = float(largest)
        self._peak_logit, self._unread_logit = self._peak(), None
        if self._nonfinite_step is None and not all(map(math.isfinite, self._last.values())):
            self._nonfinite_step = trainer.global_step
            rank_zero_warn(f"SpectralMonitor: not finite at step {trainer.global_step}: {self._last}.")
        self._log(trainer, pl_module, readings, sites)

    def _peak(self) -> float:
        """The largest logit so far; NaN becomes it and stays it."""
        unread = -math.inf if self._unread_logit is None else float(self._unread_logit)
        return self._peak_logit if unread <= self._peak_logit or math.isnan(self._peak_logit) else unread

    def _log(self, trainer: Trainer, pl_module: LightningModule, readings: dict[str, Tensor], sites: list[Any]) -> None:
        pl_module.log_dict(self._last, logger=False)
        values = dict(self._last)
        if self.per_layer:
            for name, values_L in readings.items():
                values |= {f"{name}/layer_{layer:02d}": value for layer, value in enumerate(values_L.tolist())}
        if self.entropy:
            entropy_L = torch.stack([site.core.entropy_H.amin() for site in sites])
            values["attention/entropy"] = float(entropy_L.min())
            if self.per_layer:
                values |= {f"attention/entropy/layer_{n:02d}": value for n, value in enumerate(entropy_L.tolist())}
        if self.tied_rows:
            values["logit/tied_rows"] = float(torch.stack([site.core.tied_rows_H.sum() for site in sites]).sum())
        for logger in trainer.loggers:  # not through `log`, which would repeat a reading at every step until the next
            logger.log_metrics(values, step=trainer.global_step - 1)

    def verdict_fields(self) -> dict[str, Any]:
        """What the run's verdict takes from here."""
        return {
            "sigma_q": self._last.get("sigma/q"),
            "sigma_k": self._last.get("sigma/k"),
            "max_logit": self._last.get("logit/max"),
            "max_logit_peak": self._peak() if self._last else None,
            **({} if self._nonfinite_step is None else {"nonfinite_step": self._nonfinite_step}),
        }

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "last": dict(self._last),
            "peak_logit": self._peak_logit,
            "unread_logit": self._unread_logit,
            "nonfinite_step": self._nonfinite_step,
            "trial_NnB": self._top.trial_NnB,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._last, self._peak_logit = dict(state_dict["last"]), state_dict["peak_logit"]
        self._unread_logit = state_dict.get("unread_logit")
        self._nonfinite_step = state_dict.get("nonfinite_step")
        self._top.trial_NnB = state_dict["trial_NnB"]
