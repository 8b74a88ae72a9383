import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.rounding import MODES, Rounding, round_to

LOW_HALVES = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


def floats(patterns: np.ndarray) -> Tensor:
    return torch.from_numpy(patterns.astype(np.uint32).view(np.float32))


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal bit patterns, the sign of zero included; any NaN equals any NaN."""
    assert actual.dtype is expected.dtype is torch.float32
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    assert torch.equal(actual[~nan].view(torch.int32), expected[~nan].view(torch.int32))


def random_patterns(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint64)


def oracle(x: Tensor, bits: int, to_integer: np.ufunc) -> Tensor:
    """Rounds in float64 on the grid of the value's binade, exactly."""
    wide = x.double().numpy()
    exponent = np.maximum(np.frexp(wide)[1] - 1, -126)  # below 2^-126 the grid stays that of the smallest normal
    step = np.ldexp(1.0, exponent - bits)
    with np.errstate(over="ignore"):
        return torch.from_numpy((to_integer(wide / step) * step).astype(np.float32))


class TestNearest:
    def test_seven_bits_are_the_bfloat16_cast_around_every_bfloat16_value(self):
        high = np.arange(2**16, dtype=np.uint64) << 16
        for low in LOW_HALVES:
            x = floats(high + low)
            assert_same_bits(round_to(x, 7), x.to(torch.bfloat16).float())

    def test_seven_bits_are_the_bfloat16_cast_on_random_patterns(self):
        x = floats(random_patterns(1 << 20))
        assert_same_bits(round_to(x, 7), x.to(torch.bfloat16).float())

    def test_fp16_is_the_half_cast_around_every_half_value(self):
        halves = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
        halves = halves[np.isfinite(halves)]
        middles = (halves[:-1] + halves[1:]) / 2  # exact: a half has 11 bits; ties, and 65520, where overflow begins
        edges = np.float32([65504, 65519.996, 65520, 65536, 1e30, np.inf, np.nan, 2**-25, 2**-26, 1e-45, 0])
        for base in (halves, middles, edges, -edges):
            for x in (base, np.nextafter(base, np.float32(np.inf)), np.nextafter(base, np.float32(-np.inf))):
                tensor = torch.from_numpy(x)
                assert_same_bits(Rounding.parse("fp16")(tensor), tensor.half().float())

    def test_fp16_is_the_half_cast_on_random_patterns(self):
        x = floats(random_patterns(1 << 20, seed=1))
        assert_same_bits(Rounding.parse("fp16")(x), x.half().float())

    @pytest.mark.parametrize(("dtype", "bits"), [(ml_dtypes.float8_e5m2, 2), (ml_dtypes.float8_e4m3fn, 3)])
    def test_few_bits_agree_with_an_eight_bit_float_in_its_normal_range(self, dtype: type, bits: int):
        info = ml_dtypes.finfo(dtype)
        magnitude = np.exp2(np.random.default_rng(0).uniform(info.minexp, info.maxexp - 1, 1 << 16)).astype(np.float32)
        x = np.where(np.arange(magnitude.size) % 2, magnitude, -magnitude)
        assert_same_bits(round_to(torch.from_numpy(x), bits), torch.from_numpy(x.astype(dtype).astype(np.float32)))

    @pytest.mark.parametrize("bits", range(1, 23))
    def test_every_width_agrees_with_exact_arithmetic(self, bits: int):
        exponents = np.arange(255, dtype=np.uint64)[:, None] << 23
        fractions = random_patterns(256, seed=bits) & 0x7FFFFF
        half_way = ((fractions >> (23 - bits)) << (23 - bits)) | (1 << (22 - bits))
        for patterns in (exponents + fractions, exponents + half_way):
            x = floats(patterns)
            assert_same_bits(round_to(x, bits), oracle(x, bits, np.rint))
            assert_same_bits(round_to(-x, bits), -oracle(x, bits, np.rint))

    def test_all_bits_change_nothing(self):
        x = floats(random_patterns(1000))
        assert_same_bits(round_to(x, 23), x)


class TestTowardsZero:
    @pytest.mark.parametrize("bits", [1, 2, 7, 10, 22])
    def test_agrees_with_exact_arithmetic(self, bits: int):
        x = floats((np.arange(255, dtype=np.uint64)[:, None] << 23) + (random_patterns(256) & 0x7FFFFF))
        x = torch.cat([x, -x])
        assert_same_bits(round_to(x, bits, "rz"), oracle(x, bits, np.trunc))

    def test_fp16_never_grows_and_never_overflows(self):
        x = floats(random_patterns(1 << 18))
        x = x[x.isfinite()]
        rounded = Rounding.parse("fp16:rz")(x)
        nearest = x.half().float()
        below = torch.from_numpy(np.nextafter(nearest.half().numpy(), np.float16(0)).astype(np.float32))
        assert_same_bits(rounded, torch.where(nearest.abs() > x.abs(), torch.copysign(below, x), nearest))


class TestStochastic:
    @pytest.mark.parametrize("spec", ["2:sr", "bf16:sr", "17:sr", "fp16:sr"])
    @pytest.mark.parametrize("fraction", [0.015625, 0.25, 0.5, 0.875])
    @pytest.mark.parametrize("start", [1.0, -1.0, 2.0**-20, -(2.0**-20)])
    def test_is_unbiased_on_the_two_neighbours(self, spec: str, fraction: float, start: float):
        rounding = Rounding.parse(spec)
        subnormal = rounding.exponent_bits == 5 and abs(start) < 2.0**-14
        step = 2.0**-24 if subnormal else abs(start) * 2.0**-rounding.mantissa_bits
        low, count = abs(start), 1 << 16
        x = torch.full((count,), low + fraction * step).copysign(torch.tensor(start))
        up = (rounding(x, seed=3).abs().double() - low) / step
        assert set(up.tolist()) == {0.0, 1.0}
        assert abs(up.mean().item() - fraction) < 4 * (fraction * (1 - fraction) / count) ** 0.5

    @pytest.mark.parametrize("spec", ["2:sr", "bf16:sr", "fp16:sr"])
    def test_the_seed_is_all_that_decides(self, spec: str):
        rounding, x = Rounding.parse(spec), torch.randn(64, 33, generator=torch.Generator().manual_seed(0))
        torch.manual_seed(1)
        first = rounding(x, seed=5)
        torch.manual_seed(2)
        assert torch.equal(first, rounding(x, seed=5))
        for other in (6, 5 + (1 << 32), 5 + (1 << 63)):  # every one of the 64 bits counts
            assert not torch.equal(first, rounding(x, seed=other))

    def test_neighbours_and_seeds_are_uncorrelated(self):
        x, count = torch.full((1 << 16,), 1 + 2.0**-8), 1 << 16
        one, two = (round_to(x, 7, "sr", seed=seed) > 1 for seed in (0, 1))
        for a, b in ((one, two), (one[1:], one[:-1])):
            agreement = (a == b).double().mean().item()
            assert abs(agreement - 0.5) < 4 * 0.5 / count**0.5


class TestEveryMode:
    @pytest.mark.parametrize("mode", MODES)
    def test_values_on_the_grid_never_move(self, mode: str):
        grid = floats(np.arange(2**16, dtype=np.uint64) << 16)
        assert_same_bits(round_to(grid, 7, mode, seed=1), grid)
        halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16)
        assert_same_bits(Rounding.parse(f"fp16:{mode}")(halves, seed=1), halves.float())

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("spec", ["1", "bf16", "fp16", "22"])
    def test_nan_stays_nan_and_infinity_stays(self, mode: str, spec: str):
        rounding = Rounding.parse(f"{spec}:{mode}")
        nan = floats(np.array([0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF, 0xFF800001, 0x7FC00000]))
        infinity = floats(np.array([0x7F800000, 0xFF800000]))
        for seed in range(8):
            assert rounding(nan, seed).isnan().all()
            assert_same_bits(rounding(infinity, seed), infinity)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_narrow_inputs_are_widened(self, dtype: torch.dtype):
        x = torch.randn(100).to(dtype)
        assert_same_bits(round_to(x, 3), round_to(x.float(), 3))

    def test_views_round_like_copies(self):
        x = torch.randn(16, 24)
        assert_same_bits(round_to(x.T, 7), round_to(x.T.contiguous(), 7))

    def test_compiled_equals_eager(self):
        specs = ["2", "bf16", "fp16", "bf16:rz", "fp16:rz", "3:sr", "fp16:sr"]

        def every(x: Tensor) -> list[Tensor]:
            return [Rounding.parse(spec)(x * 1.0, seed=7) for spec in specs]

        x = torch.cat([floats(random_patterns(1 << 14)), torch.randn(1 << 14), torch.randn(1 << 14) * 1e-6])
        for compiled, eager in zip(torch.compile(every, fullgraph=True)(x), every(x), strict=True):
            assert_same_bits(compiled, eager)


class TestSpelling:
    @pytest.mark.parametrize("text", ["fp32", "bf16", "fp16", "2", "bf16:sr", "fp16:rz", "5:sr"])
    def test_text_round_trips(self, text: str):
        assert str(Rounding.parse(text)) == text
        assert Rounding.parse(Rounding.parse(text)) == Rounding.parse(text)

    def test_a_number_is_mantissa_bits(self):
        assert Rounding.parse(7) == Rounding.parse("bf16")
        assert Rounding.parse("23:sr") == Rounding.parse("fp32")  # nothing is dropped, so nothing is drawn

    @pytest.mark.parametrize("value", ["bf17", "", "2.5", -1, None, "0", 24, "bf16:up", True])
    def test_nonsense_is_refused_and_named(self, value: object):
        with pytest.raises(ValueError, match=r"rounding|mantissa_bits") as error:
            Rounding.parse(value)
        assert str(value).split(":")[-1] in str(error.value)

    def test_a_narrow_exponent_goes_with_fp16_only(self):
        with pytest.raises(ValueError, match="exponent_bits"):
            Rounding(7, exponent_bits=5)

    def test_round_to_names_what_is_wrong(self):
        x = torch.ones(2)
        with pytest.raises(ValueError, match="mode='up'"):
            round_to(x, 7, "up")
        with pytest.raises(ValueError, match="mantissa_bits=0"):
            round_to(x, 0)
        with pytest.raises(ValueError, match=r"torch\.float64"):
            round_to(x.double(), 7)
