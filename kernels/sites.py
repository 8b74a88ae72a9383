"""Where a streaming softmax rounds: one named site for every value that an implementation may store in low precision.

The recurrence (FlashAttention-2, arXiv 2307.08691), for one block of queries and key tiles j = 1, 2, ...; ``r_x`` is
the rounding at site ``x``, and dots are products with float32 accumulation::

    forward   S  = r_s_scaled(scale * r_s(Q . K_j'))              masked scores of the tile
              m' = r_m_carry(max(m, h)),  h = rowmax S            h is raised where sfa_beta says, see below
              P  = exp2(log2(e) * r_s_minus_m(S - m'))            1 exactly where S is the row's maximum
              a  = r_alpha(exp2(log2(e) * (m - m')))
              l  = r_l_carry(a * l + r_p_sum(rowsum P))           of r_p_pv(P) when sum_rounded_p
              O  = r_o_carry(r_o_rescaled(a * O) + r_pv(r_p_pv(P) . V_j))
    at last   out = r_o_out(r_o_div(O / l)),  LSE = r_lse(m + ln l)         O * (1 / l) when reciprocal

    backward  delta = r_delta(rowsum r_delta_product(dO * out))             or another delta_from, see below
              S   = the same with r_s_bwd at both places;  P = exp2(log2(e) * (S - LSE))
              dP  = r_dp(dO . V_j');  dS = r_ds(P * (dP - delta))
              dQ  = r_dq(dQ + r_dq_chunk(scale * dS . K_j))       over key tiles
              dK  = r_dk(dK + r_dk_chunk(scale * dS' . Q))        over query tiles
              dV  = r_dv(dV + r_dv_chunk(r_p_pv(P)' . dO))        over query tiles

A chunk of dQ or dK whose product the hardware rounds itself (bfloat16 operands, site bf16) is rounded before the scale
as well as after it. Narrow presets are meant for bfloat16 inputs: inputs are not rounded, and float16 ones go through
bfloat16 P, dS and output unless these sites are set to fp16.

Variants that are no rounding:

* ``kv_order`` visits the key tiles of a query tile in ascending or descending order, in both passes.
* ``delta_from`` is ``out`` (dO * the saved output), ``out_fp32`` (dO * the output recomputed in the backward pass, P
  unrounded) or ``p_dp`` (P * dP summed over all key tiles). On paper the three are equal.
* ``sfa_beta`` is the stabilised softmax of arXiv 2510.04212: where more than one score of a row of the tile lies within
  ``sfa_tolerance`` of its maximum h, no P may be 1 exactly, so h goes up by (beta - 1) * h if h > 0, or to 0 if h < 0.
  The released code then clamps the row sum at 1e-10, which scales down every row that was raised by more than 23, and
  raises tiles that are masked whole. Here nothing is clamped: a raise of 64 or more is halved until it is less, so
  that neither P nor l underflows and the raise still varies from row to row, as it must.

Which implementation rounds where (F = float32, B = bfloat16; measured from the public sources):

=============  ====  ====  ============  ======  =======  ==========  ===========  ==========  =========
site           fp32  fa2   o_carry_only  l_only  pv_only  bf16_carry  qiu_untiled  ucker_cuda  ucker_cpu
=============  ====  ====  ============  ======  =======  ==========  ===========  ==========  =========
s, s_scaled    F     F     B             B       B        B           B            B           B
s_bwd          F     F     B             B       B        B           B            B           B
m_carry        F     F     F             F       F        F           F            F           B
s_minus_m      F     F     F             F       F        F           F            B           B
p_pv           F     B     B             B       B        B           B            B           B
p_sum          F     F     F             F       F        F           F            F           B
alpha          F     F     F             F       F        F           F            F           B
l_carry        F     F     F             B       F        B           F            B           B
pv             F     F     F             F       B        B           B            B           B
o_rescaled     F     F     F             F       F        B           F            B           B
o_carry        F     F     B             F       F        B           F            B           B
o_div, o_out   F, F  F, B  F, B          F, B    F, B     B, B        F, B         B, B        B, B
lse            F     F     F             F       F        B           F            F           B
dp             F     F     F             F       F        B           B            B           B
delta_product  F     F     F             F       F        F           F            B           B
delta          F     F     F             F       F        B           F            F           B
ds             F     B     B             B       B        B           B            B           B
d*_chunk, d*   F     F     F             F       F        B           F            B           B
sum_rounded_p  no    no    no            no      no       no          no           no          yes
reciprocal     no    yes   yes           yes     yes      no          no           no          no
=============  ====  ====  ============  ======  =======  ==========  ===========  ==========  =========

``fa2`` is what production kernels do: only matmul operands and the final output are narrow. ``bf16_carry`` is the
fault: the same recurrence whose running output and statistics live in bfloat16. ``o_carry_only``, ``l_only`` and
``pv_only`` put one of its roundings into ``fa2`` with bfloat16 scores; these four multiply by 1 / l, as the CUDA code
of FlashAttention-2 does, and the others divide. ``qiu_untiled`` (arXiv 2510.04212) needs ``tile`` = the sequence
length. ``ucker_cuda`` and ``ucker_cpu`` follow that paper's released code, run eagerly under CUDA autocast and on CPU;
the latter has ``sum_rounded_p``. They leave out what has no site here: both round the difference m - m' to bfloat16,
and ``ucker_cpu`` also ln l, S - LSE, P before dS and dP - delta.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from kernels.rounding import FP32, Rounding

_BF16 = Rounding.parse("bf16")


@dataclasses.dataclass(frozen=True)
class RoundingSites:
    """The rounding at every site of the recurrence in this module's docstring.

    Each site takes ``fp32 | bf16 | fp16 | <mantissa bits>`` with an optional mode (``bf16:sr``, ``"2:rz"``); what is
    not named is not rounded. The variants at the end take the values that the module's docstring names.

    Example::

        RoundingSites(l_carry="bf16", o_carry=2)
        RoundingSites.preset("bf16_carry").at_carries("2")

    Raises:
        ValueError: a field holds something else; the message names the site.
    """

    s: Rounding = FP32
    s_scaled: Rounding = FP32
    s_minus_m: Rounding = FP32
    p_pv: Rounding = FP32
    p_sum: Rounding = FP32
    alpha: Rounding = FP32
    l_carry: Rounding = FP32
    m_carry: Rounding = FP32
    pv: Rounding = FP32
    o_rescaled: Rounding = FP32
    o_carry: Rounding = FP32
    o_div: Rounding = FP32
    o_out: Rounding = FP32
    lse: Rounding = FP32
    s_bwd: Rounding = FP32
    dp: Rounding = FP32
    delta_product: Rounding = FP32
    delta: Rounding = FP32
    ds: Rounding = FP32
    dq_chunk: Rounding = FP32
    dq: Rounding = FP32
    dk_chunk: Rounding = FP32
    dk: Rounding = FP32
    dv_chunk: Rounding = FP32
    dv: Rounding = FP32
    sum_rounded_p: bool = False
    reciprocal: bool = False
    delta_from: str = "out"
    kv_order: str = "ascending"
    sfa_beta: float | None = None
    sfa_tolerance: float = 0.0
    _text: str = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in SITE_NAMES:
            try:
                object.__setattr__(self, name, Rounding.parse(getattr(self, name)))
            except ValueError as error:
                raise ValueError(f"site {name}: {error}") from None
        self._check_variants()
        parts = [f"{name}={getattr(self, name)}" for name in SITE_NAMES if not getattr(self, name).is_identity]
        parts += [f"{name}={getattr(self, name)}" for name in VARIANTS if getattr(self, name) != VARIANTS[name]]
        # built here because torch.compile cannot trace it
        object.__setattr__(self, "_text", ",".join(parts))

    def _check_variants(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed or type(getattr(self, name)) is not type(allowed[0]):
                raise ValueError(f"site {name}={getattr(self, name)!r} must be {' or '.join(map(str, allowed))}.")
        for name, least in (("sfa_beta", 1.0), ("sfa_tolerance", 0.0)):
            value = getattr(self, name)
            if name == "sfa_beta" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < math.inf:
                raise ValueError(f"site {name}={value!r} must be a finite number of at least {least:g}.")
            object.__setattr__(self, name, float(value))
        if self.sfa_beta is None and self.sfa_tolerance:
            raise ValueError("site sfa_tolerance is for the stabilised softmax; set sfa_beta too, e.g. 2.")
        if self.sfa_beta is not None and self.p_pv.exponent_bits < 8:
            raise ValueError("site sfa_beta makes P as small as 1e-28, which p_pv=fp16 cannot hold; use p_pv=bf16.")

    @classmethod
    def preset(cls, name: str) -> RoundingSites:
        """One of ``fp32, fa2, bf16_carry, qiu_untiled, o_carry_only, l_only, pv_only, ucker_cuda, ucker_cpu``."""
        if name not in PRESETS:
            raise ValueError(f"preset {name!r} is not one of {', '.join(PRESETS)}.")
        return PRESETS[name]

    @classmethod
    def build(cls, preset: str = "fp32", overrides: dict[str, Any] | None = None, carry: Any = None) -> RoundingSites:
        """A preset, ``carry`` at the carries and statistics it rounds, then single sites by name (the YAML form)."""
        sites = cls.preset(preset)
        if carry is not None:
            try:
                sites = sites.at_carries(carry)
            except ValueError as error:
                raise ValueError(f"carry: {error}") from None
        unknown = sorted(set(overrides or {}) - {*SITE_NAMES, *VARIANTS})
        if unknown:
            raise ValueError(
                f"overrides.{unknown[0]} is not one of the sites {', '.join(SITE_NAMES)} and the variants "
                f"{', '.join(VARIANTS)}."
            )
        return dataclasses.replace(sites, **(overrides or {}))

    def at_carries(self, rounding: Any) -> RoundingSites:
        """Replaces the rounding of those scores, running sums and saved statistics (``CARRY_SITES``) that do round.

        So the mantissa is a dial on a fault, and no fault (``fp32``) stays none whatever the dial says.
        """
        rounded = [name for name in CARRY_SITES if not getattr(self, name).is_identity]
        return dataclasses.replace(self, **dict.fromkeys(rounded, Rounding.parse(rounding)))  # type: ignore[arg-type]

    @property
    def is_exact(self) -> bool:
        """Whether no site rounds, so that float64 inputs make sense."""
        return all(getattr(self, name).is_identity for name in SITE_NAMES)

    @property
    def is_stochastic(self) -> bool:
        """Whether any site draws random numbers."""
        return any(getattr(self, name).mode == "sr" for name in SITE_NAMES)

    def encode(self) -> str:
        """A canonical string: only what differs from no rounding, e.g. ``l_carry=bf16,o_carry=2:sr``."""
        return self._text

    @classmethod
    @functools.lru_cache(maxsize=256)
    def decode(cls, text: str) -> RoundingSites:
        """The inverse of :meth:`encode`."""
        values: dict[str, Any] = dict(part.split("=") for part in filter(None, text.split(",")))
        for name in values:
            if name in ("sum_rounded_p", "reciprocal"):
                values[name] = values[name] == "True"
            elif name in ("sfa_beta", "sfa_tolerance"):
                values[name] = float(values[name])
        return cls.build(overrides=values)


SITE_NAMES = tuple(field.name for field in dataclasses.fields(RoundingSites) if field.type == "Rounding")
# What changes the recurrence without being a rounding, with its default.
VARIANTS = {
    field.name: field.default
    for field in dataclasses.fields(RoundingSites)
    if field.init and field.name not in SITE_NAMES
}
_CHOICES: dict[str, tuple[Any, ...]] = {
    "sum_rounded_p": (True, False),
    "reciprocal": (True, False),
    "delta_from": ("out", "out_fp32", "p_dp"),
    "kv_order": ("ascending", "descending"),
}

# What is carried from tile to tile or saved for the backward pass, and the scores both are made of.
CARRY_SITES = ("s", "s_scaled", "s_bwd", "l_carry", "o_carry", "lse", "delta", "dq")

_OPERANDS: dict[str, Any] = dict(p_pv=_BF16, ds=_BF16, o_out=_BF16)
_FA2: dict[str, Any] = dict(**_OPERANDS, reciprocal=True)
_SCORES: dict[str, Any] = dict(s=_BF16, s_scaled=_BF16, s_bwd=_BF16)
_GRADIENTS: dict[str, Any] = dict.fromkeys(("dq_chunk", "dq", "dk_chunk", "dk", "dv_chunk", "dv"), _BF16)
_ACCUMULATOR: dict[str, Any] = dict.fromkeys(("l_carry", "pv", "o_rescaled", "o_carry", "o_div", "dp"), _BF16)
_EVERY: dict[str, Any] = dict.fromkeys(SITE_NAMES, _BF16)

PRESETS: dict[str, RoundingSites] = {
    "fp32": RoundingSites(),
    "fa2": RoundingSites(**_FA2),
    "bf16_carry": RoundingSites(**_OPERANDS, **_SCORES, **_ACCUMULATOR, **_GRADIENTS, lse=_BF16, delta=_BF16),
    "qiu_untiled": RoundingSites(**_OPERANDS, **_SCORES, pv=_BF16, dp=_BF16),
    "o_carry_only": RoundingSites(**_FA2, **_SCORES, o_carry=_BF16),
    "l_only": RoundingSites(**_FA2, **_SCORES, l_carry=_BF16),
    "pv_only": RoundingSites(**_FA2, **_SCORES, pv=_BF16),
    "ucker_cuda": RoundingSites(
        **_OPERANDS, **_SCORES, **_ACCUMULATOR, **_GRADIENTS, s_minus_m=_BF16, delta_product=_BF16
    ),
    # its P is bfloat16 from the start, so that is what it sums
    "ucker_cpu": RoundingSites(**_EVERY, sum_rounded_p=True),
}
