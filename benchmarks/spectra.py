"""Time and accuracy of the spectral sensors, on the CPU, against the decompositions they stand in for.

    python benchmarks/spectra.py         # about a minute

Every comparison takes turns on the same data, repeat after repeat, so that a slow moment of the machine hits both;
times are the median of the process's CPU time and the ratio is that of the medians. The matrices that ``TopSingular``
follows drift at every call, and from a third of them a spike emerges: the largest singular value is hardest to follow
as the spike leaves the bulk.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kernels.logit_bound import logit_spectral_bound
from kernels.spectra import TopSingular

Times = dict[str, list[float]]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--matrices", type=int, default=24, help="matrices followed together")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--calls", type=int, default=16, help="calls while the spikes emerge")
    parser.add_argument("--drift", type=float, default=0.03, help="radians that the bulk turns in a call")
    parser.add_argument("--repeats", type=int, default=9, help="of the comparisons without drift")
    return parser.parse_args()


def timed(times: Times, name: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    start = time.process_time()
    result = run(*args, **kwargs)
    times.setdefault(name, []).append((time.process_time() - start) * 1e3)
    return result


def drifting(args: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """(matrices [N, n, n], size of their spikes [N]) at each call; the bulk's singular values reach 2."""
    generator = torch.Generator().manual_seed(0)
    N, n = args.matrices, args.width

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    bulk, frame_u, frame_v = gaussian(N, n, n) / n**0.5, *(torch.linalg.qr(gaussian(N, n, 2)).Q for _ in range(2))
    drift = torch.tensor(args.drift)
    final_N = torch.where(torch.arange(N) % 3 == 0, 5.0, torch.where(torch.arange(N) % 3 == 1, 10.0, 0.0))
    for call in range(args.calls):
        emerging = torch.arange(N) % 3 == 0
        spike_N = torch.where(emerging, final_N * (call + 1) / args.calls, final_N)
        angle = torch.tensor(0.05 * call)
        u, v = (frame[..., 0] * angle.cos() + frame[..., 1] * angle.sin() for frame in (frame_u, frame_v))
        yield bulk + spike_N[:, None, None] * u[:, :, None] * v[:, None, :], spike_N
        bulk = bulk * drift.cos() + gaussian(N, n, n) / n**0.5 * drift.sin()


def follow(args: argparse.Namespace) -> None:
    """``TopSingular`` against ``svdvals`` on drifting matrices."""
    top = TopSingular()
    times: Times = {}
    cold: Times = {}
    errors = []
    for call, (w, spike_N) in enumerate(drifting(args)):
        if not call:
            timed(cold, "first", top, w)  # starts from random vectors
        s = timed(times, "TopSingular", top, w).s[:, 0]
        exact = timed(times, "svdvals", torch.linalg.svdvals, w)[:, 0]
        emerging = (spike_N > 1.0) & (spike_N < 3.0)  # a spike leaves the bulk at size 1, where both end at 2
        errors.append(torch.stack([(s / exact - 1).abs(), emerging]))
    error, emerging = torch.stack(errors, 1)
    title = f"{args.matrices} drifting matrices {args.width} x {args.width}, {args.calls} calls"
    table(title, times, "svdvals")
    mean = {name: statistics.fmean(values) for name, values in times.items()}
    print(f"mean over calls: {mean['TopSingular']:.1f} ms, {mean['svdvals'] / mean['TopSingular']:.1f} times faster")
    print(f"slowest call {max(times['TopSingular']):.1f} ms, first call of all {cold['first'][0]:.1f} ms")
    print(f"largest relative error of sigma_1: {error.max():.1e}, at emergence {error[emerging.bool()].max():.1e}")


def per_head(args: argparse.Namespace) -> None:
    """Heads of one layer: Gram route against ``svdvals``; logit bound against the norm of the product."""
    generator = torch.Generator().manual_seed(0)
    shape = (args.heads, 64, args.width)
    q, k = (torch.randn(shape, generator=generator) / args.width**0.5 for _ in range(2))
    norms: Times = {}
    bounds: Times = {}
    excess: dict[str, float] = {}
    top, warm = TopSingular(), TopSingular(exact_below=0)
    weights = q.flatten(0, 1), k.flatten(0, 1), args.heads
    for _ in range(args.repeats + 1):
        s = timed(norms, "TopSingular", top, q).s[:, 0]
        error = s / timed(norms, "svdvals", torch.linalg.svdvals, q)[:, 0] - 1
        product = timed(bounds, "product, norm", lambda: torch.linalg.matrix_norm(q.mT @ k, 2))
        for name, follow in (("factors", None), ("factors, warm iteration", warm)):
            bound = timed(bounds, name, logit_spectral_bound, *weights, scale=1.0, top=follow)
            excess[name] = float((bound / product - 1).abs().max())
    table(f"{args.heads} heads 64 x {args.width}: leading triplet", drop_first(norms), "svdvals")
    print(f"largest relative error of sigma_1: {float(error.abs().max()):.1e}")
    table(f"{args.heads} heads: norm of W_Q' W_K", drop_first(bounds), "product, norm")
    print("largest difference from the norm: " + "; ".join(f"{name} {value:.1e}" for name, value in excess.items()))


def drop_first(times: Times) -> Times:
    return {name: values[1:] for name, values in times.items()}


def table(title: str, times: Times, baseline: str) -> None:
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"\n{title:<48}  ms  x faster")
    for name, value in medians.items():
        print(f"{name:<40} {value:9.2f}  {medians[baseline] / value:8.1f}")


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores"
    )
    print(f"float32, {args.threads} thread, median process CPU time, in turn")
    follow(args)
    per_head(args)


if __name__ == "__main__":
    main()
