from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.hadamard import random_hadamard

BLOCKS = [1, 2, 4, 8, 16, 32, 64, 256]


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def sylvester(block: int) -> Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < block:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h


class TestMatrix:
    @pytest.mark.parametrize("block", BLOCKS)
    def test_is_sylvester_s(self, block: int):
        got = random_hadamard(torch.eye(block, dtype=torch.float64), block=block, seed=None) * block**0.5
        torch.testing.assert_close(got, sylvester(block))

    @pytest.mark.parametrize("block", BLOCKS)
    def test_signs_come_first_and_are_the_same_for_every_block(self, block: int):
        x = normal(3, 4 * block, dtype=torch.float64)
        got = random_hadamard(x, block=block, seed=7).view(3, 4, block)
        signs = random_hadamard(torch.eye(block, dtype=torch.float64), block=block, seed=7)[:, 0] * block**0.5
        assert ((signs - signs.sign()).abs() < 1e-12).all()
        plain = random_hadamard(x.view(3, 4, block) * signs.sign(), block=block, seed=None)
        torch.testing.assert_close(got, plain)

    def test_signs_are_even_and_differ_between_seeds(self):
        block = 1 << 12
        first = [random_hadamard(torch.eye(1, block), block=block, seed=seed) for seed in range(2)]
        assert torch.equal(first[0].abs(), first[1].abs())
        impulse = [random_hadamard(torch.ones(block), block=block, seed=seed) for seed in (0, 1, 1 << 40)]
        for i, y in enumerate(impulse):
            assert abs(y[0].item()) < 4  # the sum of the signs over sqrt(block)
            assert all(not torch.equal(y, other) for other in impulse[:i])
        assert torch.equal(impulse[0], random_hadamard(torch.ones(block), block=block, seed=0))


class TestTransform:
    @given(
        shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
        axis=st.integers(0, 2),
        block=st.sampled_from([1, 2, 8, 32]),
        seed=st.one_of(st.none(), st.integers(0, 2**40)),
    )
    @settings(max_examples=60, deadline=None)
    def test_inverts_and_keeps_products_along_any_axis(self, shape: list[int], axis: int, block: int, seed: Any):
        axis %= len(shape)
        shape[axis] *= block
        x, w = normal(*shape, dtype=torch.float64), normal(*shape, dtype=torch.float64).flip(0)
        y = random_hadamard(x, axis, block, seed)
        torch.testing.assert_close(random_hadamard(y, axis, block, seed, inverse=True), x)
        torch.testing.assert_close((y * random_hadamard(w, axis, block, seed)).sum(axis), (x * w).sum(axis))
        last = random_hadamard(x.movedim(axis, -1).contiguous(), -1, block, seed).movedim(-1, axis)
        assert torch.equal(last, y)

    def test_spreads_an_outlier(self):
        x = torch.zeros(64)
        x[40] = 1.0
        y = random_hadamard(x)
        assert not y[:32].any()
        torch.testing.assert_close(y[32:].abs(), torch.full((32,), 32**-0.5))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_narrow_inputs_are_transformed_in_float32(self, dtype: torch.dtype):
        x = normal(8, 64).to(dtype)
        for seed in (0, None):
            assert torch.equal(random_hadamard(x, seed=seed), random_hadamard(x.float(), seed=seed).to(dtype))

    def test_neither_autocast_nor_matmul_precision_matters(self):
        x = normal(8, 64)
        expected = random_hadamard(x)
        precision = torch.get_float32_matmul_precision()
        try:
            torch.set_float32_matmul_precision("medium")
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert torch.equal(random_hadamard(x), expected)
        finally:
            torch.set_float32_matmul_precision(precision)

    def test_gradient_is_the_inverse(self):
        x, weight = normal(4, 64).requires_grad_(), normal(4, 64).flip(1)
        (gradient,) = torch.autograd.grad((random_hadamard(x, seed=3) * weight).sum(), x)
        torch.testing.assert_close(gradient, random_hadamard(weight, seed=3, inverse=True))

    def test_leaves_the_generator_alone(self):
        state = torch.get_rng_state()
        random_hadamard(normal(32))
        assert torch.equal(torch.get_rng_state(), state)

    @pytest.mark.slow
    def test_compiled_equals_eager(self):
        x = normal(16, 64)
        compiled = torch.compile(random_hadamard, fullgraph=True)
        for axis, seed in ((-1, 0), (-1, 5), (-1, 6), (-1, None)):
            assert torch.equal(compiled(x, axis=axis, seed=seed), random_hadamard(x, axis=axis, seed=seed))


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"block": 24}, "block=24 must be a power of two"),
            ({"block": 0}, "block=0 must be a power of two"),
            ({"block": 128}, "axis 1 has length 64, not a multiple of block=128"),
            ({"axis": 0}, "axis 0 has length 4, not a multiple of block=32"),
            ({"axis": 2}, r"axis=2 must be from -2 to 1 for shape \(4, 64\)"),
        ],
    )
    def test_options_are_refused_and_named(self, options: dict[str, Any], message: str):
        with pytest.raises(ValueError, match=f"random_hadamard: {message}"):
            random_hadamard(normal(4, 64), **options)

    def test_integers_are_refused(self):
        with pytest.raises(ValueError, match=r"torch\.int64; give a floating-point tensor"):
            random_hadamard(torch.arange(32))
