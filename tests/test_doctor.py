"""``doctor`` says what is there, and fails when a kernel does not give what it must."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from kernels import self_test
from lightning_qk.__main__ import main as command
from lightning_qk.doctor import main


def test_it_tells_what_runs_where_and_that_all_holds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-qk", "doctor", "--device", "cpu"])
    assert command() == 0
    shown = capsys.readouterr().out
    assert "FAILED" not in shown and "all hold" in shown
    for said in (
        f"torch                  {torch.__version__}",
        "emulated attention     cpu",
        "native MX products",
        "gloo",
    ):
        assert said in shown
    for preset in ("bf16_carry", "fa2"):
        assert f"ok     attention {preset}: bits of the reference: 100.000 %" in shown


def wrong_rounding(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return round_to(x, *args, **kwargs) * (1 + 2**-23)


round_to, mx_quantize, streaming = self_test.round_to, self_test.mx_quantize, self_test.tied_rows.streaming_attention


def without_fault(*args: Any, **kwargs: Any) -> Any:
    return streaming(*args, **{**kwargs, "sites": "fp32"})


@pytest.mark.parametrize(
    ("module", "name", "wrong", "said"),
    [
        (self_test, "round_to", wrong_rounding, "FAILED round_to: known bits"),
        (self_test, "mx_quantize", lambda x, *_, **__: mx_quantize(x, "mxfp8_e5m2"), "FAILED mx_quantize: known bits"),
        (self_test.tied_rows, "streaming_attention", without_fault, "FAILED bias bf16_carry"),
    ],
)
def test_a_kernel_that_errs_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], module: Any, name: str, wrong: Any, said: str
) -> None:
    monkeypatch.setattr(module, name, wrong)
    assert main(["--device", "cpu"]) == 1
    shown = capsys.readouterr().out
    assert said in shown and "all hold" not in shown


def test_the_fixed_inputs_cover_signs_binades_and_zero() -> None:
    x = self_test.numbers(4096)
    assert (x > 0).any() and (x < 0).any() and (x == 0).any()
    assert x[x != 0].abs().log2().floor().unique().numel() > 20
