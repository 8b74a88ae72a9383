"""One training step of the student-teacher proxy in MX formats, as ratios to its fp32 step, measured in the same run.

    python benchmarks/mx_training.py                  # the canonical size, a few minutes on one core
    python benchmarks/mx_training.py --depth 2 --width 256 --batch 512 --rounds 9

A step is the forward pass, the backward pass and Adam. Variants take turns, round after round, so that a slow minute of
the machine hits all of them; times are CPU seconds of this process on one thread (on a GPU, wall time between
synchronisations), ratios are of medians over rounds.

The peer is torchao's emulated MXFP8 product (``_to_mxfp8_then_scaled_mm``, ``KernelPreference.EMULATED``) in the place
of every linear layer's. It quantises the same six operands, in E4M3 with floor scales, and rounds no vector operation;
the variant "E4M3 products only" does just that, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torchao
from torch import Tensor, nn
from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from lightning_qk.gaussian_data import draw
from lightning_qk.mx_policy import PRESETS
from lightning_qk.precision import MXTraining
from lightning_qk.routes import route_linears
from lightning_qk.student_teacher import StudentTeacher

Step = Callable[[], None]


class TorchaoLinear(nn.Linear):
    """``nn.Linear`` on torchao's emulated MXFP8 product."""

    def forward(self, x: Tensor) -> Tensor:
        y = _to_mxfp8_then_scaled_mm(x, self.weight, KernelPreference.EMULATED, ScaleCalculationMode.FLOOR)
        return y if self.bias is None else y + self.bias


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    return parser.parse_args()


def optimizer_step(module: StudentTeacher, batch: tuple[Tensor, Tensor]) -> Step:
    optimizer = torch.optim.Adam(module.student.parameters(), lr=6e-4)

    def step() -> None:
        loss = module(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def variants(args: argparse.Namespace) -> dict[str, Step]:
    """What is compared, by name; the first is the base of all ratios."""
    x, noise = draw(args.batch, args.width, 1e-3, 0)
    batch = x.to(args.device), noise.to(args.device)

    def student() -> StudentTeacher:
        torch.manual_seed(0)
        return StudentTeacher(depth=args.depth, width=args.width).to(args.device)

    def ours(preset: str, **settings: str) -> Step:
        module, plugin = student(), MXTraining(preset, route="mlp", base="fp32", **settings)  # type: ignore[arg-type]
        plugin.convert_module(module)
        return optimizer_step(module, batch)

    def peer() -> Step:
        module = student()
        for linear in route_linears(module, "mlp").values():
            linear.__class__ = TorchaoLinear
        return optimizer_step(module, batch)

    products_only = ours("mxfp8_e4m3", vector="fp32", ln_affine="fp32", activation="fp32")
    return {
        "plain torch, fp32": optimizer_step(student(), batch),
        **{preset: ours(preset) for preset in args.presets},
        "mxfp8_e4m3, stochastic": ours("mxfp8_e4m3", rounding="sr"),
        "E4M3 products only": products_only,
        f"torchao {torchao.__version__}, the same": peer(),
    }


def seconds(step: Step, device: str) -> float:
    """CPU time of one step; on a GPU, wall time between synchronisations."""
    cuda = device.startswith("cuda")
    clock = time.perf_counter if cuda else time.process_time
    if cuda:
        torch.cuda.synchronize()
    start = clock()
    step()
    if cuda:
        torch.cuda.synchronize()
    return clock() - start


def main() -> None:
    """Runs the rounds and prints the table."""
    args = arguments()
    torch.set_num_threads(1)
    steps = variants(args)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(args.rounds + 1):
        for name, step in steps.items():
            elapsed = seconds(step, args.device)
            if repeat:  # the first warms up
                times[name].append(elapsed)
    print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, one thread, {args.device}")
    print(f"{args.depth} layers, d {args.width}, batch {args.batch}, median of {args.rounds} rounds\n")
    base = statistics.median(times["plain torch, fp32"])
    for name, values in times.items():
        median = statistics.median(values)
        print(f"  {name:28s} {median * 1e3:9.1f} ms   {median / base:6.2f} of fp32")


if __name__ == "__main__":
    main()
