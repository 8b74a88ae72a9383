"""Bounds on attention logits: never below a logit that can occur, and no higher than they need be."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kernels.logit_bound import logit_cauchy_schwarz_bound, logit_spectral_bound
from kernels.spectra import TopSingular


def weights(heads: int, kv_heads: int, d: int, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    w_q, w_k = (torch.randn(rows * d, n, generator=generator) / n**0.5 for rows in (heads, kv_heads))
    return w_q, w_k


def forms(w_q: Tensor, w_k: Tensor, heads: int, kv_heads: int) -> Tensor:
    """float64 [H, n, n], the bilinear form of every head, formed: the oracle."""
    d = len(w_q) // heads
    q, k = w_q.double(), w_k.double()
    pairs = [(h, h // (heads // kv_heads)) for h in range(heads)]
    return torch.stack([q[h * d : (h + 1) * d].T @ k[g * d : (g + 1) * d] for h, g in pairs])


def logits(x_Tn: Tensor, w_q: Tensor, w_k: Tensor, heads: int, kv_heads: int) -> Tensor:
    """float64 [H, T, T], unscaled, the way a layer makes them."""
    d, T = len(w_q) // heads, len(x_Tn)
    q_HTD = (x_Tn.double() @ w_q.double().T).view(T, heads, d).transpose(0, 1)
    k_GTD = (x_Tn.double() @ w_k.double().T).view(T, kv_heads, d).transpose(0, 1)
    return q_HTD @ k_GTD.repeat_interleave(heads // kv_heads, 0).mT


@pytest.mark.parametrize("implicit", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "n"), [(4, 4, 16, 64), (6, 2, 16, 48), (4, 1, 20, 100), (1, 1, 24, 30), (2, 2, 40, 25)]
)
def test_it_is_the_norm_of_the_formed_product(implicit: bool, heads: int, kv_heads: int, d: int, n: int) -> None:
    w_q, w_k = weights(heads, kv_heads, d, n)
    top = TopSingular(exact_below=0, block=4, tolerance=1e-3) if implicit else None
    bound = logit_spectral_bound(w_q, w_k, heads, kv_heads, scale=1.0, top=top)
    norm = torch.linalg.matrix_norm(forms(w_q, w_k, heads, kv_heads), 2)
    assert bound.dtype is torch.float32 and bound.shape == (heads,)
    assert (bound.double() >= norm).all()
    torch.testing.assert_close(bound.double(), norm, rtol=2e-3 if implicit else 2e-4, atol=0)
    assert top is None or top.trial_NnB is not None  # it did iterate


def test_the_bound_is_reached_by_the_worst_inputs() -> None:
    w_q, w_k = weights(4, 2, 16, 64)
    u, _, vh = torch.linalg.svd(forms(w_q, w_k, 4, 2))
    bound = logit_spectral_bound(w_q, w_k, 4, 2, input_norm=3.0)
    for h in range(4):
        x = 3.0 * torch.stack([u[h, :, 0], vh[h, 0]])  # a query and a key as long as they may be
        reached = logits(x, w_q, w_k, 4, 2)[h, 0, 1] / math.sqrt(16)
        assert 0.9995 * bound[h] < reached <= bound[h]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    groups=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    d=st.integers(1, 12),
    n=st.integers(1, 20),
    length=st.floats(1e-3, 1e3),
    scale=st.one_of(st.none(), st.floats(0.01, 10.0)),
)
def test_no_logit_of_inputs_of_that_length_is_larger(
    seed: int, groups: int, kv_heads: int, d: int, n: int, length: float, scale: float | None
) -> None:
    heads = groups * kv_heads
    w_q, w_k = weights(heads, kv_heads, d, n, seed)
    x = torch.randn(30, n, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    x[0] = torch.linalg.svd(forms(w_q, w_k, heads, kv_heads)[0]).U[:, 0]  # close to the worst case
    x = length * x / x.norm(dim=1, keepdim=True)
    bound = logit_spectral_bound(w_q, w_k, heads, kv_heads, scale=scale, input_norm=length)
    factor = d**-0.5 if scale is None else scale
    found = logits(x, w_q, w_k, heads, kv_heads).abs().amax((1, 2)) * factor
    assert (found <= bound.double()).all()


def test_orthogonal_queries_and_keys_need_no_room() -> None:
    w_q, w_k = weights(2, 2, 16, 64)
    w_q[8:16], w_q[24:], w_k[:8], w_k[16:24] = 0.0, 0.0, 0.0, 0.0  # within a head, q and k have no row in common
    bound = logit_spectral_bound(w_q, w_k, 2, scale=1.0)
    product = torch.linalg.matrix_norm(w_q, 2) * torch.linalg.matrix_norm(w_k, 2)
    assert (bound > 0).all() and (bound < 1e-4 * product).all()


def test_biases_are_one_more_column() -> None:
    torch.manual_seed(0)
    q_proj, k_proj = nn.Linear(24, 16).double(), nn.Linear(24, 16).double()
    x = torch.randn(500, 24, dtype=torch.float64)
    x = 2.0 * x / x.norm(dim=1, keepdim=True)
    q, k = (proj(x).view(500, 2, 8).transpose(0, 1) for proj in (q_proj, k_proj))
    w_q, w_k = (torch.cat([proj.weight, proj.bias[:, None]], 1) for proj in (q_proj, k_proj))
    bound = logit_spectral_bound(w_q, w_k, heads=2, input_norm=(2.0**2 + 1) ** 0.5)
    assert not bound.requires_grad
    assert ((q @ k.mT).abs().amax((1, 2)) / math.sqrt(8) <= bound).all()


def test_the_iteration_follows_weights_that_change() -> None:
    heads, d, n = 6, 32, 96
    w_q, w_k = weights(heads, 2, d, n)
    generator = torch.Generator().manual_seed(5)
    x = torch.linalg.qr(torch.randn(n, 2, generator=generator)).Q.T
    top = TopSingular(exact_below=0)
    for step in range(12):
        w_q = w_q + 0.03 * torch.randn(w_q.shape, generator=generator) / n**0.5
        spiked_q = w_q.clone()
        spiked_q[64] += 0.5 * step * x[0]  # head 2 runs away
        w_k[0] += 0.2 * x[1]
        bound = logit_spectral_bound(spiked_q, w_k, heads, 2, scale=1.0, top=top)
        norm = torch.linalg.matrix_norm(forms(spiked_q, w_k, heads, 2), 2)
        assert (bound >= norm * (1 - 1e-6)).all()
        assert (bound <= norm * 1.011).all()


@pytest.mark.parametrize("implicit", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_head_that_blew_up_spoils_only_itself(implicit: bool, value: float) -> None:
    w_q, w_k = weights(4, 2, 16, 64)
    clean = logit_spectral_bound(w_q, w_k, 4, 2)
    w_q[20, 3] = value
    top = TopSingular(exact_below=0) if implicit else None
    bound = logit_spectral_bound(w_q, w_k, 4, 2, top=top)
    assert bound.isnan().tolist() == [False, True, False, False]
    torch.testing.assert_close(bound[[0, 2, 3]], clean[[0, 2, 3]], rtol=0.02, atol=0)
    w_k[20, 3] = value  # the second key head, of query heads 2 and 3
    assert logit_spectral_bound(w_q, w_k, 4, 2, top=top).isnan().tolist() == [False, True, True, True]


def test_layers_stack_and_narrow_weights_are_read_in_float32() -> None:
    layers = [weights(2, 2, 8, 24, seed) for seed in range(3)]
    w_q, w_k = (torch.cat(side) for side in zip(*layers, strict=True))
    stacked = logit_spectral_bound(w_q, w_k, heads=6)
    torch.testing.assert_close(stacked, torch.cat([logit_spectral_bound(*layer, heads=2) for layer in layers]))
    w_q, w_k = (w.bfloat16() for w in layers[0])
    torch.testing.assert_close(logit_spectral_bound(w_q, w_k, 2), logit_spectral_bound(w_q.float(), w_k.float(), 2))


def test_the_scale_is_that_of_attention_unless_given() -> None:
    w_q, w_k = weights(2, 2, 16, 24)
    unscaled = logit_spectral_bound(w_q, w_k, 2, scale=1.0)
    torch.testing.assert_close(logit_spectral_bound(w_q, w_k, 2), unscaled / 4)
    torch.testing.assert_close(logit_spectral_bound(w_q, w_k, 2, scale=-0.5, input_norm=2.0), unscaled * 2)
    q, k = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16)
    unscaled = logit_cauchy_schwarz_bound(q, k, scale=1.0)
    torch.testing.assert_close(logit_cauchy_schwarz_bound(q, k), unscaled / 4)
    torch.testing.assert_close(logit_cauchy_schwarz_bound(q, k, scale=-2.0), unscaled * 2)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "k_shape"), [(3, None, (16, 8)), (4, 3, (12, 8)), (4, 2, (16, 8)), (4, None, (16, 9))]
)
def test_weights_that_do_not_fit_are_refused(heads: int, kv_heads: int | None, k_shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"w_q \(16, 8\).*heads={heads}"):
        logit_spectral_bound(torch.zeros(16, 8), torch.zeros(k_shape), heads, kv_heads)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.integers(1, 6), st.integers(1, 40)),
    size=st.floats(1e-6, 1e6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_cauchy_schwarz_is_never_below_a_logit(
    seed: int, shape: tuple[int, ...], size: float, dtype: torch.dtype
) -> None:
    B, G, group, T, D = shape
    generator = torch.Generator().manual_seed(seed)
    q = (torch.randn(B, G * group, T, D, generator=generator) * min(size, 1e3)).to(dtype)
    k = (torch.randn(B, G, T, D, generator=generator) / size**0.5).to(dtype)
    k[:, :, 0] = (q[:, ::group, -1].double() / size).to(dtype)  # aligned: the bound is tight
    found = (q.double() @ k.double().repeat_interleave(group, 1).mT).abs().amax((0, 2, 3)) / D**0.5
    bound = logit_cauchy_schwarz_bound(q, k)
    assert bound.dtype is torch.float32 and bound.shape == (G * group,)
    tiny = 1e-30  # products that float32 cannot hold
    assert (found <= bound.double() + tiny).all()


def test_cauchy_schwarz_is_reached_and_pairs_within_a_sequence_only() -> None:
    q, k = torch.zeros(2, 2, 3, 4), torch.zeros(2, 1, 3, 4)
    q[0, 0, 1, 0], k[0, 0, 2, 0] = 6.0, 4.0
    q[1, 0, 1, 0], k[1, 0, 2, 0] = 1.0, 10.0  # not 6 * 10: those never meet
    q[1, 1, 0, 3] = 3.0
    torch.testing.assert_close(logit_cauchy_schwarz_bound(q, k), torch.tensor([12.0, 15.0]), rtol=2e-5, atol=0)


def test_cauchy_schwarz_keeps_nan_and_refuses_what_does_not_fit() -> None:
    q, k = torch.ones(2, 4, 3, 8), torch.ones(2, 2, 3, 8)
    k[1, 1, 2, 0] = math.nan
    assert logit_cauchy_schwarz_bound(q, k).isnan().tolist() == [False, False, True, True]
    for wrong in (torch.ones(2, 3, 3, 8), torch.ones(2, 2, 3, 7), torch.ones(1, 2, 3, 8)):
        with pytest.raises(ValueError, match="do not fit"):
            logit_cauchy_schwarz_bound(q, wrong)
