"""What a sensor reads of an attention module, and what a guard may change in it.

The switches are persistent buffers, one entry a head: they change the function that is computed, so they travel with
the weights through checkpoints, validation and export. Each has a copy in Python, free to read, on which a compiled
graph is guarded (a hook that is added later is not seen by a compiled submodule).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_qk.attention import AttentionCore

QK_NORM_EPS = 1e-6
SWITCHES = ("qk_norm", "v_norm", "fp32_carry", "softcap", "mlp_norm")
_LEAST_SIZE = 1e-3  # vectors smaller than that are not blown up all the way: their direction is rounding noise


def rms_normalise(x: Tensor) -> Tensor:
    """x / rms(x) over the last dimension in float32, returned in x's dtype.

    The epsilon is 1e-6, times the square of the vector's largest entry where that lies between 1e-3 and 1: a fixed one
    would make the result depend on the scale of small vectors.
    """
    wide = x.float()
    size = wide.detach().abs().amax(-1, keepdim=True).clamp(_LEAST_SIZE, 1.0)
    return F.rms_norm(wide / size, (x.shape[-1],), eps=QK_NORM_EPS).to(x.dtype)


class Projection(NamedTuple):
    """Where a projection's weight and bias are.

    Attributes:
        weight: the parameter that holds the matrix.
        bias: the parameter that holds its bias.
        rows: outputs of the parameter that are this projection's, None for all.
        transposed: the parameter is [in, out].
    """

    weight: nn.Parameter
    bias: nn.Parameter | None = None
    rows: slice | None = None
    transposed: bool = False


def switches_in(state_dict: Mapping[str, Any]) -> list[str]:
    """The keys of the switches that are on in a model's state dict."""
    return [
        key for key, value in state_dict.items() if key.rpartition(".")[2] in SWITCHES and bool(_is_on(value).any())
    ]


def _is_on(switch: Tensor) -> Tensor:
    return switch if switch.dtype is torch.bool else switch.isfinite()


def _follow_loaded(module: nn.Module, _: object) -> None:
    assert isinstance(module, _Switches)
    module._follow_buffers()


class _Switches(nn.Module):
    """Persistent switches with a copy in Python."""

    def __init__(self) -> None:
        super().__init__()
        self._on: dict[str, tuple[int, ...]] = {}
        self.register_load_state_dict_post_hook(_follow_loaded)

    def heads_on(self, switch: str) -> tuple[int, ...]:
        """The heads for which a switch is on, without touching the device."""
        return self._on[switch]

    def switches_on(self) -> dict[str, tuple[int, ...]]:
        """The switches that are on for any head, and for which."""
        return {name: heads for name, heads in self._on.items() if heads}

    def _add_switch(self, name: str, buffer: Tensor) -> None:
        self.register_buffer(name, buffer)
        self._on[name] = ()

    def _follow_buffers(self) -> None:
        for name in self._on:
            self._on[name] = tuple(_is_on(self.get_buffer(name)).nonzero()[:, 0].tolist())


class AttentionSite(_Switches):
    """One attention module. ``lightning_qk.model.Attention`` is a site; other modules get one as a submodule.

    Subclasses name their projections and, in their forward pass, call :meth:`treat` and then :attr:`core`.

    Args:
        n_heads: query heads.
        n_kv_heads: key and value heads; switches of the query heads that share one move together.
        head_dim: width of a query and key head.
        core: sensors, and where a plugin put it, the attention itself.

    Attributes:
        own_core: the core it began with, the model's own attention.
        qk_norm: bool [H], q and k are RMS-normalised.
        v_norm: bool [H], v is.
        fp32_carry: bool [H], a plugin's fault is kept out of the head.
        softcap: float32 [H], c of the soft cap ``c tanh(S / c)`` of the logits; inf is none.
    """

    qk_norm: Tensor
    v_norm: Tensor
    fp32_carry: Tensor
    softcap: Tensor
    base_cap: float = math.inf  # of a model whose logits are capped whatever the switches say

    def __init__(self, n_heads: int, n_kv_heads: int, head_dim: int, core: AttentionCore) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, head_dim
        for name in ("qk_norm", "v_norm", "fp32_carry"):
            self._add_switch(name, torch.zeros(n_heads, dtype=torch.bool))
        self._add_switch("softcap", torch.full((n_heads,), math.inf))
        self._core = self.own_core = core

    def projection(self, name: str) -> Projection:
        """Where ``q``, ``k``, ``v`` or ``o`` is."""
        raise NotImplementedError(f"{type(self).__name__}.projection: say where {name!r} is.")

    @property
    def scales_qk(self) -> bool:
        """Whether logits scale with the weights of q and k: not where the model itself normalises either."""
        return True

    @property
    def core(self) -> AttentionCore:
        """The attention core; assign to it to replace it."""
        return self._core

    @core.setter
    def core(self, core: AttentionCore) -> None:
        self._core = core
        self._inform_core()

    def weight(self, name: str) -> Tensor:
        """The matrix of ``q``, ``k``, ``v`` or ``o`` as ``nn.Linear`` has it, [out, in]: a view of the parameter."""
        matrix, _, rows, transposed = self.projection(name)
        full = matrix.T if transposed else matrix
        return full if rows is None else full[rows]

    def bias(self, name: str) -> Tensor | None:
        """Its bias [out], a view."""
        _, bias, rows, _ = self.projection(name)
        return bias if bias is None or rows is None else bias[rows]

    @property
    def q_weight(self) -> Tensor:
        """[H * D, n], of which sigma_q is the largest singular value."""
        return self.weight("q")

    @property
    def k_weight(self) -> Tensor:
        """[G * D, n]."""
        return self.weight("k")

    def matrices(self, names: Iterable[str]) -> list[nn.Parameter]:
        """The parameters that hold exactly these projections.

        Raises:
            ValueError: one of them holds others too.
        """
        holders = {name: self.projection(name).weight for name in "qkvo"}
        wanted = {id(holders[name]) for name in names}
        beyond = [name for name in holders if id(holders[name]) in wanted and name not in names]
        if beyond:
            raise ValueError(
                f"no route for {' and '.join(names)} alone: {type(self).__name__} keeps {'/'.join(beyond)} in the same "
                "parameter. Use the route 'attention', or a model with separate projections such as Llama."
            )
        return list({id(holders[name]): holders[name] for name in names}.values())

    # switches

    def set_switch(self, name: str, on: bool, heads: Iterable[int] | None = None) -> None:
        """Switches ``qk_norm``, ``v_norm`` or ``fp32_carry`` from the next forward pass on, for heads or for all."""
        self._write(name, on, heads)

    def set_qk_norm(self, on: bool, heads: Iterable[int] | None = None) -> None:
        """Switches QK-norm from the next forward pass on."""
        self._write("qk_norm", on, heads)

    def set_softcap(self, cap: float | None, heads: Iterable[int] | None = None) -> None:
        """Caps the logits from the next forward pass on; None takes the cap off.

        Raises:
            ValueError: the core cannot.
        """
        if cap is not None:
            _require_softcap(self._core)
        self._write("softcap", math.inf if cap is None else cap, heads)

    @property
    def qk_norm_on(self) -> bool:
        """Whether any head's q and k are normalised, without touching the device."""
        return bool(self._on["qk_norm"])

    def whole_groups(self, heads: Iterable[int]) -> tuple[int, ...]:
        """The heads that share a key head with any of these."""
        group = self.n_heads // self.n_kv_heads
        return tuple(h for g in sorted({h // group for h in heads}) for h in range(g * group, (g + 1) * group))

    @torch.no_grad()
    def _write(self, name: str, value: bool | float, heads: Iterable[int] | None) -> None:
        chosen = list(range(self.n_heads) if heads is None else self.whole_groups(heads))
        self.get_buffer(name)[chosen] = value
        self._follow_buffers()

    def _follow_buffers(self) -> None:
        super()._follow_buffers()
        self._inform_core()

    def _inform_core(self) -> None:
        self._core.clean_heads = self._on["fp32_carry"]
        if self.cap_H is not None:
            _require_softcap(self._core)

    # forward pass

    @property
    def cap_H(self) -> Tensor | None:
        """float32 [H], the caps on the logits, or None where there are none."""
        if not self._on["softcap"] and self.base_cap == math.inf:
            return None
        return self.softcap.clamp(max=self.base_cap)

    def treat(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as the switches want them."""
        return self._normed("qk_norm", q), self._normed("qk_norm", k), self._normed("v_norm", v)

    def _normed(self, switch: str, x: Tensor) -> Tensor:
        on = self._on[switch]
        if not on:
            return x
        normed = rms_normalise(x)
        if len(on) == self.n_heads:
            return normed
        flags = self.get_buffer(switch)[:: self.n_heads // x.shape[1]]
        return torch.where(flags[:, None, None], normed, x)


def _require_softcap(core: AttentionCore) -> None:
    if not core.has_softcap:
        raise ValueError(
            f"{type(core).__name__} has no soft cap: the streaming emulator cannot cap logits. Set core: sdpa in the "
            "plugin, or leave the soft cap out (model.overrides.softcap, QKGuard action softcap)."
        )


class MLPSite(_Switches):
    """One MLP, whose output a guard may RMS-normalise.

    Attributes:
        mlp_norm: bool [1].
    """

    mlp_norm: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._add_switch("mlp_norm", torch.zeros(1, dtype=torch.bool))

    @torch.no_grad()
    def set_mlp_norm(self, on: bool) -> None:
        """Switches the norm from the next forward pass on."""
        self.mlp_norm.fill_(on)
        self._follow_buffers()

    def treat(self, y: Tensor) -> Tensor:
        """The MLP's output as the switch wants it."""
        return rms_normalise(y) if self._on["mlp_norm"] else y
