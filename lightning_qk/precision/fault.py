"""The precision plugin that owns the arithmetic of a run: its base dtype, and which faults are on in which pass."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import nn
from typing_extensions import override

from lightning_qk.attention import AttentionCore, FaultSwitch
from lightning_qk.routes import attention_sites


class FaultPrecision(Precision):
    """Base dtype, attention cores and the switch between faulty and clean passes.

    Weights are float32. With ``base="bf16"`` training, validation and the reference pass run under bfloat16 autocast.
    The fault is on from the forward pass to the end of the backward pass (activation checkpointing recomputes there)
    and off inside :meth:`reference` and, by default, in validation.

    Subclasses override :meth:`make_core`. As a plugin: ``trainer.plugins`` takes one Precision, as a single mapping,
    and ``trainer.precision`` must stay unset, because the plugin owns the dtype.

    Args:
        base: ``bf16`` (autocast) or ``fp32``.
        faults_in_validation: keep the fault on in validation and test passes.
        seed: base seed of stochastic roundings.
    """

    def __init__(
        self, base: Literal["bf16", "fp32"] = "bf16", faults_in_validation: bool = False, seed: int = 0
    ) -> None:
        super().__init__()
        if base not in ("bf16", "fp32"):
            raise ValueError(f"{type(self).__name__}: base={base!r} must be 'bf16' or 'fp32'.")
        self.base, self.faults_in_validation, self.seed = base, faults_in_validation, seed
        self.switch = FaultSwitch()
        self._module: Any = None

    def make_core(self, layer: int, n_layers: int, n_heads: int) -> AttentionCore | None:
        """The attention core of a layer; None keeps the one it has."""
        return None

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        # in place and idempotent: DDP discards the return value, and fit, validate and test each call it
        self._module = module  # the LightningModule; `connect` would get DDP's wrapper
        sites = attention_sites(module)
        for layer, site in enumerate(sites):
            core = self.make_core(layer, len(sites), site.n_heads)
            if core is not None:
                core.observed, core.keep_qk = site.core.observed, site.core.keep_qk
                site.core = core
        return module

    @override
    def forward_context(self) -> AbstractContextManager:
        if self.base == "fp32":
            return nullcontext()
        device = "cpu" if self._module is None else self._module.device.type
        # no cast cache: the reference pass must not reuse casts of the primary pass (torch#65766)
        return torch.autocast(device, dtype=torch.bfloat16, cache_enabled=False)

    @override
    @contextmanager
    def train_step_context(self) -> Generator[None]:
        step = self._module.trainer.fit_loop.total_batch_idx  # a counter of micro-batches that resume restores
        self.switch.seed = self.seed * 1_000_000_007 + step
        with self.forward_context():
            yield

    @override
    @contextmanager
    def val_step_context(self) -> Generator[None]:
        with self._switched(on=self.faults_in_validation), self.forward_context():
            yield

    @override
    @contextmanager
    def test_step_context(self) -> Generator[None]:
        with self.val_step_context():
            yield

    @override
    @contextmanager
    def predict_step_context(self) -> Generator[None]:
        with self.val_step_context():
            yield

    @contextmanager
    def reference(self) -> Generator[None]:
        """A clean pass on the same batch: same base dtype, fault off, sensors left as the faulty pass set them.

        Keep it open until the pass's backward is done.
        """
        with self._switched(on=False):
            yield

    @contextmanager
    def _switched(self, on: bool) -> Generator[None]:
        before = self.switch.on, self.switch.recording
        self.switch.on, self.switch.recording = on, False
        try:
            yield
        finally:
            self.switch.on, self.switch.recording = before
