"""What a guard does once it fires, at the query-key channel and, as controls, at other places of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer
from typing_extensions import override

from callbacks.guard_triggers import LogitBound
from lightning_qk.attention import StreamingCore
from lightning_qk.routes import mlp_sites
from lightning_qk.sites import AttentionSite, MLPSite, adopt_mlps

Heads = dict[int, tuple[int, ...]]  # by layer


class Scene(NamedTuple):
    """Where an action acts.

    Attributes:
        trainer: the run's.
        module: its LightningModule.
        sites: the attention sites in layer order.
        targets: the heads that are acted on.
    """

    trainer: Trainer
    module: LightningModule
    sites: Sequence[AttentionSite]
    targets: Heads


class GuardAction:
    """Something that a guard switches on, and off again if it is released.

    Attributes:
        scopes: what it can be confined to.
        switch: the persistent switch of the model that it sets, if it changes the function that is computed.
    """

    scopes: tuple[str, ...] = ("all",)
    switch: str | None = None

    def attach(self, module: nn.Module) -> None:
        """Before weights are restored: adds the switches that the action needs and the model lacks."""

    def check(self, scene: Scene) -> None:
        """Before training.

        Raises:
            ValueError: this model or plugin cannot take it.
        """

    def apply(self, scene: Scene) -> None:
        """Switches it on for the targets; called again, with the new ones, where a scope fires bit by bit."""

    def release(self, scene: Scene) -> None:
        """Switches it off."""

    def switched(self, targets: Heads) -> Heads:
        """What of its switch is on when it acts on these."""
        return targets

    def before_optimizer_step(self, scene: Scene, optimizer: Optimizer) -> None:
        """While it is on, before clipping and the step: gradients are complete."""

    def after_micro_batch(self, scene: Scene, stepped: bool) -> None:
        """While it is on, after every micro-batch, and whether that took an optimizer step."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed action needs beyond the model, the optimizer and the scheduler."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`."""


class _Switch(GuardAction):
    """A switch of the attention sites."""

    scopes = ("all", "layer", "head")
    switch = ""

    @override
    def apply(self, scene: Scene) -> None:
        self._set(scene, True)

    @override
    def release(self, scene: Scene) -> None:
        self._set(scene, False)

    def _set(self, scene: Scene, on: bool) -> None:
        for layer, heads in scene.targets.items():
            scene.sites[layer].set_switch(self.switch, on, heads)


class QKNorm(_Switch):
    """Parameter-free RMS normalisation of q and k: logits stay within sqrt(d). The guard of arXiv 2608.02091."""

    switch = "qk_norm"


class VNorm(_Switch):
    """The same of v: a control that leaves the logits alone."""

    switch = "v_norm"


class FP32Carry(_Switch):
    """Takes the plugin's fault out of the attention of the targets: the repair at the source."""

    switch = "fp32_carry"

    @override
    def check(self, scene: Scene) -> None:
        cores = [site.core for site in scene.sites if isinstance(site.core, StreamingCore)]
        if all(core.sites == core.clean_sites for core in cores):
            raise ValueError(
                "QKGuard: action='fp32_carry' needs an attention fault to take out; set trainer.plugins to "
                "BF16CarryAttention with core: streaming, or choose another action."
            )


class Softcap(_Switch):
    """Soft cap ``c tanh(S / c)`` of the logits.

    Args:
        cap: c; 50 in Gemma 2 (arXiv 2408.00118).
    """

    switch = "softcap"

    def __init__(self, cap: float = 50.0) -> None:
        if not cap > 0:
            raise ValueError(f"QKGuard: action_args.cap={cap} must be positive.")
        self.cap = cap

    @override
    def check(self, scene: Scene) -> None:
        if not all(site.core.has_softcap for site in scene.sites):
            raise ValueError(
                "QKGuard: action='softcap' needs a core that can cap logits, which the streaming emulator cannot; set "
                "core: sdpa in the plugin, or choose another action."
            )

    @override
    def _set(self, scene: Scene, on: bool) -> None:
        for layer, heads in scene.targets.items():
            scene.sites[layer].set_softcap(self.cap if on else None, heads)


class MLPNorm(GuardAction):
    """Parameter-free RMS normalisation of the MLP's output in the layers that fire: a control."""

    scopes = ("all", "layer")
    switch = "mlp_norm"

    @override
    def attach(self, module: nn.Module) -> None:
        adopt_mlps(module)

    @override
    def switched(self, targets: Heads) -> Heads:
        return {layer: (0,) for layer in targets}

    @override
    def check(self, scene: Scene) -> None:
        count = len(mlp_sites(scene.module))
        if count != len(scene.sites):
            raise ValueError(
                f"QKGuard: action='mlp_norm' needs an MLP for each of the {len(scene.sites)} attention modules, found "
                f"{count}; choose another action."
            )

    @override
    def apply(self, scene: Scene) -> None:
        self._set(scene, True)

    @override
    def release(self, scene: Scene) -> None:
        self._set(scene, False)

    def _set(self, scene: Scene, on: bool) -> None:
        mlps = mlp_sites(scene.module)
        for layer in scene.targets:
            mlps[layer].set_mlp_norm(on)


class QKClip(GuardAction):
    """QK-clip (Kimi K2, arXiv 2507.20534): after a step, heads whose largest logit S is above tau get smaller weights.

    With gamma = tau / S, W_Q becomes gamma^alpha W_Q and W_K gamma^(1 - alpha) W_K, biases alike. Where query heads
    share a key head, W_Q takes all of gamma and the shared W_K stays, as the shared keys of Kimi K2 do. S is over the
    micro-batches and ranks of the step; a head with S at or below tau, negative too, or not finite keeps its weights.
    Right after the step at which the guard fires, S is that of the last micro-batch alone.

    Args:
        tau: the largest logit that is left alone.
        alpha: the share of the queries.
    """

    scopes = ("all", "layer", "head")

    def __init__(self, tau: float = 100.0, alpha: float = 0.5) -> None:
        if not tau > 0 or not 0 <= alpha <= 1:
            raise ValueError(f"QKGuard: action_args.tau={tau} must be positive and alpha={alpha} from 0 to 1.")
        self.tau, self.alpha = tau, alpha
        self._reader = LogitBound()
        self._seen: Tensor | None = None

    @override
    def check(self, scene: Scene) -> None:
        self._reader.prepare(scene.sites)
        for site in scene.sites:
            if not site.scales_qk:
                raise ValueError(
                    "QKGuard: action='qk_clip' has no effect on logits of normalised queries and keys; choose another "
                    "action, or a model without query-key normalisation and sigma-reparametrisation."
                )
            if isinstance(site.q_weight, DTensor) and site.projection("q").rows is not None:
                raise ValueError(
                    "QKGuard: action='qk_clip' cannot scale a part of a fused projection that FSDP2 has sharded; use "
                    "another action, or a model with separate projections."
                )
            if site.q_weight.dtype is not torch.float32:
                raise ValueError(
                    f"QKGuard: action='qk_clip' needs float32 weights, got {site.q_weight.dtype}: factors close to 1 "
                    "would round away. Train with float32 weights under autocast (precision bf16-mixed)."
                )

    @override
    def apply(self, scene: Scene) -> None:
        if scene.trainer.global_step:  # else there is no pass to read yet
            self.after_micro_batch(scene, stepped=True)

    @override
    @torch.no_grad()
    def after_micro_batch(self, scene: Scene, stepped: bool) -> None:
        chosen = [scene.sites[layer] for layer in scene.targets]
        seen = self._reader.read(chosen, self.tau)
        self._seen = seen if self._seen is None else torch.maximum(self._seen, seen)
        if not stepped:
            return
        seen, self._seen = self._seen.nan_to_num(-torch.inf, -torch.inf, -torch.inf), None
        if scene.trainer.world_size > 1:
            torch.distributed.all_reduce(seen, op=torch.distributed.ReduceOp.MAX)
        gamma = torch.where(seen > self.tau, self.tau / seen, 1.0)
        for site, heads, gamma_H in zip(
            chosen, scene.targets.values(), gamma.split([site.n_heads for site in chosen]), strict=True
        ):
            outside = [h for h in range(site.n_heads) if h not in heads]
            self._shrink(site, gamma_H.index_fill(0, torch.tensor(outside, device=gamma_H.device).long(), 1.0))

    def _shrink(self, site: AttentionSite, gamma_H: Tensor) -> None:
        alpha = self.alpha if site.n_kv_heads == site.n_heads else 1.0
        for name, factor_H in (("q", gamma_H**alpha), ("k", gamma_H ** (1 - alpha))):
            if name == "k" and alpha == 1.0:
                continue
            for part in (site.weight(name), site.bias(name)):
                if part is not None:
                    scale_rows(part, factor_H.repeat_interleave(part.shape[0] // factor_H.shape[0]))


def scale_rows(x: Tensor, factor_R: Tensor) -> None:
    """Multiplies the rows of a weight or the entries of a bias in place, sharded or not."""
    factor = factor_R.to(x.device, x.dtype).view(-1, *[1] * (x.ndim - 1))
    if isinstance(x, DTensor):
        factor = distribute_tensor(factor, x.device_mesh, [Replicate()] * x.device_mesh.ndim)
    x.mul_(factor)


def switches_on(module: nn.Module, sites: Sequence[AttentionSite]) -> dict[str, Heads]:
    """Every switch of the model that is on, and for which heads (an MLP's counts as head 0)."""
    mlps = [part for part in module.modules() if isinstance(part, MLPSite)]
    found: dict[str, Heads] = {}
    for switched in (sites, mlps):
        for layer, part in enumerate(switched):
            for name, heads in part.switches_on().items():
                found.setdefault(name, {})[layer] = heads
    return found
