"""The Triton kernel without a GPU: interpreted, and compiled for GPUs that are not here.

Triton decides when it is imported whether it interprets, so each check runs this file in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kernels
from kernels.mx_blocks import check, mx_quantize
from kernels.mx_formats import FORMATS, ROUNDINGS, SCALES, uniform

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SHAPES = [
    ((5, 37), -1, 32),
    ((37, 5), 0, 32),
    ((3, 20, 7), 1, 16),
    ((3, 20, 7), 1, None),
    ((9,), 0, 4),
    ((6, 70), -1, 5),
]

VARIANTS = [("*fp32", -1, "rne"), ("*fp32", 0, "sr"), ("*bf16", -1, "away")]  # dtype, axis, rounding


def run(task: str, **environment: str) -> str:
    process = subprocess.run(
        [sys.executable, __file__, task],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def assert_same_bits(actual: Tensor, expected: Tensor, label: object) -> None:
    actual, expected = actual.cpu().float(), expected.cpu().float()
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan), label
    assert torch.equal(actual[~nan].view(torch.int32), expected[~nan].view(torch.int32)), label


def spread() -> Tensor:
    """Blocks of all sizes, one with an infinity, one with a NaN, one of zeros, one of ties."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-150, 127, (24, 2), generator=generator).repeat_interleave(32, 1)
    x = torch.ldexp(torch.randn(24, 64, generator=generator), exponents)
    x[3, 5], x[4, 40], x[5], x[6, :32] = torch.inf, torch.nan, 0.0, torch.arange(-16, 16) / 4
    x[5, 1] = -0.0
    return x


def compare_everything(device: str) -> None:
    """Every mode in float32, and shapes, axes and dtypes in two of them, against PyTorch operations on the CPU."""
    x = spread()
    for fmt in FORMATS:
        for scale in SCALES:
            for rounding in ROUNDINGS:
                for prescale in (False, True):
                    options = {"scale": scale, "rounding": rounding, "seed": (5 << 32) + 7, "prescale": prescale}
                    got = mx_quantize(x.to(device), fmt, **options, backend="triton")
                    assert_same_bits(got, mx_quantize(x, fmt, **options), (fmt, options))
    for shape, axis, block in SHAPES:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for rounding in ("rne", "sr"):
                x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
                options = {"axis": axis, "block": block, "rounding": rounding}
                got = mx_quantize(x.to(device), **options, backend="triton")
                assert got.dtype is dtype and got.shape == x.shape
                assert_same_bits(got, mx_quantize(x, **options), (shape, dtype, options))
    codes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]).repeat(192)
    draws = uniform(codes.shape, 12226, codes.device)
    assert draws[389] == 0  # the one draw that could move a number that is a code already
    assert_same_bits(mx_quantize(codes.to(device), rounding="sr", seed=12226, backend="triton"), codes, "codes")
    transposed = torch.randn(64, 16).T
    assert_same_bits(mx_quantize(transposed.to(device), backend="triton"), mx_quantize(transposed), "transposed")


def compile_kernel(capability: int, dtype: str, axis: int, rounding: str) -> str:
    """PTX of the kernel for a [768, 3072] tensor, as a launch would specialise it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kernels import mx_triton

    s = check("test", torch.empty(768, 3072), "mxfp4_e2m1", axis, 32, "floor", rounding, 0, False)
    values = {**mx_triton.constants(s), **({"inner": 1} if axis else {})}
    signature = {p.name: "constexpr" if p.name in values else "i32" for p in mx_triton._kernel.params}
    signature |= {"x_ptr": dtype, "out_ptr": dtype}
    names = list(signature)
    source = ASTSource(
        mx_triton._kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in values.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in {*values, "key"}},
    )
    options = {"enable_fp_fusion": False, "num_warps": 4}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]


@needs_triton
class TestKernel:
    def test_interpreted_equals_torch_in_every_mode(self):
        run("interpret", TRITON_INTERPRET="1")

    def test_compiles_for_gpus_that_are_not_here(self):
        listings = run("compile").split(".version")[1:]
        assert [re.search(r"\.target sm_(\d+)", ptx)[1] for ptx in listings] == ["80", "90", "100"] * len(VARIANTS)
        for ptx in listings:
            assert not re.search(r"\bfma\.", ptx)  # a contraction
            assert ".ftz" not in ptx  # subnormals flushed
            loads = re.findall(r"ld\.global\S*", ptx)
            assert loads and set(loads) == {"ld.global.v4.b32"}  # 16 bytes at once, along either axis

    @needs_cuda
    def test_on_a_gpu_equals_torch_on_the_cpu_in_every_mode(self):
        compare_everything("cuda")
        x = spread()
        assert_same_bits(mx_quantize(x.cuda()), mx_quantize(x), "auto")


class TestChoice:
    def test_without_triton_everything_else_works(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setitem(sys.modules, "triton", None)  # makes its import fail
        spec = importlib.util.find_spec("kernels.mx_triton")
        without = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(without)
        monkeypatch.setitem(sys.modules, "kernels.mx_triton", without)
        monkeypatch.setattr(kernels, "mx_triton", without, raising=False)
        x = torch.randn(64)
        assert not without.supports(check("test", x, "mxfp4_e2m1", -1, 32, "floor", "rne", 0, False))
        assert torch.equal(mx_quantize(x), mx_quantize(x, backend="torch"))
        with pytest.raises(RuntimeError, match=r"needs Triton \(pip install triton\)"):
            mx_quantize(x, backend="triton")

    @needs_triton
    def test_a_cpu_tensor_is_refused(self):
        with pytest.raises(ValueError, match="backend='triton' got a tensor on cpu; use 'auto' or 'torch'"):
            mx_quantize(torch.ones(32), backend="triton")

    @needs_triton
    def test_a_long_block_is_refused(self):
        with pytest.raises(ValueError, match="blocks up to 16384, got 16385"):
            mx_quantize(torch.ones(16385), block=None, backend="triton")


if __name__ == "__main__":
    if sys.argv[1] == "interpret":
        compare_everything("cpu")
    else:
        for variant in VARIANTS:
            for capability in (80, 90, 100):
                print(compile_kernel(capability, *variant))
