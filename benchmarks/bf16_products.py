"""A linear layer's three bfloat16 products: PyTorch's own, and in float32 rounded once, over the float32 layer's.

    python benchmarks/bf16_products.py         # seconds, minutes on a CPU without bfloat16 products

The three take turns; times are medians of the process's CPU time, one thread.
"""

from __future__ import annotations

import statistics
import time
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F

from kernels import has_bf16_products, widened_bf16_products

SHAPES = {"proxy": (1024, 64, 256), "gpt2-small, 256 tokens": (256, 768, 3072)}  # tokens, inputs, outputs
REPEATS = 5


def step_ms(shape: tuple[int, int, int], dtype: torch.dtype, products: AbstractContextManager[None]) -> float:
    tokens, inputs, outputs = shape
    x = torch.randn(tokens, inputs, dtype=dtype, requires_grad=True)
    w = torch.randn(outputs, inputs, dtype=dtype, requires_grad=True)
    with products:
        start = time.process_time()
        y = F.linear(x, w)
        y.backward(torch.ones_like(y))
        return (time.process_time() - start) * 1e3


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, native: {has_bf16_products()}")
    for name, shape in SHAPES.items():
        times: dict[str, list[float]] = {"float32": [], "native": [], "widened": []}
        for _ in range(REPEATS + 1):  # the first warms up
            times["float32"].append(step_ms(shape, torch.float32, nullcontext()))
            times["native"].append(step_ms(shape, torch.bfloat16, nullcontext()))
            times["widened"].append(step_ms(shape, torch.bfloat16, widened_bf16_products()))
        median = {kind: statistics.median(values[1:]) for kind, values in times.items()}
        ratios = ", ".join(f"{kind} {median[kind] / median['float32']:.2f}" for kind in ("native", "widened"))
        print(f"{name:<24} float32 {median['float32']:.2f} ms; bfloat16 over it: {ratios}")


if __name__ == "__main__":
    main()
