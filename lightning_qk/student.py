"""The student and the teacher of the proxy for MX instabilities (arXiv 2506.20752).

With x in R^d, ``A_0 = x``, ``h_k = W1_k LN(A_k)`` and ``A_{k+1} = A_k + W2_k phi(h_k)`` for k = 0 to L - 1: the MLP
half of a transformer, with neither attention nor embeddings. As in the released code W2 has a bias and W1 has none, LN
is affine, phi is GELU by default, the hidden width is 4d, or round(8d/3) for SwiGLU, and weights begin as PyTorch
begins them, uniform within 1/sqrt(fan-in). The teacher is L layers ``W2 phi(W1 x)``, d wide, without LN, residual and
bias.

A teacher with that initialisation shrinks what it is given at every layer: at d = 512 its outputs have a standard
deviation of 0.197 after one layer, 9e-4 after four, below the label noise, so that the student's task is to cancel its
own residual stream. A rescaled teacher has every layer's output brought to a standard deviation of 1. (With SwiGLU a
layer squares the size of a sample, so that the outputs of a deep one are a few large samples among many small ones.)
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_qk.mx_vector import ACTIVATIONS, Activation, Sum, activate

_PROBES = 4096  # inputs that a teacher is rescaled on


class StudentBlock(nn.Module):
    """LayerNorm, linear, activation, linear, and the sum with the input.

    Args:
        width: d.
        activation: one of :data:`lightning_qk.mx_vector.ACTIVATIONS`.
        layer_norm: whether there is one.
    """

    def __init__(self, width: int, activation: str, layer_norm: bool) -> None:
        super().__init__()
        swiglu = activation == "swiglu"
        hidden = round(8 * width / 3) if swiglu else 4 * width
        self.norm = nn.LayerNorm(width) if layer_norm else nn.Identity()
        self.up_proj = nn.Linear(width, hidden * (2 if swiglu else 1), bias=False)
        self.activation = Activation(activation)
        self.down_proj = nn.Linear(hidden, width)
        self.sum = Sum()

    @override
    def forward(self, x_BD: Tensor) -> Tensor:
        """[B, D] to [B, D]."""
        return self.sum(x_BD, self.down_proj(self.activation(self.up_proj(self.norm(x_BD)))))


class Student(nn.Module):
    """The network that learns.

    Args:
        depth: L.
        width: d.
        activation: phi.
        layer_norm: whether blocks normalise their input.

    Raises:
        ValueError: naming the argument.
    """

    def __init__(self, depth: int, width: int, activation: str = "gelu", layer_norm: bool = True) -> None:
        super().__init__()
        _check("Student", depth, width, activation)
        self.blocks = nn.ModuleList(StudentBlock(width, activation, layer_norm) for _ in range(depth))

    @override
    def forward(self, x_BD: Tensor) -> Tensor:
        """[B, D] to [B, D]."""
        for block in self.blocks:
            x_BD = block(x_BD)
        return x_BD


class Teacher(nn.Module):
    """The network that is learnt. Its weights are buffers: no optimizer, clipping or policy has a hold on them.

    Args:
        depth: L.
        width: d, of hidden layers too; SwiGLU has round(2d/3).
        activation: phi.
        rescaled: bring every layer's output to a standard deviation of 1 over standard normal inputs.
        generator: draws the weights; None is the global one.

    Raises:
        ValueError: naming the argument.
    """

    def __init__(
        self,
        depth: int,
        width: int,
        activation: str = "gelu",
        rescaled: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        _check("Teacher", depth, width, activation)
        self.activation, self.depth = activation, depth
        hidden = round(2 * width / 3) if activation == "swiglu" else width
        wide = 2 * hidden if activation == "swiglu" else hidden
        x_BD = torch.randn(_PROBES, width, generator=generator) if rescaled else None
        for layer in range(depth):
            up, down = _uniform(wide, width, generator), _uniform(width, hidden, generator)
            if x_BD is not None:
                y_BD = self._layer(x_BD, up, down)
                down /= y_BD.std()
                x_BD = y_BD / y_BD.std()
            self.register_buffer(f"up_{layer}", up)
            self.register_buffer(f"down_{layer}", down)

    def _layer(self, x_BD: Tensor, up_HD: Tensor, down_DH: Tensor) -> Tensor:
        return F.linear(activate(self.activation, F.linear(x_BD, up_HD)), down_DH)

    @override
    @torch.no_grad()
    def forward(self, x_BD: Tensor) -> Tensor:
        """[B, D] to [B, D], in float32 whatever the precision of the run."""
        with torch.autocast(x_BD.device.type, enabled=False):
            for layer in range(self.depth):
                x_BD = self._layer(x_BD, self.get_buffer(f"up_{layer}"), self.get_buffer(f"down_{layer}"))
        return x_BD


def _uniform(width_out: int, width_in: int, generator: torch.Generator | None) -> Tensor:
    return (torch.rand(width_out, width_in, generator=generator) * 2 - 1) / math.sqrt(width_in)


def _check(name: str, depth: int, width: int, activation: str) -> None:
    if depth < 1 or width < 1:
        raise ValueError(f"{name}: depth={depth} and width={width} must be at least 1.")
    if activation not in ACTIVATIONS:
        raise ValueError(f"{name}: activation={activation!r} is not one of {', '.join(ACTIVATIONS)}.")
