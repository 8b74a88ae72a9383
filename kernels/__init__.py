"""Arithmetic only: tensors in, tensors out. Knows no model and no Lightning.

``round_to`` and ``Rounding`` round significands, ``RoundingSites`` says where a streaming softmax rounds, and
``streaming_attention`` runs it; ``TopSingular`` follows the leading singular values of drifting matrices.
"""

from kernels.rounding import Rounding, round_to
from kernels.sites import PRESETS, RoundingSites
from kernels.spectra import SingularTriplets, TopSingular
from kernels.streaming import StreamingOutput, streaming_attention

__all__ = [
    "PRESETS",
    "Rounding",
    "RoundingSites",
    "SingularTriplets",
    "StreamingOutput",
    "TopSingular",
    "round_to",
    "streaming_attention",
]
