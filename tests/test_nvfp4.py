"""NVFP4 fake quantisation against torchao, and what two levels of scales imply."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

from kernels.mx_formats import ROUNDINGS
from kernels.nvfp4 import nvfp4_quantize


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    nan = expected.isnan()
    assert actual.dtype is expected.dtype and torch.equal(actual.isnan(), nan)
    kind = torch.int32 if expected.dtype is torch.float32 else torch.int16
    assert torch.equal(actual[~nan].view(kind), expected[~nan].view(kind))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def torchao(x: Tensor) -> Tensor:
    return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().amax())).dequantize()


class TestAgainstTorchao:
    @pytest.mark.parametrize("spread", [0, 3, 12, 20])
    @pytest.mark.parametrize("size", [-80, -10, 0, 10, 100])
    def test_same_bits(self, size: int, spread: int):
        # blocks of different sizes: scales over all of E4M3 and, from a spread of 12 on, below it
        x = normal(64, 256) * torch.exp2(size + spread * (normal(64, 16, seed=1).repeat_interleave(16, 1).tanh() - 1))
        assert_same_bits(nvfp4_quantize(x), torchao(x))

    def test_ties(self):
        codes = torch.tensor([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 6])
        x = torch.stack([codes * scale for scale in (448.0, 1.0, 0.875, 2.0**-6, 1.0625)])
        assert_same_bits(nvfp4_quantize(torch.cat([x, -x])), torchao(torch.cat([x, -x])))

    def test_bfloat16(self):
        x = normal(32, 128).bfloat16()
        assert_same_bits(nvfp4_quantize(x), torchao(x))


class TestEdges:
    @pytest.mark.parametrize("rounding", ROUNDINGS)
    def test_zeros_stay_and_keep_their_sign(self, rounding: str):
        x = torch.tensor([0.0, -0.0] * 16)
        assert_same_bits(nvfp4_quantize(x, rounding=rounding), x)
        x[16] = 1.0
        assert_same_bits(nvfp4_quantize(x, rounding=rounding), x)

    @pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
    def test_one_non_finite_element_makes_all_nan(self, bad: float):
        x = normal(4, 32)
        x[2, 3] = bad
        assert nvfp4_quantize(x).isnan().all()

    @pytest.mark.parametrize("magnitude", [2.0**-149, 2.0**-126, 2.0**-110, 2.0**127, (2 - 2.0**-23) * 2.0**127])
    def test_the_ends_of_float32_make_no_nan(self, magnitude: float):
        x = torch.linspace(-1, 1, 32) * magnitude
        result = nvfp4_quantize(x)
        assert result.isfinite().all()
        if magnitude >= 2.0**-110:
            assert ((result - x).abs().max() / magnitude) <= 0.2

    def test_nothing_in_nothing_out(self):
        assert nvfp4_quantize(torch.empty(0, 16)).shape == (0, 16)


class TestBlocks:
    @given(shape=st.lists(st.integers(1, 40), min_size=1, max_size=3), axis=st.integers(0, 2))
    @settings(max_examples=50, deadline=None)
    def test_axes_and_short_blocks(self, shape: list[int], axis: int):
        x, axis = normal(*shape), axis % len(shape)
        result = nvfp4_quantize(x, axis=axis)
        last = x.movedim(axis, -1)
        filled = F.pad(last, (0, -last.shape[-1] % 16))
        assert_same_bits(nvfp4_quantize(filled)[..., : last.shape[-1]].movedim(-1, axis), result)


class TestRounding:
    @pytest.mark.parametrize(("rounding", "expected"), [("rne", 1.0), ("away", 1.5), ("rz", 1.0)])
    def test_ties(self, rounding: str, expected: float):
        x = torch.full((16,), 1.25 * 448)
        x[0] = 6 * 448
        assert nvfp4_quantize(x, rounding=rounding)[1] == expected * 448

    def test_stochastic_is_unbiased_and_keyed_by_the_seed(self):
        x = torch.full((1 << 16,), 1.1 * 448)
        x[::16] = 6 * 448
        first = nvfp4_quantize(x, rounding="sr", seed=1)
        up = (first[x < 6 * 448] / 448 - 1).double() / 0.5
        assert set(up.tolist()) == {0.0, 1.0}
        assert abs(up.mean().item() - 0.2) < 4 * (0.2 * 0.8 / up.numel()) ** 0.5
        assert torch.equal(first, nvfp4_quantize(x, rounding="sr", seed=1))
        assert not torch.equal(first, nvfp4_quantize(x, rounding="sr", seed=2))


class TestGradient:
    def test_passes_straight_through(self):
        x, weight = normal(4, 40).requires_grad_(), normal(4, 40, seed=1)
        (gradient,) = torch.autograd.grad((nvfp4_quantize(x) * weight).sum(), x)
        assert torch.equal(gradient, weight)


class TestCompiled:
    @pytest.mark.slow
    @pytest.mark.parametrize("rounding", ROUNDINGS)
    def test_same_bits(self, rounding: str):
        torch.compiler.reset()
        x = torch.cat([normal(16, 40), normal(15, 40) * 1e-4])  # short last blocks
        for axis in (0, 1):
            compiled = torch.compile(nvfp4_quantize, fullgraph=True)(x, axis=axis, rounding=rounding, seed=3)
            assert_same_bits(compiled, nvfp4_quantize(x, axis=axis, rounding=rounding, seed=3))


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "message"),
        [({"rounding": "up"}, "rounding='up' is not one of rne, away, rz, sr"), ({"axis": 1}, "axis=1 must be from")],
    )
    def test_options_are_refused_and_named(self, options: dict[str, Any], message: str):
        with pytest.raises(ValueError, match=f"nvfp4_quantize: {message}"):
            nvfp4_quantize(torch.ones(16), **options)

    def test_other_dtypes_are_refused(self):
        with pytest.raises(ValueError, match=r"nvfp4_quantize: got torch\.float64; give float32"):
            nvfp4_quantize(torch.ones(16, dtype=torch.float64))
