"""The Triton kernels compiled for GPUs that are not here: what is rounded where, and nothing contracted.

Every launch becomes a compilation by Triton's own path from arguments to machine code, for a target of our choice.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import PRESETS, RoundingSites, triton_attention
from kernels.reference import Plan

triton = pytest.importorskip("triton")
if triton_attention.interpreting():
    pytest.skip("TRITON_INTERPRET is set: nothing is compiled", allow_module_level=True)

ARCHITECTURES = [80, 90, 100]
SHARED_MEMORY = 99 * 1024  # of a program on the smallest GPU since 2020 (compute capability 8.6)
Compile = Callable[..., dict[str, Any]]


class Driver:
    """Stands for a GPU of some architecture."""

    def __init__(self, architecture: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch  # compiled kernels are kept by device

    def get_current_stream(self, device: int = 0) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Compile]:
    """A function that compiles the three kernels for one architecture, plan and input."""
    from triton.runtime.driver import driver

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    results: dict[str, Any] = {}

    def launch(kernel: Any, *_: Any, arguments: tuple[Any, ...], **options: Any) -> None:
        results[kernel.__name__] = kernel.warmup(*arguments, grid=(1,), **options)

    monkeypatch.setattr(triton_attention, "_launch", lambda k, L, t, b, N, *a, **o: launch(k, arguments=a, **o))

    def compile_all(
        sites: RoundingSites | str, dtype: torch.dtype = torch.bfloat16, architecture: int = 80, D: int = 16,
        tile: int = 512, block: int | None = 16, causal: bool = True,
    ) -> dict[str, Any]:  # fmt: skip
        sites = RoundingSites.preset(sites) if isinstance(sites, str) else sites
        if block is not None:  # small blocks compile faster
            monkeypatch.setattr(triton_attention, "_blocks", lambda *_: (block, block, 1))
        driver.set_active(Driver(architecture))
        x = torch.zeros(2, 1024, D, dtype=dtype)
        lse = torch.zeros(2, 1024, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
        plan = Plan(sites, tile, tile, 1024, 1024, causal, D**-0.5)
        triton_attention.forward(x, x, x, plan)
        triton_attention.backward(x, x, x, x, x, lse, plan)
        return dict(results)

    yield compile_all
    driver.set_active(None)  # found anew when next needed


def conversions(sites: RoundingSites, dtype: torch.dtype) -> dict[str, int]:
    """How many conversions to bfloat16 each kernel must have, from the sites alone.

    Scores are computed twice in the forward pass, once for the maximum and once for P. A conversion of what has just
    been converted is folded into it: o_out of o_div, and an operand or an output that a site has rounded already. Sums
    that a loop carries are converted once more when stored as bfloat16.
    """

    def count(*names: str) -> int:
        return sum(getattr(sites, name).is_bf16_rne for name in names)

    bf16 = dtype is torch.bfloat16
    # a product in bfloat16 is rounded before the scale and after it
    chunks = 2 if bf16 and sites.ds.fits_bf16 else 1
    operands = {name: int(bf16 and getattr(sites, name).mantissa_bits < 7) for name in ("p_pv", "ds")}
    carried = ("p_sum", "alpha", "l_carry", "m_carry", "pv", "o_rescaled", "o_carry", "lse")
    return {
        "forward_kernel": 2 * count("s", "s_scaled")
        + count("s_minus_m", "p_pv", *carried)
        + operands["p_pv"]
        + (count("o_div", "o_out") > 0 or bf16),
        "dq_kernel": 2 * count("s_bwd")
        + count("dp", "delta_product", "delta", "ds", "dq")
        + operands["ds"]
        + chunks * count("dq_chunk")
        + bf16,
        "dkdv_kernel": 2 * count("s_bwd")
        + count("p_pv", "dp", "ds", "dk", "dv_chunk", "dv")
        + sum(operands.values())
        + chunks * count("dk_chunk")
        + 2 * bf16,
    }


def machine_code(kernel: Any, path: Path) -> str:
    """The kernel disassembled by the tool that Triton ships."""
    path.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run(
        [os.fspath(tool), "-sass", os.fspath(path)], capture_output=True, text=True, check=True
    ).stdout


class TestConversions:
    @pytest.mark.parametrize(
        ("preset", "dtype"),
        [*((preset, torch.bfloat16) for preset in PRESETS), ("fp32", torch.float32), ("ucker_cpu", torch.float32)],
    )
    def test_presets(self, preset: str, dtype: torch.dtype, compiled: Compile):
        sites = PRESETS[preset]
        found = {
            name: len(re.findall(r"arith\.truncf [^\n]*bf16>", kernel.asm["ttir"]))
            for name, kernel in compiled(sites, dtype).items()
        }
        assert found == conversions(sites, dtype)

    def test_other_roundings_are_done_on_the_bits(self, compiled: Compile):
        sites = RoundingSites(p_pv="3", ds="3", l_carry="bf16:rz", o_carry="bf16:sr", dq="4")  # type: ignore[arg-type]
        kernels = compiled(sites)
        found = {name: len(re.findall(r"arith\.truncf", kernel.asm["ttir"])) for name, kernel in kernels.items()}
        assert found == conversions(sites, torch.bfloat16)
        assert all("arith.andi" in kernel.asm["ttir"] for kernel in kernels.values())

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_the_gpu_rounds_to_nearest(self, architecture: int, compiled: Compile):
        for kernel in compiled("bf16_carry", architecture=architecture).values():
            assert "cvt.rn.bf16" in kernel.asm["ptx"] and not re.search(r"cvt\.r[zp]\.bf16", kernel.asm["ptx"])


class TestArithmetic:
    @pytest.mark.parametrize("sites", ["fa2", "bf16_carry"])
    def test_nothing_is_contracted(self, sites: str, compiled: Compile, tmp_path: Path):
        kernels = compiled(sites)
        assert all(kernel.metadata.enable_fp_fusion is False for kernel in kernels.values())
        assert all("fma.rn.f32" not in kernel.asm["ptx"] for kernel in kernels.values())
        # the forward pass has fused operations inside its logarithm and its division
        for name in ("dq_kernel", "dkdv_kernel"):
            code = machine_code(kernels[name], tmp_path / f"{name}.cubin")
            assert "FMUL" in code and "FFMA" not in code

    @pytest.mark.parametrize("sites", ["fp32", "fa2"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_full_precision_products(self, sites: str, dtype: torch.dtype, compiled: Compile):
        for name, kernel in compiled(sites, dtype).items():
            assert "tf32" not in kernel.asm["ptx"]
            products = re.findall(r"tt\.dot [^\n]*?: tensor<\w+x(\w+)> \*", kernel.asm["ttir"])
            exact_operands = {"forward_kernel": 1, "dq_kernel": 1, "dkdv_kernel": 2}[name]  # of P and of dS
            wide = len(products) if dtype is torch.float32 else exact_operands if sites == "fp32" else 0
            assert products.count("f32") == wide and products.count("bf16") == len(products) - wide

    def test_the_division_is_exact(self, compiled: Compile):
        for sites in ("fp32", "fa2"):  # by l, and of 1 by l
            ptx = compiled(sites)["forward_kernel"].asm["ptx"]
            assert "div.rn.f32" in ptx and "div.full.f32" not in ptx and "div.approx" not in ptx

    def test_maxima_keep_nan(self, compiled: Compile):
        assert "max.NaN.f32" in compiled("fp32")["forward_kernel"].asm["ptx"]

    def test_exact_sites_round_nothing(self, compiled: Compile):
        for kernel in compiled("fp32", torch.float32).values():
            assert not re.search(r"arith\.(truncf|extf|bitcast)|tt\.bitcast", kernel.asm["ttir"])


ANYTHING = RoundingSites.build(
    "ucker_cpu",
    {"delta_from": "p_dp", "sfa_beta": 2.0, "sfa_tolerance": 0.1, "o_carry": "3:sr", "dk": "bf16:sr", "dp": "fp16:rz"},
)


@pytest.mark.slow
class TestEveryTarget:
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    @pytest.mark.parametrize("D", [64, 128, 256])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("sites", ["bf16_carry", "fp32"])
    def test_default_blocks_fit_any_gpu(
        self, sites: str, dtype: torch.dtype, D: int, architecture: int, compiled: Compile
    ):
        for kernel in compiled(sites, dtype, architecture, D, block=None).values():
            assert kernel.metadata.shared <= SHARED_MEMORY, kernel.name

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    @pytest.mark.parametrize(
        ("sites", "dtype", "D", "tile"),
        [
            (ANYTHING, torch.bfloat16, 64, 512),
            (dataclasses.replace(ANYTHING, delta_from="out_fp32", kv_order="descending"), torch.float16, 24, 100),
            (RoundingSites(), torch.float64, 64, 512),
            (RoundingSites(sfa_beta=2.0, delta_from="out_fp32"), torch.float64, 8, 1),
        ],
    )
    def test_every_variant(
        self, sites: RoundingSites, dtype: torch.dtype, D: int, tile: int, architecture: int, compiled: Compile
    ):
        for causal in (True, False):
            assert len(compiled(sites, dtype, architecture, D, tile, block=None, causal=causal)) == 3
