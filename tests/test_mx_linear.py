"""A linear layer's three products, operand by operand, against explicit quantisation and matmul."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import mx_quantize, random_hadamard
from lightning_qk.attention import FaultSwitch
from lightning_qk.mx_linear import MXLinear, bf16
from lightning_qk.mx_policy import OPERANDS, PRESETS, MXPolicy
from lightning_qk.operand_format import OperandFormat

FORMAT = OperandFormat("mxfp8_e4m3")
SHAPES = [(64,), (2, 32), (2, 3, 7)]


@dataclasses.dataclass
class Arithmetic:
    policy: MXPolicy
    native: bool = False


def layer(policy: MXPolicy | None, bias: bool = True, seed: int = 0) -> torch.nn.Linear:
    torch.manual_seed(seed)
    linear = torch.nn.Linear(96, 64, bias=bias)
    if policy is not None:
        MXLinear.take_over(linear, FaultSwitch(), arithmetic=Arithmetic(policy))
    return linear


def tensors(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(*shape, 96, requires_grad=True), torch.randn(*shape, 64)


def results(linear: torch.nn.Linear, shape: tuple[int, ...]) -> dict[str, Tensor]:
    x, dy = tensors(shape)
    y = linear(x)
    y.backward(dy)
    bias = {} if linear.bias is None else {"db": linear.bias.grad}
    return {"y": y.detach(), "dx": x.grad, "dw": linear.weight.grad, **bias}  # type: ignore[dict-item]


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def by_hand(policy: MXPolicy, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """The definition: each operand along the axis that its product sums over, every result rounded if it says so."""
    forward, backward = (one == "bf16" for one in (policy.vector, policy.vector_backward))
    linear = layer(None)
    x, dy = tensors(shape)
    w, b = linear.weight.detach(), linear.bias.detach()
    q = {
        name: (lambda t, axis, one=one: t if one is None else mx_quantize(t, one.fmt, axis))
        for name, one in policy.operands.items()
    }
    y = bf16(F.linear(q["x"](bf16(x.detach(), forward), -1), q["w"](bf16(w, forward), -1)), forward)
    y = bf16(y + bf16(b, forward), forward)
    x, w, dy = bf16(x.detach(), backward), bf16(w, backward), bf16(dy, backward)
    dx = bf16(q["dy_dgrad"](dy, -1) @ q["w_dgrad"](w, 0), backward)
    dy_NO, x_NI = dy.flatten(0, -2), x.flatten(0, -2)
    dw = bf16(q["dy_wgrad"](dy_NO, 0).T @ q["x_wgrad"](x_NI, 0), backward)
    return {"y": y, "dx": dx, "dw": dw, "db": bf16(dy_NO.sum(0), backward)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", OPERANDS)
def test_each_operand_alone_changes_its_own_product(name: str, shape: tuple[int, ...]) -> None:
    only: Any = {name: FORMAT}
    seen, exact = results(layer(MXPolicy(**only)), shape), results(layer(None), shape)
    expected = by_hand(MXPolicy(**only), shape)
    product = "y" if name in ("x", "w") else "dw" if name.endswith("wgrad") else "dx"
    assert not torch.equal(seen[product], exact[product])
    for key in exact:
        if key == "y" and product == "y":  # the bias is added to the finished product
            assert torch.equal(seen[key], expected[key])
        else:
            assert torch.equal(seen[key], expected[key] if key == product else exact[key]), key


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "nvfp4"])
def test_a_preset_is_its_definition(name: str) -> None:
    for shape in SHAPES[:2]:
        expected = results(layer(None), shape) if name == "fp32" else by_hand(PRESETS[name], shape)
        assert_equal(results(layer(PRESETS[name]), shape), expected)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_without_formats_it_is_plain_torch(bias: bool, autocast: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
        left, right = (results(layer(policy, bias), (8,)) for policy in (MXPolicy(), None))
    assert_equal(left, right)


def test_under_autocast_operands_are_bfloat16() -> None:
    linear = layer(PRESETS["mxfp8_e4m3"])
    x, dy = tensors((64,))
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        y = linear(x)
    assert y.dtype is torch.bfloat16
    y.backward(dy.bfloat16())
    expected = mx_quantize(dy.bfloat16(), "mxfp8_e4m3", 0).T @ mx_quantize(x.detach().bfloat16(), "mxfp8_e4m3", 0)
    assert linear.weight.grad is not None and torch.equal(linear.weight.grad, expected.float())


def test_policy_and_switch_are_read_at_every_call() -> None:
    linear = layer(PRESETS["mxfp4"])
    assert isinstance(linear, MXLinear) and linear.arithmetic is not None
    x, _ = tensors((64,))
    exact = layer(None)(x)
    assert not torch.equal(linear(x), exact)
    linear.switch.on = False
    assert torch.equal(linear(x), exact)
    linear.switch.on, linear.arithmetic.policy = True, MXPolicy()
    assert torch.equal(linear(x), exact)
    linear.arithmetic.policy = PRESETS["mxfp8_e4m3"]
    with torch.no_grad():  # the forward pass is the same with and without a graph
        without_graph = linear(x)
    assert torch.equal(without_graph, linear(x)) and not torch.equal(without_graph, exact)


def test_a_gradient_fault_takes_the_place_of_the_policys_formats() -> None:
    fault = OperandFormat("mxfp4_e2m1")
    linear = layer(PRESETS["mxfp8_e4m3"])
    MXLinear.take_over(linear, FaultSwitch(), weight_gradient=fault)
    both = dataclasses.replace(PRESETS["mxfp8_e4m3"], x_wgrad=fault, dy_wgrad=fault)
    assert_equal(results(linear, (64,)), results(layer(both), (64,)))


def test_stochastic_rounding_draws_by_seed_stream_and_operand() -> None:
    policy = PRESETS["mxfp4"].replace_operands(OPERANDS, rounding="sr", scale="rceil")

    def run(seed: int, stream: int) -> dict[str, Tensor]:
        linear = layer(policy)
        assert isinstance(linear, MXLinear)
        linear.switch.seed, linear.stream = seed, stream
        return results(linear, (64,))

    assert_equal(run(3, 1), run(3, 1))
    for other in (run(4, 1), run(3, 2)):
        assert not any(torch.equal(run(3, 1)[key], other[key]) for key in ("y", "dx", "dw"))
    x = torch.full((64, 96), 0.7)
    draws = [OperandFormat("mxfp4_e2m1", rounding="sr")(x, -1, seed) for seed in (2, 3)]
    assert not torch.equal(*draws)


@pytest.mark.parametrize("which", ["weight_gradient", "all"])
def test_hadamard_transforms_both_operands_of_a_product(which: Any) -> None:
    operands: Any = dict.fromkeys(OPERANDS, FORMAT)
    seen = results(layer(MXPolicy(**operands, hadamard=which)), (64,))
    plain = results(layer(MXPolicy(**operands)), (64,))
    x, dy = tensors((64,))
    seed = 1  # of the right operand
    transformed = [mx_quantize(random_hadamard(t.detach(), 0, 32, seed), "mxfp8_e4m3", 0) for t in (dy, x)]
    assert torch.equal(seen["dw"], transformed[0].T @ transformed[1])
    for key in ("y", "dx"):
        assert torch.equal(seen[key], plain[key]) == (which == "weight_gradient")
    exact = results(layer(None), (64,))
    for key in ("y", "dx", "dw"):
        assert (seen[key] - exact[key]).norm() < 0.06 * exact[key].norm()


def test_no_gradient_is_made_for_an_input_that_wants_none() -> None:
    linear = layer(PRESETS["mxfp4"])
    linear.weight.requires_grad_(False)
    linear(torch.randn(64, 96)).sum().backward()
    assert linear.weight.grad is None and linear.bias.grad is not None


def test_only_plain_linears_are_taken_over() -> None:
    class Mine(torch.nn.Linear):
        pass

    with pytest.raises(TypeError, match="Mine is not a plain"):
        MXLinear.take_over(Mine(4, 4), FaultSwitch())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", ["floor", "rceil"])
def test_six_operands_in_e4m3_are_torchaos_linear(dtype: torch.dtype, scale: str) -> None:
    """Bit for bit, with its emulated product."""
    from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    def gradients(multiply: Any, linear: torch.nn.Linear) -> list[Tensor]:
        x, dy = (t.detach().to(dtype) for t in tensors((2, 64)))
        x.requires_grad_(True)
        y = multiply(x, linear)
        y.backward(dy)
        assert x.grad is not None and linear.weight.grad is not None
        return [y.detach(), x.grad, linear.weight.grad]

    operands: Any = dict.fromkeys(OPERANDS, OperandFormat("mxfp8_e4m3", scale))
    ours = gradients(lambda x, linear: linear(x), layer(MXPolicy(**operands), bias=False).to(dtype))
    mode = ScaleCalculationMode[scale.upper()]
    theirs = gradients(
        lambda x, linear: _to_mxfp8_then_scaled_mm(x, linear.weight, KernelPreference.EMULATED, mode),
        layer(None, bias=False).to(dtype),
    )
    for left, right in zip(ours, theirs, strict=True):
        assert torch.equal(left, right)


def test_a_layer_that_has_no_native_product_for_its_shape_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The device alone is a stand-in: no product here has sides that are multiples of 16, or whole blocks."""
    monkeypatch.setattr("kernels.scaled_products.device_obstacle", lambda _: None)
    expected = results(layer(PRESETS["mxfp8_e4m3"]), (24,))
    linear = layer(PRESETS["mxfp8_e4m3"])
    assert isinstance(linear, MXLinear) and linear.arithmetic is not None
    linear.arithmetic.native = True
    with caplog.at_level("INFO"):
        for _ in range(2):
            linear.zero_grad()
            _, dy = tensors((24,))
            linear(torch.randn(24, 96)).backward(dy)
    assert caplog.text.count("emulated in some layers (a side of the result, 24, is no multiple of 16)") == 1
    assert caplog.text.count("emulated in some layers (an axis of 24 is not whole blocks of 32)") == 1
    linear.zero_grad()
    assert_equal(results(linear, (24,)), expected)
