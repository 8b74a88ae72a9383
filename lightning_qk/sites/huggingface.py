"""Sites in Hugging Face transformers' decoders: GPT-2, Llama and Qwen.

These attention modules hand q, k and v to a function that they look up by ``config._attn_implementation``. A site gives
its module a copy of the config that names the function below; everything else, the masks too, still goes by the
model's own config, whose function is called in the end.
"""

from __future__ import annotations

import copy
import math
import sys
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from lightning_qk.attention import ModelCore, Pass, explicit_attention
from lightning_qk.sites.site import AttentionSite, Projection

WATCHED = "lightning_qk_site"
SITE = "lightning_qk_site"  # the submodule's name, which torch shows where a state dict has it and the model has not
_SUPPORTED = ("eager", "sdpa")


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, Tensor | None]:
    """What a module with a site calls instead of its attention function."""
    site = getattr(module, SITE)
    assert isinstance(site, LlamaSite)
    return site.attend(query, key, value, attention_mask, **settings)


class LlamaSite(AttentionSite):
    """Separate ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj``, grouped keys: Llama, Qwen2, Qwen3."""

    def __init__(self, module: Any) -> None:
        from transformers.modeling_utils import AttentionInterface

        config = module.config
        super().__init__(*self._shape(config, module), core=ModelCore())
        self._own = (module, config)  # a tuple: the module must not become a submodule of its submodule
        self._function()
        AttentionInterface.register(WATCHED, attend)
        module.config = copy.copy(config)
        module.config._attn_implementation = WATCHED

    def __setstate__(self, state: dict[str, Any]) -> None:
        from transformers.modeling_utils import AttentionInterface

        AttentionInterface.register(WATCHED, attend)  # a process that only unpickles the model has not
        super().__setstate__(state)

    @staticmethod
    def _shape(config: Any, module: Any) -> tuple[int, int, int]:
        return config.num_attention_heads, config.num_key_value_heads, module.head_dim

    def _function(self) -> Any:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        module, config = self._own
        name = config._attn_implementation
        if name not in _SUPPORTED:
            raise ValueError(
                f"{type(module).__name__}: attn_implementation={name!r} does not say which keys a query sees; load the "
                "model with attn_implementation='sdpa' or 'eager'."
            )
        if name == "eager":
            home = next(
                c for c in type(module).__mro__ if hasattr(sys.modules[c.__module__], "eager_attention_forward")
            )
            return sys.modules[home.__module__].eager_attention_forward
        return ALL_ATTENTION_FUNCTIONS[name]

    @override
    def projection(self, name: str) -> Projection:
        linear = getattr(self._own[0], f"{name}_proj")
        return Projection(linear.weight, linear.bias)

    @property
    @override
    def scales_qk(self) -> bool:
        return not hasattr(self._own[0], "q_norm")  # Qwen3 normalises behind the projections

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **settings: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[B, H, T, D] to [B, T, H, D] and the weights, where the model's function returns any."""
        q, k, v = self.treat(q, k, v)
        module, config = self._own
        own = settings.get("is_causal")
        causal = config._attn_implementation != "eager" and mask is None
        causal = causal and (getattr(module, "is_causal", True) if own is None else own)
        scale, dropout = settings.get("scaling"), settings.get("dropout", 0.0)
        if not isinstance(self.core, ModelCore):
            return self._through_core(q, k, v, causal, scale, dropout), None
        logits = Pass(q, k, scale, causal and q.shape[2] > 1, mask, self.cap_H)
        self.core.keep(logits)
        if logits.softcap_H is not None:
            out, weights = explicit_attention(logits, v, dropout)
            return out.transpose(1, 2).contiguous(), weights
        return self._function()(module, q, k, v, mask, **settings)

    def _through_core(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, dropout: float
    ) -> Tensor:
        if not causal or dropout or (scale is not None and not math.isclose(scale, q.shape[-1] ** -0.5)):
            raise ValueError(
                f"{type(self.core).__name__} is causal, with scale 1/sqrt(d), without dropout or mask. Load the model "
                "with attn_implementation='sdpa' and no attention dropout; pass no attention_mask that hides tokens."
            )
        group = self.n_heads // k.shape[1]
        k, v = (x.to(q.dtype).repeat_interleave(group, 1) for x in (k, v))
        return self.core(q, k, v).transpose(1, 2).contiguous()


class GPT2Site(LlamaSite):
    """One fused, transposed ``c_attn`` for q, k and v: GPT-2."""

    def __init__(self, module: Any) -> None:
        if module.reorder_and_upcast_attn or module.is_cross_attention:
            raise ValueError(
                "GPT2Attention with reorder_and_upcast_attn or as cross-attention does not pass q and k through "
                "transformers' attention interface in one place; turn it off in the config."
            )
        super().__init__(module)

    @staticmethod
    @override
    def _shape(config: Any, module: Any) -> tuple[int, int, int]:
        return module.num_heads, module.num_heads, module.head_dim

    @override
    def projection(self, name: str) -> Projection:
        module = self._own[0]
        if name == "o":
            return Projection(module.c_proj.weight, module.c_proj.bias, transposed=True)
        start = "qkv".index(name) * module.embed_dim
        rows = slice(start, start + module.embed_dim)
        return Projection(module.c_attn.weight, module.c_attn.bias, rows, transposed=True)
