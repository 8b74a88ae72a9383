"""Arithmetic only: tensors in, tensors out. Knows no model and no Lightning.

``round_to`` and ``Rounding`` round significands. ``RoundingSites`` says where a streaming softmax rounds, and
``streaming_attention`` runs it. ``mx_quantize`` rounds to microscaling (MX) formats, ``mx_encode`` and ``mx_decode``
store them; ``nvfp4_quantize`` and ``random_hadamard`` are what goes with them. ``TopSingular`` follows the leading
singular values of drifting matrices; the two logit bounds come from weights and from activations.
``widened_bf16_products`` is for CPUs that have no fast bfloat16 products.
"""

from kernels.bf16_products import has_bf16_products, widened_bf16_products
from kernels.hadamard import random_hadamard
from kernels.logit_bound import logit_cauchy_schwarz_bound, logit_spectral_bound
from kernels.mx_blocks import mx_quantize
from kernels.mx_codes import MXEncoded, mx_decode, mx_encode
from kernels.nvfp4 import nvfp4_quantize
from kernels.rounding import Rounding, round_to
from kernels.sites import PRESETS, RoundingSites
from kernels.spectra import SingularTriplets, TopSingular
from kernels.streaming import StreamingOutput, streaming_attention

__all__ = [
    "PRESETS",
    "MXEncoded",
    "Rounding",
    "RoundingSites",
    "SingularTriplets",
    "StreamingOutput",
    "TopSingular",
    "has_bf16_products",
    "logit_cauchy_schwarz_bound",
    "logit_spectral_bound",
    "mx_decode",
    "mx_encode",
    "mx_quantize",
    "nvfp4_quantize",
    "random_hadamard",
    "round_to",
    "streaming_attention",
    "widened_bf16_products",
]
