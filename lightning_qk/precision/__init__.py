"""Precision plugins: the arithmetic of a run and its faults."""

from lightning_qk.precision.bf16_carry import BF16CarryAttention
from lightning_qk.precision.fault import FaultPrecision

__all__ = ["BF16CarryAttention", "FaultPrecision"]
