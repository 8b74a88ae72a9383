"""Finds attention and MLP modules of other libraries and gives them sites, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lightning_qk.sites.huggingface import GPT2Site, LlamaSite
from lightning_qk.sites.litgpt import LitGPTSite
from lightning_qk.sites.site import AttentionSite, MLPSite
from lightning_qk.sites.torch_attention import SITE, MultiheadSite

# By name, so that no library is imported before a module of it is there; add others by class. Subclasses count too.
ADAPTERS: dict[str | type, Callable[[Any], AttentionSite]] = {
    "GPT2Attention": GPT2Site,
    "LlamaAttention": LlamaSite,
    "Qwen2Attention": LlamaSite,
    "Qwen3Attention": LlamaSite,
    "CausalSelfAttention": LitGPTSite,
    "MultiheadAttention": MultiheadSite,
}
# the linear layers of an MLP, by the class that holds them; a mixture of experts has none that are a layer's own
MLPS: dict[str | type, tuple[str, ...]] = {
    "GPT2MLP": ("c_fc", "c_proj"),
    "LlamaMLP": ("gate_proj", "up_proj", "down_proj"),
    "Qwen2MLP": ("gate_proj", "up_proj", "down_proj"),
    "Qwen3MLP": ("gate_proj", "up_proj", "down_proj"),
    "GptNeoxMLP": ("fc", "proj"),
    "LLaMAMLP": ("fc_1", "fc_2", "proj"),
    "LLaMAMoE": (),
    "TransformerEncoderLayer": ("linear1", "linear2"),
    "TransformerDecoderLayer": ("linear1", "linear2"),
}
LIBRARIES = ("torch", "transformers", "litgpt")
MLP_SITE = "lightning_qk_mlp_site"


def table_entry(module: nn.Module, table: dict[str | type, Any]) -> Any:
    """The entry of the first class in the module's ancestry that the table has, or None; names are the libraries'."""
    for kind in type(module).__mro__:
        for key in (kind, kind.__name__ if kind.__module__.split(".")[0] in LIBRARIES else kind):
            if key in table:
                return table[key]
    return None


def mlp_modules(model: nn.Module) -> list[tuple[nn.Module, tuple[str, ...]]]:
    """The modules of :data:`MLPS` in layer order, and the names of their linear layers.

    Raises:
        ValueError: one is a mixture of experts.
    """
    found = [(module, names) for module in model.modules() if (names := table_entry(module, MLPS)) is not None]
    for module, names in found:
        if not names:
            raise ValueError(
                f"{type(module).__name__} is a mixture of experts: its layer has no MLP of its own. Use a route of "
                "attention."
            )
    return found


def present_sites(model: nn.Module) -> list[AttentionSite]:
    """The sites that ``model`` has by now, in layer order."""
    return [module for module in model.modules() if isinstance(module, AttentionSite)]


def adopt_attention(model: nn.Module) -> list[AttentionSite]:
    """The sites of ``model`` in layer order; modules of :data:`ADAPTERS` get theirs now, if they have none.

    A new site adds its switches, which are persistent buffers, to the state dict: adopt a model before weights are
    loaded into it.
    """
    sites = present_sites(model)
    if sites:
        return sites
    for module in list(model.modules()):
        adapter = table_entry(module, ADAPTERS)
        if adapter is not None:
            site = adapter(module)
            module.add_module(SITE, site.to(site.projection("q").weight.device))
            sites.append(site)
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # nested tensors exist on the fast path only, which sites close
    return sites


def adopt_mlps(model: nn.Module) -> list[MLPSite]:
    """The MLPs of ``model`` in layer order as sites, as :func:`adopt_attention`; only where the MLP is a module."""
    sites = [module for module in model.modules() if isinstance(module, MLPSite)]
    if sites:
        return sites
    for module, _ in mlp_modules(model):
        if not hasattr(module, "linear1"):
            site = MLPSite().to(next(module.parameters()).device)
            module.add_module(MLP_SITE, site)
            module.register_forward_hook(_treat_output)
            sites.append(site)
    return sites


def _treat_output(module: nn.Module, _: Any, y: Tensor) -> Tensor:
    site = getattr(module, MLP_SITE)
    assert isinstance(site, MLPSite)
    return site.treat(y)
