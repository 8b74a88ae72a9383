"""Leading singular values of a batch of matrices that drift slowly, by warm-started block subspace iteration.

For every matrix W the iteration keeps a block V of trial right singular vectors from the last call and repeats
``V <- orth(W' orth(W V))``; the singular values of the small matrix ``W V`` then approximate the leading ones of W,
with residual ``|W' u - s v| / s``. A block of 8 with 2 rounds, and more where the residual asks for them, follows a
spike that emerges from the bulk to better than 1e-3 (a block of 1, power iteration, loses it at the crossing). Matrices
below ``exact_below`` are decomposed exactly instead.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SingularTriplets(NamedTuple):
    """Leading singular triplets of N matrices [m, n], largest first.

    Attributes:
        s: [N, k] singular values.
        u: [N, m, k] left vectors.
        v: [N, n, k] right vectors.
        residual: [N, k], ``|W' u - s v| / s``; 0 to rounding when exact.
    """

    s: Tensor
    u: Tensor
    v: Tensor
    residual: Tensor


class TopSingular:
    """Follows the ``k`` leading singular triplets of matrices from call to call.

    Args:
        k: triplets to return.
        block: trial vectors kept; at least ``k``.
        iterations: rounds a call.
        exact_below: matrices whose smaller side is below this get a full decomposition.
        tolerance: residual of the leading triplet above which a call iterates on; the first call starts from random
            vectors and usually does.
        max_iterations: most rounds a call.

    Attributes:
        trial_NnB: the trial vectors carried to the next call, None before the first; save and restore them to resume.

    Raises:
        ValueError: ``k`` or ``block`` cannot be.
    """

    def __init__(
        self,
        k: int = 1,
        block: int = 8,
        iterations: int = 2,
        exact_below: int = 384,
        tolerance: float = 0.01,
        max_iterations: int = 64,
    ) -> None:
        if not 1 <= k <= block:
            raise ValueError(f"TopSingular: k={k} must be from 1 to block={block}.")
        self.k, self.block, self.iterations = k, block, iterations
        self.exact_below, self.tolerance, self.max_iterations = exact_below, tolerance, max_iterations
        self.trial_NnB: Tensor | None = None

    @torch.no_grad()
    def __call__(self, w_Nmn: Tensor) -> SingularTriplets:
        """Triplets of ``w_Nmn`` [N, m, n] (or [m, n]), computed in float32.

        Raises:
            ValueError: not a matrix or batch of matrices, or smaller than ``k``.
        """
        if w_Nmn.ndim == 2:
            w_Nmn = w_Nmn[None]
        if w_Nmn.ndim != 3 or min(w_Nmn.shape[1:]) < self.k:
            raise ValueError(f"TopSingular: shape {tuple(w_Nmn.shape)} is not [N, m, n] with m, n >= k={self.k}.")
        w = w_Nmn.float()
        finite = w.isfinite().all(dim=2).all(dim=1)
        # a matrix that has blown up reports NaN instead of stopping the decomposition of the others
        safe = torch.where(finite[:, None, None], w, torch.zeros_like(w))
        if min(w.shape[1:]) < max(self.exact_below, self.block):
            u, s, vh = torch.linalg.svd(safe, full_matrices=False)
            u, s, v = u[..., : self.k], s[..., : self.k], vh.transpose(1, 2)[..., : self.k]
        else:
            u, s, v = self._iterate(safe)
        residual = (safe.transpose(1, 2) @ u - v * s[:, None]).norm(dim=1) / s.clamp_min(torch.finfo(s.dtype).tiny)
        s, residual = (torch.where(finite[:, None], x, torch.nan) for x in (s, residual))
        return SingularTriplets(s, u, v, residual)

    def _iterate(self, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        v = self.trial_NnB
        fresh = v is None or v.shape != (w.shape[0], w.shape[2], self.block) or v.device != w.device
        if fresh:
            generator = torch.Generator().manual_seed(0)
            v = torch.randn(w.shape[0], w.shape[2], self.block, generator=generator).to(w.device)
        assert v is not None
        done = 0
        while True:
            for _ in range(self.iterations):
                u = torch.linalg.qr(w @ v).Q
                v = torch.linalg.qr(w.transpose(1, 2) @ u).Q
            done += self.iterations
            left, s, right = torch.linalg.svd(w @ v, full_matrices=False)
            rotated = v @ right.transpose(1, 2)
            gap = (w.transpose(1, 2) @ left[..., :1] - rotated[..., :1] * s[:, None, :1]).norm(dim=1)[:, 0]
            if done >= self.max_iterations or bool((gap <= self.tolerance * s[:, 0]).all()):
                break
        self.trial_NnB = rotated
        return left[..., : self.k], s[..., : self.k], rotated[..., : self.k]
