"""What the kernels of a machine with a GPU compute and how fast, in one run of a few minutes.

Run ``python benchmarks/gpu_check.py``. Numerics: how many elements of every preset equal those of the readable
reference, bit for bit, and how far the others are; whether tied maxima bias the output to the side that the reference
says. Speed: attention against PyTorch's own (automatic and FlashAttention), the MX kernel against a copy of its tensor.
Without a GPU the same is done for what runs on the CPU, at sizes for a CPU, and the report says so.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable

import attention
import torch
from torch import Tensor

from kernels import PRESETS, mx_quantize, self_test, streaming_attention
from kernels.mx_formats import FORMATS, ROUNDINGS, SCALES

NUMERICS_SHAPE = (2, 4, 512, 64)


def everything(qkvg: list[Tensor], preset: str, backend: str) -> dict[str, Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in qkvg[:3])
    result = streaming_attention(q, k, v, sites=preset, tile=128, backend=backend)
    dq, dk, dv = torch.autograd.grad(result.out, (q, k, v), qkvg[3])
    return {"out": result.out.detach(), "lse": result.lse, "dq": dq, "dk": dk, "dv": dv}


def distance(got: Tensor, want: Tensor) -> tuple[float, float, float]:
    """Percent of elements that are equal, and greatest and mean signed distance in units of the last place."""
    got, want = got.cpu(), want.cpu()
    integer = torch.int16 if want.element_size() == 2 else torch.int32
    ordered = [
        torch.where((b := x.view(integer).long()) < 0, -(b & (2 ** (8 * x.element_size() - 1) - 1)), b)
        for x in (got, want)
    ]
    steps = (ordered[0] - ordered[1]).double()
    return 100 * (steps == 0).double().mean().item(), steps.abs().max().item(), steps.mean().item()


def numerics(device: str, backend: str) -> None:
    print(f"\n1. {backend} on {device} against reference on cpu, bfloat16 {NUMERICS_SHAPE}, tile 128, causal")
    print("   percent of elements equal | greatest distance, units of the last place")
    generator = torch.Generator().manual_seed(0)
    qkvg = [torch.randn(NUMERICS_SHAPE, generator=generator).to(torch.bfloat16) for _ in range(4)]
    for preset in PRESETS:
        want = everything(qkvg, preset, "reference")
        got = everything([x.to(device) for x in qkvg], preset, backend)
        cells = [(name, *distance(got[name], want[name])) for name in want]
        print(
            f"   {preset:<13}" + "".join(f"  {name} {equal:7.3f} |{most:5.0f}" for name, equal, most, _ in cells),
            flush=True,
        )


def self_tests(device: str) -> bool:
    """Whether every check of the kernels holds; those of `lightning-qk doctor`."""
    print(f"\n2. Self-tests of the kernels on {device}")
    checks = []
    for check in self_test.run(device):
        checks.append(check)
        print(f"   {'ok    ' if check.good else 'NOT SO'} {check.name}: {check.found}", flush=True)
    return all(check.good for check in checks)


def speed(device: str, repeats: int) -> None:
    print(f"\n3. Attention, forward and backward, bfloat16, causal; median of {repeats}")
    argv = [
        "--device",
        device,
        "--repeats",
        str(repeats),
        "--tiles",
        "128",
        "512",
        "--presets",
        "bf16_carry",
        "fa2",
        "fp32",
    ]
    if device == "cpu":
        argv += ["--backends", "cpu", "--sizes", attention.CPU_SIZES[0]]
    args = attention.arguments(argv)
    for size in args.sizes:
        shape = tuple(int(n) for n in size.split(","))
        attention.show(shape, attention.measure(shape, args))


def milliseconds(call: Callable[[], Tensor], device: str, repeats: int) -> float:
    times = []
    for repeat in range(repeats + 3):
        if device != "cpu":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10 if device != "cpu" else 1):
            call()
        if device != "cpu":
            torch.cuda.synchronize()
        if repeat >= 3:
            times.append((time.perf_counter() - start) * (1e3 if device == "cpu" else 1e2))
    return statistics.median(times)


def quantiser(device: str, repeats: int) -> None:
    shape = (8192, 8192) if device != "cpu" else (768, 3072)
    print(f"\n4. mx_quantize {shape} against a copy of the tensor; median of {repeats}")
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(shape, device=device).to(dtype)
        kept = torch.empty_like(x)
        copy = milliseconds(lambda: kept.copy_(x), device, repeats)  # noqa: B023
        print(f"   {dtype!s:<15} copy {copy:7.3f} ms, {2 * x.numel() * x.element_size() / copy / 1e6:7.1f} GB/s")
        for fmt in ("mxfp4_e2m1", "mxfp8_e4m3"):
            for rounding in ("rne", "sr"):
                spent = milliseconds(lambda: mx_quantize(x, fmt, rounding=rounding), device, repeats)  # noqa: B023
                print(f"   {fmt:<11} {rounding:<4} {spent:10.3f} ms  {spent / copy:6.2f} x copy")


def quantiser_numerics(device: str) -> bool:
    """Whether the device's quantiser gives the bits of the CPU's in every format, scale and rounding."""
    x = torch.randn(256, 320, generator=torch.Generator().manual_seed(0)) * 10
    wrong = [
        (fmt, scale, rounding)
        for fmt in FORMATS
        for scale in SCALES
        for rounding in ROUNDINGS
        if not torch.equal(
            mx_quantize(x.to(device), fmt, scale=scale, rounding=rounding, seed=3).cpu(),
            mx_quantize(x, fmt, scale=scale, rounding=rounding, seed=3, backend="torch"),
        )
    ]
    print(f"\n5. mx_quantize on {device} against torch operations on cpu: {wrong or 'the same bits in every mode'}")
    return not wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    started = time.monotonic()
    on_gpu = args.device != "cpu"
    if not on_gpu:
        torch.set_num_threads(1)
    name = torch.cuda.get_device_name() if on_gpu else attention.processor()
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {name}, {os.cpu_count()} cores")
    if not on_gpu:
        print("No GPU here: what follows is the CPU part only, and says nothing of a GPU.")
    backend = "triton" if on_gpu else "cpu"
    numerics(args.device, backend)
    good = self_tests(args.device)
    speed(args.device, args.repeats)
    quantiser(args.device, args.repeats)
    good &= quantiser_numerics(args.device)
    print(f"\n{time.monotonic() - started:.0f} s in all")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
