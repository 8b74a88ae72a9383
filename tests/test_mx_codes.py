"""Codes and scales as stored: decoding equals quantising, and torchao stores the same bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_mx_blocks import INTEGER, KINDS, TORCHAO, assert_same_bits, data, generator
from test_mx_formats import ML_DTYPES
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor

from kernels.mx_blocks import mx_quantize
from kernels.mx_codes import code_values, mx_decode, mx_encode
from kernels.mx_formats import FORMATS, ROUNDINGS, SCALES, scale_codes, scale_values


class TestDecode:
    @pytest.mark.parametrize("rounding", ROUNDINGS)
    @pytest.mark.parametrize("scale", SCALES)
    @pytest.mark.parametrize("fmt", FORMATS)
    def test_equals_quantising(self, fmt: str, scale: str, rounding: str):
        for kind in KINDS:
            for prescale in (False, True):
                x = data(kind, fmt)
                options: dict[str, Any] = {"scale": scale, "rounding": rounding, "seed": 9, "prescale": prescale}
                assert_same_bits(mx_decode(mx_encode(x, fmt, **options)), mx_quantize(x, fmt, **options))

    @given(
        shape=st.lists(st.integers(1, 40), min_size=1, max_size=3),
        axis=st.integers(-3, 2),
        block=st.sampled_from([1, 3, 16, 32, None]),
        fmt=st.sampled_from(list(FORMATS)),
        dtype=st.sampled_from(list(INTEGER)),
    )
    @settings(max_examples=100, deadline=None)
    def test_restores_shape_and_dtype(self, shape: list[int], axis: int, block: Any, fmt: str, dtype: torch.dtype):
        x = torch.randn(shape, generator=generator()).to(dtype)
        axis = max(-len(shape), min(len(shape) - 1, axis))
        encoded = mx_encode(x, fmt, axis=axis, block=block)
        assert_same_bits(mx_decode(encoded), mx_quantize(x, fmt, axis=axis, block=block))
        length, rest = shape[axis], x.numel() // shape[axis]
        assert encoded.codes.numel() == rest * (-(-length // 2) if FORMATS[fmt].bits == 4 else length)
        assert encoded.scales.numel() == rest * -(-length // (block or length))
        assert encoded.codes.dtype is encoded.scales.dtype is torch.uint8

    @pytest.mark.parametrize("fmt", FORMATS)
    def test_a_nan_block_is_known_by_its_scale(self, fmt: str):
        x = torch.randn(2, 64, generator=generator())
        x[0, 3], x[1, 60] = torch.nan, -torch.inf
        encoded = mx_encode(x, fmt)
        assert (encoded.scales == 255).tolist() == [[True, False], [False, True]]
        assert not encoded.codes.view(2, 2, -1)[encoded.scales == 255].any()
        assert_same_bits(mx_decode(encoded), mx_quantize(x, fmt))


class TestCodes:
    @pytest.mark.parametrize("fmt", FORMATS)
    def test_every_finite_number_gets_its_code(self, fmt: str):
        values = torch.tensor(code_values(FORMATS[fmt]))
        keep = values.abs() <= FORMATS[fmt].max_normal  # neither NaN, nor infinity, nor INT8's -2
        codes = torch.arange(len(values), dtype=torch.uint8)[keep]
        for exponent in (-100, 0, 100):
            x = torch.stack([values[keep], torch.full_like(values[keep], 2.0 ** FORMATS[fmt].emax)], 1).flatten()
            encoded = mx_encode(x * 2.0**exponent, fmt, block=2)
            assert (encoded.scales == 127 + exponent).all()
            first = encoded.codes & 0xF if FORMATS[fmt].bits == 4 else encoded.codes[::2]
            assert torch.equal(first, codes)

    @pytest.mark.parametrize("name", ML_DTYPES)
    def test_every_code_decodes_as_in_ml_dtypes(self, name: str):
        fmt = FORMATS[name]
        codes = np.arange(1 << fmt.bits, dtype=np.uint8)
        packed = codes[::2] | codes[1::2] << 4 if fmt.bits == 4 else codes
        encoded = mx_encode(torch.zeros(len(codes)), name)._replace(codes=torch.from_numpy(packed))
        encoded = encoded._replace(scales=torch.full_like(encoded.scales, 127))
        expected = torch.from_numpy(codes.view(ML_DTYPES[name]).astype(np.float32))
        assert_same_bits(mx_decode(encoded), expected)

    def test_every_scale_code(self):
        codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
        scales = scale_values(codes)
        assert scales[:255].tolist() == [2.0 ** (code - 127) for code in range(255)]
        assert scales[255].isnan()
        assert torch.equal(scale_codes(scales), codes)


class TestAgainstTorchao:
    @pytest.mark.parametrize("scale", SCALES)
    @pytest.mark.parametrize("fmt", TORCHAO)
    def test_stores_the_same_bytes(self, fmt: str, scale: str):
        for kind in ("gaussian", "log-uniform"):
            x = data(kind, fmt)
            x[0, :32] = 0
            theirs = MXTensor.to_mx(x, TORCHAO[fmt], 32, ScaleCalculationMode[scale.upper()])
            ours = mx_encode(x, fmt, scale=scale)
            assert torch.equal(ours.scales, theirs.scale.view(torch.uint8))
            assert torch.equal(ours.codes, theirs.qdata.view(torch.uint8))


class TestErrors:
    def test_options_are_refused_and_named(self):
        with pytest.raises(ValueError, match="mx_encode: fmt='fp4' is not one of"):
            mx_encode(torch.ones(32), "fp4")
        with pytest.raises(ValueError, match=r"shape \(0, 3\) has no elements"):
            mx_encode(torch.empty(0, 3))

    def test_a_tensor_that_requires_grad_is_encoded_without(self):
        encoded = mx_encode(torch.randn(32, requires_grad=True))
        assert not mx_decode(encoded).requires_grad
