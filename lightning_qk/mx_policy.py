"""What is rounded, and how, in the products and vector operations of a layer: the arithmetic of an MX training run.

A linear layer is three products, each a sum along another axis, and so has six operands to quantise:

==================  ==================  =========================================
product             operands            axis of the blocks
==================  ==================  =========================================
``Y = X W'``        ``x, w``            in, in
``dW = dY' X``      ``dy_wgrad, x_wgrad``  tokens, tokens
``dX = dY W``       ``dy_dgrad, w_dgrad``  out, out
==================  ==================  =========================================

``w`` and ``w_dgrad`` are the same weights quantised along different axes, so dX is not the exact gradient of the
quantised forward pass. Everything else is a vector operation: bfloat16, one rounding a primitive, if it is rounded at
all. The definitions and the named arms are those of arXiv 2506.20752 and of the code released with it, but for the
places where the code is not what the paper says; ``as_released`` chooses the code there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from lightning_qk.operand_format import NVFP4, RELEASED_BUMP, OperandFormat

FORWARD = ("x", "w")
BACKWARD = ("x_wgrad", "dy_wgrad", "dy_dgrad", "w_dgrad")
OPERANDS = (*FORWARD, *BACKWARD)
HADAMARD = ("none", "weight_gradient", "all")


@dataclasses.dataclass(frozen=True)
class MXPolicy:
    """The formats of a linear layer's six operands, and the rest of the arithmetic. The default rounds nothing.

    Args:
        x: format of the forward product's X; None, here and in the next five, leaves the operand as it is.
        w: of the forward product's W.
        x_wgrad: of X in the weight gradient.
        dy_wgrad: of dY in the weight gradient.
        dy_dgrad: of dY in the input gradient.
        w_dgrad: of W in the input gradient.
        gain: of gain and bias of LayerNorms, where ``ln_affine`` is ``mx``.
        hadamard: products whose operands are transformed along their common axis first: ``none``, ``weight_gradient``
            or ``all``.
        vector: ``bf16`` rounds what goes into a product or comes out of one, and the primitives of LayerNorms and sums.
        vector_backward: the same for the gradients.
        ln_affine: gain and bias of LayerNorms: ``mx`` in the format of ``gain``, ``bf16``, or ``fp32``: then nothing in
            a LayerNorm is rounded.
        activation: ``bf16`` rounds every primitive of the activation function, ``fp32`` none.
        as_released: where the released code differs, do as it does: LayerNorm gain and bias are never in MX; with
            ``ln_affine="fp32"`` only they are spared; LayerNorm biases get no gradient; activation functions are never
            rounded but for SwiGLU's SiLU; a bump is :func:`lightning_qk.operand_format.released_bump`.

    Raises:
        ValueError: naming the field.
    """

    x: OperandFormat | None = None
    w: OperandFormat | None = None
    x_wgrad: OperandFormat | None = None
    dy_wgrad: OperandFormat | None = None
    dy_dgrad: OperandFormat | None = None
    w_dgrad: OperandFormat | None = None
    gain: OperandFormat | None = None
    hadamard: Literal["none", "weight_gradient", "all"] = "none"
    vector: Literal["fp32", "bf16"] = "fp32"
    vector_backward: Literal["fp32", "bf16"] = "fp32"
    ln_affine: Literal["fp32", "bf16", "mx"] = "fp32"
    activation: Literal["fp32", "bf16"] = "fp32"
    as_released: bool = False

    def __post_init__(self) -> None:
        allowed = {
            "hadamard": HADAMARD,
            "vector": ("fp32", "bf16"),
            "vector_backward": ("fp32", "bf16"),
            "ln_affine": ("fp32", "bf16", "mx"),
            "activation": ("fp32", "bf16"),
        }
        for field, values in allowed.items():
            if getattr(self, field) not in values:
                raise ValueError(f"MXPolicy: {field}={getattr(self, field)!r} is not one of {', '.join(values)}.")
        blocks = [one.block for one in self.operands.values() if one is not None and one.block is not None]
        if self.hadamard != "none" and any(block & (block - 1) for block in blocks):
            raise ValueError(f"MXPolicy: hadamard={self.hadamard!r} needs blocks of a power of two, got {max(blocks)}.")
        if self.ln_affine == "mx" and self.gain is None:
            raise ValueError("MXPolicy: ln_affine='mx' needs a format, gain; use a preset in MX, weights, or 'bf16'.")

    @property
    def operands(self) -> dict[str, OperandFormat | None]:
        """The six formats by name."""
        return {name: getattr(self, name) for name in OPERANDS}

    @property
    def forward_is_exact(self) -> bool:
        """Whether the forward product of a linear layer is left alone."""
        return self.x is None and self.w is None and self.vector == "fp32"

    @property
    def linear_is_exact(self) -> bool:
        """Whether all three products of a linear layer are."""
        return self.vector == self.vector_backward == "fp32" and not any(self.operands.values())

    @property
    def is_exact(self) -> bool:
        """Whether nothing at all is rounded."""
        return self.linear_is_exact and self.ln_affine == self.activation == "fp32"

    @property
    def in_effect(self) -> MXPolicy:
        """The same arithmetic without what has no effect in it, to compare it with another."""
        if self.is_exact:
            return MXPolicy()
        if self.ln_affine == "mx" and not self.as_released:
            return self
        return dataclasses.replace(_bf16_affine(self), gain=None)

    def rounds_activation(self, name: str) -> bool:
        """Whether an activation function is rounded; in the released code all but SwiGLU escape."""
        return self.activation == "bf16" and (name == "swiglu" or not self.as_released)

    def replace_operands(self, names: tuple[str, ...], **changes: Any) -> MXPolicy:
        """Changes fields of those of the named operands, or of ``gain``, that have a format."""
        formats = {name: getattr(self, name) for name in names}
        changed: dict[str, Any] = {
            name: dataclasses.replace(one, **changes) for name, one in formats.items() if one is not None
        }
        return dataclasses.replace(self, **changed)

    def without(self, *names: str) -> MXPolicy:
        """Leaves the named operands unquantised."""
        nothing: dict[str, Any] = dict.fromkeys(names)
        return dataclasses.replace(self, **nothing)

    def only(self, cause: str) -> MXPolicy:
        """The policy with one of :data:`CAUSES` alone, and everything else exact.

        LayerNorm gains and biases are rounded to bfloat16 under ``vector``, and under ``ln`` too, before MX.

        Raises:
            ValueError: there is no such cause.
        """
        if cause not in CAUSES:
            raise ValueError(f"MXPolicy: cause {cause!r} is not one of {', '.join(CAUSES)}.")
        kept: dict[str, Any] = {field: getattr(self, field) for field in CAUSES[cause]}
        if cause == "vector" and self.ln_affine != "fp32":
            kept["ln_affine"] = "bf16"  # under fp32 no primitive of a LayerNorm would be rounded
        return MXPolicy(**kept, hadamard=self.hadamard, as_released=self.as_released)

    def changed(self, change: str) -> MXPolicy:
        """The policy after one of :data:`CHANGES`.

        Raises:
            ValueError: there is no such change.
        """
        if change not in CHANGES:
            raise ValueError(f"MXPolicy: change {change!r} is not one of {', '.join(CHANGES)}.")
        return CHANGES[change](self)

    def after(self, changes: Sequence[str]) -> MXPolicy:
        """The policy after several of :data:`CHANGES`, in order.

        Raises:
            ValueError: there is no such change, or one makes no difference; ``none`` may.
        """
        policy = functools.reduce(MXPolicy.changed, changes, self)
        for i, change in enumerate(changes):
            without = functools.reduce(MXPolicy.changed, [*changes[:i], *changes[i + 1 :]], self)
            if change != "none" and without.in_effect == policy.in_effect:
                raise ValueError(
                    f"changes={list(changes)}: {change} changes nothing in this policy, or others undo it. Leave it "
                    "out, or give none, the control."
                )
        return policy

    @classmethod
    def preset(cls, name: str) -> MXPolicy:
        """One of :data:`PRESETS`.

        Raises:
            ValueError: there is no such preset.
        """
        if name not in PRESETS:
            raise ValueError(f"MXPolicy: preset {name!r} is not one of {', '.join(PRESETS)}.")
        return PRESETS[name]


CAUSES: Mapping[str, tuple[str, ...]] = {
    "x": ("x", "x_wgrad"),
    "w": ("w", "w_dgrad"),
    "dy": ("dy_wgrad", "dy_dgrad"),
    "ln": ("gain", "ln_affine"),
    "vector": ("vector", "vector_backward", "activation"),
    **{f"{name}_alone": (name,) for name in OPERANDS},
}
"""What may cause an error, and the fields it is made of; an operand of one product is ``<name>_alone``."""


def _bump(policy: MXPolicy) -> MXPolicy:
    scale = RELEASED_BUMP if policy.as_released else "rceil"
    return policy.replace_operands((*OPERANDS, "gain"), scale=scale)


def _ln_fp32(policy: MXPolicy) -> MXPolicy:
    return dataclasses.replace(policy, ln_affine="fp32")


def _activation_fp32(policy: MXPolicy) -> MXPolicy:
    return dataclasses.replace(policy, activation="fp32")


def _forward_only(policy: MXPolicy) -> MXPolicy:
    return dataclasses.replace(policy.without(*BACKWARD), vector_backward="fp32")


def _bf16_activations(policy: MXPolicy) -> MXPolicy:
    return _bf16_affine(policy.without("x", "x_wgrad"))


def _bf16_affine(policy: MXPolicy) -> MXPolicy:
    return dataclasses.replace(policy, ln_affine="bf16") if policy.ln_affine == "mx" else policy


CHANGES: Mapping[str, Callable[[MXPolicy], MXPolicy]] = {
    "none": lambda policy: policy,  # a control
    "fp32": lambda _: MXPolicy(),
    "bump": _bump,
    "ln_fp32": _ln_fp32,
    "activation_fp32": _activation_fp32,
    "bf16_activations": _bf16_activations,  # and LayerNorms, as in the paper
    "bf16_activations_and_gradients": lambda policy: _bf16_activations(policy).without("dy_wgrad", "dy_dgrad"),
    "forward_only": _forward_only,
    "bf16_weights": lambda policy: _bf16_affine(policy.without("w")),  # those of the backward pass stay as they are
}
"""What an intervention in a run makes of its policy."""


def uniform(fmt: str) -> MXPolicy:
    """All six operands in one format, vector operations in bfloat16, LayerNorm gain and bias in MX."""
    operands: dict[str, Any] = dict.fromkeys((*OPERANDS, "gain"), OperandFormat(fmt))
    affine: Any = "bf16" if fmt == NVFP4 else "mx"  # NVFP4 shares a scale in a whole tensor
    return MXPolicy(**operands, vector="bf16", vector_backward="bf16", ln_affine=affine, activation="bf16")


_E4M3 = uniform("mxfp8_e4m3")
PRESETS: Mapping[str, MXPolicy] = {
    "fp32": MXPolicy(),
    "bf16": MXPolicy(vector="bf16", vector_backward="bf16", ln_affine="bf16", activation="bf16"),
    "mxfp8_e4m3": _E4M3,
    "mxfp8_e5m2": uniform("mxfp8_e5m2"),
    "mxfp8_mix": _E4M3.replace_operands(("dy_wgrad", "dy_dgrad", "w_dgrad"), fmt="mxfp8_e5m2"),
    "mxfp6_e2m3": uniform("mxfp6_e2m3"),
    "mxfp6_e3m2": uniform("mxfp6_e3m2"),
    "mxfp4": uniform("mxfp4_e2m1"),
    "nvfp4": uniform(NVFP4),
    "bf16_activations": _E4M3.changed("bf16_activations"),
    "forward_only": _E4M3.changed("forward_only"),
    "weights_only": _E4M3.changed("bf16_activations_and_gradients"),
}
"""Arms by name; the last three are E4M3 in what they quantise."""
