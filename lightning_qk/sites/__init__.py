"""Attention and MLP modules as sensors and guards see them, whoever wrote the model."""

from lightning_qk.sites.adopt import ADAPTERS, MLPS, adopt_attention, adopt_mlps, present_sites
from lightning_qk.sites.site import AttentionSite, MLPSite, Projection, switches_in

__all__ = [
    "ADAPTERS",
    "MLPS",
    "AttentionSite",
    "MLPSite",
    "Projection",
    "adopt_attention",
    "adopt_mlps",
    "present_sites",
    "switches_in",
]
