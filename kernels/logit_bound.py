"""Upper bounds on attention logits: from the weights before any token is seen, and from queries and keys.

With rows of W_Q and W_K as ``nn.Linear`` keeps them, head h of an input x has the query ``W_Q,h x``, so that its
logit is the bilinear form ``scale * x_i' M_h x_j`` with ``M_h = W_Q,h' W_K,h`` [n, n] of rank d, and

    |logit_ij| <= scale * ||M_h||_2 * |x_i| * |x_j|

(Emadi 2026, arXiv 2602.18851, who finds the norm by power iteration on the factors). M_h is not formed here either:
with QR decompositions ``W_Q,h' = Q_q R_q`` and ``W_K,h' = Q_k R_k`` its norm is that of the d x d matrix
``R_q R_k'``. That needs no state and cannot miss the leading direction, so it is the default; the warm iteration on the
factors, block Krylov instead of power, is two to five times as fast. ``||M_h||_2`` is at most
``||W_Q,h||_2 ||W_K,h||_2`` and can be far below it.

The weights bound no logit of a model with rotary positions or QK-norm: these act between W_Q and W_K.
:func:`logit_cauchy_schwarz_bound` holds for any queries and keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.spectra import TopSingular

_ROUNDING = 1e-6  # of the product of Frobenius norms: covers float32 in the decompositions
_MARGIN = 1.0 + 1e-5  # covers float32 in the norms of queries and keys, and in the logits compared with the bound


@torch.no_grad()
def logit_spectral_bound(
    w_q: Tensor,
    w_k: Tensor,
    heads: int,
    kv_heads: int | None = None,
    scale: float | None = None,
    input_norm: float = 1.0,
    top: TopSingular | None = None,
) -> Tensor:
    """Largest possible ``|logit|`` of every head for inputs no longer than ``input_norm``, float32 [heads].

    Biases: append them to the weights as one more column, and pass ``(input_norm**2 + 1) ** 0.5``. Layers: stack their
    weights and pass the heads of all.

    Args:
        w_q: query weight [heads * d, n], as in ``nn.Linear(n, heads * d)``; any float dtype, read in float32.
        w_k: key weight [kv_heads * d, n]; query head h uses key head ``h // (heads // kv_heads)``.
        heads: query heads.
        kv_heads: key heads, None for ``heads``.
        scale: factor on ``q . k``; None is ``1 / sqrt(d)``, 1 gives the bound on ``q . k``, which for ``input_norm`` 1
            is the spectral norm of M.
        input_norm: largest Euclidean norm of an input of the projections; the bound is quadratic in it.
        top: follows the norms from call to call by implicit iteration instead of decomposing, unless d is below its
            ``exact_below``; one for each set of weights. The bound, raised by the residual, then holds if the iteration
            has found the leading direction.

    Returns:
        The bound, NaN for a head with a non-finite weight or one too large for float32 products.

    Raises:
        ValueError: the shapes and numbers of heads do not fit.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    rows, width = w_q.shape
    if rows % heads or heads % kv_heads or tuple(w_k.shape) != (rows // heads * kv_heads, width):
        raise ValueError(
            f"logit_spectral_bound: w_q {tuple(w_q.shape)} and w_k {tuple(w_k.shape)} are not [heads * d, n] and "
            f"[kv_heads * d, n] for heads={heads}, kv_heads={kv_heads}."
        )
    d, group = rows // heads, heads // kv_heads
    q_Hdn, k_Gdn = w_q.float().reshape(heads, d, width), w_k.float().reshape(kv_heads, d, width)
    if top is None:
        norm_H = _product_norm(q_Hdn, k_Gdn, group)
    else:
        found = top(q_Hdn.mT, k_Gdn.repeat_interleave(group, 0))
        norm_H = found.s[:, 0] * (1.0 + found.residual[:, 0])
    sizes_q, sizes_k = (x.flatten(1).norm(dim=1) for x in (q_Hdn, k_Gdn))
    norm_H = norm_H + _ROUNDING * sizes_q * sizes_k.repeat_interleave(group)
    return norm_H * (abs(d**-0.5 if scale is None else scale) * input_norm**2)


def _product_norm(q_Hdn: Tensor, k_Gdn: Tensor, group: int) -> Tensor:
    r_q, r_k = (torch.linalg.qr(x.mT, mode="r").R for x in (q_Hdn, k_Gdn))
    core = (r_q.double() @ r_k.double().repeat_interleave(group, 0).mT).float()  # whatever the matmul precision
    finite = core.isfinite().all(2).all(1)
    norm_H = torch.linalg.svdvals(core.where(finite[:, None, None], 0.0))[:, 0]
    return norm_H.where(finite, torch.nan)


@torch.no_grad()
def logit_cauchy_schwarz_bound(q_BHTD: Tensor, k_BGTD: Tensor, scale: float | None = None) -> Tensor:
    """``scale * max_i |q_i| * max_j |k_j|`` of every head, at its largest over the batch: float32 [H], NaN kept.

    Args:
        q_BHTD: queries, any float dtype.
        k_BGTD: keys; their heads G divide H, and query head h uses key head ``h // (H // G)``.
        scale: factor on ``q . k``; None is ``1 / sqrt(D)``.

    Raises:
        ValueError: the shapes do not fit.
    """
    (B, H, _, D), (keys_B, G, _, keys_D) = q_BHTD.shape, k_BGTD.shape
    if keys_B != B or keys_D != D or H % G:
        raise ValueError(f"logit_cauchy_schwarz_bound: {tuple(q_BHTD.shape)} and {tuple(k_BGTD.shape)} do not fit.")
    q_BH, k_BG = (torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).amax(-1) for x in (q_BHTD, k_BGTD))
    longest_H = (q_BH * k_BG.repeat_interleave(H // G, 1)).amax(0)
    return longest_H * (_MARGIN * abs(D**-0.5 if scale is None else scale))
