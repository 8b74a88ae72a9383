"""A run whose guard has fired goes on under a guard, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer

from lightning_qk.sites import switches_in


def refuse_unguarded(trainer: Trainer, checkpoint: Mapping[str, Any], weights: Mapping[str, Any] | None = None) -> None:
    """Refuses to train on from the checkpoint of a guard that fired where the run has none to take over its state.

    Args:
        trainer: that of the run that goes on.
        checkpoint: Lightning's.
        weights: the state dict, where a strategy (FSDP2) keeps it elsewhere.

    Raises:
        ValueError: a switch of the model is on, or a guard's history says that it fired, and there is no such callback.
    """
    if not trainer.training:
        return
    fired = switches_in(checkpoint.get("state_dict") or weights or {})
    states = checkpoint.get("callbacks", {}).items()
    fired += [key for key, state in states if key.startswith("QKGuard") and state.get("fired_step") is not None]
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    if fired and not any(getattr(callback, "owns_switches", False) for callback in callbacks):
        raise ValueError(
            f"The checkpoint has a guard that fired ({fired[0]} and {len(fired) - 1} more) but no QKGuard is among "
            "trainer.callbacks. Resume with the run's own callbacks (an arm's own YAML), or add a QKGuard."
        )
