"""Training in microscaling formats: matmuls on quantised operands, everything between them in bfloat16."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from lightning_qk.arguments import check_arguments
from lightning_qk.mx_policy import OPERANDS, MXPolicy
from lightning_qk.operand_format import OperandFormat
from lightning_qk.precision.attention_fault import AttentionFault
from lightning_qk.precision.fault import FaultPrecision
from lightning_qk.precision.gradient_fault import GradientFault
from lightning_qk.precision.matmul_formats import MatmulFormats

_WEIGHTS, _ACTIVATIONS = ("w", "w_dgrad"), ("x", "x_wgrad", "dy_wgrad", "dy_dgrad")


class MXTraining(FaultPrecision):
    """Fake-quantised MX products in chosen linear layers, with the vector operations between them in bfloat16.

    Weights and the optimizer stay in float32. Attention's own products are not quantised. The policy is made in this
    order: ``preset``; ``weights``, ``activations`` and what ``operands`` adds; ``scale``, ``rounding`` and ``block`` of
    all that; single fields of ``operands``; ``changes``. An option of which nothing is left in the end is refused.

    Example (YAML)::

        trainer:
          plugins:
            class_path: MXTraining
            init_args: {preset: mxfp8_mix, route: all, head: true, operands: {dy_dgrad: {rounding: sr}}}

    Args:
        preset: a policy of :data:`lightning_qk.mx_policy.PRESETS`: ``mxfp8_e4m3``, ``mxfp8_e5m2``, ``mxfp8_mix``,
            ``mxfp6_e2m3``, ``mxfp6_e3m2``, ``mxfp4``, ``nvfp4``, ``bf16_activations``, ``forward_only``,
            ``weights_only``, ``bf16`` or ``fp32``. ``forward_only`` stays so under ``weights``, ``activations`` and
            ``vector``.
        changes: what to change in all the rest, in order: names of :data:`lightning_qk.mx_policy.CHANGES`, such as
            ``bump``. Each must make a difference, but for ``none``.
        weights: format of weights in both passes (``w``, ``w_dgrad``), and of LayerNorm gains and biases in MX; None is
            the preset's.
        activations: format of activations and gradients (the other four operands); None is the preset's.
        scale: rule of the shared scales of all operands, and of LayerNorm gains and biases in MX; None is the preset's,
            as for the next two.
        rounding: of all their elements.
        block: elements that share a scale.
        operands: single operands by name (``x, w, x_wgrad, dy_wgrad, dy_dgrad, w_dgrad``), over the last five: a
            format, a mapping of :class:`~lightning_qk.operand_format.OperandFormat`'s fields, or null for none.
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
        common = _given(scale=scale, rounding=rounding, block=block)
        fields = _given(hadamard=hadamard, vector=vector, ln_affine=ln_affine, activation=activation)
        OperandFormat("mxfp8_e4m3", **common)  # complains of them even where no operand takes them
        policy = dataclasses.replace(MXPolicy.preset(preset), as_released=as_released)
        gain = ("gain",) if policy.gain is not None or ln_affine == "mx" else ()
        for names, fmt in (((*_WEIGHTS, *gain), weights), (_ACTIVATIONS, activations)):
            policy = policy if fmt is None else _with_format(policy, names, fmt)
        policy = dataclasses.replace(policy, **fields, **_given(vector_backward=vector))
        if preset == "forward_only":
            policy = policy.changed("forward_only")  # the options above are of both passes
        policy = _with_operands(policy, operands or {}, common).replace_operands(("gain",), **common)
        policy = policy.after(changes or [])
        _refuse_idle(policy, common, fields)
        matmul = MatmulFormats(policy, route, layers, head, native)
        super().__init__(attention, gradient, base, faults_in_validation, seed, matmul)


def _given(**options: Any) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}


def _with_format(policy: MXPolicy, names: Iterable[str], fmt: str) -> MXPolicy:
    changed = {name: dataclasses.replace(getattr(policy, name) or OperandFormat(), fmt=fmt) for name in names}
    return dataclasses.replace(policy, **changed)  # type: ignore[arg-type]


def _with_operands(policy: MXPolicy, operands: Mapping[str, Any], common: Mapping[str, Any]) -> MXPolicy:
    """``common`` fields in all operands that have a format, and over them those of single ``operands``."""
    for name in operands:
        if name not in OPERANDS:
            raise ValueError(f"MXTraining: operands.{name} is not one of {', '.join(OPERANDS)}.")
    for name, format_now in policy.operands.items():
        wanted = operands.get(name, {})
        if wanted is None:
            policy = policy.without(name)
            continue
        fields = {"fmt": wanted} if isinstance(wanted, str) else wanted
        if not isinstance(fields, Mapping):
            raise ValueError(f"MXTraining: operands.{name}={wanted!r} must be a format, its settings, or null.")
        check_arguments(f"MXTraining: operands.{name}", OperandFormat, fields)
        if format_now is None and "fmt" not in fields:
            if name not in operands:
                continue
            raise ValueError(f"MXTraining: operands.{name}.fmt is missing, and the preset leaves it unquantised.")
        changed: dict[str, Any] = {name: dataclasses.replace(format_now or OperandFormat(), **{**common, **fields})}
        policy = dataclasses.replace(policy, **changed)
    return policy


def _refuse_idle(policy: MXPolicy, common: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Refuses options of which nothing is left in the policy."""
    formats = [one for one in (*policy.operands.values(), policy.in_effect.gain) if one is not None]
    exempt = policy.as_released and not formats  # as_released.yaml is for all arms, controls too
    for key, value in common.items():
        if not exempt and all(getattr(one, key) != value for one in formats):
            raise ValueError(
                f"MXTraining: {key}={value!r} is in no operand's format: none is quantised, or operands or changes "
                "have another. Leave it out, or quantise operands by preset, weights, activations or operands."
            )
    for key, value in fields.items():
        if getattr(policy, key) != value:
            raise ValueError(f"MXTraining: {key}={value!r} is undone by changes; leave one of the two out.")
