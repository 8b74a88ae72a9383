"""Spectra of changes of the logits' bilinear form, against the matrices formed and decomposed in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.delta_spectra import DeltaSpectrum, delta_spectra


def weights(heads: int, kv_heads: int, d: int, n: int, size: float = 1e-3, seed: int = 0) -> list[Tensor]:
    """W_Q, W_K and changes of them by ``size``."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(count, d, n) for count in (heads, kv_heads)]
    return [
        scale * torch.randn(shape, generator=draw) / n**0.5
        for scale, shape in zip((1, 1, size, size), shapes * 2, strict=True)
    ]


def formed(q_Hdn: Tensor, k_Gdn: Tensor, dq_Hdn: Tensor, dk_Gdn: Tensor) -> list[Tensor]:
    """delta2 and delta3 [H, n, n] in float64."""
    q, k, dq, dk = (x.double() for x in (q_Hdn, k_Gdn, dq_Hdn, dk_Gdn))
    k, dk = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, dk))
    return [dq.mT @ k + q.mT @ dk, dq.mT @ dk]


def decomposed(delta_Hnn: Tensor) -> DeltaSpectrum:
    s = torch.linalg.svdvals(delta_Hnn)
    p = s.square() / s.square().sum(1, keepdim=True)
    entropy = -(p * p.clamp_min(1e-300).log()).sum(1)
    return DeltaSpectrum(delta_Hnn.flatten(1).norm(dim=1), s.square().sum(1) / s[:, 0].square(), entropy.exp())


def assert_spectra(tensors: list[Tensor], rtol: float) -> None:
    for found, delta in zip(delta_spectra(*tensors), formed(*tensors), strict=True):
        for value, expected in zip(found, decomposed(delta), strict=True):
            assert value.dtype is torch.float64
            torch.testing.assert_close(value, expected, rtol=rtol, atol=0)


SHAPES = [(4, 4, 16, 64), (6, 2, 8, 48), (4, 1, 5, 33), (1, 1, 24, 40), (2, 2, 40, 25), (2, 1, 1, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1e-7, 1e-3, 10.0])
@pytest.mark.parametrize(("heads", "kv_heads", "d", "n"), SHAPES)
def test_they_are_those_of_the_formed_matrices(
    heads: int, kv_heads: int, d: int, n: int, size: float, dtype: torch.dtype
) -> None:
    tensors = [x.to(dtype) for x in weights(heads, kv_heads, d, n, size)]
    assert_spectra(tensors, rtol=2e-5 if dtype is torch.float32 else 1e-9)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    groups=st.integers(1, 3),
    kv_heads=st.integers(1, 2),
    d=st.integers(1, 8),
    n=st.integers(1, 20),
    size=st.floats(1e-6, 1e2),
)
def test_the_ranks_are_ranks(seed: int, groups: int, kv_heads: int, d: int, n: int, size: float) -> None:
    found = delta_spectra(*weights(groups * kv_heads, kv_heads, d, n, size, seed))
    for spectrum, rank in zip(found, (min(2 * d, n), min(d, n)), strict=True):
        assert (spectrum.stable_rank >= 1 - 1e-12).all()
        assert (spectrum.effective_rank >= spectrum.stable_rank * (1 - 1e-9)).all()
        assert (spectrum.effective_rank <= rank * (1 + 1e-9)).all()


def test_a_repeated_rank_one_step_has_rank_one() -> None:
    """Changes along one direction of the inputs each, however long they last; delta2 then has two."""
    q, k, _, _ = weights(2, 2, 8, 32)
    u, v, a, b = (torch.randn(m, generator=torch.Generator().manual_seed(m)) for m in (8, 9, 32, 33))
    dq, dk = 1e-3 * torch.outer(u, a).expand(2, 8, 32), 1e-3 * torch.outer(v[:8], b[:32]).expand(2, 8, 32)
    first, second = delta_spectra(q, k, dq, dk)
    torch.testing.assert_close(second.effective_rank, torch.ones(2).double(), rtol=1e-4, atol=0)
    torch.testing.assert_close(second.stable_rank, torch.ones(2).double(), rtol=1e-4, atol=0)
    assert (first.effective_rank <= 2 + 1e-6).all()


def test_of_equal_singular_values_both_ranks_are_their_number() -> None:
    eye = torch.eye(4, 12)[None]
    _, second = delta_spectra(eye, eye, 3 * eye, eye.roll(4, 2))
    assert [float(value) for value in second] == pytest.approx([6.0, 4.0, 4.0])


def test_no_change_has_no_rank() -> None:
    q, k, dq, _ = weights(2, 2, 4, 16)
    first, second = delta_spectra(q, k, torch.zeros_like(dq), torch.zeros_like(dq))
    for value in (*first, *second):
        assert not value.any()
    first, second = delta_spectra(q, k, dq, torch.zeros_like(dq))
    assert (first.effective_rank >= 1).all() and not second.norm.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("argument", range(4))
def test_a_weight_that_is_not_finite_is_nan_in_its_heads_only(argument: int, bad: float) -> None:
    tensors = weights(4, 2, 4, 16)
    tensors[argument][0, 1, 2] = bad
    heads = [0] if argument in (0, 2) else [0, 1]  # two queries share a key
    spoilt, _ = delta_spectra(*tensors)
    whole, _ = delta_spectra(*weights(4, 2, 4, 16))
    for value, expected in zip(spoilt, whole, strict=True):
        assert value[heads].isnan().all()
        rest = [head for head in range(4) if head not in heads]
        torch.testing.assert_close(value[rest], expected[rest], rtol=1e-12, atol=0)


def test_shapes_that_do_not_fit() -> None:
    q, k, dq, dk = weights(4, 2, 4, 16)
    for tensors in ((q[:3], k, dq[:3], dk), (q, k[..., :15], dq, dk[..., :15]), (q, k, dq[:2], dk), (q, k, dq, dk[:1])):
        with pytest.raises(ValueError, match=r"delta_spectra: .*\[H, d, n\]"):
            delta_spectra(*tensors)
