"""Element formats and rounding onto their grids, against ml_dtypes and exact arithmetic."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.mx_codes import code_values
from kernels.mx_formats import FORMATS, ROUNDINGS, SCALES, block_scales, round_elements, uniform
from kernels.rounding import hash32

ML_DTYPES = {
    "mxfp8_e4m3": ml_dtypes.float8_e4m3fn,
    "mxfp8_e5m2": ml_dtypes.float8_e5m2,
    "mxfp6_e2m3": ml_dtypes.float6_e2m3fn,
    "mxfp6_e3m2": ml_dtypes.float6_e3m2fn,
    "mxfp4_e2m1": ml_dtypes.float4_e2m1fn,
}


def positive_grid(name: str) -> np.ndarray:
    """All finite magnitudes of a format in order; their place is their code, so ties to even go to even places."""
    codes = np.arange(1 << (FORMATS[name].bits - 1), dtype=np.uint8)
    values = codes / 64.0 if name == "mxint8" else codes.view(ML_DTYPES[name]).astype(np.float64)
    return values[np.isfinite(values)]


def on_grid(y: np.ndarray, grid: np.ndarray, rounding: str) -> np.ndarray:
    """Magnitudes rounded by looking up their two neighbours in the grid, in float64."""
    y = np.minimum(y, grid[-1])
    below = np.minimum(np.searchsorted(grid, y, side="right") - 1, grid.size - 2)
    low, high = grid[below], grid[below + 1]
    middle = (low + high) / 2
    up = {
        "rz": y >= high,
        "away": y >= middle,
        "rne": (y > middle) | ((y == middle) & (below % 2 == 1)),
    }[rounding]
    return np.where(up, high, low)


def around(values: np.ndarray) -> np.ndarray:
    """float32 values with their two neighbours each."""
    values = values.astype(np.float32)
    return np.concatenate([values, np.nextafter(values, np.float32(np.inf)), np.nextafter(values, np.float32(0))])


def critical(name: str) -> np.ndarray:
    """Every code, every midpoint of codes, and the float32 numbers next to them, up to where a floor scale reaches."""
    grid = positive_grid(name)
    beyond = np.linspace(grid[-1], 2.0 ** (FORMATS[name].emax + 1), 9)[:-1]
    return around(np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, beyond]))


class TestTable:
    @pytest.mark.parametrize("name", ML_DTYPES)
    def test_agrees_with_ml_dtypes(self, name: str):
        fmt, info = FORMATS[name], ml_dtypes.finfo(ML_DTYPES[name])
        assert (fmt.max_normal, fmt.min_normal) == (float(info.max), float(info.smallest_normal))
        assert (fmt.bits, fmt.mantissa_bits) == (info.bits, info.nmant)
        assert fmt.min_normal * 2.0**-fmt.mantissa_bits == float(info.smallest_subnormal)
        assert 2.0**fmt.emax <= fmt.max_normal < 2.0 ** (fmt.emax + 1)

    @pytest.mark.parametrize("name", ML_DTYPES)
    def test_every_code_means_what_ml_dtypes_says(self, name: str):
        values = np.array(code_values(FORMATS[name]), dtype=np.float32)
        expected = np.arange(values.size, dtype=np.uint8).view(ML_DTYPES[name]).astype(np.float32)
        np.testing.assert_array_equal(values, expected)
        np.testing.assert_array_equal(np.signbit(values), np.arange(values.size) >= values.size // 2)

    def test_int8_is_two_s_complement_in_sixty_fourths(self):
        np.testing.assert_array_equal(code_values(FORMATS["mxint8"]), np.arange(256, dtype=np.uint8).view(np.int8) / 64)

    @pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
    def test_patterns_are_those_of_the_numbers(self, fmt):
        patterns = np.array([fmt.min_normal, fmt.max_normal], dtype=np.float32).view(np.int32)
        assert patterns.tolist() == [fmt.min_normal_pattern, fmt.max_pattern]


class TestRoundElements:
    @pytest.mark.parametrize("rounding", ["rne", "away", "rz"])
    @pytest.mark.parametrize("name", FORMATS)
    def test_every_code_midpoint_and_neighbour(self, name: str, rounding: str):
        y = critical(name)
        rounded = round_elements(torch.from_numpy(y), FORMATS[name], rounding).numpy()
        np.testing.assert_array_equal(rounded, on_grid(y.astype(np.float64), positive_grid(name), rounding))

    @pytest.mark.parametrize("name", ML_DTYPES)
    def test_every_bfloat16_number_rounds_as_in_ml_dtypes(self, name: str):
        y = (np.arange(2**15, dtype=np.uint32) << 16).view(np.float32)
        y = y[y < 2.0 ** (FORMATS[name].emax + 1)]  # where a scale would put the largest magnitude
        expected = np.minimum(y, np.float32(FORMATS[name].max_normal)).astype(ML_DTYPES[name]).astype(np.float32)
        np.testing.assert_array_equal(round_elements(torch.from_numpy(y), FORMATS[name], "rne").numpy(), expected)

    @pytest.mark.parametrize("rounding", ["rne", "away", "rz"])
    @pytest.mark.parametrize("name", FORMATS)
    def test_random_magnitudes(self, name: str, rounding: str):
        fmt = FORMATS[name]
        low = np.log2(fmt.min_normal) - fmt.mantissa_bits - 3
        y = np.exp2(np.random.default_rng(0).uniform(low, fmt.emax + 1, 1 << 14)).astype(np.float32)
        rounded = round_elements(torch.from_numpy(y), fmt, rounding).numpy()
        np.testing.assert_array_equal(rounded, on_grid(y.astype(np.float64), positive_grid(name), rounding))

    @pytest.mark.parametrize("name", FORMATS)
    def test_a_draw_decides_between_neighbours(self, name: str):
        fmt, grid = FORMATS[name], positive_grid(name)
        low, high = (torch.from_numpy(x.astype(np.float32)) for x in (grid[:-1], grid[1:]))
        quarter = low + (high - low) / 4  # exact
        for draw, expected in ((0.0, high), (0.25 - 2.0**-24, high), (0.25, low), (1 - 2.0**-24, low)):
            assert torch.equal(round_elements(quarter, fmt, "sr", torch.full_like(low, draw)), expected)
            assert torch.equal(round_elements(low, fmt, "sr", torch.full_like(low, draw)), low)

    @pytest.mark.parametrize("rounding", ROUNDINGS)
    @pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
    def test_codes_stay(self, fmt, rounding: str):
        y = torch.tensor([value for value in code_values(fmt) if 0 <= value <= fmt.max_normal])
        assert torch.equal(round_elements(y, fmt, rounding, torch.zeros_like(y)), y)


class TestBlockScales:
    @staticmethod
    def exponent(amax: float, name: str, scale: str) -> int:
        """The rule in words, in exact arithmetic."""
        fmt = FORMATS[name]
        if scale == "rceil":
            exponent = next(e for e in range(-300, 200) if amax <= fmt.max_normal * 2.0**e)
        else:
            significand, binade = np.frexp(amax)  # in [0.5, 1)
            steps = significand * 2 ** (fmt.mantissa_bits + 1)
            up = {"floor": False, "ceil": significand > 0.5, "even": steps + 0.5 >= 2 ** (fmt.mantissa_bits + 1)}[scale]
            exponent = int(binade) - 1 + up - fmt.emax
        return max(-127, min(127, exponent))

    @pytest.mark.parametrize("scale", SCALES)
    @pytest.mark.parametrize("name", FORMATS)
    def test_follows_the_rule_at_every_threshold(self, name: str, scale: str):
        fmt = FORMATS[name]
        steps = np.arange(2 ** (fmt.mantissa_bits + 1), 2 ** (fmt.mantissa_bits + 2))  # half steps of a binade
        significands = around(steps / 2.0 ** (fmt.mantissa_bits + 1))
        exponents = np.array([-126, -118, -100, -1, 0, 7, 126, 127])[:, None]
        amax = np.ldexp(significands.astype(np.float64), exponents).astype(np.float32).ravel()
        amax = amax[np.isfinite(amax) & (amax >= 2.0**-126)]
        scales, inverse = block_scales(torch.from_numpy(amax), fmt, scale)
        expected = [2.0 ** self.exponent(float(a), name, scale) for a in amax]
        assert scales.tolist() == expected
        assert inverse.tolist() == [1 / x for x in expected]

    @pytest.mark.parametrize("scale", SCALES)
    @pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
    def test_zero_has_the_smallest_scale_and_non_finite_has_none(self, fmt, scale: str):
        nan = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
        scales, inverse = block_scales(torch.cat([torch.tensor([0.0, torch.inf]), nan]), fmt, scale)
        assert scales[0] == 2.0**-127 and scales[1:].isnan().all()
        assert inverse.isfinite().all()


class TestUniform:
    def draws(self, seed: int, shape: tuple[int, ...] = (1 << 12,)) -> Tensor:
        return uniform(torch.Size(shape), seed, torch.device("cpu"))

    def test_is_the_documented_hash(self):
        index = torch.arange(1 << 12, dtype=torch.int32)
        for seed, low, high in ((7, 7, 0), ((3 << 32) + 9, 9, 3), (-1, -1, -1), (1 << 31, -(1 << 31), 0)):
            key = hash32(hash32(torch.tensor(high ^ 0x5BD1E995, dtype=torch.int32)) + low)
            bits = hash32(hash32(index) + key).numpy().view(np.uint32)
            np.testing.assert_array_equal(self.draws(seed).numpy(), (bits >> 8) * 2.0**-24)

    def test_nothing_is_special_about_zero(self):
        assert self.draws(0)[0] > 0

    def test_lies_in_the_unit_interval_evenly(self):
        draws = self.draws(3, (1 << 18,))
        assert draws.min() >= 0 and draws.max() < 1
        counts = torch.histc(draws, 64, 0, 1)
        chi_squared = ((counts - 4096) ** 2 / 4096).sum().item()
        assert 63 - 4 * 126**0.5 < chi_squared < 63 + 4 * 126**0.5

    @pytest.mark.parametrize("other", [8, 7 + (1 << 31), 7 + (1 << 32), 7 + (1 << 40), 7 + (1 << 63), -7])
    def test_any_bit_of_the_seed_gives_other_draws(self, other: int):
        one, two = self.draws(7), self.draws(other)
        assert (one == two).sum() <= 1
        # nor the same draws in another order: then the errors of a tensor would add up to the same sum at every seed
        assert not torch.equal(one.sort().values, two.sort().values)
        correlation = torch.corrcoef(torch.stack([one, two]))[0, 1].abs().item()
        assert correlation < 4 / one.numel() ** 0.5

    def test_depends_on_the_flat_index_alone(self):
        assert torch.equal(self.draws(5, (64, 64)).flatten(), self.draws(5))
        assert torch.equal(self.draws(5, (100,)), self.draws(5)[:100])

    def test_neighbours_are_uncorrelated(self):
        draws = self.draws(1, (1 << 16,))
        for lag in (1, 2, 32, 1024):
            correlation = torch.corrcoef(torch.stack([draws[lag:], draws[:-lag]]))[0, 1].abs().item()
            assert correlation < 4 / draws.numel() ** 0.5

    def test_leaves_the_generator_alone(self):
        state = torch.get_rng_state()
        self.draws(0)
        assert torch.equal(torch.get_rng_state(), state)
