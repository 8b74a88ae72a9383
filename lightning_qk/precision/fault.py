"""The precision plugin that owns the arithmetic of a run: its base dtype, and which faults are on in which pass.

Trainer takes one Precision, so faults compose inside it: an :class:`AttentionFault` and :class:`MatmulFormats` act in
the forward and backward pass, a :class:`GradientFault` on the finished gradient or in the product that makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from typing_extensions import override

from kernels import has_bf16_products, widened_bf16_products
from lightning_qk.attention import FaultSwitch
from lightning_qk.mx_policy import MXPolicy
from lightning_qk.precision.attention_fault import AttentionFault
from lightning_qk.precision.clean_gradients import CleanGradients
from lightning_qk.precision.gradient_fault import GradientFault
from lightning_qk.precision.matmul_formats import MatmulFormats
from lightning_qk.routes import attention_sites
from lightning_qk.sites import present_sites
from lightning_qk.strategies import refuse_strategy


class FaultPrecision(Precision):
    """Base dtype, faults, and the switch between faulty and clean passes.

    Weights are float32. With ``base="bf16"`` training, validation and the reference pass run under bfloat16 autocast,
    on a CPU without bfloat16 products by :func:`kernels.widened_bf16_products`, until the run ends.
    Faults of the passes are on from the forward pass to the end of the backward pass (activation checkpointing
    recomputes there) and off inside :meth:`reference` and, by default, in validation. A fault of the finished gradient
    acts once an optimizer step: after reduction and accumulation, before every callback, clipping and the optimizer.

    As a plugin: ``trainer.plugins`` takes one Precision, as a single mapping, and ``trainer.precision`` must stay
    unset, because the plugin owns the dtype.

    Args:
        attention: roundings inside attention; None leaves the model's own attention.
        gradient: quantisation of weight gradients; None is none.
        base: ``bf16`` (autocast) or ``fp32``.
        faults_in_validation: keep the fault on in validation and test passes.
        seed: base seed of stochastic roundings.
        matmul: formats of matmuls and vector operations; None leaves them as they are.

    Attributes:
        clean: the gradient without the faults, for callbacks that asked for it.
    """

    def __init__(
        self,
        attention: AttentionFault | None = None,
        gradient: GradientFault | None = None,
        base: Literal["bf16", "fp32"] = "bf16",
        faults_in_validation: bool = False,
        seed: int = 0,
        matmul: MatmulFormats | None = None,
    ) -> None:
        super().__init__()
        if base not in ("bf16", "fp32"):
            raise ValueError(f"{type(self).__name__}: base={base!r} must be 'bf16' or 'fp32'.")
        self.attention, self.gradient, self.matmul = attention, gradient, matmul
        self.base, self.faults_in_validation, self.seed = base, faults_in_validation, seed
        self.switch = FaultSwitch()
        self.clean = CleanGradients(self)
        self._module: Any = None
        self._run = ExitStack()  # what ends with the run

    @property
    def faults_in_passes(self) -> bool:
        """Whether the forward and backward pass with the faults on differ from clean ones."""
        in_product = self.gradient is not None and self.gradient.where == "product"
        in_matmuls = self.matmul is not None and not self.matmul.policy.is_exact
        return in_product or in_matmuls or (self.attention is not None and self.attention.is_faulty)

    def verdict_fields(self) -> dict[str, Any]:
        """What the run's verdict takes from here: tables say so where an error was amplified."""
        gradient = {} if self.gradient is None else {"error_gain": self.gradient.error_gain}
        return gradient if self.matmul is None else gradient | self.matmul.verdict_fields()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self.matmul is None else {"matmul_changes": list(self.matmul.changes)}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.matmul is not None:
            self.matmul.restore([])  # an old checkpoint from before any change has no state to load

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        changes = state_dict.get("matmul_changes", [])
        if self.matmul is None and changes:
            raise ValueError(
                f"{type(self).__name__}: the checkpoint's MX policy has been changed ({', '.join(changes)}), but the "
                "plugin has none. Resume with the run's own YAML."
            )
        if self.matmul is not None:
            self.matmul.restore(changes)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        # in place and idempotent: DDP discards the return value, and fit, validate and test each call it
        trainer = getattr(module, "_trainer", None)  # none where a model is converted by itself
        if trainer is not None:
            refuse_strategy(trainer)
            if self.matmul is not None and trainer.state.fn == TrainerFn.FITTING and trainer.global_step == 0:
                self.matmul.restore([])  # changes of an earlier run end with it
        self._run.close()
        if self.base == "bf16" and not has_bf16_products():
            self._run.enter_context(widened_bf16_products())
        self._module = module  # the LightningModule; `connect` would get DDP's wrapper
        self.switch.on = True
        if self.gradient is not None:
            self.gradient.convert(module, self.switch)
        if self.matmul is not None:
            self.matmul.convert(module, self.switch)
        sites = attention_sites(module) if self.attention is not None else present_sites(module)
        for layer, site in enumerate(sites):
            core = site.own_core
            if self.attention is not None:
                core = self.attention.make_core(self.switch, layer, len(sites), site.n_heads)
            core.observed, core.keep_qk = site.core.observed, site.core.keep_qk
            core.switch = self.switch
            site.core = core
        return module

    @override
    def teardown(self) -> None:
        """Faults and what callbacks asked for end with the run: the model may go on under another plugin, or none."""
        self.switch.on = False
        self.clean.forget()
        self._run.close()

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        def closure_then_fault() -> Any:
            result = closure()
            self.clean.keep(model)
            if self.gradient is not None:
                step = model.trainer.global_step  # restored by resume
                with model.trainer.profiler.profile("[Precision]FaultPrecision.fault"):  # type: ignore[attr-defined]
                    self.gradient.perturb(model, (self.seed * 1_000_000_007 + step) << 32)
            self.clean.compare(model)
            return result

        result = super().optimizer_step(optimizer, model=model, closure=closure_then_fault, **kwargs)
        self.clean.clear()
        return result

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
        trainer = self._module.trainer
        step = trainer.fit_loop.total_batch_idx  # a counter of micro-batches that resume restores
        # ranks draw apart, else stochastic rounding would not average out over them
        self.switch.seed = self.seed * 1_000_000_007 + step * trainer.world_size + trainer.global_rank
        if self.matmul is not None and not self.matmul.products:
            self.matmul.choose_products(self._module.device)
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
    def under(self, policy: MXPolicy) -> Generator[None]:
        """Another faulty pass on the same batch, under another policy; sensors are left as they are.

        Keep it open until the pass's backward is done.
        """
        assert self.matmul is not None
        with self._switched(on=True), self.matmul.instead(policy):
            yield

    @contextmanager
    def _switched(self, on: bool) -> Generator[None]:
        before = self.switch.on, self.switch.recording
        self.switch.on, self.switch.recording = on, False
        try:
            yield
        finally:
            self.switch.on, self.switch.recording = before
