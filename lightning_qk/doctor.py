"""``python -m lightning_qk doctor``: versions, what will run where, and whether the kernels give what they must."""

from __future__ import annotations

import os
import platform
import sys
from argparse import ArgumentError
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed
from jsonargparse import ArgumentParser

import kernels
from kernels import self_test
from kernels.scaled_products import device_obstacle
from lightning_qk.complaints import complain

PACKAGES = ("lightning-qk", "torch", "lightning", "jsonargparse", "triton", "numpy", "datasets", "tensorboard")


def versions() -> Iterator[tuple[str, str]]:
    """Each package and its version."""
    yield "python", platform.python_version()
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"


def machine() -> Iterator[tuple[str, str]]:
    """What this machine has."""
    yield (
        "system",
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
    )
    threads = os.environ.get("LIGHTNING_QK_THREADS")
    yield "LIGHTNING_QK_THREADS", threads or "not set: fit uses all cores, each run of a sweep one"
    for index in range(torch.cuda.device_count()):
        one = torch.cuda.get_device_properties(index)
        yield f"cuda:{index}", f"{one.name}, sm{one.major}{one.minor}, {one.total_memory / 2**30:.0f} GiB"
    if not torch.cuda.is_available():
        yield "GPU", f"none that torch {torch.__version__} can use"
    yield "kernels", str(Path(kernels.__file__).parent)


def backends(device: str) -> Iterator[tuple[str, str]]:
    """What runs where on a device, as ``auto`` chooses."""
    gpu = device != "cpu"
    yield "emulated attention", "triton" if gpu else "cpu (PyTorch operations; stochastic sites: reference)"
    yield (
        "PyTorch's attention",
        "flash, memory-efficient or cuDNN, as PyTorch chooses" if gpu else "CPU kernels of PyTorch",
    )
    native = gpu or kernels.has_bf16_products()
    yield "bfloat16 products", "native" if native else "in float32, rounded once: this CPU has none that are fast"
    yield "MX formats", "triton" if gpu else "torch operations (torch.compile fuses them)"
    obstacle = device_obstacle(torch.device(device))
    yield "native MX products", "yes" if obstacle is None else f"no, emulated: {obstacle}"
    distributed = [name for name in ("nccl", "gloo") if getattr(torch.distributed, f"is_{name}_available")()]
    yield "several processes", f"{', '.join(distributed)}: DDP and FSDP2 (ModelParallelStrategy)"


def main(args: list[str] | None = None) -> int:
    """Prints all of it; 0 when every self-test holds, 1 when one does not, 2 for a wrong argument."""
    parser = ArgumentParser(
        prog="python -m lightning_qk doctor", description=__doc__, exit_on_error=False, allow_abbrev=False
    )
    there = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    parser.add_argument("--device", choices=there, default=there[-1], help="where the kernels are tested")
    try:
        device = parser.parse_args(args).device
    except ArgumentError as error:
        return complain(error, sys.argv[1:] if args is None else args)
    for title, rows in (("versions", versions()), ("machine", machine()), (f"on {device}", backends(device))):
        print(title)
        for name, value in rows:
            print(f"  {name:<22} {value}")
    print(f"self-tests of the kernels on {device}")
    failed = 0
    for check in self_test.run(device):
        failed += not check.good
        print(f"  {'ok    ' if check.good else 'FAILED'} {check.name}: {check.found}", flush=True)
    print(f"{failed} failed" if failed else "all hold")
    return 1 if failed else 0
