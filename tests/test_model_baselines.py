"""The always-on stabilisers: QK-norms, soft cap, sigma-reparametrisation, z-loss."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import SIZE, assert_same, fault, fit, gpt, gradients, module, weights
from torch import Tensor, nn

from callbacks import SpectralMonitor
from lightning_qk.attention import Pass, SDPACore, explicit_attention, soft_capped
from lightning_qk.baselines import QK_NORMS, QKNorm, SigmaLinear
from lightning_qk.model import GPT, GPTConfig
from lightning_qk.precision import MXGradient
from lightning_qk.routes import attention_sites, route_parameters

SDPA: dict[str, Any] = dict(sites="fp32", carry=None, core="sdpa")


def tokens(batch: int = 2, length: int = 16) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 32, (batch, length + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1], ids[:, 1:]


def loud(model: GPT, std: float = 1.0) -> GPT:
    """Logits that are not near zero."""
    torch.manual_seed(7)
    for site in attention_sites(model):
        site.core.observed = True
        for linear in (site.q_proj, site.k_proj):
            nn.init.normal_(linear.weight, std=std)
    return model


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"qk_norm": "l2"}, f"qk_norm='l2' is not one of none, {', '.join(QK_NORMS)}"),
        ({"softcap": 0.0}, "softcap=0.0"),
        ({"softcap": math.inf}, "softcap=inf"),
        ({"z_loss": -1.0}, "z_loss=-1.0"),
    ],
)
def test_config_errors_name_the_field(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        GPTConfig(**{**SIZE, **fields})


def test_without_baselines_there_is_nothing_new_to_train() -> None:
    assert sum(p.numel() for p in gpt().parameters()) == sum(
        p.numel() for p in gpt(softcap=50.0, z_loss=1e-4).parameters()
    )
    assert {type(m) for m in gpt().modules()} == {type(m) for m in gpt(qk_norm="none", sigma_reparam=False).modules()}


# QK-norm


def by_formula(kind: str, x: Tensor, gain: Tensor) -> Tensor:
    """[B, H, T, D] in float64."""
    wide = x.double()
    if kind.endswith("_full_width"):
        wide = wide.transpose(1, 2).flatten(2)
    if kind.startswith("layernorm"):
        wide = wide - wide.mean(-1, keepdim=True)
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain.double()
    return normed if normed.ndim == 4 else normed.unflatten(2, (x.shape[1], -1)).transpose(1, 2)


@pytest.mark.parametrize("kind", QK_NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_qk_norm_is_its_formula(kind: str, dtype: torch.dtype) -> None:
    norm = QKNorm(kind, n_heads=3, head_dim=8)
    assert (norm.weight is None) == (kind == "rms")
    gain = torch.ones(8)
    if norm.weight is not None:
        assert norm.weight.shape == ((24,) if kind.endswith("_full_width") else (8,))
        nn.init.normal_(norm.weight, mean=1.0)
        gain = norm.weight.detach()
    x = (torch.randn(2, 3, 5, 8) * 4 + 1).to(dtype)
    result = norm(x)
    assert result.dtype is dtype and result.shape == x.shape
    tolerance = 1e-5 if dtype is torch.float32 else 2**-7
    torch.testing.assert_close(result.double(), by_formula(kind, x, gain).detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", QK_NORMS)
@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_a_model_with_qk_norm_starts_bounded_and_trains_its_gains(kind: str, positions: str) -> None:
    model = loud(gpt(qk_norm=kind, positions=positions), std=5.0)
    model.loss(*tokens()).backward()
    logits = max(float(site.core.max_logit_H.max()) for site in attention_sites(model))
    heads = 2 if kind.endswith("_full_width") else 1  # one head may have all of the width's norm
    assert 0.5 < logits <= heads * math.sqrt(8) * (1 + 1e-5)
    gains = [
        gradient for name, gradient in gradients(model).items() if "_norm.weight" in name and "attention.q" in name
    ]
    assert len(gains) == (0 if kind == "rms" else 2) and all(gain.any() for gain in gains)
    assert not any(site.scales_qk for site in attention_sites(model))


def test_rms_from_the_config_is_what_the_guard_switches_on() -> None:
    configured, switched = loud(gpt(qk_norm="rms")), loud(gpt())
    for site in attention_sites(switched):
        site.set_qk_norm(True)
    torch.testing.assert_close(configured(tokens()[0]), switched(tokens()[0]), rtol=0, atol=0)
    assert not attention_sites(configured)[0].qk_norm_on  # no switch: not the guard's business


# soft cap


def test_a_soft_cap_of_a_head_is_its_formula_and_inf_is_none() -> None:
    scores = (10 * torch.randn(2, 3, 4, 4)).requires_grad_()
    capped = soft_capped(scores, torch.tensor([5.0, math.inf, 50.0]))
    for head, cap in ((0, 5.0), (2, 50.0)):
        torch.testing.assert_close(capped[:, head], cap * torch.tanh(scores[:, head] / cap))
    assert torch.equal(capped[:, 1], scores[:, 1])
    (gradient,) = torch.autograd.grad(capped.sum(), scores)
    torch.testing.assert_close(gradient[:, 0], 1 - torch.tanh(scores[:, 0] / 5.0).square(), rtol=1e-4, atol=1e-6)
    assert torch.equal(gradient[:, 1], torch.ones(2, 4, 4))
    zero = torch.zeros(1, 1, 1, 1, requires_grad=True)
    assert float(torch.autograd.grad(soft_capped(zero, torch.tensor([math.inf])), zero)[0]) == 1.0


@pytest.mark.parametrize("cap", [1.0, 1e4])
def test_explicit_attention_is_attention(cap: float) -> None:
    """Forward and backward, against float64; at a high cap, against the fused kernel."""
    q, k, v = (torch.randn(2, 4, 9, 8, requires_grad=True) for _ in range(3))
    out, p = explicit_attention(Pass(q, k, softcap_H=torch.full((4,), cap)), v)
    q64, k64, v64 = (x.detach().double().requires_grad_() for x in (q, k, v))
    scores = cap * torch.tanh(q64 @ k64.mT / math.sqrt(8) / cap)
    p64 = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf).softmax(-1)
    torch.testing.assert_close(p.double(), p64, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(out.double(), p64 @ v64, rtol=1e-4, atol=1e-5)
    weight = torch.randn_like(out)
    ours = torch.autograd.grad((out * weight).sum(), (q, k, v))
    theirs = torch.autograd.grad((p64 @ v64 * weight).sum(), (q64, k64, v64))
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left.double(), right, rtol=1e-3, atol=1e-5)
    if cap > 100:
        torch.testing.assert_close(out, SDPACore()(q, k, v), rtol=1e-4, atol=1e-5)


def test_under_autocast_the_soft_capped_scores_stay_float32() -> None:
    q, k = (torch.randn(1, 2, 8, 16) * 30 for _ in range(2))
    v = torch.randn(1, 2, 8, 16).bfloat16()
    logits = Pass(q.bfloat16(), k.bfloat16(), softcap_H=torch.full((2,), 1e4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, p = explicit_attention(logits, v)
    assert out.dtype is torch.bfloat16 and p.dtype is torch.float32
    torch.testing.assert_close(p, explicit_attention(logits, v)[1], rtol=0, atol=0)


def test_a_model_with_a_soft_cap_has_capped_logits_and_keeps_the_lower_of_two_caps() -> None:
    free, capped = loud(gpt()), loud(gpt(softcap=2.0))
    before = free(tokens()[0])
    plain = [site.core.max_logit_H for site in attention_sites(free)]
    assert float(plain[0].max()) > 4
    assert not torch.allclose(capped(tokens()[0]), before, atol=1e-3)
    sites = attention_sites(capped)
    torch.testing.assert_close(sites[0].core.max_logit_H, 2.0 * torch.tanh(plain[0] / 2.0))
    assert bool((sites[0].core.logit_bound_H >= sites[0].core.max_logit_H).all())
    assert sites[0].switches_on() == {}
    for cap, effective in ((1.0, 1.0), (9.0, 2.0)):
        sites[0].set_softcap(cap)
        capped(tokens()[0])
        torch.testing.assert_close(sites[0].core.max_logit_H, effective * torch.tanh(plain[0] / effective))


def test_a_soft_cap_and_the_streaming_emulator_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"StreamingCore has no soft cap.*Set core: sdpa in the plugin"):
        fit(tmp_path, [], fault(), module({"softcap": 30.0}))
    fit(tmp_path, [], fault(**SDPA), module({"softcap": 30.0}), max_steps=1)
    model = gpt()
    fault().convert_module(model)
    (site, _) = attention_sites(model)
    with pytest.raises(ValueError, match="has no soft cap"):
        site.set_softcap(30.0)
    assert site.switches_on() == {}


# sigma-reparametrisation


def test_sigma_reparametrisation_starts_as_the_plain_layer() -> None:
    plain, model = gpt(bias=True), gpt(bias=True, sigma_reparam=True)
    torch.testing.assert_close(model(tokens()[0]), plain(tokens()[0]), rtol=1e-4, atol=1e-5)
    assert len(model.sigma_linears) == 2 * 6
    for name, p in plain.named_parameters():
        assert torch.equal(model.get_parameter(name), p), name
    assert list(route_parameters(model, "all")) == list(route_parameters(plain, "all"))


def test_the_gain_is_the_spectral_norm_and_power_iteration_follows_the_weight() -> None:
    model = gpt(sigma_reparam=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
    for _ in range(40):
        optimizer.zero_grad()
        model.loss(*tokens()).backward()
        optimizer.step()
    for linear in model.sigma_linears:
        top = float(torch.linalg.svdvals(linear.weight.detach())[0])
        assert 0.7 * top < float(linear.u @ linear.weight @ linear.v) < top * (1 + 1e-5)  # one step a pass lags
        for _ in range(300):
            linear.follow()
        norm = float(torch.linalg.svdvals(linear.effective_weight().detach())[0])
        assert norm == pytest.approx(float(linear.gain), rel=1e-3)
    moved = [
        float(linear.gain) / float(fresh.gain)
        for linear, fresh in zip(model.sigma_linears, gpt(sigma_reparam=True).sigma_linears, strict=True)
    ]
    assert all(abs(ratio - 1) > 1e-3 for ratio in moved)


def test_its_gradient_holds_the_singular_vectors_constant() -> None:
    torch.manual_seed(0)
    linear = SigmaLinear(6, 4, bias=False)
    linear.start()
    x, weight = torch.randn(5, 6), torch.randn(5, 4)
    (linear(x) * weight).sum().backward()
    assert linear.weight.grad is not None and linear.gain.grad is not None
    d = weight.T @ x  # the gradient with respect to the effective weight
    sigma = linear.u @ linear.weight.detach() @ linear.v
    gain = linear.gain.detach()
    dot = (d * linear.weight.detach()).sum()
    expected = gain / sigma * d - gain / sigma**2 * dot * torch.outer(linear.u, linear.v)
    torch.testing.assert_close(linear.weight.grad, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(linear.gain.grad, (dot / sigma)[None], rtol=1e-4, atol=1e-5)


def test_power_iteration_steps_once_a_training_pass_and_never_in_evaluation() -> None:
    results = []
    for checkpointing in (False, True):
        model = gpt(checkpointing, sigma_reparam=True, dropout=0.1)
        with torch.no_grad():
            for linear in model.sigma_linears:
                linear.u.copy_(F.normalize(torch.ones_like(linear.u), dim=0))
                linear.v.copy_(F.normalize(torch.ones_like(linear.v), dim=0))
        model.eval()(tokens()[0])
        assert float(model.sigma_linears[0].u.std()) < 1e-6
        with torch.no_grad():
            model.train()(tokens()[0])
        assert float(model.sigma_linears[0].u.std()) < 1e-6
        torch.manual_seed(3)
        model.loss(*tokens()).backward()
        linear = model.sigma_linears[0]
        once = F.normalize(linear.weight.detach() @ F.normalize(torch.ones(16), dim=0), dim=0)
        torch.testing.assert_close(linear.u, once)
        results.append(gradients(model))
    assert_same(*results)


def test_two_passes_before_a_backward_pass_are_allowed_and_state_round_trips() -> None:
    model = gpt(sigma_reparam=True)
    (model.loss(*tokens()) + model.loss(*tokens(3))).backward()
    twin = gpt(sigma_reparam=True, seed=1)
    twin.load_state_dict(model.state_dict())
    torch.testing.assert_close(twin.eval()(tokens()[0]), model.eval()(tokens()[0]), rtol=0, atol=0)


def test_the_monitor_reads_the_weight_that_acts_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    monitor = SpectralMonitor(1)
    fitted, _ = fit(tmp_path, [monitor], fault(), module({"sigma_reparam": True}), max_steps=3)
    largest = max(float(torch.linalg.svdvals(site.q_weight.detach())[0]) for site in attention_sites(fitted))
    assert monitor.verdict_fields()["sigma_q"] == pytest.approx(largest, rel=1e-4)
    raw = max(float(torch.linalg.svdvals(site.q_proj.weight.detach())[0]) for site in attention_sites(fitted))
    assert raw != pytest.approx(largest, rel=1e-4)
    again, _ = fit(tmp_path, [], fault(), module({"sigma_reparam": True}), max_steps=3)
    assert_same(weights(fitted), weights(again))


def test_mx_products_of_reparametrised_layers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"SigmaLinear is not a plain nn\.Linear"):
        fit(tmp_path, [], MXGradient(route="qk", where="product", base="fp32"), module({"sigma_reparam": True}))


# z-loss


def test_the_z_loss_is_added_in_training_only() -> None:
    plain, model = gpt(), gpt(z_loss=0.1)
    logits = plain(tokens()[0])
    z = float(logits.logsumexp(-1).square().mean())
    expected = float(plain.loss(*tokens()))
    assert float(model.loss(*tokens())) == pytest.approx(expected + 0.1 * z, rel=1e-5)
    assert float(model.eval().loss(*tokens())) == pytest.approx(expected, rel=1e-6)
    gradient = torch.autograd.grad(model.train().loss(*tokens()), model.final_norm.weight)[0]
    assert not torch.allclose(gradient, torch.autograd.grad(plain.loss(*tokens()), plain.final_norm.weight)[0])
