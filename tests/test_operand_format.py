"""Operands of a product: that every format arrives, and the released bump with its measured deficiency."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import mx_quantize, nvfp4_quantize
from lightning_qk.operand_format import OperandFormat, released_bump


@pytest.mark.parametrize("axis", [0, -1])
def test_it_is_the_kernels_quantisation(axis: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 96)
    operand = OperandFormat("mxfp8_e5m2", "even", "sr", block=16)
    assert torch.equal(operand(x, axis, 7), mx_quantize(x, "mxfp8_e5m2", axis, 16, "even", "sr", 7))
    assert torch.equal(OperandFormat("nvfp4", rounding="sr")(x, axis, 7), nvfp4_quantize(x, axis, "sr", 7))


def overflowing(x: torch.Tensor, axis: int) -> torch.Tensor:
    """What a floor scale saturates in E4M3: more than 1.75 times the power of two below the block's maximum."""
    blocks = x.unflatten(axis, (-1, 32))
    top = blocks.abs().amax(axis % x.ndim + 1, keepdim=True)
    return (blocks.abs() > 1.75 * torch.exp2(torch.floor(torch.log2(top)))).flatten(axis % x.ndim, axis % x.ndim + 1)


@pytest.mark.parametrize(
    ("shape", "axis", "changed", "of_the_correct"),
    [((512, 2048), -1, 0.0007, 0.12), ((2048, 512), 0, 0.0007, 0.12), ((2048, 512), -1, 0.0031, 0.52)],
)
def test_the_released_bump_corrects_as_little_as_was_measured(
    shape: tuple[int, int], axis: int, changed: float, of_the_correct: float
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    floor, correct = (mx_quantize(x, "mxfp8_e4m3", axis, scale=scale, rounding="away") for scale in ("floor", "rceil"))
    released = released_bump(x, "mxfp8_e4m3", axis, 32, "away")
    over = overflowing(x, axis)
    assert ((released != floor) & over).float().mean() == pytest.approx(changed, rel=0.15)
    ratio = ((released != floor) & over).sum() / ((correct != floor) & over).sum()
    assert float(ratio) == pytest.approx(of_the_correct, rel=0.15)


def test_the_released_bump_is_right_where_there_is_one_block() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 32)
    one_above = (overflowing(x, -1).sum(-1, keepdim=True) > 0).expand_as(x)
    released, correct = released_bump(x, "mxfp8_e4m3", -1, 32, "rne"), mx_quantize(x, "mxfp8_e4m3", scale="rceil")
    # positions, not blocks: only what exceeds 1.75 at its own position is bumped
    assert torch.equal(released[~one_above], correct[~one_above])
    over = overflowing(x, -1)
    assert torch.equal(released[over], correct[over])


def test_the_two_block_case_stays_clamped() -> None:
    x = torch.cat((torch.linspace(0.90, 0.99, 32), torch.linspace(1.0, 1.5, 32)))[None]
    assert set(released_bump(x, "mxfp8_e4m3", -1, 32, "away")[0, :32].tolist()) == {0.875}
    assert mx_quantize(x, "mxfp8_e4m3", scale="rceil")[0, :32].max() > 0.9


def test_what_it_cannot_do_is_said() -> None:
    for length, fmt, rounding, named in (
        (33, "mxfp8_e4m3", "rne", "axis 1 of length 33 must be a multiple of block=32;"),
        (32, "mxfp8_e4m3", "sr", "has no rounding='sr'"),
        (32, "mxfp6_e2m3", "rne", "of fmt='mxfp8_e4m3' alone, not of 'mxfp6_e2m3'"),
    ):
        with pytest.raises(ValueError, match=f"{named}.* scale='rceil', the bump as described"):
            released_bump(torch.zeros(4, length), fmt, -1, 32, rounding)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"fmt": "mxfp5"}, "fmt='mxfp5' is not one of mxfp8_e4m3"),
        ({"scale": "flor"}, "scale='flor' is not one of floor, ceil, even, rceil, bump_released"),
        ({"rounding": "foo"}, "rounding='foo' is not one of rne"),
        ({"fmt": "mxfp8_e4m3", "scale": "bump_released", "rounding": "sr"}, "has no rounding='sr'"),
        ({"fmt": "mxfp4_e2m1", "scale": "bump_released"}, "alone, not of 'mxfp4_e2m1'"),
    ],
)
def test_an_option_that_cannot_be_complains_when_it_is_given(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        OperandFormat(**options)
