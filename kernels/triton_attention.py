"""The recurrence of :mod:`kernels.reference` on a GPU, in three Triton kernels.

Same logical tiles, same roundings, same stochastic draws; what differs from the reference is the order in which the
float32 sums inside a product or a row sum are added up, and on a GPU also ``exp2``, which the hardware approximates to
about 2 units in the last place of float32 (subnormal results become 0), ``log``, and the accumulator of the tensor
cores. A value that lies that close to the boundary between two roundings may therefore come out one unit of its site
higher or lower.

Products of bfloat16 values run on the tensor cores, which is exact up to the sum; so do those of float16 values. All
others are float32 products of full precision ("ieee", never TF32), which are many times slower. Fused multiply-add is
switched off, as it would skip the rounding between the two.

Under ``TRITON_INTERPRET=1``, set before Triton is imported, everything runs on CPU tensors, slowly: for tests.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kernels.reference import Plan
from kernels.rounding import MANTISSA_FP32, Rounding, split_seed
from kernels.sites import SITE_NAMES, RoundingSites

MAX_HEAD_DIM = 256


@dataclasses.dataclass(frozen=True)
class Constants:
    """What the kernels are compiled for.

    Args:
        sites: the roundings.
        causal: whether keys after the query are masked.
        scale: the factor on q.k.
        head_dim: D.
        padded_dim: D, or the next power of two.
        block_rows: queries worked on at once; a power of two.
        block_columns: keys worked on at once; a power of two.
        native_p: whether the inputs' dtype holds P as rounded by ``p_pv``.
        native_ds: whether it holds dS.
        bf16_ds: whether that dtype is bfloat16.
    """

    sites: RoundingSites
    causal: bool
    scale: float
    head_dim: int
    padded_dim: int
    block_rows: int
    block_columns: int
    native_p: bool
    native_ds: bool
    bf16_ds: bool

    def rounding(self, site: str) -> Rounding:
        """The rounding at a named site."""
        return getattr(self.sites, site)

    def dropped_bits(self, site: str) -> int:
        """Low bits of a float32 that go."""
        return MANTISSA_FP32 - self.rounding(site).mantissa_bits

    def seed_offset(self, site: str) -> int:
        """Where its seed is among those of a tile."""
        return 2 * SITE_NAMES.index(site)


def _kernels() -> ModuleType:
    try:
        from kernels import triton_kernels
    except ImportError as error:
        raise RuntimeError(
            f"backend='triton' needs Triton, which cannot be imported here ({error}); "
            "pip install triton on Linux, or use backend='reference'."
        ) from error
    return triton_kernels


def interpreting() -> bool:
    """Whether Triton runs its kernels on CPU tensors here."""
    try:
        import triton
    except ImportError:
        return False
    return triton.knobs.runtime.interpret


def _power_of_two(least: int, x: int) -> int:
    return max(least, 1 << (x - 1).bit_length())


def _holds(dtype: torch.dtype, rounding: Rounding) -> bool:
    """Whether every value of this rounding is one of ``dtype``, so that the product may use its tensor cores."""
    narrow = {torch.bfloat16: rounding.fits_bf16, torch.float16: rounding.exponent_bits == 5}
    return narrow.get(dtype, False)


def _blocks(padded_dim: int, native: bool) -> tuple[int, int, int]:
    """Rows and columns of a kernel block, and pipeline stages, such that 8 warps spill few registers or none."""
    if native:
        return (64, 64, 2) if padded_dim <= 64 else (64, 32, 2) if padded_dim <= 128 else (32, 32, 1)
    return (32, 32, 1) if padded_dim <= 64 else (16, 16, 1)


def _constants(q_NTD: Tensor, plan: Plan) -> tuple[Constants, dict[str, Any]]:
    """The constants, and the options of every launch."""
    D = q_NTD.shape[2]
    if D > MAX_HEAD_DIM:
        raise ValueError(
            f"backend='triton': head dimension {D} is above {MAX_HEAD_DIM}, too large for a multiprocessor; "
            "use backend='reference'."
        )
    padded, sites = _power_of_two(16, D), plan.sites
    native_p, native_ds = (_holds(q_NTD.dtype, rounding) for rounding in (sites.p_pv, sites.ds))
    rows, columns, stages = _blocks(padded, native_p and native_ds and sites.delta_from != "out_fp32")
    constants = Constants(
        sites=sites,
        causal=plan.causal,
        scale=plan.scale,
        head_dim=D,
        padded_dim=padded,
        block_rows=min(rows, _power_of_two(16, min(plan.q_tile, plan.q_length))),
        block_columns=min(columns, _power_of_two(16, min(plan.k_tile, plan.k_length))),
        native_p=native_p,
        native_ds=native_ds,
        bf16_ds=native_ds and q_NTD.dtype is torch.bfloat16,
    )
    # contraction to fused multiply-add would skip a rounding; Triton's default is still on
    return constants, {"num_warps": 8, "num_stages": stages, "enable_fp_fusion": False}


def _seeds(plan: Plan, length: int, tile: int, device: torch.device) -> Tensor:
    """int32 [tiles, 2 * sites]: the halves of the seed of every stochastic site in every tile of one axis."""
    if not plan.sites.is_stochastic:
        return torch.zeros(1, dtype=torch.int32, device=device)
    table = [
        [half for site in SITE_NAMES for half in split_seed(plan.site_seed(site, start))]
        for start in range(0, length, tile)
    ]
    return torch.tensor(table, dtype=torch.int32).to(device, non_blocking=True)


def _everything(plan: Plan, *tensors: Tensor) -> Tensor:
    """int32 [1]: whether even blocks that are masked whole matter, because 0 * NaN or 0 * inf may be in them."""
    finite = torch.stack([x.isfinite().all() for x in tensors]).all()
    overflows = any(getattr(plan.sites, site).exponent_bits < 8 for site in ("dp", "delta_product", "delta"))
    return (~finite | overflows).to(torch.int32).view(1)


def _sizes(plan: Plan) -> tuple[int, int, int, int, int]:
    T, S = plan.q_length, plan.k_length
    return T, S, min(plan.q_tile, T), min(plan.k_tile, S), plan.first_head


def _input(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x.float() if x.dtype.itemsize < 4 and interpreting() else x  # see kernels.triton_rounding


def _empty_like(x: Tensor) -> Tensor:
    dtype = torch.float32 if x.dtype.itemsize < 4 and interpreting() else x.dtype
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _launch(kernel: Any, length: int, tile: int, block: int, N: int, *arguments: Any, **options: Any) -> None:
    """One program for every block of every tile of ``length`` rows of N heads."""
    programs = -(-length // tile) * -(-tile // block) * N
    with torch.cuda.device_of(arguments[0]):  # Triton launches on the current device
        kernel[(programs,)](*arguments, **options)


def forward(q_NTD: Tensor, k_NSD: Tensor, v_NSD: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`kernels.reference.forward`."""
    kernels = _kernels()
    C, options = _constants(q_NTD, plan)
    N, T, _ = q_NTD.shape
    T, S, q_tile, k_tile, _ = sizes = _sizes(plan)
    dtype = torch.float64 if q_NTD.dtype is torch.float64 else torch.float32
    out = _empty_like(q_NTD)
    lse, top = (torch.empty(N, T, dtype=dtype, device=q_NTD.device) for _ in range(2))
    ties = torch.empty(N, T, dtype=torch.int32, device=q_NTD.device)
    _launch(
        kernels.forward_kernel, T, q_tile, C.block_rows, N,
        *map(_input, (q_NTD, k_NSD, v_NSD)), out, lse, top, ties, _seeds(plan, S, k_tile, q_NTD.device),
        _everything(plan, v_NSD), *sizes, C, **options,
    )  # fmt: skip
    return out.to(q_NTD.dtype), lse, top.amax(1), (ties > 1).sum(1, dtype=torch.int32)


def backward(
    dout_NTD: Tensor, q_NTD: Tensor, k_NSD: Tensor, v_NSD: Tensor, out_NTD: Tensor, lse_NT: Tensor, plan: Plan
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`kernels.reference.backward`."""
    kernels = _kernels()
    C, options = _constants(q_NTD, plan)
    N = q_NTD.shape[0]
    T, S, q_tile, k_tile, _ = sizes = _sizes(plan)
    dout, q, k, v, out, lse = map(_input, (dout_NTD, q_NTD, k_NSD, v_NSD, out_NTD, lse_NT))
    dq, dk, dv = map(_empty_like, (q_NTD, k_NSD, v_NSD))
    delta = torch.empty_like(lse)
    seeds, row_seeds = (_seeds(plan, *axis, q.device) for axis in ((S, k_tile), (T, q_tile)))
    everything = _everything(plan, dout, q, k, v, out)
    _launch(
        kernels.dq_kernel, T, q_tile, C.block_rows, N,
        dout, q, k, v, out, lse, delta, dq, seeds, everything, *sizes, C, **options,
    )  # fmt: skip
    _launch(
        kernels.dkdv_kernel, S, k_tile, C.block_columns, N,
        dout, q, k, v, lse, delta, dk, dv, seeds, row_seeds, everything, *sizes, C, **options,
    )  # fmt: skip
    return dq.to(q_NTD.dtype), dk.to(k_NSD.dtype), dv.to(v_NSD.dtype)
