"""Time of microscaling fake quantisation against torchao's ``to_mx`` + dequantise and against a copy of the tensor.

Run ``python benchmarks/mx.py``. Every repeat times each variant once, in turn, so that a slow moment of the machine
hits all alike; the table gives the median of the process's CPU time, its ratio to a copy, and how many times as long
torchao takes for the same format, rounding to nearest (it has neither stochastic rounding nor INT8 here). With
``--device cuda`` the Triton kernel takes the place of eager mode, times are wall time, and the copy stands for the
memory's bandwidth.
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
from torch import Tensor
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor

from kernels.mx_blocks import mx_quantize
from kernels.mx_formats import FORMATS, ROUNDINGS, SCALES

TORCHAO = {
    "mxfp8_e4m3": torch.float8_e4m3fn,
    "mxfp8_e5m2": torch.float8_e5m2,
    "mxfp6_e2m3": "fp6_e2m3",
    "mxfp6_e3m2": "fp6_e3m2",
    "mxfp4_e2m1": torch.float4_e2m1fn_x2,
}
Quantise = Callable[[Tensor], Tensor]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shape", type=int, nargs="+", default=[768, 3072])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["mxfp4_e2m1", "mxfp8_e4m3"])
    parser.add_argument("--scale", choices=SCALES, default="floor")
    parser.add_argument("--roundings", nargs="+", choices=ROUNDINGS, default=["rne", "sr"])
    parser.add_argument("--axis", type=int, default=-1, help="torchao always takes the last")
    parser.add_argument("--repeats", type=int, default=21)
    return parser.parse_args()


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def torchao(fmt: str, scale: str) -> Quantise:
    mode = ScaleCalculationMode[scale.upper()]
    return lambda x: MXTensor.to_mx(x, TORCHAO[fmt], 32, mode).dequantize()


def ours(fmt: str, rounding: str, args: argparse.Namespace, compiled: bool) -> Quantise:
    quantise = torch.compile(mx_quantize, fullgraph=True) if compiled else mx_quantize
    return lambda x: quantise(x, fmt, axis=args.axis, scale=args.scale, rounding=rounding, seed=7)


def variants(args: argparse.Namespace) -> dict[tuple[str, str], Quantise]:
    """What to time, by format and label."""
    eager = "triton" if args.device.startswith("cuda") else "eager"
    table: dict[tuple[str, str], Quantise] = {("", "copy"): torch.clone}
    for fmt in args.formats:
        if fmt in TORCHAO:
            table[fmt, "torchao"] = torchao(fmt, args.scale)
        for rounding in args.roundings:
            table[fmt, f"{rounding} {eager}"] = ours(fmt, rounding, args, compiled=False)
            table[fmt, f"{rounding} compiled"] = ours(fmt, rounding, args, compiled=True)
    return table


def seconds(quantise: Quantise, x: Tensor) -> float:
    """CPU time of one call; on a GPU, wall time between synchronisations."""
    clock = time.perf_counter if x.is_cuda else time.process_time
    if x.is_cuda:
        torch.cuda.synchronize()
    start = clock()
    quantise(x)
    if x.is_cuda:
        torch.cuda.synchronize()
    return clock() - start


def measure(args: argparse.Namespace) -> dict[tuple[str, str], float]:
    """Median milliseconds of every variant."""
    x = torch.randn(args.shape, generator=torch.Generator().manual_seed(0)) * 1e-2
    x = x.to(args.device, getattr(torch, args.dtype))
    table = variants(args)
    times: dict[tuple[str, str], list[float]] = {name: [] for name in table}
    for repeat in range(args.repeats + 2):
        for name, quantise in table.items():
            elapsed = seconds(quantise, x)
            if repeat > 1:  # the first compiles, the second warms up
                times[name].append(elapsed * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    torch._dynamo.config.recompile_limit = 64  # one function, many options
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else processor()
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {device}, {os.cpu_count()} cores")
    clock = "wall time" if args.device.startswith("cuda") else "process CPU time"
    print(f"{args.dtype} {tuple(args.shape)}, axis {args.axis}, {args.scale}, {args.threads} thread, ", end="")
    print(f"median {clock} of {args.repeats} in turn\n")
    times = measure(args)
    copy = times["", "copy"]
    print(f"{'':<28}{'ms':>8}  {'x copy':>7}  {'torchao / this':>14}")
    for (fmt, label), value in times.items():
        peer = times.get((fmt, "torchao"))
        faster = "" if peer is None else f"{peer / value:14.1f}"
        print(f"{fmt:<12}{label:<16}{value:8.2f}  {value / copy:7.2f}  {faster}")


if __name__ == "__main__":
    main()
