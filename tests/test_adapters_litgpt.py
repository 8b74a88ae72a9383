"""Sites in litgpt's GPT, where the package is installed: as in models of other libraries."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from test_adapters import sensors, tokens, watch
from test_adapters_training import STEPS, Mine, Watch, batches, threshold
from tiny import assert_same, fault, trainer, weights
from torch import Tensor

from callbacks import QKGuard, SpectralMonitor
from lightning_qk.attention import StreamingCore
from lightning_qk.routes import attention_sites, mlp_sites, route_linears, route_parameters

litgpt = pytest.importorskip("litgpt")

SIZE: dict[str, Any] = dict(
    **dict(n_layer=2, n_head=4, n_embd=32, n_query_groups=2, block_size=32, vocab_size=32, padded_vocab_size=32),
    **dict(intermediate_size=48, rotary_percentage=0.5),
)
KINDS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "own_keys": {"n_query_groups": 4, "bias": False},
    "llama": {"mlp_class_name": "LLaMAMLP", "norm_class_name": "RMSNorm", "bias": False},
    "normed": {"norm_qk": True, "norm_class_name": "RMSNorm"},
    "capped": {"attention_logit_softcapping": 3.0},
    "window": {"sliding_window_size": 4, "sliding_window_indices": [1, 0]},
    "scaled": {"attention_scores_scalar": 2},
}
EVERY = pytest.mark.parametrize("kind", KINDS)


def model(kind: str = "grouped", size: float = 4.0, **fields: Any) -> Any:
    torch.manual_seed(0)
    gpt = litgpt.GPT(litgpt.Config(**{**SIZE, **KINDS[kind], **fields}))
    with torch.no_grad():
        for name, p in gpt.named_parameters():
            if p.ndim == 2 and "norm" not in name:
                p.mul_(size)
    return gpt


@EVERY
def test_a_site_changes_nothing_and_sees_what_the_softmax_sees(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpt = model(kind)
    before = gpt(tokens())
    seen: list[Tensor] = []
    attention = litgpt.model.CausalSelfAttention
    own = attention.scaled_dot_product_attention

    def scores(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        scale = (module.config.attention_scores_scalar or 8) ** -0.5
        raw = q.double() @ k.double().mT * scale
        cap = module.config.attention_logit_softcapping
        raw = raw if cap is None else cap * torch.tanh(raw / cap)
        hidden = torch.full((12, 12), -math.inf, dtype=torch.double).triu(1) if mask is None else mask.double()
        seen.append((raw + hidden).detach())
        return own(module, q, k, v, mask)

    sites = watch(gpt)
    assert [(site.n_heads, site.n_kv_heads, site.head_dim) for site in sites] == [
        (4, 4 if kind == "own_keys" else 2, 8)
    ] * 2
    monkeypatch.setattr(attention, "scaled_dot_product_attention", scores)
    torch.testing.assert_close(gpt(tokens()), before, rtol=0, atol=0)
    expected = torch.stack([score.amax((0, 2, 3)) for score in seen]).float()
    torch.testing.assert_close(sensors(sites), expected, rtol=1e-4, atol=1e-5)
    entropies = torch.stack([site.core.entropy_H for site in sites])
    rows = torch.stack([torch.special.entr(score.softmax(-1)).sum(-1).mean((0, 2)) for score in seen]).float()
    torch.testing.assert_close(entropies, rows, rtol=1e-4, atol=1e-5)
    assert sites[0].scales_qk == (kind != "normed")
    assert attention_sites(copy.deepcopy(gpt))[0] is not sites[0]


@EVERY
def test_qk_norm_bounds_the_logits(kind: str) -> None:
    gpt = model(kind)
    sites = watch(gpt)
    for site in sites:
        site.set_qk_norm(True)
    twin = copy.deepcopy(gpt)
    torch.testing.assert_close(twin(tokens()), gpt(tokens()), rtol=0, atol=0)
    bound = 8 * (KINDS[kind].get("attention_scores_scalar", 8) ** -0.5)
    assert 0.5 < float(sensors(sites).max()) <= bound * (1 + 1e-5)


def test_a_soft_cap_is_that_of_the_logits() -> None:
    gpt = model()
    sites = watch(gpt)
    plain = gpt(tokens())
    largest = sensors(sites)[0]
    for site in sites:
        site.set_softcap(2.0)
    ours = gpt(tokens())
    torch.testing.assert_close(sensors(sites)[0], 2.0 * torch.tanh(largest / 2.0))
    torch.testing.assert_close(ours, model(attention_logit_softcapping=2.0)(tokens()), rtol=1e-4, atol=1e-4)
    for site in sites:
        site.set_softcap(1e6)  # so high a cap is none
    torch.testing.assert_close(gpt(tokens()), plain, rtol=1e-3, atol=1e-3)


def test_weights_are_views_that_make_the_queries_and_routes_are_whole() -> None:
    gpt = model()
    sites = watch(gpt)
    gpt(tokens())
    before = sensors(sites)[1]
    with torch.no_grad():
        sites[1].q_weight.mul_(3.0)
        sites[1].bias("q").mul_(3.0)  # type: ignore[union-attr]
    gpt(tokens())
    torch.testing.assert_close(sensors(sites)[1], 3.0 * before, rtol=1e-3, atol=1e-4)
    assert [tuple(sites[0].weight(name).shape) for name in "qkvo"] == [(32, 32), (16, 32), (16, 32), (32, 32)]
    whole = torch.cat([sites[0].weight(name) for name in "qkv"])
    torch.testing.assert_close(whole, gpt.transformer.h[0].attn.qkv.weight, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"no route for q and k alone: LitGPTSite keeps v"):
        route_parameters(gpt, "qk")
    assert len(route_parameters(gpt, "attention", [1])) == 2
    assert list(route_linears(gpt, "mlp", [0])) == ["transformer.h.0.mlp.fc", "transformer.h.0.mlp.proj"]
    llama = model("llama")
    assert len(route_parameters(llama, "mlp")) == 6 and len(mlp_sites(llama)) == 2


def test_a_plugin_puts_its_fault_into_the_model() -> None:
    plain, clean, faulty = model()(tokens()), model(), model()
    fault("fp32", None).convert_module(clean)
    fault().convert_module(faulty)
    torch.testing.assert_close(clean(tokens()), plain, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(faulty(tokens()), plain, rtol=1e-2, atol=1e-2)
    assert all(isinstance(site.core, StreamingCore) for site in attention_sites(faulty))
    for kind, said in (("window", "sliding window"), ("scaled", "a scale of its own")):
        other = model(kind)
        fault().convert_module(other)
        with pytest.raises(ValueError, match=said):
            other(tokens())
    with pytest.raises(ValueError, match="StreamingCore has no soft cap"):
        fault().convert_module(model("capped"))


def test_what_cannot_be_watched_is_refused() -> None:
    from litgpt import adapter, lora

    adapted = adapter.GPT(adapter.Config(**SIZE, adapter_start_layer=0))
    for other in (adapted, lora.GPT(lora.Config(**SIZE, lora_r=2))):
        with pytest.raises(ValueError, match=r"LoRA and adapters .* Use litgpt\.GPT itself"):
            attention_sites(other)
    experts = litgpt.GPT(litgpt.Config(**SIZE, mlp_class_name="LLaMAMoE", n_expert=2, n_expert_per_token=1))
    with pytest.raises(ValueError, match="mixture of experts"):
        route_parameters(experts, "mlp")
    assert len(attention_sites(experts)) == 2


def test_a_compiled_model_follows_the_switches() -> None:
    gpt = model()
    sites = watch(gpt)
    compiled = torch.compile(gpt, backend="eager")
    torch.testing.assert_close(compiled(tokens()), gpt(tokens()), rtol=1e-4, atol=1e-4)
    for site in sites:
        site.set_qk_norm(True)
    torch.testing.assert_close(compiled(tokens()), gpt(tokens()), rtol=1e-4, atol=1e-4)


class LitMine(Mine):
    def loss(self, tokens_BT: Tensor) -> Tensor:
        return F.cross_entropy(self.model(tokens_BT[:, :-1]).flatten(0, 1), tokens_BT[:, 1:].flatten())


def test_guard_and_monitor_work_and_survive_resume(tmp_path: Path) -> None:
    def run(*callbacks: Any, steps: int = STEPS, ckpt: Path | None = None) -> tuple[LitMine, Watch]:
        seen, mine = Watch(), LitMine(model())
        settings: dict[str, Any] = dict(max_steps=steps, enable_checkpointing=True)
        trainer(tmp_path, [*callbacks, seen], **settings).fit(mine, batches(), ckpt_path=ckpt)
        return mine, seen

    _, plain = run()
    step, limit = threshold(plain)
    guard, monitor = QKGuard(limit), SpectralMonitor(1)
    expected, guarded = run(guard, monitor)
    assert guard.history == [{"step": step, "layers": [0, 1], "logit": pytest.approx(plain.logits[step - 1])}]
    assert guarded.losses[:step] == plain.losses[:step] and guarded.losses[step] != plain.losses[step]
    assert max(guarded.logits[step:]) <= math.sqrt(8) * (1 + 1e-5) < limit
    assert monitor.verdict_fields()["sigma_q"] == pytest.approx(guarded.sigma[-1], rel=1e-4)
    run(QKGuard(limit), ModelCheckpoint(tmp_path, filename="last", every_n_train_steps=1), steps=STEPS - 1)
    again = QKGuard(limit)
    resumed, _ = run(again, ckpt=tmp_path / "last.ckpt")
    assert again.fired_step == step and attention_sites(resumed)[0].qk_norm_on
    assert_same(weights(resumed), weights(expected))
