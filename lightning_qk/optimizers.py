"""Optimizers by name, and the pair that Muon comes as."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer
from typing_extensions import override

OPTIMIZERS = ("adamw", "sgd", "muon")


class MuonWithAdamW(Optimizer):
    """Muon for the matrices that transform hidden states, AdamW for everything else, as one optimizer.

    Muon (https://kellerjordan.github.io/posts/muon, :class:`torch.optim.Muon`) is made for hidden matrices; embeddings,
    the head, gains and biases stay with AdamW. Its update is scaled to AdamW's usual size (arXiv 2502.16982), so that
    one learning rate serves both. Lightning steps one optimizer per run; this is one, with one state and one list of
    groups, Muon's first.

    Args:
        muon: Muon's parameter group.
        adamw: AdamW's parameter groups.
        lr: of both.
        momentum: Muon's.
        betas: AdamW's.
        eps: AdamW's.
    """

    def __init__(
        self,
        muon: dict[str, Any],
        adamw: list[dict[str, Any]],
        lr: float,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        self._parts: list[Optimizer] = [
            Muon([muon], lr=lr, momentum=momentum, adjust_lr_fn="match_rms_adamw"),
            AdamW(adamw, lr=lr, betas=betas, eps=eps),
        ]
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """The parts step what this optimizer holds: the same dictionaries, not copies."""
        self._parts[0].param_groups, self._parts[1].param_groups = self.param_groups[:1], self.param_groups[1:]
        for part in self._parts:
            part.state = self.state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for part in self._parts:
            part.step()
        return loss


def check_settings(
    owner: str,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    momentum: float | None = None,
    weight_decay: float = 0.0,
) -> None:
    """Checks what every optimizer here is made with, so that NaN is told before the first step.

    Raises:
        ValueError: naming the setting.
    """
    if not 0.0 < lr < math.inf:
        raise ValueError(f"{owner}: lr={lr} must be positive and finite.")
    if not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"{owner}: betas={betas} must be at least 0 and below 1.")
    if momentum is not None and not 0.0 <= momentum < 1.0:
        raise ValueError(f"{owner}: momentum={momentum} must be at least 0 and below 1.")
    for name, value in (("eps", eps), ("weight_decay", weight_decay)):
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{owner}: {name}={value} must be at least 0 and finite.")


def make_optimizer(
    name: str, parameters: Iterable[nn.Parameter], hidden: Iterable[nn.Parameter], settings: Mapping[str, Any]
) -> Optimizer:
    """An optimizer over parameters of which only matrices decay.

    Args:
        name: one of :data:`OPTIMIZERS`.
        parameters: all that are trained.
        hidden: those of them that Muon takes.
        settings: ``lr, betas, eps, momentum, weight_decay``.

    Raises:
        ValueError: the name.
    """
    lr, betas, eps, momentum, decay = (settings[key] for key in ("lr", "betas", "eps", "momentum", "weight_decay"))
    betas = tuple(betas)
    parameters = list(parameters)
    taken = {id(p) for p in hidden} if name == "muon" else set()
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2 and id(p) not in taken], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    if name == "adamw":
        return AdamW(groups, lr=lr, betas=betas, eps=eps)
    if name == "sgd":
        return SGD(groups, lr=lr, momentum=momentum)
    if name == "muon":
        matrices = {"params": [p for p in parameters if id(p) in taken], "weight_decay": decay}
        return MuonWithAdamW(matrices, groups, lr, momentum, betas, eps)
    raise ValueError(f"optimizer={name!r} is not one of {', '.join(OPTIMIZERS)}.")
