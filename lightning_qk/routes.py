"""Routes: named groups of weight matrices through which a gradient error can reach the model.

Callbacks and plugins name routes and attention sites; only this module knows which attributes they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lightning_qk.model import MLP, Attention

_PROJECTIONS = {
    "q": ("q_proj",),
    "k": ("k_proj",),
    "v": ("v_proj",),
    "o": ("o_proj",),
    "qk": ("q_proj", "k_proj"),
    "vo": ("v_proj", "o_proj"),
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
}
ROUTES = (*_PROJECTIONS, "mlp", "all")


def attention_sites(model: nn.Module) -> list[Attention]:
    """The attention modules of ``model`` in layer order.

    Raises:
        ValueError: there are none.
    """
    sites = [module for module in model.modules() if isinstance(module, Attention)]
    if not sites:
        raise ValueError(f"{type(model).__name__} has no lightning_qk.model.Attention: nothing to watch or to guard.")
    return sites


def route_linears(model: nn.Module, route: str, layers: Sequence[int] | None = None) -> dict[str, nn.Linear]:
    """The linear layers of a route, by their names in ``model``; arguments and errors of :func:`route_parameters`."""
    if route not in ROUTES:
        raise ValueError(f"route {route!r} is not one of {', '.join(ROUTES)}.")
    chosen: set[nn.Module] = set()
    if route != "mlp":
        names = _PROJECTIONS["attention" if route == "all" else route]
        chosen |= {getattr(site, name) for site in _pick(attention_sites(model), layers) for name in names}
    if route in ("mlp", "all"):
        mlps = [module for module in model.modules() if isinstance(module, MLP)]
        chosen |= {linear for mlp in _pick(mlps, layers) for linear in (mlp.up_proj, mlp.down_proj)}
    return {
        name: module for name, module in model.named_modules() if module in chosen and isinstance(module, nn.Linear)
    }


def route_parameters(model: nn.Module, route: str, layers: Sequence[int] | None = None) -> dict[str, nn.Parameter]:
    """The weight matrices of a route, by their names in ``model``.

    Args:
        model: a GPT or a module that holds one.
        route: ``q, k, v, o, qk, vo, mlp, attention`` or ``all`` (attention and MLP); embeddings, norms and biases
            belong to no route.
        layers: indices of the blocks; None is all of them.

    Raises:
        ValueError: for an unknown route or a layer that does not exist.
    """
    chosen = {id(linear.weight) for linear in route_linears(model, route, layers).values()}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in chosen}


def _pick(modules: list, layers: Sequence[int] | None) -> list:
    if layers is None:
        return modules
    wrong = [layer for layer in layers if not 0 <= layer < len(modules)]
    if wrong:
        raise ValueError(f"layers: {wrong[0]} is not a layer; the model has layers 0 to {len(modules) - 1}.")
    return [modules[layer] for layer in layers]
