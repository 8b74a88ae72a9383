"""Takes the signs from the momentum that the optimizer has built up: is it there that errors of one sign add up?"""

from __future__ import annotations

from typing import Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer
from typing_extensions import override

from callbacks.draws import generator, normal, run_seed
from lightning_qk.module import full, write_full
from lightning_qk.routes import route_parameters
from lightning_qk.strategies import refuse_strategy

MODES = ("reversed", "random")
_MOMENTA = ("exp_avg", "momentum_buffer")  # of Adam and AdamW; of SGD and Muon


class MomentumSigns(Callback):
    r"""Multiplies a route's momentum m by signs s, element by element, before every step of the optimizer.

    ``reversed`` takes s = -1, ``random`` draws every sign anew; the sizes ``|m|``, the gradient and Adam's second
    moment stay. With Adam's ``m <- b m + (1 - b) g`` a gradient that is always the same then weighs
    ``(1 - b) / (1 + b)`` in the update and not 1 (reversed; 1/19 at b = 0.9), one that changes sign at every step
    weighs 1 and not ``(1 - b) / (1 + b)``; with random signs both add up to no more than noise does. So what is
    coherent in time is lost, of the error as of the true gradient: compare with a run without the fault.

    Draws depend on (``seed``, step, name of the weight), so ranks agree and a resumed run goes on bit for bit; there is
    no state.

    Args:
        mode: ``reversed`` or ``random``.
        route: a route of :func:`lightning_qk.routes.route_parameters`.
        layers: its layers; None is all.
        seed: of random signs; None takes the run's (``seed_everything``).

    Raises:
        ValueError: another mode.
        MisconfigurationException: the optimizer keeps no momentum.
    """

    def __init__(
        self,
        mode: Literal["reversed", "random"] = "reversed",
        route: str = "qk",
        layers: list[int] | None = None,
        seed: int | None = None,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"MomentumSigns: mode={mode!r} is not one of {', '.join(MODES)}.")
        self.mode, self.route, self.layers, self.seed = mode, route, layers, run_seed(seed)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        refuse_strategy(trainer)
        mine = {id(p) for p in route_parameters(pl_module, self.route, self.layers).values()}
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                kept = "betas" in group or group.get("momentum")
                if not kept and any(id(p) in mine for p in group["params"]):
                    raise MisconfigurationException(
                        f"MomentumSigns: {type(optimizer).__name__} keeps no momentum of route {self.route}; choose "
                        "adamw or muon, or sgd with model.momentum above 0."
                    )

    @override
    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        for name, p in route_parameters(pl_module, self.route, self.layers).items():
            state = optimizer.state.get(p, {})
            momentum = next((state[key] for key in _MOMENTA if state.get(key) is not None), None)
            if p.grad is None or momentum is None:  # before the first step there is none
                continue
            if self.mode == "reversed":
                momentum.neg_()
            else:
                draw = generator(self.seed, trainer.global_step, name)
                write_full(momentum, full(momentum) * normal(tuple(momentum.shape), momentum.device, draw).sign())
