"""Sites in ``nn.MultiheadAttention`` and in what is built of it."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from test_adapters import watch
from tiny import fault
from torch import nn

from lightning_qk.routes import attention_sites, route_parameters


def multihead(**settings: Any) -> tuple[nn.MultiheadAttention, nn.MultiheadAttention]:
    """A stock module and its twin with a site."""
    torch.manual_seed(0)
    stock = nn.MultiheadAttention(16, 4, **settings)
    with torch.no_grad():
        for p in stock.parameters():
            p.copy_(torch.randn(p.shape) * 0.7)
    watched = copy.deepcopy(stock)
    watch(watched)
    return stock, watched


CAUSAL = torch.ones(6, 6, dtype=torch.bool).triu(1)
PADDED = torch.tensor([[False] * 6, [False] * 4 + [True] * 2, [False] * 5 + [True]])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "call",
    [
        {},
        {"need_weights": False},
        {"average_attn_weights": False},
        {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False},
        {"attn_mask": CAUSAL, "is_causal": True},
        {"attn_mask": torch.randn(6, 6, generator=torch.Generator().manual_seed(3)), "need_weights": False},
        {"attn_mask": torch.randn(12, 6, 6, generator=torch.Generator().manual_seed(3))},
        {"key_padding_mask": PADDED, "need_weights": False},
        {"attn_mask": CAUSAL, "is_causal": True, "key_padding_mask": PADDED},
    ],
    ids=str,
)
def test_a_site_in_multihead_attention_changes_nothing(call: dict[str, Any], batch_first: bool) -> None:
    stock, watched = multihead(batch_first=batch_first)
    x = torch.randn(3, 6, 16, generator=torch.Generator().manual_seed(2))
    x = x if batch_first else x.transpose(0, 1)
    for training, grad in ((True, True), (False, True), (False, False)):
        with torch.set_grad_enabled(grad):
            (out, weights), (ours, our_weights) = (
                module.train(training)(x, x, x, **call) for module in (stock, watched)
            )
        torch.testing.assert_close(ours, out, rtol=1e-5, atol=1e-5)
        assert (weights is None) == (our_weights is None)
        if weights is not None:
            torch.testing.assert_close(our_weights, weights, rtol=1e-5, atol=1e-6)


def test_keys_of_another_width_and_unbatched_input() -> None:
    stock, watched = multihead(kdim=5, vdim=7)
    q, k, v = torch.randn(6, 16), torch.randn(4, 5), torch.randn(4, 7)
    for left, right in zip(stock(q, k, v), watched(q, k, v), strict=True):
        torch.testing.assert_close(right, left, rtol=1e-5, atol=1e-5)
    (site,) = attention_sites(watched)
    assert [tuple(site.weight(name).shape) for name in "qkvo"] == [(16, 16), (16, 5), (16, 7), (16, 16)]
    assert len(route_parameters(watched, "qk")) == 2


def test_multihead_sensors_see_masks_and_padding() -> None:
    _, watched = multihead(batch_first=True)
    (site,) = attention_sites(watched)
    x = torch.randn(3, 6, 16)
    watched(x, x, x, attn_mask=CAUSAL, key_padding_mask=PADDED)
    q, k = (
        (x @ site.weight(n).T + site.bias(n)).unflatten(-1, (4, 4)).transpose(1, 2)  # type: ignore[operator]
        for n in "qk"
    )
    hidden = CAUSAL | PADDED[:, None, None]
    scores = (q @ k.mT / 2).masked_fill(hidden, -math.inf)
    torch.testing.assert_close(site.core.max_logit_H, scores.amax((0, 2, 3)).detach(), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="no route for q and k alone: MultiheadSite"):
        route_parameters(watched, "qk")
    assert list(route_parameters(watched, "attention")) == ["in_proj_weight", "out_proj.weight"]


@pytest.mark.parametrize("padded", [False, True])
def test_a_transformer_encoder_has_no_way_around_its_sites(padded: bool) -> None:
    """In evaluation its layers would call a fused kernel instead of their attention."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, activation="gelu")
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)
    call = {"src_key_padding_mask": PADDED} if padded else {}
    x = torch.randn(3, 6, 16)
    with torch.no_grad():
        slow = encoder(x, **call)
    sites = watch(encoder)
    assert len(sites) == 2 and len(route_parameters(encoder, "mlp")) == 4
    with torch.no_grad():
        torch.testing.assert_close(encoder(x, **call), slow, rtol=1e-5, atol=1e-5)
        encoder.eval()
        quiet = encoder(x, **call)
        torch.testing.assert_close(quiet[~PADDED], slow[~PADDED], rtol=1e-5, atol=1e-5)
        for site in sites:
            site.set_qk_norm(True)
        assert not torch.allclose(encoder(x, **call), quiet, rtol=1e-3, atol=1e-3)


def test_a_fault_in_multihead_attention_needs_a_causal_call_without_weights() -> None:
    _, watched = multihead(batch_first=True)
    x = torch.randn(3, 6, 16)
    causal: dict[str, Any] = dict(attn_mask=CAUSAL, is_causal=True, need_weights=False)
    plain = watched(x, x, x, **causal)[0]
    fault("fp32", None).convert_module(watched)
    torch.testing.assert_close(watched(x, x, x, **causal)[0], plain, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="is_causal=True and need_weights=False"):
        watched(x, x, x)
