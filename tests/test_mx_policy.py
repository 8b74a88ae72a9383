"""The named policies and what interventions make of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lightning_qk.mx_policy import BACKWARD, CHANGES, OPERANDS, PRESETS, MXPolicy
from lightning_qk.mx_vector import ACTIVATIONS

E4M3, E5M2 = "mxfp8_e4m3", "mxfp8_e5m2"


def formats(policy: MXPolicy) -> dict[str, str]:
    return {name: "" if operand is None else operand.fmt for name, operand in policy.operands.items()}


def test_the_default_rounds_nothing() -> None:
    assert MXPolicy().is_exact and MXPolicy.preset("fp32") == MXPolicy()
    assert not MXPolicy.preset("bf16").linear_is_exact and not MXPolicy(ln_affine="bf16").is_exact
    assert MXPolicy(activation="bf16").linear_is_exact and not MXPolicy(activation="bf16").is_exact


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bf16", [""] * 6),
        *((name, [name] * 6) for name in (E4M3, E5M2, "mxfp6_e2m3", "mxfp6_e3m2", "nvfp4")),
        ("mxfp4", ["mxfp4_e2m1"] * 6),
        ("mxfp8_mix", [E4M3, E4M3, E4M3, E5M2, E5M2, E5M2]),
        ("bf16_activations", ["", E4M3, "", E4M3, E4M3, E4M3]),
        ("forward_only", [E4M3, E4M3, "", "", "", ""]),
        ("weights_only", ["", E4M3, "", "", "", E4M3]),
    ],
)
def test_a_preset_has_the_formats_of_its_arm(name: str, expected: list[str]) -> None:
    """In the order x, w, x_wgrad, dy_wgrad, dy_dgrad, w_dgrad."""
    policy = MXPolicy.preset(name)
    assert formats(policy) == dict(zip(OPERANDS, expected, strict=True))
    assert policy.vector == "bf16"
    assert policy.vector_backward == ("fp32" if name == "forward_only" else "bf16")


def test_changes_are_the_interventions() -> None:
    policy = MXPolicy.preset(E4M3)
    after = {name: policy.changed(name) for name in CHANGES}
    assert after["none"] == policy and after["fp32"].is_exact
    assert {one.scale for one in after["bump"].operands.values() if one} == {"rceil"}
    assert after["ln_fp32"] == dataclasses.replace(policy, ln_affine="fp32")
    assert after["activation_fp32"] == dataclasses.replace(policy, activation="fp32")
    assert formats(after["bf16_weights"]) == {**dict.fromkeys(OPERANDS, E4M3), "w": ""}
    assert formats(after["bf16_activations_and_gradients"]) == formats(MXPolicy.preset("weights_only"))
    assert not any(formats(after["forward_only"])[name] for name in BACKWARD)
    assert len(set(after.values())) == len(after)
    affine = {name: one.ln_affine for name, one in after.items()}
    assert {name for name, one in affine.items() if one == "bf16"} == {name for name in after if "bf16" in name}


def test_a_cause_alone_keeps_its_fields_and_nothing_else() -> None:
    policy = MXPolicy.preset("mxfp8_mix")
    assert policy.only("x") == MXPolicy(x=policy.x, x_wgrad=policy.x_wgrad)
    assert policy.only("w") == MXPolicy(w=policy.w, w_dgrad=policy.w_dgrad)
    assert policy.only("dy") == MXPolicy(dy_wgrad=policy.dy_wgrad, dy_dgrad=policy.dy_dgrad)
    assert policy.only("ln") == MXPolicy(gain=policy.gain, ln_affine="mx")
    assert policy.only("vector") == MXPolicy.preset("bf16")
    assert policy.changed("ln_fp32").only("vector").ln_affine == "fp32"
    for name in OPERANDS:
        only: Any = {name: getattr(policy, name)}
        assert policy.only(f"{name}_alone") == MXPolicy(**only)
    with pytest.raises(ValueError, match="cause 'z' is not one of x, w, dy, ln, vector"):
        policy.only("z")


def test_as_released_bumps_as_released() -> None:
    policy = dataclasses.replace(MXPolicy.preset(E4M3), as_released=True)
    assert {one.scale for one in policy.changed("bump").operands.values() if one} == {"bump_released"}
    assert policy.activation == "bf16"
    assert [name for name in ACTIVATIONS if policy.rounds_activation(name)] == ["swiglu"]


@pytest.mark.parametrize("name", ["mxfp8_e5m2", "mxfp8_mix", "mxfp6_e2m3", "mxfp4"])
def test_the_released_bump_is_of_e4m3_alone(name: str) -> None:
    policy = dataclasses.replace(MXPolicy.preset(name), as_released=True)
    with pytest.raises(ValueError, match=r"of fmt='mxfp8_e4m3' alone, not of 'mxfp.*: leave out as_released"):
        policy.changed("bump")


def test_several_changes_each_make_a_difference() -> None:
    policy = MXPolicy.preset(E4M3)
    assert policy.after([]) == policy.after(["none"]) == policy == policy.after(["none", "none"])
    assert policy.after(["bump", "none", "ln_fp32"]) == policy.changed("bump").changed("ln_fp32")
    unused_gain = policy.without(*OPERANDS).changed("ln_fp32")
    for one, changes in (
        (policy, ["bump", "bump"]),
        (policy, ["bump", "fp32"]),
        (policy.changed("ln_fp32"), ["ln_fp32"]),
        (MXPolicy.preset("bf16"), ["forward_only", "bump"]),
        (MXPolicy.preset("bf16_activations"), ["bf16_activations"]),
        (unused_gain, ["bump"]),
        (dataclasses.replace(MXPolicy(), as_released=True), ["fp32"]),
    ):
        with pytest.raises(ValueError, match=r"changes=\[.* changes nothing .* Leave it out, or give none"):
            one.after(changes)


@pytest.mark.parametrize("how", [{"scale": "rceil"}, {"block": 16}, {"block": None}])
def test_nvfp4_takes_no_scale_and_no_block(how: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"none of fmt='nvfp4'.* leave them out"):
        MXPolicy.preset("nvfp4").replace_operands(OPERANDS, **how)
    with pytest.raises(ValueError, match="the change bump too"):
        MXPolicy.preset("nvfp4").changed("bump")


def test_every_preset_can_be_named_and_nothing_else() -> None:
    assert all(MXPolicy.preset(name) is policy for name, policy in PRESETS.items())
    with pytest.raises(ValueError, match="preset 'mxfp5' is not one of fp32, bf16"):
        MXPolicy.preset("mxfp5")
    with pytest.raises(ValueError, match="change 'fp16' is not one of none, fp32"):
        MXPolicy().changed("fp16")
    with pytest.raises(ValueError, match="ln_affine='mx' needs a format"):
        MXPolicy(ln_affine="mx")
    with pytest.raises(ValueError, match="ln_affine='fp8'"):
        MXPolicy(ln_affine="fp8")  # type: ignore[arg-type]
