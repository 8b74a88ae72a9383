r"""Spectra of what a change of the query and key weights does to the attention logits, head by head.

The logits of a head are the bilinear form ``M = W_Q' W_K`` [n, n] of its inputs, with rows of W_Q and W_K [d, n] as
``nn.Linear`` keeps them. If the weights move by dW_Q and dW_K, M moves by

    delta2 + delta3,   delta2 = dW_Q' W_K + W_Q' dW_K,   delta3 = dW_Q' dW_K

of rank at most 2d and d (Huang et al. 2026, arXiv 2606.28116, where the spectral entropy of delta2 becomes abnormal
long before the loss does). Neither is formed. With QR decompositions ``[dW_Q' W_Q'] = Q_q [A_1 A_2]`` and
``[dW_K' W_K'] = Q_k [B_1 B_2]`` of [n, 2d] matrices,

    delta2 = Q_q (A_1 B_2' + A_2 B_1') Q_k',   delta3 = Q_q A_1 B_1' Q_k'

have the singular values of the matrices in the middle. These are small, and their squares are the eigenvalues of a Gram
matrix, in float64. Householder QR has an error in proportion to each column, so that a dW far below W keeps its digits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class DeltaSpectrum(NamedTuple):
    """Of the matrices of H heads, with singular values s and ``p = s^2 / sum s^2``; all float64 [H].

    NaN for a head with a weight that is not finite; ranks are 0 for a matrix of zeros.

    Attributes:
        norm: Frobenius norm, ``(sum s^2)^0.5``.
        stable_rank: ``sum s^2 / max s^2``, from 1 to the rank.
        effective_rank: ``exp(-sum p log p)``, from 1 to the rank.
    """

    norm: Tensor
    stable_rank: Tensor
    effective_rank: Tensor


@torch.no_grad()
def delta_spectra(q_Hdn: Tensor, k_Gdn: Tensor, dq_Hdn: Tensor, dk_Gdn: Tensor) -> tuple[DeltaSpectrum, DeltaSpectrum]:
    """The spectra of delta2, of first order in the change, and delta3, of second.

    Args:
        q_Hdn: query weights of H heads before the change; any float dtype, read in float32 or float64.
        k_Gdn: key weights of G heads; query head h uses key head ``h // (H // G)``.
        dq_Hdn: the change of the query weights.
        dk_Gdn: the change of the key weights.

    Raises:
        ValueError: the shapes do not fit.
    """
    (H, d, n), (G, *key) = q_Hdn.shape, k_Gdn.shape
    if H % G or key != [d, n] or dq_Hdn.shape != q_Hdn.shape or dk_Gdn.shape != k_Gdn.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q_Hdn, k_Gdn, dq_Hdn, dk_Gdn))
        raise ValueError(f"delta_spectra: {shapes} are not [H, d, n], [G, d, n] and the same again, G dividing H.")
    (a_1, a_2), (b_1, b_2) = _triangles(dq_Hdn, q_Hdn), _triangles(dk_Gdn, k_Gdn)
    b_1, b_2 = (x.repeat_interleave(H // G, 0) for x in (b_1, b_2))
    # below its first d rows a triangle's first d columns are 0
    return _spectrum(a_1 @ b_2.mT + a_2 @ b_1.mT), _spectrum(a_1[:, :d] @ b_1[:, :d].mT)


def _triangles(change_Hdn: Tensor, weight_Hdn: Tensor) -> tuple[Tensor, Tensor]:
    """R of ``[change' weight']`` in float64, its left and its right half."""
    pair = torch.cat([change_Hdn, weight_Hdn], 1)
    r = torch.linalg.qr(pair.to(torch.promote_types(pair.dtype, torch.float32)).mT, mode="r").R.double()
    return r[..., : r.shape[-1] // 2], r[..., r.shape[-1] // 2 :]


def _spectrum(core: Tensor) -> DeltaSpectrum:
    gram = core.mT @ core
    finite = gram.isfinite().flatten(1).all(1)
    squares = torch.linalg.eigvalsh(gram.where(finite[:, None, None], 0.0)).clamp_min(0.0)
    total, largest = squares.sum(1), squares[:, -1]
    entropy = torch.special.entr(squares / total.where(total > 0, 1.0)[:, None]).sum(1)
    moved = total > 0
    values = total.sqrt(), (total / largest).where(moved, 0.0), entropy.exp().where(moved, 0.0)
    return DeltaSpectrum(*(value.where(finite, torch.nan) for value in values))
