"""Training runs on two processes over gloo, whole (DDP) or sharded (FSDP2), and what every rank saw of them."""

from __future__ import annotations

import dataclasses
import faulthandler
import multiprocessing
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from tiny import data, fault, fit, module
from torch import Tensor

from lightning_qk.module import full
from lightning_qk.routes import attention_sites


@dataclasses.dataclass(frozen=True)
class Case:
    """A run; functions, for it is made anew for every strategy.

    Attributes:
        callbacks: makes its callbacks.
        plugin: makes its plugin.
        fields: of the model's config.
        arguments: of the module.
        settings: of the Trainer.
    """

    callbacks: Callable[[], list[Callback]] = list
    plugin: Callable[[], Any] = fault
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


class Seen(Callback):
    """Whole gradients that reach clipping, whole weights at the end, losses, logits and what callbacks say."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor]] = []
        self.losses: list[float] = []
        self.logits: list[float] = []
        self.result: dict[str, Any] = {}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        found = {name: p.grad for name, p in pl_module.named_parameters()}
        self.gradients.append({name: full(g.detach()).clone() for name, g in found.items() if g is not None})

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))
        if all(site.core.observed for site in attention_sites(pl_module)):
            self.logits.append(max(float(site.core.max_logit_H.max()) for site in attention_sites(pl_module)))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        others = [c for c in trainer.callbacks if hasattr(c, "verdict_fields")]  # type: ignore[attr-defined]
        self.result = {
            "weights": {name: full(value).clone() for name, value in pl_module.state_dict().items()},
            "gradients": self.gradients,
            "losses": self.losses,
            "logits": self.logits,
            "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
            "fields": {type(c).__name__: c.verdict_fields() for c in others},
        }


def run(root: Path, case: Case, strategy: Strategy | None = None, ckpt_path: Path | None = None) -> dict[str, Any]:
    """One run, as this process sees it: alone, or as a rank with half of every batch."""
    seen = Seen()
    ranks = {} if strategy is None else {"devices": 2, "strategy": strategy}
    model = module(case.fields, **case.arguments)
    batches = data(batch_size=8 if strategy is None else 4)
    callbacks = [*case.callbacks(), seen]
    fit(root, callbacks, case.plugin(), model, batches, ckpt_path, **{**ranks, **case.settings})
    return seen.result


def ddp() -> Strategy:
    return DDPStrategy(process_group_backend="gloo")


def fsdp(save_distributed_checkpoint: bool = True) -> Strategy:
    return ModelParallelStrategy(2, 1, save_distributed_checkpoint, process_group_backend="gloo")


# A fork of pytest's process, with the threads of all tests before, crashed once in CI: ranks are forked from a process
# that has imported what they need and has done nothing else.
multiprocessing.set_forkserver_preload(["lightning_qk.module", "callbacks", "torch.distributed.fsdp", "pytest"])


def on_two_ranks(root: Path, work: Mapping[str, Callable[[], Any]]) -> dict[str, tuple[Any, Any]]:
    """What every piece of work returned on rank 0 and on rank 1, in two processes.

    Lightning takes the processes for ones that a job scheduler has started; all work is done by the same two.

    Raises:
        RuntimeError: a rank crashed; with the stack of where.
    """
    root.mkdir(parents=True, exist_ok=True)
    arguments = (find_free_network_port(), str(root), cloudpickle.dumps(dict(work)))
    try:
        torch.multiprocessing.start_processes(_rank, arguments, nprocs=2, start_method="forkserver")
    except torch.multiprocessing.ProcessExitedException as error:
        raise RuntimeError("".join(file.read_text() for file in root.glob("rank_?.stack"))) from error
    return {name: (torch.load(root / f"{name}_0.pt"), torch.load(root / f"{name}_1.pt")) for name in work}


def _rank(rank: int, port: int, root: str, work: bytes) -> None:
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    with open(f"{root}/rank_{rank}.stack", "w") as stack:
        faulthandler.enable(stack)
        for name, piece in cloudpickle.loads(work).items():
            torch.save(piece(), f"{root}/{name}_{rank}.pt")
        torch.distributed.destroy_process_group()
        faulthandler.disable()
