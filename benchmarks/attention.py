"""Time of forward and backward attention: PyTorch's fused kernel against the backends of ``streaming_attention``.

Run ``python benchmarks/attention.py``, on a GPU with ``--device cuda``. Every repeat times each variant once, in turn,
so that a slow moment of the machine hits all alike; the table gives the median, and its ratio to the fused kernel's. On
a CPU the clock is the process's CPU time, on a GPU wall time between synchronisations.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels import PRESETS, RoundingSites, streaming_attention

CPU_SIZES = ["2,4,512,64", "2,12,1024,64"]
GPU_SIZES = ["32,12,1024,64", "4,16,4096,128"]
CALLS = {"cpu": 1, "cuda": 10}  # timed together, so that a launch is not what is measured

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--sizes", nargs="+", metavar="B,H,T,D", help=f"batch,heads,time,dim; default {' '.join(CPU_SIZES)}"
    )
    parser.add_argument("--backends", nargs="+", help="default: reference cpu, or triton on a GPU")
    parser.add_argument("--tiles", nargs="+", type=int, default=[128, 256, 512])
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=["bf16_carry", "fa2"])
    parser.add_argument("--carry", help="another rounding at the carries, e.g. 2")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    on_gpu = args.device.startswith("cuda")
    if on_gpu and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: PyTorch sees no GPU here.")
    args.sizes = args.sizes or (GPU_SIZES if on_gpu else CPU_SIZES)
    args.backends = args.backends or (["triton"] if on_gpu else ["reference", "cpu"])
    return args


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def streaming(sites: RoundingSites, tile: int, backend: str) -> Attention:
    return lambda q, k, v: streaming_attention(q, k, v, sites=sites, tile=tile, backend=backend).out


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return fused(q, k, v)


def variants(args: argparse.Namespace) -> dict[str, Attention]:
    peers = {"sdpa": fused, "flash": flash} if args.device.startswith("cuda") else {"sdpa": fused}
    return peers | {
        f"{preset:<12} tile {tile:<5} {backend}": streaming(
            RoundingSites.build(preset, carry=args.carry), tile, backend
        )
        for preset in args.presets
        for tile in args.tiles
        for backend in args.backends
    }


def seconds(attend: Attention, qkvg: list[Tensor], backward: bool = True) -> float:
    """Time of one forward and, if wanted, backward pass."""
    device = qkvg[0].device.type
    clock = time.perf_counter if device == "cuda" else time.process_time
    if device == "cuda":
        torch.cuda.synchronize()
    start = clock()
    for _ in range(CALLS[device]):
        out = attend(*qkvg[:3])
        if backward:
            torch.autograd.grad(out, qkvg[:3], qkvg[3])
    if device == "cuda":
        torch.cuda.synchronize()
    return (clock() - start) / CALLS[device]


def measure(shape: tuple[int, ...], args: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Median milliseconds of every variant: forward, and forward with backward."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator).to(args.device, getattr(torch, args.dtype)) for _ in range(4)]
    qkvg = [x.requires_grad_() for x in tensors[:3]] + tensors[3:]
    times: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for repeat in range(args.repeats + 1):
        for name, attend in variants(args).items():
            for backward in (False, True):
                elapsed = seconds(attend, qkvg, backward)
                if repeat:  # the first warms up
                    times[name, backward].append(elapsed * 1e3)
    median = {key: statistics.median(values) for key, values in times.items()}
    return {name: (median[name, False], median[name, True]) for name, _ in times}


def show(shape: tuple[int, ...], times: dict[str, tuple[float, float]]) -> None:
    print(f"\n(B, H, T, D) = {shape!s:<22} forward, ms  x sdpa   with backward  x sdpa")
    for name, (forward, both) in times.items():
        first, second = forward / times["sdpa"][0], both / times["sdpa"][1]
        print(f"{name:<40} {forward:8.2f}  {first:6.2f}        {both:8.2f}  {second:6.2f}", flush=True)


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else processor()
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {device}, {os.cpu_count()} cores")
    print(f"causal, {args.dtype}, {args.threads} thread, median of {args.repeats} in turn")
    for size in args.sizes:
        shape = tuple(int(n) for n in size.split(","))
        show(shape, measure(shape, args))


if __name__ == "__main__":
    main()
