"""Precision plugins: the arithmetic of a run and its faults."""

from lightning_qk.precision.attention_fault import AttentionFault
from lightning_qk.precision.bf16_carry import BF16CarryAttention
from lightning_qk.precision.fault import FaultPrecision
from lightning_qk.precision.gradient_fault import GradientFault
from lightning_qk.precision.matmul_formats import MatmulFormats
from lightning_qk.precision.mx_gradient import MXGradient
from lightning_qk.precision.mx_training import MXTraining

__all__ = [
    "AttentionFault",
    "BF16CarryAttention",
    "FaultPrecision",
    "GradientFault",
    "MXGradient",
    "MXTraining",
    "MatmulFormats",
]
