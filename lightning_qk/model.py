"""A GPT whose query, key, value and output projections stay apart, so that each is a route of its own.

Pre-norm decoder of GPT-2 (Radford et al. 2019) as nanoGPT trains it: LayerNorm, exact GELU, embeddings tied and no
biases by default, N(0, 0.02) initialisation with residual projections scaled by 1/sqrt(2 * layers). Positions are
learned or rotary (arXiv 2104.09864).

QK-norm, the action of a guard, is parameter-free RMS normalisation of every query and key head in float32; since both
then have norm sqrt(D), ``|logit| <= sqrt(D)``. The always-on stabilisers of the config are separate from it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_qk.arguments import check_arguments
from lightning_qk.attention import SDPACore
from lightning_qk.baselines import QK_NORMS, QKNorm, SigmaLinear
from lightning_qk.mx_vector import Activation, Sum
from lightning_qk.sites.site import QK_NORM_EPS, AttentionSite, MLPSite, Projection, rms_normalise

__all__ = ["GPT", "MLP", "PRESETS", "QK_NORM_EPS", "Attention", "Block", "GPTConfig", "Rope", "rms_normalise"]


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT.

    Args:
        n_layers: decoder blocks.
        n_heads: attention heads a block; divides ``d_model``.
        d_model: width of the residual stream.
        context: longest sequence.
        vocab_size: rows of the embedding.
        positions: ``learned`` embeddings, or ``rope``: rotary, on q and k before QK-norm.
        bias: biases in linear layers and LayerNorms.
        tied: one matrix is the embedding and the output layer.
        dropout: after embeddings, attention output and MLP.
        mlp_ratio: hidden width of the MLP over ``d_model``.
        qk_norm: normalisation of q and k from the first step on, see :class:`lightning_qk.baselines.QKNorm`.
        softcap: c of the soft cap ``c tanh(S / c)`` of the attention logits (Gemma 2: 50), None for none.
        sigma_reparam: spectral reparametrisation of the blocks' linear layers, see
            :class:`lightning_qk.baselines.SigmaLinear`.
        z_loss: factor on the mean squared log-partition of the output logits, added to the training loss (PaLM: 1e-4).

    Raises:
        ValueError: naming the field that cannot be.
    """

    n_layers: int = 2
    n_heads: int = 2
    d_model: int = 64
    context: int = 128
    vocab_size: int = 256
    positions: Literal["learned", "rope"] = "learned"
    bias: bool = False
    tied: bool = True
    dropout: float = 0.0
    mlp_ratio: int = 4
    qk_norm: Literal["none", "rms", "rms_learnable", "rms_full_width", "layernorm", "layernorm_full_width"] = "none"
    softcap: float | None = None
    sigma_reparam: bool = False
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        for name in ("n_layers", "n_heads", "d_model", "context", "vocab_size", "mlp_ratio"):
            if getattr(self, name) < 1:
                raise ValueError(f"GPTConfig.{name}={getattr(self, name)} must be at least 1.")
        if self.d_model % self.n_heads:
            raise ValueError(f"GPTConfig.d_model={self.d_model} must be a multiple of n_heads={self.n_heads}.")
        if self.positions not in ("learned", "rope"):
            raise ValueError(f"GPTConfig.positions={self.positions!r} must be 'learned' or 'rope'.")
        if self.positions == "rope" and (self.d_model // self.n_heads) % 2:
            raise ValueError(f"GPTConfig: rope needs an even head dimension, got {self.d_model // self.n_heads}.")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"GPTConfig.dropout={self.dropout} must be in [0, 1).")
        if self.qk_norm not in ("none", *QK_NORMS):
            raise ValueError(f"GPTConfig.qk_norm={self.qk_norm!r} is not one of none, {', '.join(QK_NORMS)}.")
        if self.softcap is not None and not 0.0 < self.softcap < math.inf:
            raise ValueError(f"GPTConfig.softcap={self.softcap} must be positive and finite; null is no cap.")
        if not 0.0 <= self.z_loss < math.inf:
            raise ValueError(f"GPTConfig.z_loss={self.z_loss} must be at least 0 and finite.")

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> GPTConfig:
        """``proxy``, ``gpt2-small`` or ``gpt2-medium``, with single fields replaced by keyword."""
        if name not in PRESETS:
            raise ValueError(f"preset={name!r} is not one of {', '.join(PRESETS)}.")
        check_arguments("GPTConfig", cls, overrides)
        return cls(**{**PRESETS[name], **overrides})

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.d_model // self.n_heads


PRESETS: dict[str, dict[str, Any]] = {
    "proxy": dict(n_layers=2, n_heads=2, d_model=64, context=128, vocab_size=256),
    "gpt2-small": dict(n_layers=12, n_heads=12, d_model=768, context=1024, vocab_size=50_304),
    "gpt2-medium": dict(n_layers=24, n_heads=16, d_model=1024, context=1024, vocab_size=50_304),
}


class Attention(AttentionSite):
    """Causal self-attention with separate projections, switches for a guard and a replaceable core.

    Attributes:
        core: the :class:`~lightning_qk.attention.AttentionCore`; replace it in place.
        qk_norm: persistent bool buffer [H], whether q and k are normalised. Set it by :meth:`set_qk_norm`.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config.n_heads, config.n_heads, config.head_dim, SDPACore())
        self.base_cap = math.inf if config.softcap is None else config.softcap
        self.dropout = nn.Dropout(config.dropout)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            _linear(config, config.d_model, config.d_model) for _ in range(4)
        )
        self.rope: Rope | None = Rope(config) if config.positions == "rope" else None
        self.q_norm, self.k_norm = (
            None if config.qk_norm == "none" else QKNorm(config.qk_norm, config.n_heads, config.head_dim)
            for _ in range(2)
        )

    @override
    def projection(self, name: str) -> Projection:
        linear = getattr(self, f"{name}_proj")
        return Projection(linear.weight, linear.bias)

    @override
    def weight(self, name: str) -> Tensor:
        linear = getattr(self, f"{name}_proj")
        return linear.effective_weight() if isinstance(linear, SigmaLinear) else linear.weight

    @property
    @override
    def scales_qk(self) -> bool:
        return self.q_norm is None and not isinstance(self.q_proj, SigmaLinear)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """[B, T, C] to [B, T, C]."""
        B, T, C = x_BTC.shape
        q, k, v = (
            proj(x_BTC).view(B, T, self.n_heads, self.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            q, k = self.rope(q), self.rope(k)
        q, k, v = self.treat(q, k, v)
        cap_H = self.cap_H
        out_BHTD = self.core(q, k, v) if cap_H is None else self.core.soft_capped(q, k, v, cap_H)
        return self.dropout(self.o_proj(out_BHTD.transpose(1, 2).reshape(B, T, C)))


def _linear(config: GPTConfig, width_in: int, width_out: int) -> nn.Linear:
    kind = SigmaLinear if config.sigma_reparam else nn.Linear
    return kind(width_in, width_out, bias=config.bias)


class Rope(nn.Module):
    """Rotary position embedding, base 10,000, halves convention; tables in float32."""

    cos_TD: Tensor
    sin_TD: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        half = config.head_dim // 2
        frequency = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(config.context, dtype=torch.float64)[:, None] * frequency
        angle = torch.cat((angle, angle), dim=-1)
        self.register_buffer("cos_TD", angle.cos().float(), persistent=False)
        self.register_buffer("sin_TD", angle.sin().float(), persistent=False)

    def forward(self, x_BHTD: Tensor) -> Tensor:
        """Rotates every head by its position; computed in float32, returned in x's dtype."""
        T, half = x_BHTD.shape[2], x_BHTD.shape[3] // 2
        x = x_BHTD.float()
        rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return (x * self.cos_TD[:T] + rotated * self.sin_TD[:T]).to(x_BHTD.dtype)


class MLP(MLPSite):
    """Linear, GELU, Linear, and a norm that a guard may switch on."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        hidden = config.mlp_ratio * config.d_model
        self.up_proj = _linear(config, config.d_model, hidden)
        self.down_proj = _linear(config, hidden, config.d_model)
        self.activation = Activation("gelu")
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """[B, T, C] to [B, T, C]."""
        return self.dropout(self.treat(self.down_proj(self.activation(self.up_proj(x_BTC)))))


class Block(nn.Module):
    """One pre-norm decoder block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.d_model, bias=config.bias)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.d_model, bias=config.bias)
        self.mlp = MLP(config)
        self.sum = Sum()

    def forward(self, x_BTC: Tensor) -> Tensor:
        """[B, T, C] to [B, T, C]."""
        x_BTC = self.sum(x_BTC, self.attention(self.attention_norm(x_BTC)))
        return self.sum(x_BTC, self.mlp(self.mlp_norm(x_BTC)))


class GPT(nn.Module):
    """The language model.

    Args:
        config: its shape.
        activation_checkpointing: recompute every block in the backward pass instead of keeping its activations.
    """

    def __init__(self, config: GPTConfig, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.config, self.activation_checkpointing = config, activation_checkpointing
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.position_embedding = (
            nn.Embedding(config.context, config.d_model) if config.positions == "learned" else None
        )
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.final_norm = nn.LayerNorm(config.d_model, bias=config.bias)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.token_embedding.weight
        self.sum = Sum()
        self.apply(self._initialise)
        for name, parameter in self.blocks.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.n_layers))
        self.sigma_linears = [module for module in self.modules() if isinstance(module, SigmaLinear)]
        for linear in self.sigma_linears:
            linear.start()

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """int64 [B, T] to logits [B, T, V].

        Raises:
            ValueError: the sequence is longer than the context.
        """
        T = tokens_BT.shape[1]
        if self.config.context < T:
            raise ValueError(f"sequence of {T} tokens is longer than the model's context {self.config.context}.")
        if self.training and torch.is_grad_enabled():
            for linear in self.sigma_linears:  # here, where activation checkpointing does not repeat it
                linear.follow()
        x = self.token_embedding(tokens_BT)
        if self.position_embedding is not None:
            x = self.sum(x, self.position_embedding(torch.arange(T, device=tokens_BT.device)))
        x = self.dropout(x)
        for block in self.blocks:
            if self.activation_checkpointing and self.training:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.lm_head(self.final_norm(x))

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Mean cross-entropy in nats a token, in float32; in training with the z-loss, if there is one."""
        logits = self(tokens_BT).float().flatten(0, 1)
        loss = F.cross_entropy(logits, targets_BT.flatten())
        if self.training and self.config.z_loss:
            loss = loss + self.config.z_loss * logits.logsumexp(-1).square().mean()
        return loss
