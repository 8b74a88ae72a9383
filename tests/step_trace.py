"""A list of what happened in a training run, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule


class Trace(list[str]):
    """Labels of the calls that it watches.

    Args:
        monkeypatch: undoes it all.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._monkeypatch = monkeypatch

    def watch(self, owner: Any, name: str, label: str | Callable[[], str], before: bool = True) -> None:
        """Notes every call of a method, when it begins or when it is over."""
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if before:
                self.append(label if isinstance(label, str) else label())
            result = original(*args, **kwargs)
            if not before:
                self.append(label if isinstance(label, str) else label())
            return result

        self._monkeypatch.setattr(owner, name, wrapped)

    def watch_training(self, model: LightningModule, state: Callable[[], str]) -> None:
        """Notes forward and backward passes by the state that they run in, clipping, and the optimizer's step."""
        backward, configure = torch.Tensor.backward, model.configure_optimizers

        def traced_backward(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.append(f"backward({state()})")
            return backward(tensor, *args, **kwargs)

        def traced_optimizers() -> Any:
            setup: Any = configure()
            setup["optimizer"].register_step_post_hook(lambda *_: self.append("step"))
            return setup

        self.watch(model, "forward", lambda: f"forward({state()})")
        self._monkeypatch.setattr(torch.Tensor, "backward", traced_backward)
        self.watch(model, "configure_gradient_clipping", "clip")
        self._monkeypatch.setattr(model, "configure_optimizers", traced_optimizers)
