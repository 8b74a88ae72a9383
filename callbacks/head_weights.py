"""The query and key weights of a model, head by head."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_qk.module import full
from lightning_qk.sites import AttentionSite


def head_weights(sites: Iterable[AttentionSite]) -> tuple[Tensor, Tensor]:
    """Copies of W_Q [L * H, d, n] and W_K [L * G, d, n], as ``nn.Linear`` keeps them, whole where FSDP2 shards them."""
    weights_q, weights_k = [], []
    for site in sites:
        weights_q.append(full(site.q_weight.detach()).unflatten(0, (site.n_heads, -1)))
        weights_k.append(full(site.k_weight.detach()).unflatten(0, (site.n_kv_heads, -1)))
    return torch.cat(weights_q), torch.cat(weights_k)
