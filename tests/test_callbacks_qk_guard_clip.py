"""QK-clip: the weights that it shrinks, by how much, and when it had better not."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from test_adapters import language_model
from test_callbacks_qk_guard_actions import SDPA, model
from tiny import fault, fit, gpt, weights
from torch import nn

from callbacks import QKGuard
from callbacks.guard_actions import QKClip, Scene
from lightning_qk.attention import SDPACore
from lightning_qk.routes import attention_sites


def observed(site: Any) -> Any:
    site.core.observed = True
    return site


def scene(sites: list[Any], trainer: Any = None, **targets: Any) -> Scene:
    targets = targets.get("targets") or {layer: tuple(range(site.n_heads)) for layer, site in enumerate(sites)}
    return Scene(trainer or SimpleNamespace(world_size=1, global_step=1), nn.Module(), sites, targets)  # type: ignore[arg-type]


@pytest.mark.parametrize("alpha", [0.5, 0.0, 0.2, 1.0])
@pytest.mark.parametrize("family", ["own", "gpt2", "llama", "qwen2"])
def test_qk_clip_brings_the_largest_logit_to_tau(family: str, alpha: float) -> None:
    net = gpt(n_heads=2, bias=True) if family == "own" else language_model(family, size=20.0)
    for p in net.parameters():
        if p.ndim == 1:
            nn.init.normal_(p, mean=1.0, std=0.3)
    sites = [observed(site) for site in attention_sites(net)]
    for site in sites if family == "own" else []:
        nn.init.normal_(site.q_proj.weight, std=3.0)
    tokens = torch.randint(0, 32, (2, 12), generator=torch.Generator().manual_seed(0))
    net(tokens)
    before, old = sites[0].core.max_logit_H, {name: sites[0].weight(name).detach().clone() for name in "qk"}
    tau = float(before.sort().values[-2:].mean())
    action = QKClip(tau=tau, alpha=alpha)
    action.check(scene(sites))
    action.apply(scene(sites[:1]))
    net(tokens)
    torch.testing.assert_close(sites[0].core.max_logit_H, before.clamp(max=tau), rtol=1e-3, atol=1e-3)
    gamma = (tau / before).clamp(max=1.0)
    share = alpha if sites[0].n_kv_heads == sites[0].n_heads else 1.0
    for name, power in (("q", share), ("k", 1 - share)):
        if name == "k" and share == 1.0:
            torch.testing.assert_close(sites[0].weight("k"), old["k"], rtol=0, atol=0)
            continue
        factor = (gamma**power).repeat_interleave(old[name].shape[0] // len(gamma))
        torch.testing.assert_close(sites[0].weight(name).detach(), old[name] * factor[:, None])


def test_qk_clip_leaves_heads_that_are_not_over_alone() -> None:
    """Negative, zero and missing maxima would turn or destroy the weights."""

    class Fixed(SDPACore):
        logits = torch.tensor([-5.0, 0.0, math.nan, math.inf, 3.0, 8.0])
        max_logit_H = logit_bound_H = property(lambda self: self.logits)  # type: ignore[assignment]

    net = gpt(n_heads=6, d_model=48)
    (site, _) = attention_sites(net)
    before = weights(net)
    site.core = Fixed()
    action = QKClip(tau=4.0)
    action.apply(scene([site]))
    changed = {
        head
        for name in ("q_proj", "k_proj")
        for head in range(6)
        if not torch.equal(
            getattr(site, name).weight[8 * head : 8 * head + 8],
            before[f"blocks.0.attention.{name}.weight"][8 * head : 8 * head + 8],
        )
    }
    assert changed == {5}
    torch.testing.assert_close(site.q_weight[40:], before["blocks.0.attention.q_proj.weight"][40:] * 0.5**0.5)
    action.apply(scene([site], targets={0: (0, 4)}))
    torch.testing.assert_close(site.q_weight[40:], before["blocks.0.attention.q_proj.weight"][40:] * 0.5**0.5)


def test_qk_clip_takes_the_largest_logit_of_all_micro_batches(tmp_path: Path) -> None:
    class Scripted(SDPACore):
        readings = iter([8.0, 2.0, 4.0, 2.0, 2.0, 2.0])
        max_logit_H = logit_bound_H = property(lambda self: torch.full((2,), self.now))  # type: ignore[assignment]

    (site, _) = attention_sites(gpt())
    site.core = core = Scripted()
    before = site.q_weight.detach().clone()
    action, factors = QKClip(tau=4.0, alpha=1.0), []
    for reading, stepped in ((8.0, False), (2.0, True), (4.0, False), (2.0, True), (2.0, False), (16.0, True)):
        core.now = reading  # type: ignore[attr-defined]
        action.after_micro_batch(scene([site]), stepped)
        factors.append(float((site.q_weight / before).mean()))
    assert factors == pytest.approx([1.0, 0.5, 0.5, 0.5, 0.5, 0.125])


def test_qk_clip_keeps_a_run_near_tau(tmp_path: Path) -> None:
    class Watch(Callback):
        def __init__(self) -> None:
            self.logits: list[float] = []

        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            self.logits.append(max(float(site.core.max_logit_H.max()) for site in attention_sites(pl_module)))

    free, held = Watch(), Watch()
    for watch, callbacks in (
        (free, [QKGuard(1e9)]),
        (held, [QKGuard(1.0, action="qk_clip", action_args={"tau": 1.0})]),
    ):
        fit(tmp_path, [*callbacks, watch], fault(**SDPA), model(lr=3e-2), max_steps=20)
    assert max(held.logits[1:]) < 3.0 < max(free.logits)


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: gpt(qk_norm="rms_learnable"), "no effect on logits of normalised"),
        (lambda: gpt(sigma_reparam=True), "no effect on logits of normalised"),
        (lambda: language_model("qwen3"), "no effect on logits of normalised"),
        (lambda: gpt().bfloat16(), "needs float32 weights, got torch.bfloat16"),
    ],
)
def test_qk_clip_refuses_what_it_cannot_clip(build: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        QKClip().check(scene(attention_sites(build())))
