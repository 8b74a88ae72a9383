"""Counts of the last bin and of overflow, element by element against the quantised tensor."""

from __future__ import annotations

import pytest
import torch

from kernels import mx_quantize
from kernels.mx_formats import FORMATS, ROUNDINGS, SCALES
from kernels.mx_saturation import mx_saturation

TOP = {"mxfp8_e4m3": 1.75, "mxfp8_e5m2": 1.75, "mxfp6_e3m2": 1.75, "mxfp6_e2m3": 1.875, "mxfp4_e2m1": 1.5}


@pytest.mark.parametrize("fmt", TOP)
@pytest.mark.parametrize("axis", [0, 1])
def test_they_are_what_the_formats_largest_number_says(fmt: str, axis: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(96, 80)  # the second axis ends in a shorter block
    last = over = 0
    for row in x if axis else x.T:
        for block in row.split(32):
            unit = float(torch.exp2(torch.floor(torch.log2(block.abs().max()))))
            over += int((block.abs() > TOP[fmt] * unit).sum())
            last += int((mx_quantize(block, fmt).abs() == TOP[fmt] * unit).sum())
    seen = mx_saturation(x, fmt, axis)
    assert (int(seen.last_bin), int(seen.overflow), seen.elements) == (last, over, x.numel())
    assert last > over > 0


def test_normal_numbers_in_e4m3_overflow_as_measured() -> None:
    torch.manual_seed(0)
    seen = mx_saturation(torch.randn(2048, 512))
    assert float(seen.overflow) / seen.elements == pytest.approx(0.0085, rel=0.05)


@pytest.mark.parametrize("rounding", [one for one in ROUNDINGS if one != "sr"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_no_scale_but_floor_and_even_overflows(fmt: str, scale: str, rounding: str) -> None:
    torch.manual_seed(0)
    x, form = torch.randn(64, 64), FORMATS[fmt]
    blocks = x.abs().view(-1, 32)
    amax = blocks.amax(-1, keepdim=True)
    unit = torch.exp2(torch.floor(torch.log2(amax)))
    # "even" gives a block a larger scale where its largest number would round to the next power of two
    limit = {"floor": 2.0, "even": 2 - 2.0 ** -(form.mantissa_bits + 1)}.get(scale, 0.0)
    over = (blocks > unit * form.max_normal / 2.0**form.emax) & (amax < limit * unit)
    seen = mx_saturation(x, fmt, scale=scale, rounding=rounding)
    assert int(seen.overflow) == int(over.sum()) <= int(seen.last_bin)
    assert (int(seen.overflow) > 0) == (scale in ("floor", "even"))


def test_clustered_gains_are_all_in_the_last_bin() -> None:
    gains = torch.linspace(0.90, 0.99, 64)
    seen = mx_saturation(gains)
    assert (int(seen.last_bin), int(seen.overflow)) == (64, 64)
    assert int(mx_saturation(gains, scale="rceil").last_bin) == 0
    assert int(mx_saturation(torch.ones(64)).last_bin) == 0


def test_zeros_and_what_is_not_finite_count_as_neither() -> None:
    x = torch.zeros(4, 32)
    x[1] = 0.95
    x[2] = 0.95
    x[2, 0] = torch.inf
    x[3] = torch.nan
    assert [int(one) for one in mx_saturation(x)] == [32, 32, 128]
    assert [int(one) for one in mx_saturation(torch.zeros(0, 32))] == [0, 0, 0]
    with pytest.raises(ValueError, match="rounding='sr' draws"):
        mx_saturation(x, rounding="sr")
