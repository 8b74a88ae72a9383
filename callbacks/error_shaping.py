"""Reshapes the error of a route's gradient at its own size: which property of the error opens the channel?"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from callbacks.clean_gradient import CleanGradientCallback
from callbacks.draws import generator, normal, run_seed
from lightning_qk.module import full, logging_is_due, write_full
from lightning_qk.routes import route_parameters

# the second group needs no error of the run's own: its direction is made up
SHAPES = ("itself", "mean_removed", "mean_only", "time_shuffled")
MADE_UP = ("random_signs", "frozen_signs", "constant", "rank_one", "gaussian")
MODES = (*SHAPES, *MADE_UP)


class ErrorShaping(CleanGradientCallback):
    r"""Replaces e = faulty minus clean gradient by another error of the same Frobenius norm, weight by weight.

    The gradient becomes ``clean + |e| x / |x|``, before clipping, once per optimizer step, with x by ``mode``:

    =============  =====================================================  ==================================
    itself         e                                                      nothing changed: the monitor
    random_signs   ``|e_ij| s_ij``, signs drawn anew at every step        same sizes, no coherence
    frozen_signs   the same with signs drawn once for the run             same sizes, full coherence
    mean_removed   e less its mean over the elements of the weight
    mean_only      that mean in every element                             coherent as the mean's sign is
    constant       the same positive number in every element              full coherence, and a mean
    rank_one       ``u v'``, Gaussian u and v drawn once for the run       full coherence, hardly a mean
    gaussian       independent normal numbers, anew at every step         neither
    time_shuffled  e of one of the last ``shuffle_window`` steps, this    the error's own coherence, but not
                   one included, the same step for every weight           of this batch and these weights
    =============  =====================================================  ==================================

    ``random_signs`` and ``frozen_signs`` differ in nothing but time. Inputs behind a LayerNorm without bias have hardly
    a mean: a projection's error has none either then (``mean_only`` blows up what little there is, whatever its sign);
    ``constant`` and ``rank_one`` are constant directions, that of ``rank_one`` in general position.

    Where the run has no error of its own on the route, one can be put there: ``relative_magnitude`` sets the norm to
    that multiple of the clean gradient's. The signs' modes then have all elements of one size.

    **Sign-coherence** of what was applied, c_t: over a window of W optimizer steps, the mean over the elements of the
    route of ``|mean over the window of sign(c_t)|``; ``sign(0) = 0``. Constant signs give 1. Signs drawn anew give not
    0 but about ``sqrt(2 / (pi W))``, 0.11 for the default window.

    Draws depend on (``seed``, name of the weight, and the step where they are new), so ranks agree and a resumed run
    goes on bit for bit. Memory and checkpoint hold the sum of signs, 4 bytes an element of the route, and the errors of
    ``time_shuffled``, ``4 * shuffle_window`` bytes an element (query and key of GPT-2 small: 57 MB and 0.9 GB). No
    other callback may edit the gradient of the same weights.

    Logs ``error/magnitude`` (norm over the route), ``error/relative`` (the same over the clean gradient's norm) and
    ``error/mean`` (over elements) of what was applied, and at the end of each window ``error/coherence``; where a run
    has several ErrorShapings, each with ``/<route>`` behind it, and the layers where they are not all.

    Args:
        mode: see above.
        route: a route of :func:`lightning_qk.routes.route_parameters`.
        layers: its layers; None is all.
        magnitude: factor on ``|e|``.
        relative_magnitude: the norm as a multiple of the clean gradient's, instead of ``|e|``.
        coherence_window: W.
        shuffle_window: errors that ``time_shuffled`` draws from.
        seed: of all draws; None takes the run's (``seed_everything``), so that runs differ in the direction too.

    Raises:
        ValueError: an argument that cannot be.
        MisconfigurationException: the plugin has no fault and ``mode`` or the magnitude needs one.
    """

    def __init__(
        self,
        mode: Literal[
            "itself",
            "random_signs",
            "frozen_signs",
            "mean_removed",
            "mean_only",
            "constant",
            "rank_one",
            "gaussian",
            "time_shuffled",
        ] = "itself",
        route: str = "qk",
        layers: list[int] | None = None,
        magnitude: float = 1.0,
        relative_magnitude: float | None = None,
        coherence_window: int = 50,
        shuffle_window: int = 16,
        seed: int | None = None,
    ) -> None:
        super().__init__(route, layers)
        if mode not in MODES:
            raise ValueError(f"ErrorShaping: mode={mode!r} is not one of {', '.join(MODES)}.")
        if not 0 <= magnitude < math.inf or (relative_magnitude is not None and not 0 <= relative_magnitude < math.inf):
            raise ValueError(
                f"ErrorShaping: magnitude={magnitude} and relative_magnitude={relative_magnitude} must be at least 0 "
                "and finite."
            )
        if relative_magnitude is not None and magnitude != 1.0:
            raise ValueError(
                f"ErrorShaping: magnitude={magnitude} multiplies the run's own error and "
                f"relative_magnitude={relative_magnitude} replaces its size; give one of them."
            )
        if coherence_window < 1 or shuffle_window < 1:
            raise ValueError(
                f"ErrorShaping: coherence_window={coherence_window} and shuffle_window={shuffle_window} must be at "
                "least 1."
            )
        self.mode, self.magnitude, self.relative_magnitude = mode, magnitude, relative_magnitude
        self.seed = run_seed(seed)
        self.coherence_window, self.shuffle_window = coherence_window, shuffle_window
        self.coherences: list[float] = []
        self._steps = 0
        self._signs: dict[str, Tensor] = {}
        self._past: dict[str, list[Tensor]] = {}
        self._suffix = ""  # the route, where there are several

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        others = [one for one in trainer.callbacks if isinstance(one, ErrorShaping) and one is not self]  # type: ignore[attr-defined]
        self._suffix = f"/{self.scope}" if others else ""
        plugin = self.plugin(trainer)
        faulty = plugin.faults_in_passes or plugin.gradient is not None
        if not faulty and (self.mode not in MADE_UP or self.relative_magnitude is None):
            raise MisconfigurationException(
                f"ErrorShaping: mode={self.mode!r} with relative_magnitude={self.relative_magnitude} shapes an error "
                "that the run makes, but the plugin has no fault. Give it one in trainer.plugins, or set "
                f"relative_magnitude and one of the modes {', '.join(MADE_UP)}."
            )

    @override
    def edited(self, pl_module: LightningModule) -> Iterable[nn.Parameter]:
        return route_parameters(pl_module, self.route, self.layers).values()

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        sums = []
        with torch.no_grad():
            for name, p in self.parameters(pl_module).items():
                assert p.grad is not None
                faulty, clean = full(p.grad).double(), full(self.clean(trainer, p)).double()
                write_full(p.grad, clean + self._shaped(faulty - clean, clean, name, trainer.global_step))
                applied = full(p.grad).double() - clean  # less what rounding to the gradient's dtype took
                signs, seen = applied.sign().float(), self._signs.get(name)
                self._signs[name] = signs if seen is None else seen.to(signs.device) + signs
                sums.append(torch.stack([applied.square().sum(), applied.sum(), clean.square().sum()]))
        self._steps += 1
        elements = sum(signs.numel() for signs in self._signs.values())
        if logging_is_due(trainer):
            square, total, clean_square = torch.stack(sums).sum(0)
            pl_module.log(f"error/magnitude{self._suffix}", square.sqrt())
            pl_module.log(f"error/relative{self._suffix}", (square / clean_square.clamp_min(1e-30)).sqrt())
            pl_module.log(f"error/mean{self._suffix}", total / elements)
        if self._steps == self.coherence_window:
            self._end_window(trainer, pl_module, elements)

    def _shaped(self, error: Tensor, clean: Tensor, name: str, step: int) -> Tensor:
        direction = self._direction(error, name, step)
        relative = self.relative_magnitude
        size = self.magnitude * error.norm() if relative is None else relative * clean.norm()
        length = direction.norm()
        return direction * (size / length) if length != 0 else direction  # an error of zero has no direction

    def _direction(self, error: Tensor, name: str, step: int) -> Tensor:
        """Float64 and of any length."""
        shape, device = tuple(error.shape), error.device
        if self.mode in ("random_signs", "frozen_signs"):
            key = (name, step) if self.mode == "random_signs" else (name,)
            signs = normal(shape, device, generator(self.seed, *key)).sign()
            return signs * error.abs() if bool(error.any()) else signs
        if self.mode == "mean_removed":
            return error - error.mean()
        if self.mode == "mean_only":
            return error.mean().expand(shape)
        if self.mode == "constant":
            return torch.ones_like(error)
        if self.mode == "rank_one":
            draw = generator(self.seed, name)
            return torch.outer(*(normal((length,), device, draw) for length in shape))
        if self.mode == "gaussian":
            return normal(shape, device, generator(self.seed, name, step))
        if self.mode == "time_shuffled":
            past = self._past.setdefault(name, [])
            past.append(error.float())
            del past[: -self.shuffle_window]
            chosen = int(torch.randint(len(past), (), generator=generator(self.seed, step)))
            return past[chosen].to(device).double()
        return error

    def _end_window(self, trainer: Trainer, pl_module: LightningModule, elements: int) -> None:
        total = sum(float(signs.abs().sum(dtype=torch.float64)) for signs in self._signs.values())
        self.coherences.append(total / (self._steps * elements))
        self._steps, self._signs = 0, {}
        tag = f"error/coherence{self._suffix}"
        pl_module.log(tag, self.coherences[-1], logger=False)
        for logger in trainer.loggers:  # not through `log`, which would repeat a reading at every step until the next
            logger.log_metrics({tag: self.coherences[-1]}, step=trainer.global_step)

    def verdict_fields(self) -> dict[str, Any]:
        """What the run's verdict takes from here.

        ``error_coherence`` is the mean over all complete windows, those after a collapse too, whose consequence it is
        then. The report reads the windows themselves, up to the collapse.
        """
        windows = self.coherences
        return {
            f"error_coherence{self._suffix}": sum(windows) / len(windows) if windows else None,
            f"error_magnitude{self._suffix}": self.magnitude,
            f"error_relative_magnitude{self._suffix}": self.relative_magnitude,
        }

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(route=self.route, layers=self.layers)

    @override
    def state_dict(self) -> dict[str, Any]:
        past = {name: list(errors) for name, errors in self._past.items()}
        return {"coherences": list(self.coherences), "steps": self._steps, "signs": dict(self._signs), "past": past}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.coherences, self._steps = list(state_dict["coherences"]), state_dict["steps"]
        self._signs = dict(state_dict["signs"])
        self._past = {name: list(errors) for name, errors in state_dict["past"].items()}
