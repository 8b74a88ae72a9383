"""bfloat16 products in float32: the same numbers, for bfloat16 alone, and only while they are wanted."""

from __future__ import annotations

import platform
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import has_bf16_products, widened_bf16_products
from kernels.bf16_products import _PRODUCTS
from lightning_qk.precision import fault


def operands(name: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    batch = (3,) if name in ("bmm", "baddbmm") else ()
    shapes = [(*batch, 33, 70), (*batch, 70, 20)]
    if name in ("addmm", "baddbmm"):
        shapes.insert(0, (*batch, 33, 20))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


@pytest.mark.parametrize("name", _PRODUCTS)
def test_a_product_is_the_exact_one_rounded_once(name: str) -> None:
    given = operands(name, torch.bfloat16)
    exact = getattr(torch, name)(*(one.double() for one in given)).bfloat16()
    with widened_bf16_products():
        product = getattr(torch, name)(*given)
    assert product.dtype is torch.bfloat16
    differs = product != exact  # by the float32 sum's own error, at the boundary between two bfloat16 numbers
    assert differs.float().mean() < 2e-3
    torch.testing.assert_close(product[differs].float(), exact[differs].float(), rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64])
@pytest.mark.parametrize("name", _PRODUCTS)
def test_other_dtypes_keep_their_bits(name: str, dtype: torch.dtype) -> None:
    given = operands(name, dtype)
    scalars = {"beta": 2, "alpha": 3} if name in ("addmm", "baddbmm") else {}
    outside = getattr(torch, name)(*given, **scalars)
    with widened_bf16_products():
        assert torch.equal(getattr(torch, name)(*given, **scalars), outside)


def test_gradients_of_a_layer_go_the_same_way() -> None:
    x, w, b = (torch.randn(shape, requires_grad=True) for shape in [(4, 9, 16), (32, 16), (32,)])

    def gradients() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            y = F.linear(x, w, b)
        return [y, *torch.autograd.grad((y.float() ** 2).sum(), (x, w, b))]

    native = gradients()
    with widened_bf16_products():
        widened = gradients()
    for here, there in zip(widened, native, strict=True):
        assert here.dtype is there.dtype
        torch.testing.assert_close(here.float(), there.float(), rtol=2**-7, atol=2e-2)


def python_kernels() -> list[str]:
    """The dispatcher's lines of CPU kernels of aten::mm that are written in Python."""
    table = torch._C._dispatch_dump("aten::mm")
    return [line for line in table.splitlines() if line.startswith("CPU") and ".py" in line]


def test_it_is_over_when_it_is_over_and_nests() -> None:
    a = torch.randn(2, 3).bfloat16()
    assert not python_kernels()
    with pytest.raises(RuntimeError, match="cannot be multiplied"), widened_bf16_products():
        with widened_bf16_products():
            assert python_kernels()
        assert python_kernels()
        torch.mm(a, a)
    assert not python_kernels()


@pytest.mark.parametrize(
    ("machine", "onednn", "its_bf16", "avx512_bf16", "amx", "expected"),
    [
        pytest.param("x86_64", True, True, False, False, False, id="AVX-512 alone, where oneDNN emulates"),
        pytest.param("AMD64", True, True, False, False, False, id="the same on Windows"),
        pytest.param("x86_64", True, True, True, False, True, id="AVX512_BF16"),
        pytest.param("AMD64", True, True, True, False, True, id="AVX512_BF16 on Windows"),
        pytest.param("x86_64", True, True, False, True, True, id="AMX"),
        pytest.param("aarch64", True, True, False, False, True, id="other machine, where oneDNN knows"),
        pytest.param("aarch64", True, False, False, False, False, id="other machine without bfloat16"),
        pytest.param("x86_64", True, False, True, True, False, id="oneDNN does not use it"),
        pytest.param("x86_64", False, True, True, True, False, id="no oneDNN"),
    ],
)
def test_a_cpu_has_products_where_it_has_instructions_and_onednn_uses_them(
    monkeypatch: pytest.MonkeyPatch,
    machine: str,
    onednn: bool,
    its_bf16: bool,
    avx512_bf16: bool,
    amx: bool,
    expected: bool,
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: onednn)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: its_bf16)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert has_bf16_products() is expected


@pytest.mark.parametrize(("base", "native"), [("bf16", False), ("bf16", True), ("fp32", False)])
def test_the_plugin_widens_where_the_cpu_has_no_products(
    monkeypatch: pytest.MonkeyPatch, base: Literal["bf16", "fp32"], native: bool
) -> None:
    monkeypatch.setattr(fault, "has_bf16_products", lambda: native)
    plugin = fault.FaultPrecision(base=base)
    plugin.convert_module(torch.nn.Linear(2, 2))
    plugin.convert_module(torch.nn.Linear(2, 2))  # as fit and then validate
    assert bool(python_kernels()) is (base == "bf16" and not native)
    plugin.teardown()
    assert not python_kernels()
