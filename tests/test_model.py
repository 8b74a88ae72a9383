"""The GPT, its attention cores and its routes."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import SIZE, assert_same, gpt, gradients
from torch import Tensor, nn

from kernels import RoundingSites
from lightning_qk.attention import AttentionCore, FaultSwitch, Pass, SDPACore, StreamingCore
from lightning_qk.model import GPT, PRESETS, QK_NORM_EPS, Attention, GPTConfig, rms_normalise
from lightning_qk.routes import ROUTES, attention_sites, route_parameters

FP32 = RoundingSites()
FAULT = RoundingSites.preset("bf16_carry").at_carries(2)


def tokens(batch: int = 2, length: int = 16, seed: int = 0) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 32, (batch, length + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def streaming(sites: RoundingSites = FAULT, switch: FaultSwitch | None = None, **settings: Any) -> StreamingCore:
    return StreamingCore(sites, FP32, 8, FaultSwitch() if switch is None else switch, backend="reference", **settings)


def install(model: GPT, sites: RoundingSites = FAULT, switch: FaultSwitch | None = None) -> GPT:
    for layer, site in enumerate(attention_sites(model)):
        site.core = streaming(sites, switch, layer=layer)
    return model


def qkv(seed: int = 0, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(scale * torch.randn(2, 3, 20, 8, generator=generator) for _ in range(3))  # type: ignore[return-value]


# sizes and configuration


def test_untied_embeddings_are_two_matrices() -> None:
    tied, untied = gpt(), gpt(tied=False)
    extra = sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters())
    assert extra == SIZE["vocab_size"] * SIZE["d_model"]
    assert not torch.equal(untied.lm_head.weight, untied.token_embedding.weight)
    assert float(untied.lm_head.weight.std()) == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize(
    ("preset", "parameters", "attention"),
    [("proxy", 123_200, 32_768), ("gpt2-small", 124_373_760, 28_311_552), ("gpt2-medium", 354_599_936, 100_663_296)],
)
def test_presets_have_their_published_size(preset: str, parameters: int, attention: int) -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig.preset(preset))
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert sum(p.numel() for p in route_parameters(model, "attention").values()) == attention
    assert model.lm_head.weight is model.token_embedding.weight
    assert model.lm_head.weight.shape[0] == (256 if preset == "proxy" else 50_304)


def test_gpt2_small_with_biases_is_gpt2() -> None:
    """GPT-2's own 124,439,808 parameters: its vocabulary, its biases."""
    with torch.device("meta"):
        model = GPT(GPTConfig.preset("gpt2-small", vocab_size=50_257, bias=True))
    assert sum(p.numel() for p in model.parameters()) == 124_439_808


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n_layers": 0}, "n_layers=0"),
        ({"vocab_size": -1}, "vocab_size=-1"),
        ({"mlp_ratio": 0}, "mlp_ratio=0"),
        ({"d_model": 15}, "d_model=15"),
        ({"positions": "alibi"}, "positions='alibi'"),
        ({"positions": "rope", "d_model": 6, "n_heads": 2}, "even head dimension, got 3"),
        ({"dropout": 1.0}, r"dropout=1.0"),
        ({"dropout": -0.1}, r"dropout=-0.1"),
    ],
)
def test_config_errors_name_the_field(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        GPTConfig(**{**SIZE, **fields})


def test_preset_errors_name_the_preset_and_the_field() -> None:
    with pytest.raises(ValueError, match=r"'gpt3' is not one of proxy, gpt2-small"):
        GPTConfig.preset("gpt3")
    with pytest.raises(ValueError, match=r"GPTConfig.d_modle does not exist.*d_model"):
        GPTConfig.preset("proxy", d_modle=3)
    assert GPTConfig.preset("proxy", n_heads=4).head_dim == 16
    assert "n_heads" in PRESETS["proxy"] and PRESETS["proxy"]["n_heads"] == 2  # an override changes no preset


def test_residual_projections_start_smaller() -> None:
    model = gpt(d_model=64, n_layers=8, vocab_size=64)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            continue
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        expected = 0.02 / math.sqrt(16) if residual else 0.02
        assert parameter.detach().std() == pytest.approx(expected, rel=0.1), name


def test_biases_are_off_by_default_and_zero_when_on() -> None:
    assert not [name for name, _ in gpt().named_parameters() if name.endswith("bias")]
    biases = {name: p for name, p in gpt(bias=True).named_parameters() if name.endswith("bias")}
    assert len(biases) == 2 * (6 + 2) + 1
    assert all(not p.any() for p in biases.values())


def test_a_sequence_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match="17 tokens is longer than the model's context 16"):
        gpt()(tokens(length=17)[0])


@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_the_model_is_causal_and_knows_positions(positions: str) -> None:
    model = gpt(positions=positions)
    x, _ = tokens()
    changed = x.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 32
    before, after = model(x), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10], rtol=0, atol=0)
    assert not torch.allclose(before[:, 10:], after[:, 10:])
    swapped = x.clone()
    swapped[:, [0, 1]] = x[:, [1, 0]]
    assert x[0, 0] != x[0, 1]
    assert not torch.allclose(before[0, 5], model(swapped)[0, 5], atol=1e-7)


def test_rope_logits_depend_on_the_distance_only() -> None:
    model = gpt(positions="rope")
    assert model.position_embedding is None
    rope = attention_sites(model)[0].rope
    assert rope is not None
    one = torch.randn(8, generator=torch.Generator().manual_seed(0)).expand(1, 1, 16, 8)
    other = torch.randn(8, generator=torch.Generator().manual_seed(1)).expand(1, 1, 16, 8)
    scores = (rope(one) @ rope(other).transpose(-1, -2))[0, 0]
    for distance in range(-5, 6):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-5)
    assert scores.diagonal(0)[0] != pytest.approx(float(scores.diagonal(3)[0]), abs=1e-3)
    torch.testing.assert_close(rope(one).norm(dim=-1), one.norm(dim=-1))


# QK-norm


def logits_of(attention: Attention, x: Tensor) -> Tensor:
    attention.core = SDPACore()
    attention.core.observed = True
    attention(x)
    q, k = attention.core._kept()[:2]
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_qk_norm_bounds_every_logit(positions: str) -> None:
    attention = Attention(GPTConfig(**{**SIZE, "positions": positions}))
    nn.init.normal_(attention.q_proj.weight, std=30.0)
    nn.init.normal_(attention.k_proj.weight, std=30.0)
    x = torch.randn(2, 16, 16)
    assert logits_of(attention, x).abs().max() > 1000
    attention.set_qk_norm(True)
    bounded = logits_of(attention, x).abs().max()
    assert bounded <= math.sqrt(8) * (1 + 1e-5)
    assert bounded > 1


def test_rms_normalise_is_the_formula_in_float32() -> None:
    x = torch.randn(2, 3, 4, 8, dtype=torch.bfloat16) * 100
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + QK_NORM_EPS).sqrt()
    result = rms_normalise(x)
    assert result.dtype is torch.bfloat16
    torch.testing.assert_close(result, expected.to(torch.bfloat16), rtol=2**-7, atol=0)


@pytest.mark.parametrize("factor", [0.25, 64.0])
def test_with_qk_norm_the_scale_of_q_and_k_does_not_matter(factor: float) -> None:
    """Not the output, nor the gradient of anything else; the gradient of W_Q itself scales inversely."""
    results = []
    for scale in (1.0, factor):
        model = gpt().double()
        for site in attention_sites(model):
            site.set_qk_norm(True)
            with torch.no_grad():
                site.q_proj.weight.mul_(50 * scale)
                site.k_proj.weight.mul_(50 * scale)
        loss = F.cross_entropy(model(tokens()[0]).flatten(0, 1), tokens()[1].flatten())
        loss.backward()
        results.append((loss.detach(), gradients(model)))
    (loss, before), (scaled_loss, after) = results
    torch.testing.assert_close(loss, scaled_loss, rtol=1e-5, atol=0)  # 1e-6 in eps and float32 inside
    for name in before:
        back = factor if "q_proj" in name or "k_proj" in name else 1.0
        torch.testing.assert_close(
            after[name] * back, before[name], rtol=1e-3, atol=1e-7, msg=partial("{}: {}".format, name)
        )


def test_qk_norm_is_a_persistent_buffer_that_load_state_dict_follows() -> None:
    source, target = gpt(), gpt()
    attention_sites(source)[1].set_qk_norm(True)
    state = source.state_dict()
    assert [state[f"blocks.{i}.attention.qk_norm"].tolist() for i in range(2)] == [[False, False], [True, True]]
    target.load_state_dict(state)
    assert [site.qk_norm_on for site in attention_sites(target)] == [False, True]
    x, _ = tokens()
    torch.testing.assert_close(target(x), source(x), rtol=0, atol=0)
    assert not torch.equal(target(x), gpt()(x))
    target.load_state_dict(gpt().state_dict())
    assert not any(site.qk_norm_on for site in attention_sites(target))


@pytest.mark.parametrize("core", ["sdpa", "streaming"])
def test_a_compiled_block_follows_the_switch(core: str) -> None:
    torch._dynamo.reset()
    plain, compiled = gpt(), gpt()
    for model in (plain, compiled):
        for site in attention_sites(model):
            nn.init.normal_(site.q_proj.weight, std=1.0)
        if core == "streaming":
            install(model)
    compiled.load_state_dict(plain.state_dict())
    for block in compiled.blocks:
        block.compile(backend="eager")
    x, _ = tokens()
    before = compiled(x)
    torch.testing.assert_close(before, plain(x), rtol=0, atol=0)
    for model in (plain, compiled):
        attention_sites(model)[1].set_qk_norm(True)
    after = compiled(x)
    torch.testing.assert_close(after, plain(x), rtol=0, atol=0)
    assert not torch.equal(before, after)


def test_a_compiled_block_follows_the_fault_and_its_seed() -> None:
    """Every step has its own seed: that may not compile the block anew each time."""
    torch._dynamo.reset()
    sites = RoundingSites.build(overrides={"o_carry": 2, "l_carry": "2:sr"})
    switches = FaultSwitch(), FaultSwitch()
    plain, compiled = (install(gpt(), sites, switch) for switch in switches)
    counter = torch._dynamo.testing.CompileCounter()
    for block in compiled.blocks:
        block.compile(backend=counter)
    x, _ = tokens()
    outputs = []
    for step in range(6):
        for switch in switches:
            switch.seed, switch.on = 1_000_000_007 + step, step < 5
        outputs.append(compiled(x))
        torch.testing.assert_close(outputs[-1], plain(x), rtol=0, atol=0)
        for ours, theirs in zip(attention_sites(compiled), attention_sites(plain), strict=True):
            torch.testing.assert_close(ours.core.max_logit_H, theirs.core.max_logit_H, rtol=0, atol=0)
        if step == 2:
            settled = counter.frame_count
        elif step == 4:
            assert counter.frame_count == settled
    assert all(not torch.equal(left, right) for left, right in pairwise(outputs))


# activation checkpointing


@pytest.mark.parametrize(
    "sites", [None, FAULT, RoundingSites.build(overrides={"o_carry": "2:sr", "s": "3:sr", "dq": "2:sr"})]
)
def test_activation_checkpointing_changes_no_gradient(sites: RoundingSites | None) -> None:
    results, sensors = [], []
    for checkpointing in (False, True):
        model = gpt(checkpointing, dropout=0.2)
        if sites is not None:
            install(model, sites, FaultSwitch(seed=7))
        for site in attention_sites(model):
            site.core.observed = True
        torch.manual_seed(5)
        model.loss(*tokens()).backward()
        results.append(gradients(model))
        sensors.append({str(i): site.core.max_logit_H for i, site in enumerate(attention_sites(model))})
    assert_same(*results)
    assert_same(*sensors)


# attention cores


def brute_force_max(q: Tensor, k: Tensor) -> Tensor:
    best = torch.full((q.shape[1],), -math.inf)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for t in range(q.shape[2]):
                for s in range(t + 1):
                    best[h] = max(float(best[h]), float(q[b, h, t] @ k[b, h, s]) / math.sqrt(q.shape[3]))
    return best


@pytest.mark.parametrize("block", [256, 7])
def test_sdpa_sensor_is_the_brute_force_maximum(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_qk.attention._QUERY_BLOCK", block)
    q, k, v = qkv()
    k[:, :, -1] = 10 * q[:, :, 0]  # the largest product is in the future of its query and must not count
    core = SDPACore()
    core.observed = True
    core(q, k, v)
    torch.testing.assert_close(core.max_logit_H, brute_force_max(q, k), rtol=1e-5, atol=0)
    assert bool(
        (core.max_logit_H < (q[:, :, :1] @ k[:, :, -1:].transpose(-1, -2)).amax((0, 2, 3)) / math.sqrt(8)).all()
    )


@pytest.mark.parametrize("seed", range(5))
def test_sdpa_bound_is_never_below_the_maximum(seed: int) -> None:
    q, k, v = qkv(seed, scale=10.0**seed)
    k[:, :, 3] = 2 * q[:, :, 3]  # aligned: the bound is tight
    core = SDPACore()
    core.observed = True
    core(q, k, v)
    assert bool((core.logit_bound_H >= core.max_logit_H).all())


def test_sensors_are_silent_until_observed_and_keep_nan() -> None:
    q, k, v = qkv()
    core = SDPACore()
    core(q, k, v)
    with pytest.raises(RuntimeError, match="nothing to read yet"):
        _ = core.max_logit_H
    core.observed = True
    with torch.no_grad():
        core(q, k, v)  # validation is not a training forward pass
    with pytest.raises(RuntimeError, match="nothing to read yet"):
        _ = core.logit_bound_H
    q[1, 2, 4, 0] = math.nan
    core(q, k, v)
    assert core.max_logit_H.isnan().tolist() == [False, False, True]
    assert core.logit_bound_H.isnan().tolist() == [False, False, True]
    with pytest.raises(RuntimeError, match="nothing to read yet"):
        _ = streaming().tied_rows_H


@pytest.mark.parametrize("core", [SDPACore(), streaming(FP32)], ids=["sdpa", "streaming"])
@pytest.mark.parametrize("block", [256, 7])
def test_entropy_is_that_of_the_attention_rows(
    core: AttentionCore, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_qk.attention._QUERY_BLOCK", block)
    q, k, v = qkv(scale=2.0)
    core.keep_qk = True
    core(q, k, v)
    expected = torch.zeros(3)
    for h in range(3):
        for b in range(2):
            for t in range(20):
                p = torch.softmax(k[b, h, : t + 1] @ q[b, h, t] / math.sqrt(8), 0)
                expected[h] -= (p * p.log()).sum() / 40
    torch.testing.assert_close(core.entropy_H, expected)
    core(torch.zeros_like(q), k, v)  # flat attention: the logarithm of the number of keys
    flat = sum(math.log(t) for t in range(1, 21)) / 20
    assert core.entropy_H.tolist() == pytest.approx([flat] * 3)


def test_streaming_fp32_is_sdpa() -> None:
    q, k, v = (x.double().requires_grad_() for x in qkv())
    weight = torch.randn(q.shape, dtype=torch.float64)
    results = []
    for core in (streaming(FP32), SDPACore()):
        core.observed = True
        out = core(q, k, v)
        results.append((out, core.max_logit_H, *torch.autograd.grad((out * weight).sum(), (q, k, v))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, check_dtype=False, rtol=1e-6, atol=1e-10)


def test_streaming_switch_chooses_the_roundings_and_recording_the_sensor() -> None:
    q, k, v = qkv()
    switch = FaultSwitch()
    core = streaming(FAULT, switch)
    faulty = core(q, k, v)
    seen = core.max_logit_H
    switch.on, switch.recording = False, False
    clean = core(2 * q, k, v)
    assert core.max_logit_H is seen
    torch.testing.assert_close(clean, F.scaled_dot_product_attention(2 * q, k, v, is_causal=True))
    assert not torch.allclose(faulty, F.scaled_dot_product_attention(q, k, v, is_causal=True), atol=1e-2)


def test_a_fault_on_some_heads_is_the_full_fault_there_and_nothing_elsewhere() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    weight = torch.randn(q.shape)

    def run(core: AttentionCore) -> tuple[Tensor, ...]:
        out = core(q, k, v)
        return out, *torch.autograd.grad((out * weight).sum(), (q, k, v))

    part, full, clean = streaming(heads=(0, 2)), streaming(), streaming(FP32)
    for mixed, faulty, healthy in zip(run(part), run(full), run(clean), strict=True):
        torch.testing.assert_close(mixed[:, [0, 2]], faulty[:, [0, 2]], rtol=0, atol=0)
        torch.testing.assert_close(mixed[:, 1], healthy[:, 1], rtol=0, atol=0)
        assert not torch.equal(faulty[:, 1], healthy[:, 1])
    expected = torch.stack([full.max_logit_H[0], clean.max_logit_H[1], full.max_logit_H[2]])
    torch.testing.assert_close(part.max_logit_H, expected, rtol=0, atol=0)
    assert part.tied_rows_H.tolist() == [full.tied_rows_H[0], clean.tied_rows_H[1], full.tied_rows_H[2]]


def test_stochastic_sites_draw_by_seed_and_layer() -> None:
    sites = RoundingSites.build(overrides={"l_carry": "2:sr"})
    q, k, v = qkv()
    outputs = {
        (seed, layer): streaming(sites, FaultSwitch(seed=seed), layer=layer)(q, k, v)
        for seed in (0, 1)
        for layer in (0, 1)
    }
    again = streaming(sites, FaultSwitch(seed=1), layer=1)(q, k, v)
    torch.testing.assert_close(again, outputs[1, 1], rtol=0, atol=0)
    results = list(outputs.values())
    assert all(not torch.equal(a, b) for i, a in enumerate(results) for b in results[:i])


def test_the_first_row_sees_its_own_key_only() -> None:
    q, k = torch.ones(1, 1, 1, 4), torch.full((1, 1, 1, 4), 2.0)
    assert Pass(q, k).max_logit_H().tolist() == [4.0]


# routes


@pytest.mark.parametrize(
    ("route", "projections"),
    [
        ("q", ["attention.q_proj"]),
        ("k", ["attention.k_proj"]),
        ("v", ["attention.v_proj"]),
        ("o", ["attention.o_proj"]),
        ("qk", ["attention.k_proj", "attention.q_proj"]),
        ("vo", ["attention.o_proj", "attention.v_proj"]),
        ("mlp", ["mlp.down_proj", "mlp.up_proj"]),
        ("attention", ["attention.k_proj", "attention.o_proj", "attention.q_proj", "attention.v_proj"]),
    ],
)
def test_routes_are_these_matrices(route: str, projections: list[str]) -> None:
    model = gpt(n_layers=3, bias=True)
    expected = sorted(f"blocks.{layer}.{name}.weight" for layer in range(3) for name in projections)
    chosen = route_parameters(model, route)
    assert sorted(chosen) == expected
    assert all(model.get_parameter(name) is parameter for name, parameter in chosen.items())
    one = route_parameters(model, route, layers=[2])
    assert sorted(one) == [name for name in expected if name.startswith("blocks.2.")]


def test_route_all_is_attention_and_mlp_but_no_embedding() -> None:
    model = gpt()
    assert ROUTES[-1] == "all"
    assert sorted(route_parameters(model, "all")) == sorted(
        [*route_parameters(model, "attention"), *route_parameters(model, "mlp")]
    )
    assert not any("embedding" in name or "norm" in name for name in route_parameters(model, "all"))


def test_route_errors_name_the_route_and_the_layer() -> None:
    with pytest.raises(ValueError, match=r"'qkv' is not one of q, k, v"):
        route_parameters(gpt(), "qkv")
    for route in ("qk", "mlp", "all"):
        with pytest.raises(ValueError, match="2 is not a layer; the model has layers 0 to 1"):
            route_parameters(gpt(), route, layers=[0, 2])
    with pytest.raises(ValueError, match="Linear has no lightning_qk"):
        attention_sites(nn.Linear(2, 2))
