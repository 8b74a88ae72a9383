"""Edits the realised update along the weight's own leading directions: do they drive the runaway, or follow it?"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from callbacks.draws import generator, normal, run_seed
from lightning_qk.module import full, logging_is_due, write_full
from lightning_qk.routes import route_parameters
from lightning_qk.strategies import refuse_strategy

MODES = ("on_target", "off_target", "isotropic", "random_subspace")
SIDES = ("both", "left", "right")
_NOTHING = 1e-12  # of the update's norm: what is left of an update that lay wholly in the removed subspace


class Reading(NamedTuple):
    """What is logged of an edit.

    Attributes:
        energy: ``|R|^2 / |D|^2``, the share of the update's energy that was removed.
        gap: ``s_k / s_{k+1}`` of the weight.
        overdrawn: there was less energy outside the target than had to be removed, see :class:`DirectionProbe`.
    """

    energy: float
    gap: float
    overdrawn: bool = False


class DirectionProbe(Callback):
    r"""Removes a component R from the realised update D of each projection, after the optimizer has stepped.

    D is the weight after the step less the weight W before it: Adam, clipping and weight decay are in it. With U, V the
    ``k`` leading left and right singular vectors of W, by full decomposition in float64, the component on target is
    ``P(D) = U U' D V V'`` (``side="both"``), ``U U' D`` (``left``) or ``D V V'`` (``right``), and ``E = |P(D)|^2`` its
    energy (Frobenius). The modes replace D by

    ===============  ======================  ===========================================================
    on_target        ``a (D - P(D))``        nothing is left on target
    off_target       ``a (D - R)``           R is the projection of D on a subspace with nothing on target
                                             (``P(R) = 0``) in which D has exactly the energy E
    isotropic        ``b D``                 ``b = sqrt(1 - E / |D|^2)``: the same energy, no direction
    random_subspace  ``a (D - A A' D B B')`` random k-frames A and B, as ``side`` says: the naive
                                             control, which removes the little they hold and not E
    ===============  ======================  ===========================================================

    with a such that the norm is again ``|D|``. As R is a projection of D, ``|R|^2`` is also what D loses before it is
    rescaled, so a is the same number on and off target. Rescaling raises the effective learning rate of what remains;
    isotropic, which rescaling would undo, is the arm that shrinks instead.

    Off target, R takes directions at random from outside U and V, one after the other (two-sided: growing square blocks
    of D in random bases of both complements, then pairs of a leading and another direction), until it holds E; the last
    is turned until it holds just what is still needed. Past ``E = |D|^2 / 2`` no such R exists: then R is ``D - P(D)``
    scaled up to the energy E, which subtracts more than there is, and ``probe/overdrawn`` says in which share of the
    matrices. That happens once a runaway is under way; what the arm says of its onset is said before.

    Draws depend on (``seed``, step, name of the weight), so ranks agree and a resumed run goes on bit for bit; there is
    no state. An update that is not finite is left as it is. Exact up to the rounding of W + D to the weight's dtype.

    Logs ``probe/energy`` (``|R|^2 / |D|^2``, mean over the matrices), ``probe/energy_max``, ``probe/gap`` (the least
    ``s_k / s_{k+1}``: near 1 the leading subspace is ill-posed), energy and gap also per projection
    (``probe/energy/q_proj``), and off target ``probe/overdrawn``; at steps that it edits and at which loggers write.

    Args:
        mode: ``on_target``, ``off_target``, ``isotropic`` or ``random_subspace``.
        target: ``q``, ``k`` or ``both``; or, to probe another place, any route of
            :func:`lightning_qk.routes.route_parameters`.
        k: leading directions.
        side: ``both``, ``left`` or ``right`` singular vectors.
        layers: indices of the blocks; None is all.
        start_step: first optimizer step, counted from 1, that may be edited.
        every_n_steps: edit the steps that are multiples of it.
        seed: of the random directions; None takes the run's (``seed_everything``).

    Raises:
        ValueError: an argument that cannot be, or ``k`` not below the smaller side of a weight.
    """

    def __init__(
        self,
        mode: Literal["on_target", "off_target", "isotropic", "random_subspace"] = "on_target",
        target: str = "both",
        k: int = 3,
        side: Literal["both", "left", "right"] = "both",
        layers: list[int] | None = None,
        start_step: int = 1,
        every_n_steps: int = 1,
        seed: int | None = None,
    ) -> None:
        if mode not in MODES or side not in SIDES:
            raise ValueError(
                f"DirectionProbe: mode={mode!r} ({', '.join(MODES)}) or side={side!r} ({', '.join(SIDES)})."
            )
        if k < 1 or start_step < 1 or every_n_steps < 1:
            raise ValueError(
                f"DirectionProbe: k={k}, start_step={start_step} and every_n_steps={every_n_steps} must be at least 1."
            )
        self.mode, self.target, self.k, self.side, self.layers = mode, target, k, side, layers
        self.start_step, self.every_n_steps, self.seed = start_step, every_n_steps, run_seed(seed)
        self._hooks: list[RemovableHandle] = []
        self._before: dict[str, Tensor] = {}
        self._readings: dict[str, Reading] = {}
        self._edits = self._overdrawn = 0

    def parameters(self, pl_module: nn.Module) -> dict[str, nn.Parameter]:
        """The weights whose updates are edited, by name."""
        return route_parameters(pl_module, "qk" if self.target == "both" else self.target, self.layers)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        refuse_strategy(trainer)
        for name, p in self.parameters(pl_module).items():
            if self.k >= min(p.shape):
                raise ValueError(
                    f"DirectionProbe: k={self.k} leaves nothing outside the leading directions of {name} "
                    f"{tuple(p.shape)}; set k below {min(p.shape)}."
                )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        hook = partial(self._profiled, trainer, pl_module)
        self._hooks = [optimizer.register_step_post_hook(hook) for optimizer in trainer.optimizers]

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        step = trainer.global_step + 1
        if step >= self.start_step and step % self.every_n_steps == 0:
            self._before = {name: full(p.detach()).clone() for name, p in self.parameters(pl_module).items()}

    def _profiled(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        with trainer.profiler.profile(f"[Callback]{self.state_key}.step_post_hook"):  # type: ignore[attr-defined]
            self._after_step(trainer, pl_module)

    @torch.no_grad()
    def _after_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        before, self._before = self._before, {}
        if not before:
            return
        for name, p in self.parameters(pl_module).items():
            w_mn = before[name].double()
            d_mn = full(p.detach()).double() - w_mn
            if not bool(torch.isfinite(d_mn).all()):  # CollapseStop's business, and no decomposition exists
                self._readings[name] = Reading(math.nan, math.nan)
                continue
            draw = generator(self.seed, trainer.global_step, name)
            d_mn, self._readings[name] = edited(w_mn, d_mn, self.mode, self.side, self.k, draw)
            self._edits, self._overdrawn = self._edits + 1, self._overdrawn + self._readings[name].overdrawn
            write_full(p, w_mn + d_mn)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        readings, self._readings = self._readings, {}
        if not readings or not logging_is_due(trainer):
            return
        groups = {"": list(readings.values())}
        for name, reading in readings.items():
            groups.setdefault("/" + name.removesuffix(".weight").split(".")[-1], []).append(reading)
        values = {"probe/energy_max": float(torch.tensor([reading.energy for reading in groups[""]]).max())}
        for projection, members in groups.items():
            energy, gap = (torch.tensor([member[at] for member in members]) for at in (0, 1))
            values[f"probe/energy{projection}"], values[f"probe/gap{projection}"] = (
                float(energy.mean()),
                float(gap.min()),
            )
        if self.mode == "off_target":
            values["probe/overdrawn"] = sum(reading.overdrawn for reading in readings.values()) / len(readings)
        pl_module.log_dict(values, logger=False)
        for logger in trainer.loggers:  # not through `log`, which would repeat a reading at every step until the next
            logger.log_metrics(values, step=trainer.global_step - 1)

    def verdict_fields(self) -> dict[str, Any]:
        """What the run's verdict takes from here: the share of edits in which there was less energy than asked for."""
        if self.mode != "off_target":
            return {}
        return {"probe_overdrawn": self._overdrawn / self._edits if self._edits else None}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"edits": self._edits, "overdrawn": self._overdrawn}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._edits, self._overdrawn = state_dict["edits"], state_dict["overdrawn"]

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        self._before, self._readings = {}, {}

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)


def edited(w_mn: Tensor, d_mn: Tensor, mode: str, side: str, k: int, draw: torch.Generator) -> tuple[Tensor, Reading]:
    """The update to apply instead of ``d_mn``, as :class:`DirectionProbe` says.

    Args:
        w_mn: the weight before the step, float64 [m, n].
        d_mn: its realised update, float64.
        mode: of :class:`DirectionProbe`, as ``side``.
        side: which singular vectors count.
        k: leading directions, fewer than m and n.
        draw: where random directions come from.
    """
    u, s, vt = torch.linalg.svd(w_mn, full_matrices=False)
    u_mk, v_nk, gap = u[:, :k], vt[:k].mT, float(s[k - 1] / s[k])
    size = d_mn.norm()
    if size == 0:
        return d_mn, Reading(0.0, gap)
    removed_mn, overdrawn = _component(d_mn, u_mk, v_nk, side), False
    energy = removed_mn.square().sum()
    if mode == "isotropic":
        share = energy / size.square()
        return d_mn * (1 - share).clamp_min(0).sqrt(), Reading(float(share), gap)
    if mode == "off_target":
        removed_mn, overdrawn = _outside(d_mn, u_mk, v_nk, side, energy, draw)
    elif mode == "random_subspace":
        a_mk, b_nk = (torch.linalg.qr(normal(tuple(x.shape), x.device, draw)).Q for x in (u_mk, v_nk))
        removed_mn = _component(d_mn, a_mk, b_nk, side)
    left_mn = d_mn - removed_mn
    left = left_mn.norm()
    if left > _NOTHING * size:
        left_mn *= size / left
    return left_mn, Reading(float(removed_mn.square().sum() / size.square()), gap, overdrawn)


def _component(d_mn: Tensor, u_mk: Tensor, v_nk: Tensor, side: str) -> Tensor:
    """U U' D V V', or one side of it."""
    if side != "right":
        d_mn = u_mk @ (u_mk.mT @ d_mn)
    if side != "left":
        d_mn = (d_mn @ v_nk) @ v_nk.mT
    return d_mn


def _outside(
    d_mn: Tensor, u_mk: Tensor, v_nk: Tensor, side: str, energy: Tensor, draw: torch.Generator
) -> tuple[Tensor, bool]:
    """A component of D with this energy and nothing on target, and whether that took more than all there is."""
    (m, n), k, two_sided = d_mn.shape, u_mk.shape[1], side == "both"
    a_mm = _basis(u_mk, draw) if side != "right" else torch.eye(m).to(u_mk)
    b_nn = _basis(v_nk, draw) if side != "left" else torch.eye(n).to(v_nk)
    c_mn = a_mm.mT @ d_mn @ b_nn
    row_m1, column_n = torch.arange(m, device=d_mn.device)[:, None], torch.arange(n, device=d_mn.device)
    if side == "right":
        row_m1 = torch.zeros_like(row_m1)
    if side == "left":
        column_n = torch.zeros_like(column_n)
    leading_mn = (row_m1 >= m - k).int() + (column_n >= n - k).int()  # 2 (of one side 1) is on target
    # coefficients join as growing square blocks (of one side direction by direction), pairs with a leading one last
    order = (torch.maximum(row_m1, column_n) + (m + n) * leading_mn).flatten().argsort(stable=True)
    order = order[: int((leading_mn < 1 + two_sided).sum())]
    taken, overdrawn = _with_energy(c_mn.flatten()[order], energy)
    taken_mn = torch.zeros_like(c_mn).flatten().index_copy_(0, order, taken).view(m, n)
    return a_mm @ taken_mn @ b_nn.mT, overdrawn


def _basis(u_mk: Tensor, draw: torch.Generator) -> Tensor:
    """An orthonormal basis [m, m]: a random one of what is orthogonal to the orthonormal ``u_mk``, then ``u_mk``."""
    m, k = u_mk.shape
    q_mm = torch.linalg.qr(torch.cat([u_mk, normal((m, m - k), u_mk.device, draw)], 1)).Q
    return torch.cat([q_mm[:, k:], u_mk], 1)


def _with_energy(c_N: Tensor, energy: Tensor) -> tuple[Tensor, bool]:
    """The projection of ``c_N`` on a subspace in which it has this energy, leading coordinates first.

    Coordinates are taken whole while they fit. Then c is projected on one direction in the plane of the next two, at
    the angle to c's own part there that leaves the energy still needed. Energy that c does not have is had by scaling c
    up, which is no projection; the second value says so.
    """
    held_N = c_N.square().cumsum(0)
    if len(c_N) < 2 or not bool(energy < held_N[-1]):
        return c_N * (energy / held_N[-1]).nan_to_num(1.0, 1.0).sqrt(), bool(energy > held_N[-1])
    at = min(int(torch.searchsorted(held_N, energy)), len(c_N) - 2)
    needed = (energy - c_N[:at].square().sum()).clamp_min(0)
    x, y = c_N[at], c_N[at + 1]
    size = torch.hypot(x, y).clamp_min(torch.finfo(c_N.dtype).tiny)
    cosine = (needed.sqrt() / size).clamp_max(1)
    sine = (1 - cosine.square()).sqrt()
    direction = torch.stack([cosine * x - sine * y, cosine * y + sine * x]) / size
    taken_N = torch.zeros_like(c_N)
    taken_N[:at] = c_N[:at]
    taken_N[at : at + 2] = needed.sqrt() * direction
    return taken_N, False
