"""The error that the run's faults put into the gradient of a route, against the clean gradient of the same batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from typing_extensions import override

from callbacks.clean_gradient import CleanGradientCallback
from callbacks.early_warning import EarlyWarning, Limit
from lightning_qk.module import full
from lightning_qk.routes import route_parameters


class BiasMonitor(EarlyWarning, CleanGradientCallback):
    """Compares the faulty gradient with the clean one, every ``every_n_steps`` optimizer steps. Training is unchanged.

    Clean is the gradient of the same batch *at the same weights*, without the plugin's faults
    (:class:`lightning_qk.precision.clean_gradients.CleanGradients`); an fp32 twin's gradient at the same step index
    would differ by the distance of the two trajectories besides. With g the faulty gradient of the route, all its
    weights together, c the clean one and e = g - c, the readings are

    ==========  ======================  =======================================================================
    zeta        ``|e| / |c|``           the bound from below on the noise of arXiv 2506.20752; not squared
    cosine      ``<g, c> / |g| |c|``
    projection  ``<e, c> / |c|^2``      the part of e along c: below 0 the gradient comes out too short
    coherence   of the last ``window``  the mean over elements of ``|mean over readings of sign(e)|``, with
                readings, not before    ``sign(0) = 0``. They span ``every_n_steps * window`` steps: an error
                there are as many       that turns faster than it is read passes for noise
    ==========  ======================  =======================================================================

    No threshold holds for every run: what a route bears depends on its fault. Coherence is free of scale but has a
    floor: signs drawn anew at every reading give not 0 but about ``sqrt(2 / (pi window))``, 0.20 for the default
    window, and elements without an error lower it. So all are only logged unless ``thresholds`` says otherwise; take
    limits from healthy runs with the same window.

    They are taken before callbacks edit the gradient, wherever these stand in ``trainer.callbacks``: it is the error of
    the plugin's faults, not one that ErrorShaping makes or RouteSplice takes away, and before clipping. A gradient that
    is not finite reads NaN and does not enter ``coherence``. Of a clean gradient that is zero zeta is infinite, or 0 if
    there is no error either.

    A fault in the passes costs one clean pass over the batch a reading; a fault of the finished gradient a copy. Memory
    and checkpoint hold ``window`` bytes an element of the route (query and key of GPT-2 small: 227 MB). Readings are
    logged, and in the verdict, as ``zeta/<route>``, so that monitors of several routes can stand side by side.

    Args:
        route: a route of :func:`lightning_qk.routes.route_parameters`.
        layers: its layers; None is all.
        window: readings of the coherence.
        per_tensor: also log zeta, cosine and projection of every weight (``warning/zeta/<route>/<name>``).
        vectors: read the gains and biases of the whole model too, of norms and of linear layers, which are in no route;
            readings are then ``zeta/<route>_and_vectors`` and so on. A bias that the fault leaves without a gradient is
            left out.
        every_n_steps: see :class:`EarlyWarning`, as the next three.
        thresholds: limits by reading's name.
        patience: consecutive readings beyond a limit that make an alarm.
        first_step: no alarm before this optimizer step.

    Raises:
        ValueError: an argument that cannot be.
    """

    limits: ClassVar[Mapping[str, Limit]] = {
        "zeta": Limit(),
        "cosine": Limit(below=True),
        "projection": Limit(below=True),
        "coherence": Limit(),
    }

    def __init__(
        self,
        route: str = "qk",
        layers: list[int] | None = None,
        window: int = 16,
        per_tensor: bool = False,
        vectors: bool = False,
        every_n_steps: int = 10,
        thresholds: dict[str, float | None] | None = None,
        patience: int = 1,
        first_step: int = 0,
    ) -> None:
        EarlyWarning.__init__(self, every_n_steps, thresholds, patience, first_step)
        CleanGradientCallback.__init__(self, route, layers)
        if window < 1:
            raise ValueError(f"BiasMonitor: window={window} must be at least 1.")
        if vectors and layers is not None:
            raise ValueError(f"BiasMonitor: vectors are those of the whole model; leave out layers={layers}.")
        self.window, self.per_tensor, self.vectors = window, per_tensor, vectors
        self._now: dict[str, float] = {}
        self._tensors: dict[str, float] = {}
        self._count = 0  # readings that went into the signs
        self._signs: dict[str, Tensor] = {}  # int8 [window, out, in] by weight, the oldest reading overwritten

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        EarlyWarning.setup(self, trainer, pl_module, stage)
        CleanGradientCallback.setup(self, trainer, pl_module, stage)

    def _chosen(self, model: nn.Module) -> dict[str, nn.Parameter]:
        route = route_parameters(model, self.route, self.layers)
        return {name: p for name, p in model.named_parameters() if name in route or (self.vectors and p.ndim == 1)}

    @override
    def wanted(self, pl_module: nn.Module) -> Iterable[nn.Parameter]:
        return self._chosen(pl_module).values()

    @override
    def parameters(self, pl_module: LightningModule) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self._chosen(pl_module).items() if p.grad is not None}

    @override
    def compare(self, pl_module: LightningModule) -> None:
        trainer = pl_module.trainer
        rows, signs = {}, {}
        for name, p in self.parameters(pl_module).items():
            assert p.grad is not None
            faulty, clean = full(p.grad).double(), full(self.clean(trainer, p)).double()
            error = faulty - clean
            products = error.square(), faulty.square(), clean.square(), faulty * clean, error * clean
            rows[name] = torch.stack([product.sum() for product in products])
            signs[name] = error.sign().to(torch.int8)
        moments = torch.stack(list(rows.values())).sum(0)
        finite = bool(moments.isfinite().all())
        self._now = _ratios(moments)
        if finite:
            self._take(signs)
        if self._count >= self.window:
            self._now["coherence"] = self._coherence() if finite else math.nan
        if self.per_tensor:
            self._tensors = {
                f"{self.label(reading)}/{name}": value
                for name, row in rows.items()
                for reading, value in _ratios(row).items()
            }

    def _take(self, signs: Mapping[str, Tensor]) -> None:
        """Puts one reading in place of the oldest."""
        for name, now in signs.items():
            ring = self._signs.get(name)
            ring = now.new_zeros(self.window, *now.shape) if ring is None else ring.to(now.device)
            ring[self._count % self.window] = now
            self._signs[name] = ring
        self._count += 1

    def _coherence(self) -> float:
        sums = [ring.sum(0, dtype=torch.int32).abs() for ring in self._signs.values()]
        return sum(int(total.sum()) for total in sums) / (self.window * sum(total.numel() for total in sums))

    @override
    def read(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        self.write(trainer, self._tensors)
        return self._now

    @override
    def label(self, name: str) -> str:
        return f"{name}/{self.scope}" + "_and_vectors" * self.vectors

    @property
    @override
    def state_key(self) -> str:
        vectors = {"vectors": True} if self.vectors else {}
        return self._generate_state_key(route=self.route, layers=self.layers, **vectors)

    @override
    def state_dict(self) -> dict[str, Any]:
        signs = {name: ring.clone() for name, ring in self._signs.items()}  # which the next reading writes into
        return {**super().state_dict(), "count": self._count, "signs": signs, "window": self.window}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["window"] != self.window:
            raise ValueError(
                f"BiasMonitor: window={self.window} but the checkpoint's monitor had {state_dict['window']}. Resume "
                "with the run's own YAML."
            )
        super().load_state_dict(state_dict)
        self._count, self._signs = state_dict["count"], dict(state_dict["signs"])


def _ratios(moments: Tensor) -> dict[str, float]:
    """Readings from the sums of e^2, g^2, c^2, g c and e c, float64 [5]; NaN unless all are finite."""
    e_e, g_g, c_c, g_c, e_c = moments if bool(moments.isfinite().all()) else torch.full_like(moments, math.nan)
    return {
        "zeta": math.sqrt(ratio(e_e, c_c)),
        "cosine": float(g_c / (g_g * c_c).sqrt()),
        "projection": ratio(e_c, c_c),
    }


def ratio(error: Tensor | float, clean: Tensor | float) -> float:
    """``error / clean``: 0 where there is no error, of nothing too; infinite where there is one of nothing; or NaN."""
    error, clean = float(error), float(clean)
    if clean == 0 and not math.isnan(error):
        return math.inf if error else 0.0
    return error / clean
