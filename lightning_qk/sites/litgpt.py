"""Sites in litgpt's GPT.

Its attention module hands q, k and v, rotated and with keys repeated for their queries, to a method of its own. A site
takes that method's place in the instance and calls the class's in the end.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from lightning_qk.attention import ModelCore, Pass, explicit_attention
from lightning_qk.sites.site import AttentionSite, Projection


class LitGPTSite(AttentionSite):
    """One fused ``qkv``, grouped keys: litgpt's ``CausalSelfAttention``."""

    def __init__(self, module: Any) -> None:
        config = module.config
        if not isinstance(module.qkv, nn.Linear) or hasattr(module, "adapter_wte"):
            raise ValueError(
                f"{type(module).__module__}.{type(module).__name__}: LoRA and adapters attend by more than the "
                "projections' own weights. Use litgpt.GPT itself."
            )
        super().__init__(config.n_head, config.n_query_groups, config.head_size, ModelCore())
        if config.attention_logit_softcapping is not None:
            self.base_cap = float(config.attention_logit_softcapping)
        self._own = (module,)  # a tuple: the module must not become a submodule of its submodule
        module.scaled_dot_product_attention = self.attend

    @override
    def projection(self, name: str) -> Projection:
        (module,) = self._own
        if name == "o":
            return Projection(module.proj.weight, module.proj.bias)
        heads = {"q": self.n_heads, "k": self.n_kv_heads, "v": self.n_kv_heads}
        start = sum(heads[before] for before in "qkv"[: "qkv".index(name)]) * self.head_dim
        rows = slice(start, start + heads[name] * self.head_dim)
        return Projection(module.qkv.weight, module.qkv.bias, rows)

    @property
    @override
    def scales_qk(self) -> bool:
        return self._own[0].norm_q is None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """[B, H, T, D] to [B, T, H, D]."""
        q, k, v = self.treat(q, k, v)
        (module,) = self._own
        scale = module.mscale**2 / math.sqrt(module.config.attention_scores_scalar or self.head_dim)
        if not isinstance(self.core, ModelCore):
            if mask is not None or not math.isclose(scale, self.head_dim**-0.5):
                raise ValueError(
                    f"{type(self.core).__name__} is causal, with scale 1/sqrt(d), without a mask: a litgpt "
                    "configuration with a sliding window or a scale of its own, or a KV cache, has others."
                )
            return self.core(q, k, v).transpose(1, 2)
        logits = Pass(q, k, scale, mask is None, mask, self.cap_H)
        self.core.keep(logits)
        if self.heads_on("softcap"):
            return explicit_attention(logits, v)[0].transpose(1, 2)
        return type(module).scaled_dot_product_attention(module, q, k, v, mask)
