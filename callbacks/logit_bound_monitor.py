"""Watches how large an attention logit could become, from the weights and the length of their inputs.

For inputs x_i, x_j of a head's projections ``|logit_ij| <= |W_Q' W_K|_2 |x_i| |x_j| / sqrt(d)`` (arXiv 2602.18851, see
:mod:`kernels.logit_bound`). The logits of one batch need not point where the bound does; it grows before they do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from callbacks.early_warning import Limit
from callbacks.input_monitor import InputMonitor
from kernels import logit_spectral_bound
from lightning_qk.module import full
from lightning_qk.routes import attention_sites
from lightning_qk.sites import AttentionSite


class LogitBoundMonitor(InputMonitor):
    """Reads ``logit_bound``: the bound on the absolute logits, before any soft cap, of the worst head of any layer.

    Of weights after the step and the longest inputs of the queries and of the keys in the step's last micro-batch, over
    all ranks; with biases of ``(x, 1)`` and the bias as one more column. It bounds the logits that these weights give
    inputs no longer than that, in exact arithmetic, where logits are ``q . k / sqrt(d)``. Rotary positions, QK-norm
    (the model's own, or switched on by a guard), another scale or a bias on the logits act behind the projections:
    there it bounds nothing, and is only a reading of how far the weights could go. A weight that is not finite reads
    NaN, an input that is not finite inf. Arguments as :class:`EarlyWarning`; a threshold must be given.

    Raises:
        ValueError: an argument that cannot be.
    """

    limits: ClassVar[Mapping[str, Limit]] = {"logit_bound": Limit()}

    @override
    def read(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        lengths_L2 = torch.stack([torch.stack([_longest(x) for x in tokens.values()]) for tokens in self.tokens])
        lengths_L2 = trainer.strategy.reduce(lengths_L2, reduce_op="max")  # NaN would not outlive it on every backend
        sites = attention_sites(pl_module)
        bounds = [_bound(site, *lengths_2) for site, lengths_2 in zip(sites, lengths_L2, strict=True)]
        return {"logit_bound": float(torch.stack(bounds).amax())}


def _longest(tokens: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tokens, dim=1, dtype=torch.float32).amax().nan_to_num(nan=torch.inf)


def _bound(site: AttentionSite, length_q: Tensor, length_k: Tensor) -> Tensor:
    """Of the worst head."""
    w_q, w_k = full(site.q_weight.detach()), full(site.k_weight.detach())
    b_q, b_k = site.bias("q"), site.bias("k")
    if b_q is not None or b_k is not None:
        w_q, w_k = _augmented(w_q, b_q), _augmented(w_k, b_k)
        length_q, length_k = (length_q.square() + 1).sqrt(), (length_k.square() + 1).sqrt()
    return logit_spectral_bound(w_q, w_k, site.n_heads, site.n_kv_heads).amax() * length_q * length_k


def _augmented(weight: Tensor, bias: Tensor | None) -> Tensor:
    """The bias as one more column."""
    column = weight.new_zeros(len(weight)) if bias is None else full(bias.detach())
    return torch.cat([weight, column[:, None]], 1)
