"""Native scaled products: why there are none here, and that what would be handed to the hardware is right.

No test here runs on hardware that has them unless it is there. What cuBLAS is given, codes and scales in its layout, is
decoded again by a stand-in, so that the layout and the axes are checked on any machine.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchao.prototype.mx_formats.utils import from_blocked, to_blocked

from kernels import mx_quantize
from kernels.mx_formats import scale_values
from kernels.scaled_products import (
    TOLERANCE,
    ScaledOperand,
    device_obstacle,
    format_obstacle,
    native_obstacle,
    native_product,
    tiled_scales,
)

HAS_NATIVE = torch.cuda.is_available() and device_obstacle(torch.device("cuda")) is None


def operand(x: Tensor, axis: int, fmt: str = "mxfp8_e4m3") -> ScaledOperand:
    return ScaledOperand(x, axis, fmt, "floor", "rne", 32, 0)


def quantised(one: ScaledOperand) -> Tensor:
    return mx_quantize(one.x, one.fmt, one.axis)


@pytest.mark.parametrize("shape", [(128, 4), (256, 8), (100, 3), (1, 1), (130, 17)])
def test_scales_lie_as_torchao_lays_them(shape: tuple[int, int]) -> None:
    scales = torch.randint(0, 255, shape, dtype=torch.uint8)
    assert torch.equal(tiled_scales(scales), to_blocked(scales).flatten())


def stand_in(a: Tensor, b: Tensor, scale_a: Tensor, _: Any, scale_b: Tensor, *__: Any, output_dtype: Any) -> Tensor:
    """What ``scaled_mm`` is documented to compute, from its own arguments."""

    def decoded(codes: Tensor, scales: Tensor) -> Tensor:
        rows, blocks = codes.shape[0], codes.shape[1] // 32
        values = scale_values(from_blocked(scales.view(torch.uint8), rows, blocks))
        return codes.float() * values.repeat_interleave(32, 1)

    return (decoded(a, scale_a) @ decoded(b.T, scale_b).T).to(output_dtype)


@pytest.mark.parametrize("formats", [("mxfp8_e4m3", "mxfp8_e4m3"), ("mxfp8_e5m2", "mxfp8_e4m3")])
def test_the_three_products_of_a_layer_are_handed_over_right(
    monkeypatch: pytest.MonkeyPatch, formats: tuple[str, str]
) -> None:
    monkeypatch.setattr(F, "scaled_mm", stand_in)
    torch.manual_seed(0)
    x, w, dy = torch.randn(3, 64, 96), torch.randn(160, 96), torch.randn(3, 64, 160)
    a, b = operand(x, -1, formats[0]), operand(w, -1, formats[1])
    torch.testing.assert_close(native_product(a, b), F.linear(quantised(a), quantised(b)))
    a, b = operand(dy, -1, formats[0]), operand(w, 0, formats[1])
    torch.testing.assert_close(native_product(a, b), quantised(a) @ quantised(b))
    a, b = operand(dy.flatten(0, 1), 0, formats[0]), operand(x.flatten(0, 1), 0, formats[1])
    torch.testing.assert_close(native_product(a, b), quantised(a).T @ quantised(b))


def test_why_not() -> None:
    assert device_obstacle(torch.device("cpu")) == "the device is cpu, not cuda"
    x, w = torch.randn(64, 96), torch.randn(160, 96)
    e4m3, e5m2, e2m1 = (operand(x, -1, fmt) for fmt in ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp4_e2m1"))
    assert "not MXFP8" in str(format_obstacle(e4m3, e2m1))
    assert "two E5M2" in str(format_obstacle(e5m2, e5m2))
    assert format_obstacle(e5m2, e4m3) is None
    assert "bump_released is not one scale" in str(native_obstacle(e4m3._replace(scale="bump_released"), e4m3))
    assert "not of 16" in str(native_obstacle(e4m3, e4m3._replace(block=16)))
    assert "cpu" in str(native_obstacle(operand(x, -1), operand(w, -1)))
    assert "whole blocks" in str(native_obstacle(operand(x[:, :90], -1), operand(w[:, :90], -1)))
    assert "10, is no multiple of 16" in str(native_obstacle(operand(x[:10], -1), operand(w, -1)))


@pytest.mark.skipif(not HAS_NATIVE, reason="needs a GPU of compute capability 10.0")
def test_native_and_emulated_agree() -> None:
    torch.manual_seed(0)
    a, b = operand(torch.randn(256, 512, device="cuda"), -1), operand(torch.randn(384, 512, device="cuda"), -1)
    assert native_obstacle(a, b) is None
    expected = quantised(a).double() @ quantised(b).double().T
    error = native_product(a, b).double() - expected
    assert error.square().mean().sqrt() < TOLERANCE * expected.square().mean().sqrt()
