"""Fake quantisation against torchao, a float64 oracle and its own symmetries."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from test_mx_formats import critical, on_grid, positive_grid
from torch import Tensor
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor

from kernels.mx_blocks import mx_quantize
from kernels.mx_formats import FORMATS, ROUNDINGS, SCALES

TORCHAO: dict[str, Any] = {
    "mxfp8_e4m3": torch.float8_e4m3fn,
    "mxfp8_e5m2": torch.float8_e5m2,
    "mxfp6_e2m3": "fp6_e2m3",
    "mxfp6_e3m2": "fp6_e3m2",
    "mxfp4_e2m1": torch.float4_e2m1fn_x2,
}
INTEGER = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal bit patterns, the sign of zero included; any NaN equals any NaN."""
    assert actual.dtype is expected.dtype and actual.shape == expected.shape
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    kind = INTEGER[expected.dtype]
    assert torch.equal(actual[~nan].view(kind), expected[~nan].view(kind))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def log_uniform(low: float, high: float, shape: tuple[int, ...] = (64, 128)) -> Tensor:
    """Signed magnitudes 2^low to 2^high."""
    exponent = torch.rand(shape, generator=generator(), dtype=torch.float64) * (high - low) + low
    return (exponent.exp2() * (torch.rand(shape, generator=generator(1)) - 0.5).sign()).float()


def ties(fmt: str) -> Tensor:
    """Every code, midpoint and float32 neighbour in blocks pinned by a number in the top binade, at several scales."""
    values = torch.from_numpy(critical(fmt))
    rows = F.pad(values, (0, -len(values) % 31)).view(-1, 31)
    pinned = torch.cat([torch.full((len(rows), 1), 2.0 ** FORMATS[fmt].emax), rows], 1)
    pinned = torch.cat([pinned, -pinned])
    return torch.cat([pinned * 2.0**exponent for exponent in (-100, -3, 0, 9, 100)])


def data(kind: str, fmt: str) -> Tensor:
    """Tensors of whole blocks of 32."""
    match kind:
        case "gaussian":
            return torch.randn(128, 256, generator=generator()) * torch.logspace(-6, 6, 128)[:, None]
        case "log-uniform":
            return log_uniform(-24, 24)
        case "tiny":  # subnormals, in blocks whose largest element lies around the smallest scale
            largest = log_uniform(-130, FORMATS[fmt].emax - 96, (256, 1))
            return torch.cat([largest, log_uniform(-149, -120, (256, 31))], 1)
        case "huge":
            return log_uniform(110, 127.99)
        case _:
            return ties(fmt)


KINDS = ("gaussian", "log-uniform", "tiny", "huge", "ties")


def torchao(x: Tensor, fmt: str, scale: str) -> tuple[Tensor, Tensor]:
    """torchao's result, and the E8M0 code of every element's scale."""
    mx = MXTensor.to_mx(x, TORCHAO[fmt], 32, ScaleCalculationMode[scale.upper()])
    return mx.dequantize(), mx.scale.view(torch.uint8).repeat_interleave(32, -1)


def oracle(x: Tensor, fmt: str, scale: str, rounding: str) -> Tensor:
    """Blocks of 32 by the definitions, in float64."""
    blocks = x.double().numpy().reshape(-1, 32)
    amax = np.abs(blocks).max(1, keepdims=True)
    top = FORMATS[fmt].max_normal / 2.0 ** FORMATS[fmt].emax
    significand, exponent = np.frexp(amax)
    exponent = np.maximum(exponent - 1, -127)  # of float32 subnormals, as their exponent field has it
    significand = np.where(exponent == -127, np.maximum(amax / 2.0**-127, 1), 2 * significand)
    threshold = {"floor": 2, "ceil": 1, "rceil": top, "even": 2 - 2.0 ** -(FORMATS[fmt].mantissa_bits + 1)}[scale]
    up = significand >= threshold if scale == "even" else significand > threshold
    unit = np.exp2(np.clip(exponent + up - FORMATS[fmt].emax, -127, 127).astype(float))
    magnitude = on_grid(np.abs(blocks) / unit, positive_grid(fmt), rounding) * unit
    with np.errstate(over="ignore"):
        result = np.copysign(magnitude, blocks).astype(np.float32).reshape(x.shape)
    return torch.from_numpy(result + 0.0 if fmt == "mxint8" else result)


class TestAgainstTorchao:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("scale", SCALES)
    @pytest.mark.parametrize("fmt", TORCHAO)
    def test_same_bits(self, fmt: str, scale: str, kind: str):
        x = data(kind, fmt)
        expected, codes = torchao(x, fmt, scale)
        compared = codes > 0  # below, torchao encodes with 2^-126 or 1 and decodes with 2^-127
        if scale == "rceil":  # torchao's log2 misses that amax is the next float32 above max normal * 2^k
            amax = x.view(-1, 32).abs().amax(1).double() / FORMATS[fmt].max_normal
            above_power = torch.frexp(amax).mantissa * 2 - 1
            compared &= ~((above_power > 0) & (above_power < 2.0**-17)).repeat_interleave(32).view(x.shape)
        assert compared.double().mean() > 0.5
        assert_same_bits(mx_quantize(x, fmt, scale=scale)[compared], expected[compared])

    @pytest.mark.parametrize("fmt", TORCHAO)
    def test_bfloat16(self, fmt: str):
        x = data("log-uniform", fmt).bfloat16()
        assert_same_bits(mx_quantize(x, fmt), torchao(x, fmt, "floor")[0])

    def test_rceil_differs_only_where_torchao_s_logarithm_is_inexact(self):
        x = torch.full((1, 32), 5.0 * 2.0**100)
        x[0, 0] = 6 * 2.0**100 * (1 + 2.0**-22)  # a float32 unit above max normal, the quotient too
        assert torchao(x, "mxfp4_e2m1", "rceil")[0][0, 0] == 6 * 2.0**100  # saturates, which rceil never should
        assert_same_bits(mx_quantize(x, scale="rceil"), oracle(x, "mxfp4_e2m1", "rceil", "rne"))
        assert mx_quantize(x, scale="rceil")[0, 1] == 4 * 2.0**100  # 5 / 2 is a tie on the coarser grid


class TestAgainstDefinition:
    @pytest.mark.parametrize("rounding", ["rne", "away", "rz"])
    @pytest.mark.parametrize("scale", SCALES)
    @pytest.mark.parametrize("fmt", FORMATS)
    def test_same_bits(self, fmt: str, scale: str, rounding: str):
        for kind in KINDS:
            x = data(kind, fmt)
            assert_same_bits(mx_quantize(x, fmt, scale=scale, rounding=rounding), oracle(x, fmt, scale, rounding))

    @pytest.mark.parametrize("rounding", ["rne", "sr"])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("fmt", FORMATS)
    def test_every_result_is_a_number_of_a_narrow_dtype(self, fmt: str, dtype: torch.dtype, rounding: str):
        x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
        x = x[x.isfinite()]
        shuffled = x[torch.randperm(x.numel(), generator=generator())]
        for values in (x, shuffled):  # neighbours together, and everything beside everything
            for scale in SCALES:
                exact = mx_quantize(values.float(), fmt, scale=scale, rounding=rounding)
                inside = exact.abs() <= torch.finfo(dtype).max  # the top may round up to infinity
                narrow = mx_quantize(values, fmt, scale=scale, rounding=rounding)
                assert_same_bits(narrow.float()[inside], exact[inside])
                assert narrow[~inside].isinf().all()


class TestEdges:
    @pytest.mark.parametrize("rounding", ROUNDINGS)
    @pytest.mark.parametrize("scale", SCALES)
    @pytest.mark.parametrize("fmt", FORMATS)
    @pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan, -torch.nan])
    def test_one_non_finite_element_makes_its_block_nan(self, fmt: str, scale: str, rounding: str, bad: float):
        x = torch.randn(3, 64, generator=generator())
        options = {"fmt": fmt, "scale": scale, "rounding": rounding}
        clean = mx_quantize(x, **options)
        x[1, 40] = bad
        dirty = mx_quantize(x, **options)
        assert dirty[1, 32:].isnan().all()
        clean[1, 32:] = torch.nan
        assert_same_bits(dirty, clean)

    @pytest.mark.parametrize("rounding", ROUNDINGS)
    @pytest.mark.parametrize("dtype", INTEGER)
    @pytest.mark.parametrize("fmt", FORMATS)
    def test_zeros_stay_and_keep_their_sign(self, fmt: str, dtype: torch.dtype, rounding: str):
        x = torch.tensor([0.0, -0.0] * 32, dtype=dtype)
        assert_same_bits(mx_quantize(x, fmt, rounding=rounding), x.abs() if fmt == "mxint8" else x)

    def test_what_is_flushed_to_zero_keeps_its_sign(self):
        x = torch.tensor([-6.0, -0.1, 0.1])
        assert_same_bits(mx_quantize(x), torch.tensor([-6.0, -0.0, 0.0]))
        assert_same_bits(mx_quantize(x, "mxint8"), torch.tensor([-6.0, -0.125, 0.125]))
        assert_same_bits(mx_quantize(x * torch.tensor([1, 0.01, 1]), "mxint8"), torch.tensor([-6.0, 0.0, 0.125]))

    @pytest.mark.parametrize("scale", SCALES)
    @pytest.mark.parametrize("fmt", FORMATS)
    @pytest.mark.parametrize("magnitude", [2.0**-149, 2.0**-127, 2.0**-126, 2.0**127, (2 - 2.0**-23) * 2.0**127])
    def test_the_ends_of_float32_make_no_nan(self, fmt: str, scale: str, magnitude: float):
        x = torch.full((32,), magnitude)
        result = mx_quantize(x, fmt, scale=scale)
        assert not result.isnan().any()
        if magnitude == 2.0**127:
            assert torch.equal(result, x)

    @pytest.mark.parametrize("fmt", FORMATS)
    def test_results_are_quantised_already(self, fmt: str):
        for scale in ("floor", "ceil", "rceil"):  # with "even" and E4M3, 2 can become 1.875, which then saturates
            for rounding in ROUNDINGS:
                once = mx_quantize(data("gaussian", fmt), fmt, scale=scale, rounding=rounding)
                assert_same_bits(mx_quantize(once, fmt, scale=scale, rounding=rounding, seed=1), once)

    @pytest.mark.parametrize("shape", [(0,), (0, 32), (3, 0)])
    def test_nothing_in_nothing_out(self, shape: tuple[int, ...]):
        assert mx_quantize(torch.empty(shape)).shape == shape

    def test_the_input_is_not_touched(self):
        x = torch.randn(4, 64, generator=generator())
        before = x.clone()
        for rounding in ROUNDINGS:
            assert mx_quantize(x, rounding=rounding, prescale=True).data_ptr() != x.data_ptr()
        assert torch.equal(x, before)


class TestBlocks:
    @given(
        shape=st.lists(st.integers(1, 40), min_size=1, max_size=3),
        axis=st.integers(0, 2),
        block=st.sampled_from([1, 2, 3, 16, 32, 64, None]),
        fmt=st.sampled_from(list(FORMATS)),
        seed=st.integers(0, 2**32),
    )
    @settings(max_examples=150, deadline=None)
    def test_axes_and_short_blocks(self, shape: list[int], axis: int, block: int | None, fmt: str, seed: int):
        x, axis = torch.randn(shape, generator=generator(seed)) * 3, axis % len(shape)
        result = mx_quantize(x, fmt, axis=axis, block=block)
        assert_same_bits(mx_quantize(x, fmt, axis=axis - len(shape), block=block), result)
        moved = mx_quantize(x.movedim(axis, -1).contiguous(), fmt, block=block)
        assert_same_bits(moved.movedim(-1, axis), result)
        length = shape[axis]
        size = length if block is None else block
        filled = F.pad(x.movedim(axis, -1), (0, -length % size))
        assert_same_bits(mx_quantize(filled, fmt, block=size)[..., :length].movedim(-1, axis), result)
        first = x.narrow(axis, 0, min(size, length))  # no block knows of another
        assert_same_bits(mx_quantize(first, fmt, axis=axis, block=None), result.narrow(axis, 0, min(size, length)))

    @pytest.mark.parametrize("rounding", ROUNDINGS)
    def test_views_are_quantised_like_copies(self, rounding: str):
        x = torch.randn(96, 64, generator=generator())
        for view in (x.T, x[::3], x[:, 1::2], x.view(6, 16, 64).transpose(0, 1)):
            for axis in range(view.ndim):
                options = {"axis": axis, "rounding": rounding, "seed": 3}
                result = mx_quantize(view, **options)
                assert result.is_contiguous()
                assert_same_bits(result, mx_quantize(view.contiguous(), **options))


class TestStochastic:
    N = 1 << 14

    def draws(self, value: float, fmt: str, top: float, **options: Any) -> Tensor:
        """Many roundings of ``value`` in blocks of two whose largest element is ``top``."""
        x = torch.tensor([top, value]).repeat(self.N)
        return mx_quantize(x, fmt, block=2, rounding="sr", **options)[1::2].double()

    def assert_unbiased(self, draws: Tensor, value: float, slack: float) -> None:
        results = draws.unique().tolist()
        assert len(results) <= 2
        low, high = results[0], results[-1]
        assert low - slack <= value <= high + slack
        deviation = math.sqrt(max(0.0, (value - low) * (high - value)) / self.N)
        assert abs(draws.mean().item() - value) <= 4 * deviation + slack

    @pytest.mark.parametrize("top", [1.0, 1.3, 1.6, 1.8, 1.99])  # significands: some saturate under "floor" alone
    @pytest.mark.parametrize(
        "options",
        [
            {"scale": "rceil"},
            {"scale": "ceil"},
            {"scale": "floor", "prescale": True},
            {"scale": "even", "prescale": True},
        ],
    )
    @pytest.mark.parametrize("fmt", FORMATS)
    def test_unbiased_where_nothing_saturates(self, fmt: str, options: dict[str, Any], top: float):
        f = FORMATS[fmt]
        top *= 2.0**f.emax
        step = f.min_normal * 2.0**-f.mantissa_bits
        slack = 2.0**-22 * top if "prescale" in options else 0.0
        for seed, value in enumerate([top, -top, 1.1 * f.min_normal, -0.7 * top, 0.3 * step, -2.6 * step]):
            value = np.float32(value).item()
            draws = self.draws(value, fmt, np.float32(top).item(), seed=seed, **options)
            self.assert_unbiased(draws, value, slack)

    @pytest.mark.parametrize("scale", ["floor", "even"])
    def test_saturation_biases_and_prescale_repairs(self, scale: str):
        value = 6.5  # between 6 and the 7 at which "even" takes a larger scale
        assert self.draws(value, "mxfp4_e2m1", value, scale=scale).unique().tolist() == [6.0]
        repaired = self.draws(value, "mxfp4_e2m1", value, scale=scale, prescale=True)
        assert repaired.unique().tolist() == pytest.approx([16 / 3, 8])

    def test_the_seed_is_all_that_decides(self):
        x = torch.randn(64, 64, generator=generator())
        torch.manual_seed(1)
        first = mx_quantize(x, rounding="sr", seed=5)
        torch.manual_seed(2)
        assert torch.equal(first, mx_quantize(x, rounding="sr", seed=5))
        for other in (6, 5 + (1 << 32), 5 + (1 << 63), -5):
            assert not torch.equal(first, mx_quantize(x, rounding="sr", seed=other))

    def test_errors_of_two_seeds_are_independent(self):
        x = torch.full((1 << 15,), 1.25)
        x[::32] = 4.0
        one, two = (mx_quantize(x, rounding="sr", seed=seed) > 1.25 for seed in (0, 1 << 32))
        agreement = (one == two)[x < 4].double().mean().item()
        assert abs(agreement - 0.5) < 4 * 0.5 / (1 << 15) ** 0.5

    def test_axis_moves_blocks_not_draws(self):
        x = torch.full((32, 32), 1.25)
        x[0], x[:, 0] = 4.0, 4.0  # one scale, whichever the axis
        assert torch.equal(mx_quantize(x, rounding="sr", axis=0), mx_quantize(x, rounding="sr", axis=1))


class TestPrescale:
    @pytest.mark.parametrize("rounding", ["rne", "away", "rz"])
    @pytest.mark.parametrize("fmt", FORMATS)
    def test_multiplies_elements_not_the_scale(self, fmt: str, rounding: str):
        for significand in (1.0, 1.3, 1.6, 1.99):
            x = torch.linspace(-1, 1, 32) * significand * 2.0 ** FORMATS[fmt].emax  # so that the scale is 1
            magnitude = on_grid((x.abs() * 0.75).double().numpy(), positive_grid(fmt), rounding)
            expected = torch.from_numpy(magnitude).float() * (4 / 3)
            assert torch.equal(mx_quantize(x, fmt, rounding=rounding, prescale=True).abs(), expected)


class TestGradient:
    @pytest.mark.parametrize("rounding", ["rne", "sr"])
    def test_passes_straight_through(self, rounding: str):
        x = (torch.randn(4, 70, generator=generator()) * 5).requires_grad_()
        weight = torch.randn(4, 70, generator=generator(1))
        result = mx_quantize(x, rounding=rounding)
        assert_same_bits(result.detach(), mx_quantize(x.detach(), rounding=rounding))
        (gradient,) = torch.autograd.grad((result * weight).sum(), x)
        assert torch.equal(gradient, weight)

    def test_without_grad_nothing_is_recorded(self):
        x = torch.randn(64, requires_grad=True)
        with torch.no_grad():
            assert not mx_quantize(x).requires_grad
        assert not mx_quantize(x.detach()).requires_grad


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"fmt": "mxfp4"}, r"fmt='mxfp4' is not one of .*mxfp4_e2m1"),
            ({"scale": "round"}, r"scale='round' is not one of floor, ceil, even, rceil"),
            ({"rounding": "nearest"}, r"rounding='nearest' is not one of rne, away, rz, sr"),
            ({"backend": "cuda"}, r"backend='cuda' is not one of auto, torch, triton"),
            ({"block": 0}, r"block=0 must be an int of at least 1, or None"),
            ({"block": True}, r"block=True must be an int of at least 1, or None"),
            ({"axis": 2}, r"axis=2 must be from -2 to 1 for shape \(4, 32\)"),
            ({"axis": -3}, r"axis=-3 must be from -2 to 1"),
        ],
    )
    def test_options_are_refused_and_named(self, options: dict[str, Any], message: str):
        with pytest.raises(ValueError, match=message):
            mx_quantize(torch.ones(4, 32), **options)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool, torch.complex64])
    def test_other_dtypes_are_refused(self, dtype: torch.dtype):
        with pytest.raises(ValueError, match=rf"got {dtype}; give float32, bfloat16 or float16 \(x\.float\(\)\)"):
            mx_quantize(torch.ones(4, 32, dtype=dtype))

    def test_a_number_has_no_axis(self):
        with pytest.raises(ValueError, match="axis=-1"):
            mx_quantize(torch.tensor(1.0))
