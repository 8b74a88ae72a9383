"""Stabilisers that a model has from the first step on, for a guard to be compared with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_qk.sites.site import QK_NORM_EPS, rms_normalise

QK_NORMS = ("rms", "rms_learnable", "rms_full_width", "layernorm", "layernorm_full_width")


class QKNorm(nn.Module):
    """Normalisation of queries or keys in float32, before rotary positions; logits keep their 1/sqrt(D).

    ====================  ==========================================================================================
    rms                   RMS of every head, no parameters: what :class:`callbacks.QKGuard` switches on
    rms_learnable         RMS of every head, one gain a channel of the head, shared by heads (Qwen3, arXiv 2505.09388)
    rms_full_width        RMS over all heads together, one gain a channel (OLMo 2, arXiv 2501.00656)
    layernorm             LayerNorm of every head, one gain a channel of the head, no bias (ViT-22B, arXiv 2302.05442)
    layernorm_full_width  LayerNorm over all heads together, one gain a channel, no bias (OLMo's attention_layer_norm)
    ====================  ==========================================================================================

    Only the first bounds the logits, by sqrt(D); the gains of the others can grow.

    Args:
        kind: one of these.
        n_heads: heads.
        head_dim: D.
    """

    def __init__(self, kind: str, n_heads: int, head_dim: int) -> None:
        super().__init__()
        self.kind, self.full_width = kind, kind.endswith("_full_width")
        width = n_heads * head_dim if self.full_width else head_dim
        self.weight = None if kind == "rms" else nn.Parameter(torch.ones(width))

    def forward(self, x_BHTD: Tensor) -> Tensor:
        """[B, H, T, D] to the same, in x's dtype."""
        if self.weight is None:
            return rms_normalise(x_BHTD)
        x, gain = x_BHTD.float(), self.weight.float()
        if self.full_width:
            x = x.transpose(1, 2)
            normed = self._normalise(x.flatten(2), gain).view(x.shape).transpose(1, 2)
        else:
            normed = self._normalise(x, gain)
        return normed.to(x_BHTD.dtype)

    def _normalise(self, x: Tensor, gain: Tensor) -> Tensor:
        """Over the last axis."""
        if self.kind.startswith("layernorm"):
            return F.layer_norm(x, gain.shape, gain, eps=QK_NORM_EPS)
        return F.rms_norm(x, gain.shape, gain, QK_NORM_EPS)


class SigmaLinear(nn.Linear):
    """``nn.Linear`` with the weight ``(g / sigma(W)) W`` (Zhai et al. 2023, arXiv 2303.06296).

    sigma(W) is ``u' W v`` with vectors u and v that take one step of power iteration a training forward pass
    (:meth:`follow`) and are constants to the gradient; they start exact (:meth:`start`), and the gain g starts at
    sigma(W), so that the layer starts as the plain one. ``weight`` stays W, the parameter that is trained.

    Attributes:
        gain: g, [1].
        u: [out].
        v: [in].
    """

    u: Tensor
    v: Tensor

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("u", torch.zeros(out_features))
        self.register_buffer("v", torch.zeros(in_features))

    @torch.no_grad()
    def start(self) -> None:
        """After the weight is initialised: u, v and the gain from its decomposition."""
        u, s, vh = torch.linalg.svd(self.weight.float(), full_matrices=False)
        self.u.copy_(u[:, 0])
        self.v.copy_(vh[0])
        self.gain.copy_(s[:1])

    @torch.no_grad()
    def follow(self) -> None:
        """One step of power iteration."""
        weight = _whole(self.weight)
        with torch.autocast(weight.device.type, enabled=False):
            self.u.copy_(F.normalize(weight @ self.v, dim=0))
            self.v.copy_(F.normalize(weight.T @ self.u, dim=0))

    def effective_weight(self) -> Tensor:
        """``(g / sigma(W)) W`` [out, in], in float32."""
        weight, gain = _whole(self.weight), _whole(self.gain)
        with torch.autocast(weight.device.type, enabled=False):
            # copies: `follow` may write the next u and v before this pass goes backward
            return weight * (gain / (self.u.clone() @ (weight @ self.v.clone())))

    @override
    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return F.linear(x, self.effective_weight(), self.bias)


def _whole(x: Tensor) -> Tensor:
    """Outside of a forward pass FSDP2 leaves parameters sharded."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x
