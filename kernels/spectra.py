"""Leading singular values of a batch of matrices that drift slowly, by warm-started block Krylov iteration.

For every matrix W a block V of trial right singular vectors is kept from the last call. A round builds an orthonormal
basis of span(V, W'W V, (W'W)^2 V) and takes the singular triplets of W on it (Rayleigh-Ritz); the leading ones are the
next V. This is randomised block Krylov iteration (Musco and Musco 2015, arXiv 1504.05477) from a warm start: for the
same products with W it is far more accurate than block power iteration, the more so where a spike leaves the bulk.

What is read is kept right in two ways.

* The residual. A matrix whose residual is above ``tolerance`` gets more rounds, and after ``max_iterations`` a full
  decomposition. A residual r says that *some* singular value lies within r s of s; the error of the largest is of the
  order of r^2 unless others crowd it: below 1e-3 with the defaults in 13 000 readings of random matrices from whose
  bulk spikes emerged, but up to 1e-2 on a first, cold call just as one crosses. A smaller ``tolerance`` buys accuracy.
* A fresh direction. No residual shows a larger singular value that the block misses, as after weights were loaded. So
  at each call the last trial vector gets a random vector of its own length added. A missed direction, rho times as
  large as the largest that the block does not hold, then starts at an angle with tangent of about sqrt(2 n), and each
  call divides that by the Chebyshev polynomial T_p(2 rho^2 - 1), p = ``iterations`` (Saad 2011, Numerical Methods for
  Large Eigenvalue Problems, theorem 6.3); once it shows, the residual keeps the call going. For p = 2 and n = 512 that
  took one call for rho = 2, two for 1.5, three for 1.2 and six for 1.05; until then the error is at most rho - 1. The
  random vector is drawn from the bits of the trial vectors, which are therefore the whole state.

Products follow PyTorch's float32 matmul precision: with TF32 the values are good to about 1e-3 and no better.

Small matrices (``exact_below``) are decomposed at every call; where one side is at least twice the other, from the
eigenvectors of the smaller Gram matrix in float64, which squares the condition number but carries twice the digits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_TINY = torch.finfo(torch.float32).tiny
_LARGEST = 1e19  # Frobenius norm whose square float32 holds, with room for the products
_ROUNDING = 1e-5  # of the largest singular value: float32 products do not resolve a residual below it


class SingularTriplets(NamedTuple):
    """Leading singular triplets of N matrices [m, n], largest first, float32.

    All are NaN for a matrix that has blown up: with an entry that is not finite, or a Frobenius norm of 1e19 or more.

    Attributes:
        s: [N, k] singular values.
        u: [N, m, k] left vectors.
        v: [N, n, k] right vectors.
        residual: [N, k], the larger of ``|W' u - s v| / s`` and ``|W v - s u| / s``; 0 where s is 0, of rounding size
            when exact, and of order 1 for an s that is itself rounding error of the largest.
        gap: [N], ``s_k / s_{k+1}``: near 1 the space of the k leading vectors is ill-posed. inf where ``s_{k+1}`` is 0
            or there is none, NaN where both are 0. Iteration finds ``s_{k+1}`` from below, its residual unchecked.
    """

    s: Tensor
    u: Tensor
    v: Tensor
    residual: Tensor
    gap: Tensor


class _Ritz(NamedTuple):
    """As :class:`SingularTriplets`, with more than k values, and vectors as rows: u [N, c, m], v [N, c, n]."""

    s: Tensor
    u: Tensor
    v: Tensor
    residual: Tensor


class TopSingular:
    """Follows the ``k`` leading singular triplets of matrices, or of products of two, from call to call.

    Args:
        k: triplets to return.
        block: trial vectors kept; at least ``k``, by default ``k + 5`` (with fewer, now and then a spike is seen a
            call late).
        iterations: products with ``W'W`` a round.
        exact_below: matrices whose smaller side is below this get a full decomposition.
        tolerance: largest residual of the ``k`` triplets at which a matrix is done; the first call starts from random
            vectors and takes several rounds.
        max_iterations: products with ``W'W`` in a call after which a matrix that is not done is decomposed in full.

    Attributes:
        trial_NnB: float32, the trial vectors carried to the next call, None before the first and while matrices are
            small; save and restore them to resume bit for bit.

    Raises:
        ValueError: ``k``, ``block`` or ``iterations`` cannot be.
    """

    def __init__(
        self,
        k: int = 1,
        block: int | None = None,
        iterations: int = 2,
        exact_below: int = 384,
        tolerance: float = 0.01,
        max_iterations: int = 64,
    ) -> None:
        block = k + 5 if block is None else block
        if not 1 <= k <= block:
            raise ValueError(f"TopSingular: k={k} must be from 1 to block={block}.")
        if iterations < 1:
            raise ValueError(f"TopSingular: iterations={iterations} must be at least 1.")
        self.k, self.block, self.iterations = k, block, iterations
        self.exact_below, self.tolerance, self.max_iterations = exact_below, tolerance, max_iterations
        self.trial_NnB: Tensor | None = None

    @torch.no_grad()
    def __call__(self, w_Nmn: Tensor, right_Npn: Tensor | None = None) -> SingularTriplets:
        """Triplets of ``w_Nmn`` [N, m, n] (or [m, n]), computed in float32.

        Args:
            w_Nmn: the matrices, or their left factors [N, m, p].
            right_Npn: right factors; the products are never formed.

        Raises:
            ValueError: not matrices or batches of matrices, sides that do not fit, or a side smaller than ``k``.
        """
        factors = self._factors(w_Nmn, right_Npn)
        finite = torch.stack([torch.linalg.vector_norm(factor, dim=(1, 2)) for factor in factors]).prod(0) < _LARGEST
        if not finite.all():  # a matrix that has blown up reports NaN, stops no other and keeps its trial vectors
            factors = [torch.where(finite[:, None, None], factor, 0.0) for factor in factors]
        sides = [factors[0].shape[1], *(factor.shape[2] for factor in factors)]
        exact = min(sides) < max(self.exact_below, self.block * (self.iterations + 1), self.k + 1)
        found = self._decompose(factors, self.k + 1) if exact else self._follow(factors)
        k, s = self.k, found.s
        gap = s[:, k - 1] / s[:, k] if s.shape[1] > k else torch.full_like(s[:, 0], torch.inf)
        triplets = (s[:, :k], found.u[:, :k].mT, found.v[:, :k].mT, found.residual, gap)
        return SingularTriplets(*(x.where(finite.view(-1, *[1] * (x.ndim - 1)), torch.nan) for x in triplets))

    def _factors(self, w_Nmn: Tensor, right_Npn: Tensor | None) -> list[Tensor]:
        factors = [w_Nmn] if right_Npn is None else [w_Nmn, right_Npn]
        factors = [factor[None] if factor.ndim == 2 else factor for factor in factors]
        for factor in factors:
            if factor.ndim != 3 or min(factor.shape[1:]) < self.k:
                raise ValueError(f"TopSingular: shape {tuple(factor.shape)} is not [N, m, n] with m, n >= k={self.k}.")
        left, right = factors[0], factors[-1]
        if len(factors) == 2 and (left.shape[0], left.shape[2]) != tuple(right.shape[:2]):
            raise ValueError(f"TopSingular: {tuple(left.shape)} and {tuple(right.shape)} are not [N, m, p], [N, p, n].")
        return [factor.float() for factor in factors]

    def _follow(self, factors: list[Tensor]) -> _Ritz:
        found = self._round(factors, self._start(factors[-1]))
        rounds = max(1, self.max_iterations // self.iterations)
        for done in range(1, rounds + 1):
            size = found.s[:, : self.k]
            allowed = (self.tolerance * size).clamp_min(_ROUNDING * size[:, :1])
            late = (found.residual * size > allowed).any(1).nonzero()[:, 0]
            if not len(late):
                break
            members = [factor[late] for factor in factors]
            if done < rounds:
                again = self._round(members, found.v[late, : self.block])
            else:
                again = self._decompose(members, found.s.shape[1])
            for values, better in zip(found, again, strict=True):
                values[late] = better
        self.trial_NnB = found.v[:, : self.block].mT.contiguous()
        return found

    def _start(self, w_Nmn: Tensor) -> Tensor:
        """Rows to start from [N, block, n]: the last call's, the last of them freshened, or random ones."""
        shape = (w_Nmn.shape[0], self.block, w_Nmn.shape[2])
        generator = torch.Generator()
        if self.trial_NnB is None or self.trial_NnB.mT.shape != shape:
            return torch.randn(shape, generator=generator.manual_seed(0)).to(w_Nmn.device)
        trial = self.trial_NnB.mT.contiguous().to(w_Nmn.device)
        generator.manual_seed(int(trial.view(torch.int32).sum()))
        fresh = torch.randn(shape[0], shape[2], generator=generator) / shape[2] ** 0.5
        trial = trial.nan_to_num(0.0, 0.0, 0.0)
        trial[:, -1] += fresh.to(trial.device)
        return trial

    def _round(self, factors: list[Tensor], trial_NBn: Tensor) -> _Ritz:
        """Triplets of W on the block Krylov space of the trial rows. Rows, for a batched ``x @ W`` is twice as fast."""
        k, block = self.k, self.block
        count = max(block, k + 1)
        basis = _orthonormal(trial_NBn)
        newest = images = _times(factors, basis)
        for _ in range(self.iterations):
            # only directions matter, and unscaled ones vanish where W is small
            newest = newest / newest.abs().amax((1, 2), keepdim=True).clamp_min(_TINY)
            spread = torch.cat([basis, _times_transposed(factors, newest)], 1)
            basis = torch.cat([basis, _orthonormal(spread)[:, -block:]], 1)
            newest = _times(factors, basis[:, -block:])
            images = torch.cat([images, newest], 1)
        q, r = torch.linalg.qr(images.mT)  # a triangle is quicker to decompose than the tall images
        u, s, rotation = torch.linalg.svd(r)
        u, s, v = u.mT[:, :count] @ q.mT, s[:, :count].contiguous(), rotation[:, :count] @ basis
        lead = s[:, :k], u[:, :k], v[:, :k]
        return _Ritz(s, u, v, _residual(lead[0], _times_transposed(factors, lead[1]), lead[2]))

    def _decompose(self, factors: list[Tensor], count: int) -> _Ritz:
        """``count`` triplets (fewer on a shorter side) by full decomposition."""
        if len(factors) == 1:
            s, u, v = _svd(factors[0], count)
        else:  # W = (Q R) (P T)' = Q (R T') P' from the factors' QR decompositions
            (q, r), (p, t) = torch.linalg.qr(factors[0]), torch.linalg.qr(factors[1].mT)
            s, u, v = _svd(r @ t.mT, count)
            u, v = u @ q.mT, v @ p.mT
        lead = [x[:, : self.k] for x in (s, u, v)]
        residual = _residual(lead[0], _times_transposed(factors, lead[1]), lead[2])
        return _Ritz(s, u, v, residual.maximum(_residual(lead[0], _times(factors, lead[2]), lead[1])))


def _times(factors: list[Tensor], x_Nbn: Tensor) -> Tensor:
    """W x for each row x."""
    for factor in reversed(factors):
        x_Nbn = x_Nbn @ factor.mT
    return x_Nbn


def _times_transposed(factors: list[Tensor], x_Nbm: Tensor) -> Tensor:
    """W' x for each row x."""
    for factor in factors:
        x_Nbm = x_Nbm @ factor
    return x_Nbm


def _residual(s_Nk: Tensor, image: Tensor, expected: Tensor) -> Tensor:
    """|image - s expected| / s for each row."""
    s = s_Nk[..., None]
    return ((image - s * expected) / s.clamp_min(_TINY)).norm(dim=2)


def _orthonormal(x_Nbn: Tensor) -> Tensor:
    """Orthonormal rows; the first j span the first j rows given, whatever j, where these are independent."""
    return torch.linalg.qr(x_Nbn.mT).Q.mT


def _svd(w_Nmn: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ``count`` leading singular values [N, c] and the vectors as rows [N, c, m], [N, c, n], by decomposition."""
    m, n = w_Nmn.shape[1:]
    if max(m, n) < 2 * min(m, n):
        u, s, v = torch.linalg.svd(w_Nmn, full_matrices=False)
        return s[:, :count], u.mT[:, :count], v[:, :count]
    wide = (w_Nmn if m < n else w_Nmn.mT).double()
    short = torch.linalg.eigh(wide @ wide.mT).eigenvectors[..., -count:].mT
    # decomposing W on the eigenvectors gives orthonormal vectors on the long side also where eigenvalues are 0
    long, s, rotation = torch.linalg.svd((short @ wide).mT, full_matrices=False)
    short, long, s = (rotation @ short).float(), long.mT.float(), s.float()
    return (s, short, long) if m < n else (s, long, short)
