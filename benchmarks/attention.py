"""Time of forward and backward attention: PyTorch's fused kernel against the ``reference`` and ``cpu`` backends.

Run ``python benchmarks/attention.py``. Every repeat times each variant once, in turn, so that a slow moment of the
machine hits all alike; the table gives the median of the process's CPU time, and its ratio to the fused kernel's.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import PRESETS, RoundingSites, streaming_attention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--sizes", nargs="+", default=["2,4,512,64", "2,12,1024,64"], metavar="B,H,T,D", help="batch,heads,time,dim"
    )
    parser.add_argument("--tiles", nargs="+", type=int, default=[128, 256, 512])
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=["bf16_carry", "fa2"])
    parser.add_argument("--carry", help="another rounding at the carries, e.g. 2")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def streaming(sites: RoundingSites, tile: int, backend: str) -> Attention:
    return lambda q, k, v: streaming_attention(q, k, v, sites=sites, tile=tile, backend=backend).out


def variants(args: argparse.Namespace) -> dict[str, Attention]:
    backends = ["reference", "cpu"] if args.device == "cpu" else ["reference"]
    return {"sdpa": fused} | {
        f"{preset:<12} tile {tile:<5} {backend}": streaming(
            RoundingSites.build(preset, carry=args.carry), tile, backend
        )
        for preset in args.presets
        for tile in args.tiles
        for backend in backends
    }


def seconds(attend: Attention, qkvg: list[Tensor]) -> float:
    """CPU time of one forward and backward pass; on a GPU, wall time between synchronisations."""
    on_gpu = qkvg[0].is_cuda
    clock = time.perf_counter if on_gpu else time.process_time
    if on_gpu:
        torch.cuda.synchronize()
    start = clock()
    out = attend(*qkvg[:3])
    torch.autograd.grad(out, qkvg[:3], qkvg[3])
    if on_gpu:
        torch.cuda.synchronize()
    return clock() - start


def measure(shape: tuple[int, ...], args: argparse.Namespace) -> dict[str, float]:
    """Median milliseconds of every variant."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator).to(args.device, getattr(torch, args.dtype)) for _ in range(4)]
    qkvg = [x.requires_grad_() for x in tensors[:3]] + tensors[3:]
    attentions = variants(args)
    times: dict[str, list[float]] = {name: [] for name in attentions}
    for repeat in range(args.repeats + 1):
        for name, attend in attentions.items():
            elapsed = seconds(attend, qkvg)
            if repeat:  # the first warms up
                times[name].append(elapsed * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else processor()
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {device}, {os.cpu_count()} cores")
    clock = "wall time" if args.device.startswith("cuda") else "process CPU time"
    print(f"forward + backward, causal, {args.dtype}, {args.threads} thread, median {clock} of {args.repeats} in turn")
    for size in args.sizes:
        shape = tuple(int(n) for n in size.split(","))
        times = measure(shape, args)
        print(f"\n(B, H, T, D) = {shape}{'':<19}  ms  x sdpa")
        for name, value in times.items():
            print(f"{name:<36} {value:8.1f}  {value / times['sdpa']:6.2f}")


if __name__ == "__main__":
    main()
