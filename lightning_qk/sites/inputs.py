"""What the projections of attention sites are given: tokens, seen by hooks on the modules that own the weights."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_qk.sites.site import AttentionSite


class ProjectionInputs:
    """Hooks that keep the inputs of some projections while they are asked to.

    A hook sits on the module whose own parameter the projection's weight is: a linear layer, or an
    ``nn.MultiheadAttention``, whose ``query``, ``key`` and ``value`` are then the inputs. Compiled modules trace it;
    their graphs are guarded on whether it keeps, so leave that alone from the forward pass to the end of the backward
    pass: a recomputation must find the graph of the forward pass.

    Args:
        model: holds the sites, whatever has wrapped or sharded it since.
        sites: its attention sites in layer order.
        names: projections, of ``q``, ``k``, ``v`` and ``o``.

    Raises:
        ValueError: a projection's weight is no module's own parameter.
    """

    def __init__(self, model: nn.Module, sites: Iterable[AttentionSite], names: Sequence[str] = ("q", "k")) -> None:
        owners = {id(p): module for module in model.modules() for p in module.parameters(recurse=False)}
        self._catches: list[dict[str, _Catch]] = []
        self._handles: list[Any] = []
        for layer, site in enumerate(sites):
            self._catches.append({})
            for name in names:
                owner = owners.get(id(site.projection(name).weight))
                if owner is None:
                    raise ValueError(
                        f"ProjectionInputs: the weight of {name!r} in layer {layer} ({type(site).__name__}) is no "
                        "parameter of a module, so that no hook sees its input; let AttentionSite.projection name it."
                    )
                catch = self._catches[-1][name] = _Catch(owner, name)
                self._handles.append(owner.register_forward_pre_hook(catch, with_kwargs=True))

    def keep(self, on: bool) -> None:
        """From now on every forward pass leaves its inputs in place of the last one's, or none does; forgets these."""
        for catches in self._catches:
            for catch in catches.values():
                catch.keeping, catch.x = on, None

    def tokens(self) -> list[dict[str, Tensor]]:
        """By layer and name, [tokens, width], whatever the order of batch and time; padding counts as tokens.

        Raises:
            RuntimeError: a module has not been called since :meth:`keep`.
        """
        return [{name: catch.tokens(name, n) for name, catch in names.items()} for n, names in enumerate(self._catches)]

    def remove(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()


class _Catch:
    """One hook, and the input that it has caught."""

    def __init__(self, owner: nn.Module, name: str) -> None:
        own_qkv = isinstance(owner, nn.MultiheadAttention) and name != "o"
        self._position = "qkv".index(name) if own_qkv else 0
        self._keyword = list(inspect.signature(owner.forward).parameters)[self._position]
        self.keeping = False
        self.x: Tensor | None = None

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.keeping:
            x = args[self._position] if len(args) > self._position else kwargs[self._keyword]
            self.x = x.detach()

    def tokens(self, name: str, layer: int) -> Tensor:
        if self.x is None:
            raise RuntimeError(
                f"ProjectionInputs: the module with the weight of {name!r} in layer {layer} was not called in the last "
                "training pass, so that its input is not known; let the model call it as a module."
            )
        return self.x.flatten(0, -2)
