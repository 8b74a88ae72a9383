"""Sites in models of other libraries: they change nothing until a switch is set, and then what it says."""

from __future__ import annotations

import copy
import math
import sys
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from tiny import fault, gpt
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lightning_qk.attention import Pass, SDPACore, StreamingCore
from lightning_qk.routes import attention_sites, mlp_sites, route_linears, route_parameters
from lightning_qk.sites import ADAPTERS, AttentionSite, MLPSite, Projection, switches_in

LLAMA: dict[str, Any] = dict(
    **dict(vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2),
    **dict(intermediate_size=48, max_position_embeddings=32, use_cache=False, bos_token_id=0, eos_token_id=0),
)
GPT2: dict[str, Any] = dict(
    **dict(vocab_size=32, n_embd=32, n_layer=2, n_head=4, n_positions=32, use_cache=False, bos_token_id=0),
    **dict(eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
)
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gpt2": (GPT2LMHeadModel, GPT2Config, GPT2),
    "llama": (LlamaForCausalLM, LlamaConfig, LLAMA),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, LLAMA),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {**LLAMA, "head_dim": 8}),
}
HUGGING_FACE = pytest.mark.parametrize(
    ("family", "attention"), [(family, attention) for family in FAMILIES for attention in ("eager", "sdpa")]
)


def language_model(family: str, attention: str = "sdpa", size: float = 1.0, **fields: Any) -> Any:
    """A tiny model from its config; ``size`` multiplies the weights, for logits that are not near zero."""
    torch.manual_seed(0)
    model_class, config_class, settings = FAMILIES[family]
    model = model_class._from_config(config_class(**{**settings, **fields}), attn_implementation=attention)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2 and "norm" not in name:
                p.mul_(size)
    return model


def tokens(batch: int = 3, length: int = 12) -> Tensor:
    return torch.randint(0, 32, (batch, length), generator=torch.Generator().manual_seed(1))


def padding(batch: int = 3, length: int = 12) -> Tensor:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[1, 8:] = 0
    return mask


def watch(model: nn.Module) -> list[AttentionSite]:
    sites = attention_sites(model)
    for site in sites:
        site.core.observed = site.core.keep_qk = True
    return sites


def sensors(sites: list[AttentionSite]) -> Tensor:
    return torch.stack([site.core.max_logit_H for site in sites])


# Hugging Face


@HUGGING_FACE
def test_a_site_changes_nothing(family: str, attention: str) -> None:
    model, model_mask = language_model(family, attention, 10.0), padding()
    before = [model(tokens()).logits, model(tokens(), attention_mask=model_mask).logits]
    sites = watch(model)
    keys = 4 if family == "gpt2" else 2
    assert [(site.n_heads, site.n_kv_heads, site.head_dim) for site in sites] == [(4, keys, 8)] * 2
    assert attention_sites(model) == sites
    after = [model(tokens()).logits, model(tokens(), attention_mask=model_mask).logits]
    for left, right in zip(before, after, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0)


@HUGGING_FACE
@pytest.mark.parametrize("padded", [False, True])
def test_sensors_are_those_of_what_the_softmax_sees(
    family: str, attention: str, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = language_model(family, attention, 10.0)
    sites = watch(model)
    seen: list[Tensor] = []
    home = sys.modules[type(sites[0]._own[0]).__module__]  # type: ignore[attr-defined]
    eager = home.eager_attention_forward

    def scores(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, **rest: Any) -> Any:
        group = q.shape[1] // k.shape[1]
        seen.append((q.double() @ k.repeat_interleave(group, 1).mT.double() * scaling + mask.double()).detach())
        return eager(module, q, k, v, mask, scaling=scaling, **rest)

    arguments = {"attention_mask": padding()} if padded else {}
    model(tokens(), **arguments)
    largest, bounds = sensors(sites), torch.stack([site.core.logit_bound_H for site in sites])
    entropies = torch.stack([site.core.entropy_H for site in sites])
    monkeypatch.setattr(home, "eager_attention_forward", scores)
    model.set_attn_implementation("eager")  # the same weights by the path that can be looked into
    model(tokens(), **arguments)
    expected = torch.stack([score.amax((0, 2, 3)) for score in seen]).float()
    torch.testing.assert_close(largest, expected, rtol=1e-4, atol=1e-5)
    assert bool((bounds >= largest).all())
    rows = torch.stack([torch.special.entr(score.softmax(-1)).sum(-1).mean((0, 2)) for score in seen]).float()
    torch.testing.assert_close(entropies, rows, rtol=1e-4, atol=1e-5)


def test_sensors_use_the_models_own_scale() -> None:
    plain, scaled = (
        language_model("gpt2", size=10.0, scale_attn_by_inverse_layer_idx=inverse) for inverse in (False, True)
    )
    both = [watch(plain), watch(scaled)]
    for model in (plain, scaled):
        model(tokens())
    first, second = (torch.stack([site.core.max_logit_H for site in sites]) for sites in both)
    bounds = [sites[1].core.logit_bound_H for sites in both]
    torch.testing.assert_close(second, first / torch.tensor([[1.0], [2.0]]))  # the second layer's scale is half
    torch.testing.assert_close(bounds[1], bounds[0] / 2)


@HUGGING_FACE
def test_qk_norm_bounds_the_logits_and_forgets_their_scale(family: str, attention: str) -> None:
    """Output and gradients are those of q and k at any other scale; the gradients of W_Q and W_K scale inversely."""
    outcomes = []
    for factor in (1.0, 1e-4, 1e4):
        model = language_model(family, attention, 30.0)
        sites = watch(model)
        for site in sites:
            site.set_qk_norm(True)
            with torch.no_grad():
                for part in (site.weight("q"), site.weight("k"), site.bias("q"), site.bias("k")):
                    if part is not None:
                        part.mul_(factor)
        loss = model(tokens(), labels=tokens()).loss
        loss.backward()
        assert 0.5 < float(sensors(sites).max()) <= math.sqrt(8) * (1 + 1e-5)
        gradients = {name: p.grad for name, p in model.named_parameters()}
        for name in gradients:  # GPT-2's q and k are the first columns of a fused matrix
            part = gradients[name][..., :64] if "c_attn" in name else gradients[name]
            if any(projection in name for projection in ("q_proj", "k_proj", "c_attn")):
                part.mul_(factor)
        outcomes.append({"loss": loss.detach(), **gradients})
    for other in outcomes[1:]:
        for name, value in outcomes[0].items():
            torch.testing.assert_close(other[name], value, rtol=2e-3, atol=2e-5, msg=partial("{}: {}".format, name))


def test_switches_travel_in_the_state_dict_and_copies_are_their_own() -> None:
    model = language_model("llama", size=10.0)
    site, _ = watch(model)
    site.set_qk_norm(True)
    site.set_softcap(3.0, heads=[0])
    state = model.state_dict()
    assert [key.rpartition("layers.")[2] for key in switches_in(state)] == [
        "0.self_attn.lightning_qk_site.qk_norm",
        "0.self_attn.lightning_qk_site.softcap",
    ]
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(tokens()).logits, model(tokens()).logits, rtol=0, atol=0)
    attention_sites(twin)[0].set_qk_norm(False)
    assert site.qk_norm_on
    assert not torch.equal(twin(tokens()).logits, model(tokens()).logits)
    fresh = language_model("llama")
    with pytest.raises(RuntimeError, match=r"Unexpected key.*lightning_qk_site\.qk_norm"):
        fresh.load_state_dict(state)
    attention_sites(fresh)
    fresh.load_state_dict(state)
    assert attention_sites(fresh)[0].switches_on() == {"qk_norm": (0, 1, 2, 3), "softcap": (0, 1)}
    torch.testing.assert_close(fresh(tokens()).logits, model(tokens()).logits, rtol=0, atol=0)


def test_heads_that_share_keys_switch_together() -> None:
    model = language_model("llama", size=10.0)
    sites = watch(model)
    plain = model(tokens()).logits
    before = sensors(sites)
    sites[0].set_qk_norm(True, heads=[3])
    assert sites[0].heads_on("qk_norm") == (2, 3)
    assert not torch.equal(model(tokens()).logits, plain)
    after = sensors(sites)
    assert torch.equal(after[0, :2], before[0, :2]) and not torch.equal(after[0, 2:], before[0, 2:])


@HUGGING_FACE
def test_a_soft_cap_is_that_of_the_logits(family: str, attention: str) -> None:
    model = language_model(family, attention, 20.0)
    sites = watch(model)
    model(tokens(), attention_mask=padding())
    largest = sensors(sites)[0]
    for site in sites:
        site.set_softcap(2.0)
    capped = model(tokens(), attention_mask=padding())
    torch.testing.assert_close(sensors(sites)[0], 2.0 * torch.tanh(largest / 2.0))
    bound = sites[0].core.logit_bound_H
    assert bool((bound >= sensors(sites)[0]).all()) and float(bound.max()) <= 2.0
    other = language_model(family, "sdpa" if attention == "eager" else "eager", 20.0)
    for site in watch(other):
        site.set_softcap(2.0)
    seen = padding().bool()
    torch.testing.assert_close(
        capped.logits[seen], other(tokens(), attention_mask=padding()).logits[seen], rtol=1e-4, atol=1e-4
    )
    for site in sites:
        site.set_softcap(1e6)  # so high a cap is none
    uncapped = language_model(family, attention, 20.0)(tokens(), attention_mask=padding()).logits
    torch.testing.assert_close(
        model(tokens(), attention_mask=padding()).logits[seen], uncapped[seen], rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plugin_puts_its_fault_into_the_model(family: str) -> None:
    model = language_model(family, size=10.0)
    plain = model(tokens()).logits
    clean, faulty = copy.deepcopy(model), copy.deepcopy(model)
    fault("fp32", None).convert_module(clean)
    fault().convert_module(faulty)
    torch.testing.assert_close(clean(tokens()).logits, plain, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(faulty(tokens()).logits, plain, rtol=1e-2, atol=1e-2)
    assert all(isinstance(site.core, StreamingCore) for site in attention_sites(faulty))
    assert attention_sites(faulty)[0].core.max_logit_H.shape == (4,)
    for site in attention_sites(faulty):
        site.set_switch("fp32_carry", True)
    torch.testing.assert_close(faulty(tokens()).logits, plain, rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match=r"without dropout or mask.*attention_mask that hides"):
        faulty(tokens(), attention_mask=padding())
    with pytest.raises(ValueError, match="StreamingCore has no soft cap"):
        attention_sites(faulty)[0].set_softcap(30.0)


def test_what_cannot_be_watched_is_refused() -> None:
    model = language_model("llama")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match=r"attn_implementation='flex_attention'.*'sdpa' or 'eager'"):
        attention_sites(model)
    with pytest.raises(ValueError, match="reorder_and_upcast_attn"):
        attention_sites(language_model("gpt2", reorder_and_upcast_attn=True))
    with pytest.raises(ValueError, match="add_bias_kv"):
        attention_sites(nn.MultiheadAttention(8, 2, add_bias_kv=True))
    with pytest.raises(ValueError, match=r"Linear has no .*LlamaAttention.*MultiheadAttention"):
        attention_sites(nn.Linear(2, 2))

    class LlamaAttention(nn.Module):
        """A namesake."""

    with pytest.raises(ValueError, match="nothing to watch"):
        attention_sites(nn.Sequential(LlamaAttention()))


def test_routes_of_separate_projections() -> None:
    model = language_model("llama")
    names = {"q": ["q_proj"], "qk": ["k_proj", "q_proj"], "o": ["o_proj"], "mlp": ["down_proj", "gate_proj", "up_proj"]}
    for route, expected in names.items():
        chosen = route_parameters(model, route, layers=[1])
        assert sorted(name.split(".")[-2] for name in chosen) == expected
        assert all(".layers.1." in name for name in chosen)
        assert [f"{name}.weight" for name in route_linears(model, route, layers=[1])] == list(chosen)
    assert len(route_parameters(model, "all")) == 2 * 7


def test_routes_of_a_fused_projection_are_refused_unless_whole() -> None:
    model = language_model("gpt2")
    for route in ("q", "k", "v", "qk", "vo"):
        with pytest.raises(ValueError, match=r"no route for .* alone: GPT2Site keeps .*Use the route 'attention'"):
            route_parameters(model, route)
    assert [name.split(".", 3)[-1] for name in route_parameters(model, "attention", [0])] == [
        "attn.c_attn.weight",
        "attn.c_proj.weight",
    ]
    assert len(route_parameters(model, "o")) == 2 and len(route_parameters(model, "all")) == 8
    with pytest.raises(ValueError, match=r"c_fc.weight and 3 more are not weights of nn.Linear"):
        route_linears(model, "mlp")


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_views_that_make_the_queries(family: str) -> None:
    model = language_model(family, size=5.0)
    sites = watch(model)
    model(tokens())
    before = sensors(sites)[1]
    with torch.no_grad():
        sites[1].q_weight.mul_(3.0)
        if sites[1].bias("q") is not None:
            sites[1].bias("q").mul_(3.0)  # type: ignore[union-attr]
    model(tokens())
    expected = before if family == "qwen3" else 3.0 * before  # Qwen3 normalises behind the projection
    torch.testing.assert_close(sensors(sites)[1], expected, rtol=1e-3, atol=1e-4)
    assert sites[1].scales_qk == (family != "qwen3")
    assert [tuple(sites[0].weight(name).shape) for name in "qkvo"] == [
        *((32, 32), (32 if family == "gpt2" else 16, 32), (32 if family == "gpt2" else 16, 32), (32, 32))
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_mlp_norm_is_that_of_the_mlps_output(family: str) -> None:
    model = language_model(family)
    plain = model(tokens()).logits
    outputs: list[Tensor] = []
    sites = mlp_sites(model)
    assert len(sites) == 2 and mlp_sites(model) == sites and all(isinstance(site, MLPSite) for site in sites)
    torch.testing.assert_close(model(tokens()).logits, plain, rtol=0, atol=0)
    mlps = [module for module in model.modules() if hasattr(module, "lightning_qk_mlp_site")]
    mlps[1].register_forward_hook(lambda module, inputs, y: outputs.append(y))
    sites[1].set_mlp_norm(True)
    model(tokens())
    torch.testing.assert_close(outputs[0].square().mean(-1), torch.ones(3, 12), rtol=1e-3, atol=0)


def test_a_compiled_model_follows_the_switches() -> None:
    torch._dynamo.reset()
    plain, compiled = language_model("llama", size=10.0), language_model("llama", size=10.0)
    for model in (plain, compiled):
        watch(model)
    for layer in compiled.model.layers:
        layer.compile(backend="eager")
    outputs = []
    for change in (None, "qk_norm", "v_norm", "softcap"):
        for model in (plain, compiled):
            site = attention_sites(model)[0]
            if change == "softcap":
                site.set_softcap(1.0)
            elif change is not None:
                site.set_switch(change, True, heads=[0])
        outputs.append(compiled(tokens()).logits)
        torch.testing.assert_close(outputs[-1], plain(tokens()).logits)
        torch.testing.assert_close(sensors(attention_sites(compiled)), sensors(attention_sites(plain)))
    assert all(not torch.equal(a, b) for a, b in pairwise(outputs))


def test_own_sites_come_first() -> None:
    both = nn.ModuleList([gpt(), nn.MultiheadAttention(8, 2)])
    assert [type(site).__name__ for site in attention_sites(both)] == ["Attention", "Attention"]


class Foreign(nn.Module):
    """An attention class that nobody has heard of."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x_BTC: Tensor) -> Tensor:
        q, k, v = (proj(x_BTC).unflatten(-1, (2, 8)).transpose(1, 2) for proj in (self.q, self.k, self.v))
        q, k, v = self.lightning_qk_site.treat(q, k, v)
        return self.o(self.lightning_qk_site.core(q, k, v).transpose(1, 2).flatten(2))


class ForeignSite(AttentionSite):
    def __init__(self, module: Foreign) -> None:
        super().__init__(2, 2, 8, SDPACore())
        self._own = (module,)

    def projection(self, name: str) -> Projection:
        linear = getattr(self._own[0], name)
        return Projection(linear.weight, linear.bias)


def test_other_classes_can_be_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Foreign(), Foreign())
    with pytest.raises(ValueError, match="enter it in lightning_qk"):
        attention_sites(model)
    monkeypatch.setitem(ADAPTERS, Foreign, ForeignSite)
    with torch.no_grad():
        model[0].q.weight.mul_(50)
    sites = watch(model)
    x = torch.randn(2, 5, 16)
    plain = model(x)
    assert len(sites) == 2 and float(sites[0].core.max_logit_H.max()) > math.sqrt(8)
    sites[0].set_qk_norm(True)
    assert not torch.equal(model(x), plain)
    assert float(sites[0].core.max_logit_H.max()) <= math.sqrt(8) * (1 + 1e-5)
    assert list(route_parameters(model, "qk")) == ["0.q.weight", "0.k.weight", "1.q.weight", "1.k.weight"]


def test_a_mask_that_adds_to_the_logits_is_in_the_bound() -> None:
    q, k = torch.randn(2, 2, 6, 4), torch.randn(2, 2, 6, 4)
    for mask in (torch.full((6, 6), 45.0), torch.randn(6, 6) * 9, torch.full((6, 6), -1e9), None):
        logits = Pass(q, k, causal=False, mask=mask)
        assert bool((logits.logit_bound_H() >= logits.max_logit_H() * (1 - 1e-6)).all())
