"""A site in ``torch.nn.MultiheadAttention``, by itself or inside ``nn.TransformerEncoder`` and its kin."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_qk.attention import ModelCore, Pass, explicit_attention
from lightning_qk.sites.site import AttentionSite, Projection

SITE = "lightning_qk_site"


class WatchedMultiheadAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` whose q, k and v pass through a site. Never constructed: a module becomes one."""

    @override
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As the class it replaces; there, too, ``is_causal`` only says what ``attn_mask`` is."""
        site = getattr(self, SITE)
        assert isinstance(site, MultiheadSite)
        batched = query.dim() == 3
        if not batched:
            query, key, value = (x[None] for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = (
            F.linear(x, site.weight(name), site.bias(name)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for name, x in (("q", query), ("k", key), ("v", value))
        )
        causal = is_causal and key_padding_mask is None
        mask = None if causal else merged_mask(attn_mask, key_padding_mask, self.num_heads, q.dtype)
        out_BHTD, weights = site.attend(q, k, v, mask, causal, self.dropout if self.training else 0.0, need_weights)
        out = self.out_proj(out_BHTD.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights


class MultiheadSite(AttentionSite):
    """The site of one ``nn.MultiheadAttention``."""

    def __init__(self, module: Any) -> None:
        if module.bias_k is not None or module.add_zero_attn:
            raise ValueError(
                "nn.MultiheadAttention with add_bias_kv or add_zero_attn has keys that no token made; build it without."
            )
        super().__init__(module.num_heads, module.num_heads, module.head_dim, ModelCore())
        self._own = (module,)  # a tuple: the module must not become a submodule of its submodule
        module.__class__ = WatchedMultiheadAttention
        # in evaluation the layers around it have fast paths that never call it, unless it has a hook
        module.register_forward_pre_hook(_no_fast_path)

    @override
    def projection(self, name: str) -> Projection:
        (module,) = self._own
        if name == "o":
            return Projection(module.out_proj.weight, module.out_proj.bias)
        E, start = module.embed_dim, "qkv".index(name) * module.embed_dim
        if module.in_proj_weight is None:  # keys or values of another width
            return Projection(getattr(module, f"{name}_proj_weight"), None)
        return Projection(module.in_proj_weight, module.in_proj_bias, slice(start, start + E))

    @override
    def bias(self, name: str) -> Tensor | None:
        (module,) = self._own
        if name == "o" or module.in_proj_bias is None:
            return super().bias(name)
        return module.in_proj_bias.chunk(3)["qkv".index(name)]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout: float, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """[B, H, T, D] to the same and, if asked for, the weights [B, H, T, S]."""
        q, k, v = self.treat(q, k, v)
        if not isinstance(self.core, ModelCore):
            if not causal or dropout or need_weights:
                raise ValueError(
                    f"{type(self.core).__name__} is causal, without dropout, and returns no weights. Build "
                    "nn.MultiheadAttention with dropout=0 and call it with is_causal=True and need_weights=False."
                )
            return self.core(q, k, v), None
        logits = Pass(q, k, None, causal, mask, self.cap_H)
        self.core.keep(logits)
        if need_weights or logits.softcap_H is not None:
            out, weights = explicit_attention(logits, v, dropout)
            return out, weights.to(q.dtype) if need_weights else None
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal), None


def merged_mask(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, n_heads: int, dtype: torch.dtype
) -> Tensor | None:
    """Both masks as one that is added to the logits, broadcastable to [B, H, T, S]; in bool masks, True hides."""
    total = None
    if attn_mask is not None:
        total = _additive(attn_mask, dtype)  # [T, S] or [B * H, T, S]
        total = total.unflatten(0, (-1, n_heads)) if total.dim() == 3 else total[None, None]
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, dtype)[:, None, None]
        total = padding if total is None else total + padding
    return total


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)


def _no_fast_path(*_: object) -> None:
    pass
