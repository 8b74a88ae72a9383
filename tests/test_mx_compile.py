"""Compiled fake quantisation: the bits of eager mode, and no compilation for every new seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_mx_blocks import KINDS, assert_same_bits, data, generator
from torch import Tensor

from kernels.mx_blocks import mx_quantize
from kernels.mx_formats import FORMATS, ROUNDINGS, SCALES
from lightning_qk.attention import FaultSwitch
from lightning_qk.mx_linear import MXLinear, OperandFormat


class TestCompiled:
    @pytest.fixture(autouse=True)
    def fresh(self):
        torch.compiler.reset()

    @pytest.mark.slow
    def test_same_bits(self):
        x = torch.cat([data(kind, "mxfp4_e2m1").reshape(-1, 64)[:64] for kind in KINDS])[:, :40]  # a short last block
        x[3, 3], x[4, 34] = torch.inf, torch.nan
        assert_same_bits(torch.compile(mx_quantize, fullgraph=True)(x), mx_quantize(x))

    def test_a_new_seed_or_length_does_not_recompile(self):
        compiled = torch.compile(mx_quantize, fullgraph=True, dynamic=True)
        x = torch.randn(8, 64, generator=generator())
        compiled(x, rounding="sr", seed=2)
        with torch.compiler.set_stance("fail_on_recompile"):
            for seed in (3, 1 << 31, (5 << 32) + 7, -1):
                y = x.repeat(1, seed % 3 + 1)
                assert_same_bits(compiled(y, rounding="sr", seed=seed), mx_quantize(y, rounding="sr", seed=seed))

    @pytest.mark.slow
    def test_a_new_seed_recompiles_once_by_default(self):
        compiled = torch.compile(mx_quantize, fullgraph=True)
        x = torch.randn(8, 64, generator=generator())
        for seed in (0, 1, 2):  # a constant at first, then a variable
            compiled(x, rounding="sr", seed=seed)
        with torch.compiler.set_stance("fail_on_recompile"):
            for seed in (3, 1 << 31, (5 << 32) + 7, -1):
                assert_same_bits(compiled(x, rounding="sr", seed=seed), mx_quantize(x, rounding="sr", seed=seed))

    @pytest.mark.slow
    @pytest.mark.parametrize("rounding", ROUNDINGS)
    @pytest.mark.parametrize("fmt", FORMATS)
    def test_same_bits_in_every_mode(self, fmt: str, rounding: str):
        options: list[dict[str, Any]] = [{"scale": scale} for scale in SCALES]
        options += [{"axis": 0}, {"block": None}, {"block": 24, "prescale": True}]

        def every(x: Tensor) -> list[Tensor]:
            return [mx_quantize(x, fmt, rounding=rounding, seed=1, **option) for option in options]

        x = torch.cat([data(kind, fmt).reshape(-1, 64)[:128] for kind in KINDS])[3:, :62]  # short last blocks
        compiled = torch.compile(every, fullgraph=True)
        for values in (x, x.bfloat16()) if rounding == "rne" else (x,):
            for got, expected in zip(compiled(values), every(values), strict=True):
                assert_same_bits(got, expected)

    @pytest.mark.slow
    def test_gradient_passes(self):
        x = torch.randn(8, 64, generator=generator()).requires_grad_()
        torch.compile(mx_quantize, fullgraph=True)(x).sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x))


class TestProduct:
    def test_a_new_step_does_not_recompile(self) -> None:
        """The seed of a quantised product changes at every step; the blocks of GPT-2 sizes are compiled."""
        torch.compiler.reset()
        switch = FaultSwitch()
        plain = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        MXLinear.take_over(plain[0], switch, OperandFormat(rounding="sr", block=8), stream=3)
        compiled = torch.compile(plain, backend="aot_eager")
        x = torch.randn(16, 8)

        def gradient(model: Any, seed: int) -> torch.Tensor:
            switch.seed = seed
            model.zero_grad()
            model(x).square().sum().backward()
            return plain[0].weight.grad.clone()

        gradient(compiled, 0)
        with torch.compiler.set_stance("fail_on_recompile"):
            found = [gradient(compiled, seed) for seed in range(1, 12)]
        assert not torch.equal(found[0], found[1])
        for seed, value in enumerate(found, 1):
            torch.testing.assert_close(value, gradient(plain, seed))
