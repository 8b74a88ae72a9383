"""The rule that judges whether training has collapsed, from one loss a step; it knows of no Trainer."""

from __future__ import annotations

import math
from collections import deque
from typing import Any


class CollapseRule:
    """The sustained-divergence rule of arXiv 2608.02091, and the rule for what is not finite.

    The loss (mean of the last ``window`` optimizer steps) collapses when it exceeds its running minimum by ``excess``
    nat and does not come back to within ``margin`` of it; the collapse step is where that excess began. A loss or a
    gradient that is not finite is *nonfinite*, and final.

    Args:
        excess: nats over the running minimum that begin a collapse.
        margin: nats over it that count as recovered.
        window: optimizer steps averaged.
        stop: training is over when a divergence has lasted ``patience`` steps; otherwise it goes on, judged at its end.
        patience: optimizer steps that ``stop`` waits for a recovery.

    Raises:
        ValueError: an argument that cannot be.
    """

    def __init__(
        self, excess: float = 1.5, margin: float = 0.75, window: int = 10, patience: int = 100, stop: bool = True
    ) -> None:
        name = type(self).__name__
        if not 0 <= margin < excess < math.inf:
            raise ValueError(
                f"{name}: margin={margin} must be at least 0 and below excess={excess}, and both must be finite."
            )
        if window < 1 or patience < 0:
            raise ValueError(f"{name}: window={window} must be at least 1 and patience={patience} at least 0.")
        self.excess, self.margin, self.window, self.patience, self.stop = excess, margin, window, patience, stop
        self._recent: deque[float] = deque(maxlen=window)
        self._tail: deque[float] = deque(maxlen=50)  # what the verdict calls the final loss
        self._minimum = math.inf
        self._onset: int | None = None
        self._nonfinite = self._ended = False
        self._recovered = 0

    def judge(self, loss: float, step: int, finite_gradient: bool = True) -> None:
        """Takes in the loss of one optimizer step, counted from 1, and whether its gradient was finite."""
        if self._nonfinite:
            return
        if not math.isfinite(loss) or not finite_gradient:
            self._nonfinite = self._ended = True
            self._onset = step if self._onset is None else self._onset
            return
        self._recent.append(loss)
        self._tail.append(loss)
        mean = self._mean()
        if len(self._recent) == self.window:
            self._minimum = min(self._minimum, mean)
        if self._onset is None and mean > self._minimum + self.excess:
            self._onset = step
        elif self._onset is not None and mean <= self._minimum + self.margin:
            self._onset, self._recovered = None, self._recovered + 1
        if self.stop and self._onset is not None and step - self._onset >= self.patience:
            self._ended = True

    @property
    def over(self) -> bool:
        """Whether training should end now."""
        return self._nonfinite or (self.stop and self._ended)

    @property
    def status(self) -> str:
        """The verdict if training ended here: ``completed``, ``collapsed`` or ``nonfinite``."""
        return "nonfinite" if self._nonfinite else "completed" if self._onset is None else "collapsed"

    @property
    def current_excess(self) -> float | None:
        """Nats over the running minimum now, at least 0; None before the first loss."""
        return max(0.0, self._mean() - self._minimum) if self._recent else None

    def _mean(self) -> float:
        return sum(self._recent) / len(self._recent)

    def verdict_fields(self) -> dict[str, Any]:
        """What the run's verdict takes from here."""
        return {
            "status": self.status,
            "collapse_step": self._onset,
            "loss": sum(self._tail) / len(self._tail) if self._tail else None,
            "min_loss": self._minimum if math.isfinite(self._minimum) else None,
            "recovered_spikes": self._recovered,
        }

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, as plain values."""
        return {
            "recent": list(self._recent),
            "tail": list(self._tail),
            "minimum": self._minimum,
            "onset": self._onset,
            "nonfinite": self._nonfinite,
            "ended": self._ended,
            "recovered": self._recovered,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`."""
        self._recent = deque(state_dict["recent"], maxlen=self.window)
        self._tail = deque(state_dict["tail"], maxlen=50)
        self._minimum, self._onset = state_dict["minimum"], state_dict["onset"]
        self._nonfinite, self._ended = state_dict["nonfinite"], state_dict["ended"]
        self._recovered = state_dict["recovered"]
