"""One training step of the proxy and of gpt2-small, as ratios measured in the same run.

    python benchmarks/step.py                # both models, about 10 minutes on one core
    python benchmarks/step.py --models proxy

Variants take turns, round after round, so that a slow minute of the machine hits all of them. Times are CPU seconds of
this process (one thread), the mean of a round's steps; the ratio is of medians over rounds. A step is everything from
one batch to the next: data, forward, backward, clipping, optimizer, callbacks, logging.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.utils.data import DataLoader

from callbacks import QKGuard, RouteSplice, SpectralMonitor
from lightning_qk import GPTModule
from lightning_qk.precision import BF16CarryAttention, FaultPrecision

BATCH = {"proxy": 16, "gpt2-small": 1}
STEPS = {"proxy": 60, "gpt2-small": 10}  # tens: the monitor reads and the logger writes at every tenth step
ROUNDS = {"proxy": 5, "gpt2-small": 1}
TILE = {"proxy": 64, "gpt2-small": 128}


class Stopwatch(Callback):
    """CPU time between the starts of consecutive batches; the first step of a fit warms up and is dropped."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.marks.append(time.process_time())

    def seconds(self) -> list[float]:
        """One entry a step but the first."""
        return [b - a for a, b in itertools.pairwise(self.marks[1:])]


def batches(model: str, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The same random tokens for every variant."""
    generator = torch.Generator().manual_seed(0)
    context, vocab = (128, 256) if model == "proxy" else (1024, 50_257)
    for _ in range(count):
        tokens = torch.randint(vocab, (BATCH[model], context + 1), generator=generator)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def bare_loop(model: str) -> list[float]:
    """The same model, precision, optimizer, clipping and schedule without Lightning."""
    torch.manual_seed(0)
    module = GPTModule(preset=model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 100))
    marks = []
    for x, y in batches(model, STEPS[model] + 2):
        marks.append(time.process_time())
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            loss = module.model.loss(x, y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return [b - a for a, b in itertools.pairwise(marks[1:])]


def fit(model: str, plugin: FaultPrecision, extra: list[Callback]) -> list[float]:
    """Steps of the same model under Lightning, logging to TensorBoard every 10 steps."""
    torch.manual_seed(0)
    watch = Stopwatch()
    with TemporaryDirectory() as directory:
        trainer = Trainer(
            accelerator="cpu",
            max_steps=STEPS[model] + 2,
            max_epochs=-1,
            gradient_clip_val=1.0,
            plugins=plugin,
            callbacks=[watch, *extra],
            logger=TensorBoardLogger(Path(directory)),
            log_every_n_steps=10,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        # one loader of ready batches: a bare list would be taken for a list of loaders
        loader = DataLoader(list(batches(model, STEPS[model] + 2)), batch_size=None)  # type: ignore[arg-type]
        trainer.fit(GPTModule(preset=model), loader)
    return watch.seconds()


def variants(model: str) -> dict[str, Callable[[], list[float]]]:
    """What is compared, by name; the first is the base of all ratios but the bare loop's."""

    def sdpa() -> FaultPrecision:
        return BF16CarryAttention(sites="fp32", core="sdpa")

    def fault() -> FaultPrecision:
        return BF16CarryAttention(sites="bf16_carry", tile=TILE[model])

    return {
        "SDPA, no callbacks": lambda: fit(model, sdpa(), []),
        "bare PyTorch loop": lambda: bare_loop(model),
        "SDPA, dormant guard": lambda: fit(model, sdpa(), [QKGuard()]),
        # what every look costs once the bound is over the threshold, in layers where it is
        "SDPA, guard, exact maximum": lambda: fit(model, sdpa(), [QKGuard(1e9, trigger="max_logit")]),
        "SDPA, monitor and dormant guard": lambda: fit(model, sdpa(), [SpectralMonitor(), QKGuard()]),
        "streaming fp32 carry": lambda: fit(model, BF16CarryAttention(sites="fp32", tile=TILE[model]), []),
        "fault (bf16 carry)": lambda: fit(model, fault(), []),
        "fault and splice (two passes)": lambda: fit(model, fault(), [RouteSplice("qk")]),
    }


def main() -> None:
    """Runs the rounds and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["proxy", "gpt2-small"], choices=list(BATCH))
    parser.add_argument("--rounds", type=int, help="default: 5 for the proxy, 1 for gpt2-small")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, lightning {lightning.__version__}, {platform.processor() or platform.machine()}")
    for model in options.models:
        times: dict[str, list[float]] = {name: [] for name in variants(model)}
        rounds = options.rounds or ROUNDS[model]
        for _ in range(rounds):
            for name, run in variants(model).items():
                times[name].append(statistics.fmean(run()))  # the mean: a monitor's work falls on every tenth step
        base = statistics.median(times["SDPA, no callbacks"])
        setting = f"batch {BATCH[model]}, bf16 autocast, one thread, {rounds} x {STEPS[model]} steps"
        print(f"\n{model}: {setting}")
        for name, seconds in times.items():
            median = statistics.median(seconds)
            print(f"  {name:34s} {median * 1e3:9.1f} ms   {median / base:5.3f} of SDPA under Lightning")
        ratio = base / statistics.median(times["bare PyTorch loop"])
        print(f"  Lightning over the bare loop: {ratio:.3f}")


if __name__ == "__main__":
    import logging
    import warnings

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    main()
