"""Training in microscaling formats: matmuls on quantised operands, everything between them in bfloat16."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import torch

from lightning_qk.arguments import check_arguments
from lightning_qk.mx_policy import OPERANDS, MXPolicy
from lightning_qk.operand_format import RELEASED_BUMP, OperandFormat
from lightning_qk.precision.attention_fault import AttentionFault
from lightning_qk.precision.fault import FaultPrecision
from lightning_qk.precision.gradient_fault import GradientFault
from lightning_qk.precision.matmul_formats import MatmulFormats

_WEIGHTS, _ACTIVATIONS = ("w", "w_dgrad"), ("x", "x_wgrad", "dy_wgrad", "dy_dgrad")


class MXTraining(FaultPrecision):
    """Fake-quantised MX products in chosen linear layers, with the vector operations between them in bfloat16.

    Weights and the optimizer stay in float32. Attention's own products are not quantised.

    Example (YAML)::

        trainer:
          plugins:
            class_path: MXTraining
            init_args: {preset: mxfp8_mix, route: all, head: true, operands: {dy_dgrad: {rounding: sr}}}

    Args:
        preset: a policy of :data:`lightning_qk.mx_policy.PRESETS`: ``mxfp8_e4m3``, ``mxfp8_e5m2``, ``mxfp8_mix``,
            ``mxfp6_e2m3``, ``mxfp6_e3m2``, ``mxfp4``, ``nvfp4``, ``bf16_activations``, ``forward_only``,
            ``weights_only``, ``bf16`` or ``fp32``.
        changes: what to change in it, in order: names of :data:`lightning_qk.mx_policy.CHANGES`, such as ``bump``.
        weights: format of weights in both passes (``w``, ``w_dgrad``); None is the preset's.
        activations: format of activations and gradients (the other four operands); None is the preset's.
        scale: rule of the shared scales of all operands; None is the preset's, as for the next two.
        rounding: of all operands' elements.
        block: elements that share a scale.
        operands: single operands by name (``x, w, x_wgrad, dy_wgrad, dy_dgrad, w_dgrad``), over all that: a format, a
            mapping of :class:`~lightning_qk.operand_format.OperandFormat`'s fields, or null for none.
        hadamard: this and the next three: see :class:`~lightning_qk.mx_policy.MXPolicy`; None is the preset's.
        vector: ``bf16`` or ``fp32``, in both passes.
        ln_affine: ``fp32``, ``bf16`` or ``mx``.
        activation: ``fp32`` or ``bf16``.
        as_released: do as the released code does where that is not what its paper says.
        route: linear layers by route; a model without attention has ``mlp`` only.
        layers: indices of their blocks; None is all.
        head: quantise the output layer too.
        native: use the hardware's own scaled products where there are any; else they are emulated.
        attention: roundings inside attention besides.
        gradient: a fault of weight gradients besides; in a product it takes the place of the policy's formats there.
        base: see :class:`FaultPrecision`, as the next two; ``fp32``: no autocast, so that what the
            policy has in bfloat16 is emulated in float32 tensors, and preset ``fp32`` is plain float32.
        faults_in_validation: quantise there too.
        seed: base seed of stochastic roundings and of Hadamard signs.

    Raises:
        ValueError: naming the argument and the remedy.
    """

    def __init__(
        self,
        preset: str = "mxfp8_e4m3",
        changes: list[str] | None = None,
        weights: str | None = None,
        activations: str | None = None,
        scale: str | None = None,
        rounding: str | None = None,
        block: int | None = None,
        operands: dict[str, Any] | None = None,
        hadamard: Literal["none", "weight_gradient", "all"] | None = None,
        vector: Literal["fp32", "bf16"] | None = None,
        ln_affine: Literal["fp32", "bf16", "mx"] | None = None,
        activation: Literal["fp32", "bf16"] | None = None,
        as_released: bool = False,
        route: str = "all",
        layers: list[int] | None = None,
        head: bool = False,
        native: bool = True,
        attention: AttentionFault | None = None,
        gradient: GradientFault | None = None,
        base: Literal["bf16", "fp32"] = "bf16",
        faults_in_validation: bool = False,
        seed: int = 0,
    ) -> None:
        policy = dataclasses.replace(MXPolicy.preset(preset), as_released=as_released)
        for change in changes or []:
            policy = policy.changed(change)
        for names, fmt in ((_WEIGHTS, weights), (_ACTIVATIONS, activations)):
            policy = policy if fmt is None else _with_operands(policy, dict.fromkeys(names, fmt))
        given = {"scale": scale, "rounding": rounding, "block": block}
        formats = {key: value for key, value in given.items() if value is not None}
        policy = policy.replace_operands((*OPERANDS, "gain"), **formats)
        fields: dict[str, Any] = {
            "hadamard": hadamard,
            "vector": vector,
            "vector_backward": vector,
            "ln_affine": ln_affine,
            "activation": activation,
        }
        policy = dataclasses.replace(policy, **{key: value for key, value in fields.items() if value is not None})
        policy = _with_operands(policy, operands or {})
        for operand in policy.operands.values():
            if operand is not None:
                length = (operand.block or 1) if operand.scale == RELEASED_BUMP else 1  # which takes whole blocks only
                operand(torch.zeros(1, length), -1, 0)  # complains here, not in the first step
        matmul = MatmulFormats(policy, route, layers, head, native)
        super().__init__(attention, gradient, base, faults_in_validation, seed, matmul)


def _with_operands(policy: MXPolicy, operands: Mapping[str, Any]) -> MXPolicy:
    for name, wanted in operands.items():
        if name not in OPERANDS:
            raise ValueError(f"MXTraining: operands.{name} is not one of {', '.join(OPERANDS)}.")
        if wanted is None:
            policy = policy.without(name)
            continue
        fields = {"fmt": wanted} if isinstance(wanted, str) else wanted
        if not isinstance(fields, Mapping):
            raise ValueError(f"MXTraining: operands.{name}={wanted!r} must be a format, its settings, or null.")
        check_arguments(f"MXTraining: operands.{name}", OperandFormat, fields)
        format_now = policy.operands[name]
        if format_now is None and "fmt" not in fields:
            raise ValueError(f"MXTraining: operands.{name}.fmt is missing, and the preset leaves it unquantised.")
        changed: dict[str, Any] = {name: dataclasses.replace(format_now or OperandFormat(), **fields)}
        policy = dataclasses.replace(policy, **changed)
    return policy
