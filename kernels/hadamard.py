"""The random Hadamard transform by blocks: ``y = H D x / sqrt(block)`` with random signs ``D``.

``H`` is Sylvester's matrix, so ``H H = block * I``. The transform is orthonormal: it keeps inner products, and spreads
an outlier over its block, which is what a block format wants. Each of its ``log2(block)`` rounds puts the sums of
neighbours into the first half and their differences into the second. These are additions in float32 and no matrix
product, which autocast or a lowered matmul precision would silently round.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.mx_formats import uniform

_STREAM = 0x4861646D  # keeps the signs apart from the draws of a stochastic rounding with the same seed


def _signs(block: int, seed: int, device: torch.device) -> Tensor:
    draws = uniform(torch.Size([block]), seed ^ _STREAM, device)
    return torch.where(draws < 0.5, -1.0, 1.0)


def random_hadamard(x: Tensor, axis: int = -1, block: int = 32, seed: int | None = 0, inverse: bool = False) -> Tensor:
    """Transforms every block of ``x`` along ``axis``, all with the same signs.

    Two operands of a product transformed with the same seed along their common axis keep their product.

    Args:
        x: floating-point tensor; bfloat16 and float16 are transformed in float32 and rounded at the end.
        axis: the axis blocks run along; a multiple of ``block`` long.
        block: a power of two.
        seed: the signs are a hash of it and the position in the block; None for no signs, the same transform always.
        inverse: undo the transform of the same seed instead.

    Returns:
        A tensor of ``x``'s shape and dtype; differentiable.

    Raises:
        ValueError: naming the argument that cannot be.
    """
    if not x.is_floating_point():
        raise ValueError(f"random_hadamard: got {x.dtype}; give a floating-point tensor (x.float()).")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"random_hadamard: axis={axis} must be from {-x.ndim} to {x.ndim - 1} for shape {tuple(x.shape)}."
        )
    if type(block) is not int or block < 1 or block & (block - 1):
        raise ValueError(f"random_hadamard: block={block!r} must be a power of two.")
    axis %= x.ndim
    if x.shape[axis] % block:
        raise ValueError(f"random_hadamard: axis {axis} has length {x.shape[axis]}, not a multiple of block={block}.")
    y = (x if x.dtype is torch.float64 else x.float()).unflatten(axis, (x.shape[axis] // block, block))
    signs = 1.0 if seed is None else _signs(block, seed, x.device).view(block, *[1] * (x.ndim - 1 - axis))
    if not inverse:
        y = y * signs
    for _ in range(block.bit_length() - 1):
        a, b = y.unflatten(axis + 1, (block // 2, 2)).unbind(axis + 2)
        y = torch.cat((a + b, a - b), axis + 1)
    y = y * block**-0.5
    if inverse:
        y = y * signs
    return y.flatten(axis, axis + 1).to(x.dtype)
