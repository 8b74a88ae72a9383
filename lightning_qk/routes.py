"""Routes: named groups of weight matrices through which a gradient error can reach the model.

Callbacks and plugins name routes and attention sites; only this module and :mod:`lightning_qk.sites` know which
attributes they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lightning_qk.model import MLP
from lightning_qk.sites import ADAPTERS, AttentionSite, MLPSite, adopt_attention, adopt_mlps
from lightning_qk.sites.adopt import mlp_modules
from lightning_qk.student import StudentBlock

_PROJECTIONS = {"q": "q", "k": "k", "v": "v", "o": "o", "qk": "qk", "vo": "vo", "attention": "qkvo"}
ROUTES = (*_PROJECTIONS, "mlp", "all")


def attention_sites(model: nn.Module) -> list[AttentionSite]:
    """The attention modules of ``model`` in layer order: its own sites, or else those of Hugging Face GPT-2, Llama and
    Qwen, of litgpt's GPT and of ``nn.MultiheadAttention``, in place.

    The first call for a model of another library adds the sites' switches to its state dict; make it before weights are
    loaded (callbacks do in ``setup``).

    Raises:
        ValueError: there are none.
    """
    sites = adopt_attention(model)
    if not sites:
        known = [key if isinstance(key, str) else key.__name__ for key in ADAPTERS]
        raise ValueError(
            f"{type(model).__name__} has no lightning_qk.model.Attention, nor any of {', '.join(known)}: nothing to "
            "watch or to guard. For another attention class, write a lightning_qk.sites.AttentionSite and enter it in "
            "lightning_qk.sites.ADAPTERS under the class. A LightningModule must have its model from __init__ on: one "
            "that comes in setup or configure_model comes after the callbacks."
        )
    return sites


def mlp_sites(model: nn.Module) -> list[MLPSite]:
    """The MLPs of ``model`` in layer order, as :func:`attention_sites`.

    Raises:
        ValueError: there are none.
    """
    sites = adopt_mlps(model)
    if not sites:
        raise ValueError(f"{type(model).__name__} has no MLP module of a known class, so no output to normalise.")
    return sites


def route_linears(model: nn.Module, route: str, layers: Sequence[int] | None = None) -> dict[str, nn.Linear]:
    """The linear layers of a route, by their names in ``model``; arguments and errors of :func:`route_parameters`.

    Raises:
        ValueError: also where a matrix of the route is not the weight of an ``nn.Linear``.
    """
    chosen = {id(p): name for name, p in route_parameters(model, route, layers).items()}
    linears = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module.weight) in chosen
    }
    missing = set(chosen) - {id(linear.weight) for linear in linears.values()}
    if missing:
        names = [name for key, name in chosen.items() if key in missing]
        raise ValueError(f"route {route!r}: {names[0]} and {len(names) - 1} more are not weights of nn.Linear layers.")
    return linears


def head_linear(model: nn.Module) -> dict[str, nn.Linear]:
    """The output layer of a language model, by its name in ``model``.

    Raises:
        ValueError: there is no ``nn.Linear`` called ``lm_head``.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if name.split(".")[-1] == "lm_head" and isinstance(module, nn.Linear)
    }
    if not found:
        raise ValueError(f"head: {type(model).__name__} has no nn.Linear called lm_head; set head to false.")
    return found


def route_parameters(model: nn.Module, route: str, layers: Sequence[int] | None = None) -> dict[str, nn.Parameter]:
    """The weight matrices of a route, by their names in ``model``.

    Args:
        model: a GPT or a module that holds one, or a model of a library that :func:`attention_sites` knows.
        route: ``q, k, v, o, qk, vo, mlp, attention`` or ``all`` (attention and MLP); embeddings, norms and biases
            belong to no route.
        layers: indices of the blocks; None is all of them.

    Raises:
        ValueError: for an unknown route, a layer that does not exist, or projections that share a parameter with
            others.
    """
    if route not in ROUTES:
        raise ValueError(f"route {route!r} is not one of {', '.join(ROUTES)}.")
    chosen: set[int] = set()
    if route != "mlp":
        names = _PROJECTIONS["attention" if route == "all" else route]
        chosen |= {id(p) for site in _pick(attention_sites(model), layers) for p in site.matrices(names)}
    if route in ("mlp", "all"):
        chosen |= {id(linear.weight) for linears in _pick(_mlp_layers(model), layers) for linear in linears}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in chosen}


def _mlp_layers(model: nn.Module) -> list[list[Any]]:
    ours = (MLP, StudentBlock)
    own = [[module.up_proj, module.down_proj] for module in model.modules() if isinstance(module, ours)]
    if own:
        return own
    return [[getattr(module, name) for name in names] for module, names in mlp_modules(model)]


def _pick(modules: list, layers: Sequence[int] | None) -> list:
    if layers is None:
        return modules
    wrong = [layer for layer in layers if not 0 <= layer < len(modules)]
    if wrong:
        raise ValueError(f"layers: {wrong[0]} is not a layer; the model has layers 0 to {len(modules) - 1}.")
    return [modules[layer] for layer in layers]
