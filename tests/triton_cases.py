"""The Triton kernels under Triton's interpreter, against the reference. Run by test_triton_attention in a process of
its own, because Triton decides when it is imported whether it interprets.

What "equal" means here. The kernels do the reference's operations in its order, except that the float32 sums inside a
product or a row sum are added up in another order, and that ``exp2`` and ``log`` are NumPy's. So

* a value whose last step is a rounding to ``bits`` (its final site's or its dtype's, whichever are fewer) is the same
  unless the float32 value before it lay within a few 1e-7 of a boundary; then it differs by one unit of that place, and
  what is computed from it may differ in turn. Required: 99.9 % of the elements have the same bits, 99.9 % are
  within one unit in their own last place, and all within one unit in the last place of the tensor's largest element
  (with sites drawn at random: one unit of the coarsest site, and 95 % the same bits in a single case);
* a value that stays float32 differs by ``NOISE`` times the largest element at most.
"""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels import PRESETS, RoundingSites, reference, streaming_attention, tied_rows, triton_attention
from kernels.reference import Plan
from kernels.rounding import Rounding, split_seed
from kernels.sites import SITE_NAMES
from kernels.triton_rounding import rounded, row_max

assert triton_attention.interpreting(), "run with TRITON_INTERPRET=1"

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MANTISSA = {torch.float64: 52, torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}
NAMES = ("out", "lse", "max_logit", "tied_rows", "dq", "dk", "dv")
FINAL_SITE = {"out": "o_out", "lse": "lse", "dq": "dq", "dk": "dk", "dv": "dv"}
NOISE = 1e-5  # of float32 sums of up to 128 terms, relative to the largest element or to what it is summed from


@pytest.fixture(autouse=True)
def quiet_and_small_blocks(monkeypatch: pytest.MonkeyPatch):
    """Blocks of 16, so that short sequences have several; NumPy would warn of every infinity."""
    monkeypatch.setattr(triton_attention, "_blocks", lambda *_: (16, 16, 1))
    with np.errstate(all="ignore"):
        yield


def inputs(N: int, T: int, D: int, dtype: torch.dtype = torch.float32, S: int | None = None, seed: int = 0):
    """q, k, v and the gradient of the output; logits of a few units, like early training."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((T, 1.5), (S or T, 1.5), (S or T, 1.0), (T, 1.0))
    return [(torch.randn(N, length, D, generator=generator) * size).to(dtype) for length, size in shapes]


def plan(sites: RoundingSites | str, T: int, S: int | None = None, tile: Any = (32, 32), **others: Any) -> Plan:
    sites = RoundingSites.preset(sites) if isinstance(sites, str) else sites
    defaults = {"causal": True, "scale": 0.25}
    return Plan(sites, *tile, q_length=T, k_length=S or T, **{**defaults, **others})


def run(module: Any, qkvg: list[Tensor], settings: Plan, saved: tuple[Tensor, ...] = ()) -> dict[str, Tensor]:
    """Every value; the backward pass starts from the saved output and log-sum-exp, if given."""
    q, k, v, dout = qkvg
    forward = module.forward(q, k, v, settings)
    backward = module.backward(dout, q, k, v, *(saved or forward[:2]), settings)
    return dict(zip(NAMES, (*forward, *backward), strict=True))


def both(qkvg: list[Tensor], settings: Plan) -> dict[str, tuple[Tensor, Tensor]]:
    """Every value by the kernels and by the reference; both backward passes start from the reference's forward."""
    wanted = run(reference, qkvg, settings)
    found = run(triton_attention, qkvg, settings, (wanted["out"], wanted["lse"]))
    for name, want in wanted.items():
        got = found[name]
        assert got.dtype is want.dtype and got.shape == want.shape, name
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isposinf(), want.isposinf()), name
        assert torch.equal(got.isneginf(), want.isneginf()), name
    assert torch.equal(found["tied_rows"], wanted["tied_rows"])
    return {name: (found[name], wanted[name]) for name in NAMES}


@dataclasses.dataclass
class Agreement:
    """How many elements were compared, are equal, and are within one unit in their own last place."""

    compared: int = 0
    equal: int = 0
    near: int = 0

    def add(self, name: str, got: Tensor, want: Tensor, sites: RoundingSites, coarsest: int | None = None) -> None:
        """Adds a tensor; asserts that no element is further off than one unit, of ``coarsest`` bits, of the largest."""
        bits = MANTISSA.get(want.dtype, 23)
        if name in FINAL_SITE:
            bits = min(bits, getattr(sites, FINAL_SITE[name]).mantissa_bits)
        got, want = got[want.isfinite()].double(), want[want.isfinite()].double()
        if not want.numel():
            return
        error, largest = (got - want).abs(), want.abs().max().item()
        noise = NOISE * max(3.0, largest)
        assert error.max() <= 2.0 ** -(coarsest or bits) * largest + noise, (
            f"{name}: off by {error.max():.3g} of {largest:.3g}"
        )
        if bits < 23:
            unit = 2.0 ** (torch.frexp(torch.maximum(got.abs(), want.abs())).exponent.double() - 1 - bits)
            counted = unit > noise  # the last place of what is smaller is noise
            self.compared += int(counted.sum())
            self.equal += int((error == 0)[counted].sum())
            self.near += int((error <= unit + noise)[counted].sum())

    def check(self) -> None:
        assert self.equal >= 0.999 * self.compared and self.near >= 0.999 * self.compared, self


def assert_agree(cases: Any) -> Agreement:
    """Compares all values of (inputs, plan) pairs."""
    agreement = Agreement()
    for qkvg, settings in cases:
        for name, (got, want) in both(qkvg, settings).items():
            agreement.add(name, got, want, settings.sites)
    agreement.check()
    print(agreement)
    return agreement


def coarsest(sites: RoundingSites) -> int:
    return min(getattr(sites, name).mantissa_bits for name in SITE_NAMES)


@triton.jit
def rounding_kernel(x, out, seeds, start, C: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, rounded(tl.load(x + i), C, "l_carry", seeds, i.to(tl.int64) + start))


@triton.jit
def row_max_kernel(x, out):
    i = tl.arange(0, 16)
    tl.store(out + i, row_max(tl.load(x + 16 * i[:, None] + i[None, :])))


def constants(sites: RoundingSites) -> triton_attention.Constants:
    return triton_attention.Constants(sites, True, 1.0, 16, 16, 16, 16, True, True, True)


class TestRounding:
    """The device code gives the bits of :class:`kernels.rounding.Rounding`."""

    BLOCK = 1 << 14

    @staticmethod
    def battery() -> Tensor:
        """Random patterns, ties of every width, every edge of float16's range, subnormals, infinities, NaN."""
        generator = np.random.default_rng(0)
        patterns = generator.integers(0, 2**32, 8192, dtype=np.uint64)
        bits = np.repeat(np.arange(1, 23, dtype=np.uint64), 128)
        ties = ((patterns[: bits.size] >> (23 - bits)) << (23 - bits)) | (np.uint64(1) << (22 - bits))
        near_fp16 = generator.uniform(-1, 1, 2048) * np.exp2(generator.integers(-27, 18, 2048))
        edges = [
            0.0,
            65504,
            65519.996,
            65520,
            65536,
            2**-14,
            2**-24,
            2**-25,
            2**-26,
            1e-45,
            3.4028235e38,
            np.inf,
            np.nan,
        ]
        x = np.concatenate(
            [np.concatenate([patterns, ties]).astype(np.uint32).view(np.float32), near_fp16, edges, np.negative(edges)]
        )
        return torch.from_numpy(np.resize(x.astype(np.float32), TestRounding.BLOCK))

    @pytest.mark.parametrize("mode", ["rne", "rz", "sr"])
    @pytest.mark.parametrize("name", ["fp16", *map(str, range(1, 24))])
    def test_every_width_and_mode(self, name: str, mode: str):
        rounding, x, start = Rounding.parse(f"{name}:{mode}"), self.battery(), (1 << 32) + 12345
        sites = RoundingSites(l_carry=rounding)
        seed = plan(sites, 1, seed=7).site_seed("l_carry", 64)
        seeds = torch.tensor([split_seed(seed) if site == "l_carry" else (0, 0) for site in SITE_NAMES])
        out = torch.empty_like(x)
        rounding_kernel[(1,)](x, out, seeds.to(torch.int32), start, constants(sites), x.numel())
        index = (torch.arange(x.numel()) + start).to(torch.int32)
        want, nan = rounding(x, seed, index), x.isnan()
        assert torch.equal(out.isnan(), nan) and torch.equal(want.isnan(), nan)
        assert torch.equal(out[~nan].view(torch.int32), want[~nan].view(torch.int32))

    def test_a_row_maximum_keeps_nan(self):
        x = torch.randn(16, 16)
        x[3, 5], x[4, 0], x[5], x[6, 1] = math.nan, -math.nan, -math.inf, math.inf
        out = torch.empty(16)
        row_max_kernel[(1,)](x, out)
        torch.testing.assert_close(out, x.amax(1), rtol=0, atol=0, equal_nan=True)


class TestEqualsReference:
    @pytest.mark.parametrize(
        ("dtype", "presets"),
        [
            (torch.bfloat16, PRESETS),
            (torch.float32, ["fp32", "bf16_carry"]),
            (torch.float16, ["fa2", "ucker_cuda"]),
            *(pytest.param(dtype, PRESETS, marks=pytest.mark.slow) for dtype in DTYPES),
        ],
    )
    def test_presets(self, dtype: torch.dtype, presets: Any):
        # ragged on purpose: T is no multiple of the tiles, the tiles none of the blocks, D no power of two
        cases = [(inputs(1, 53, 24, dtype), plan(name, 53, tile=(20, 37), scale=24**-0.5)) for name in presets]
        assert_agree(cases)

    @pytest.mark.parametrize(
        ("T", "S", "tile", "blocks"),
        [
            (1, 1, (512, 512), (16, 16)),
            (5, 5, (1, 2), (16, 16)),
            (40, 40, (512, 512), (16, 32)),
            (64, 64, (32, 16), (16, 16)),
            (33, 33, (16, 24), (16, 16)),
            (20, 45, (16, 24), (16, 16)),
            (45, 20, (16, 24), (16, 16)),
            (1, 40, (4, 16), (64, 32)),
            (40, 1, (16, 4), (16, 16)),
        ],
    )
    def test_geometry(self, T: int, S: int, tile: Any, blocks: Any, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(triton_attention, "_blocks", lambda *_: (*blocks, 1))
        qkvg = inputs(1, T, 16, torch.bfloat16, S)
        # an output that is rounded on every visit shows which key tiles a row visits, masked ones included
        visits = RoundingSites(o_rescaled="4", o_out="bf16")  # type: ignore[arg-type]
        assert_agree(
            (qkvg, plan(sites, T, S, tile, causal=causal))
            for sites, causal in (("bf16_carry", True), ("bf16_carry", False), (visits, True))
        )

    @pytest.mark.parametrize(
        "variant",
        [
            {"kv_order": "descending"},
            {"kv_order": "descending", "delta_from": "p_dp", "delta_product": "bf16"},
            {"delta_from": "out_fp32", "reciprocal": True},
            {"sfa_beta": 2.0, "sfa_tolerance": 0.5, "sum_rounded_p": True},
            {"sfa_beta": 30.0, "sfa_tolerance": 1.0, "kv_order": "descending", "m_carry": "bf16"},
            {"p_pv": "5", "ds": "12", "s_minus_m": "fp16", "dp": "fp16"},
        ],
        ids=lambda variant: "-".join(variant),
    )
    def test_variants(self, variant: dict[str, Any]):
        sites = RoundingSites.build("bf16_carry", variant)
        for T, S in ((40, 40), (20, 40)):
            assert_agree([(inputs(1, T, 16, torch.bfloat16, S), plan(sites, T, S, (24, 20)))])

    @pytest.mark.parametrize("scale", [1.0, 0.1, -0.5])
    def test_scales(self, scale: float):
        sites = RoundingSites.build("bf16_carry", {"dk_chunk": "fp16"})
        assert_agree((inputs(1, 40, 16, dtype), plan(sites, 40, scale=scale)) for dtype in DTYPES)

    def test_exact_ties(self):
        # small integers: scores are exact, and ties common, within a tile and across tiles
        generator = torch.Generator().manual_seed(0)
        qkvg = [torch.randint(-2, 3, (1, 50, 16), generator=generator).to(torch.bfloat16) for _ in range(4)]
        for order, sfa in (("ascending", None), ("descending", 2.0)):
            sites = RoundingSites.build("bf16_carry", {"kv_order": order, "sfa_beta": sfa})
            results = both(qkvg, plan(sites, 50, tile=(32, 20)))
            assert 0 < results["tied_rows"][1].item() < 50
            assert torch.equal(*results["max_logit"]) and torch.equal(*results["out"])

    def test_division_and_reciprocal(self):
        # three equal scores and integers in v: only o / 3 or o * (1 / 3) is not exact
        q, v = torch.zeros(1, 4, 16), torch.arange(48.0).view(1, 3, 16) ** 2
        outs = []
        for reciprocal in (True, False):
            outs.append(both([q, v, v, q], plan(RoundingSites(reciprocal=reciprocal), 4, 3, causal=False))["out"])
            assert torch.equal(*outs[-1])
        assert not torch.equal(outs[0][0], outs[1][0])

    def test_any_memory_layout(self):
        qkvg = inputs(2, 20, 16, torch.bfloat16)
        views = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in qkvg]
        results = [both(x, plan("bf16_carry", 20)) for x in (qkvg, views)]
        assert all(torch.equal(results[0][name][0], results[1][name][0]) for name in results[0])


def share_off(got: Tensor, want: Tensor) -> float:
    """Share of elements that differ by more than float32 noise."""
    return ((got - want).abs() > NOISE * max(3.0, want.abs().max().item())).double().mean().item()


CHOICES = ["bf16", "2", "3:rz", "fp16", "bf16:rz", "12", "5", "fp16:rz", "bf16:sr", "fp16:sr", "3:sr"]


def random_case(seed: int) -> tuple[list[Tensor], Plan]:
    """Any sites at all, any variants, any geometry."""
    draw = random.Random(seed)
    names = draw.sample(SITE_NAMES, draw.randint(1, 8))
    overrides: dict[str, Any] = {name: draw.choice(CHOICES) for name in names}
    overrides.update(
        sum_rounded_p=draw.random() < 0.5,
        reciprocal=draw.random() < 0.5,
        delta_from=draw.choice(["out", "out_fp32", "p_dp"]),
        kv_order=draw.choice(["ascending", "descending"]),
    )
    if draw.random() < 0.3:
        overrides.update(sfa_beta=draw.choice([1.5, 2.0, 4.0]), sfa_tolerance=draw.choice([0.0, 0.5]), p_pv="bf16")
    sites = RoundingSites.build(draw.choice(["fp32", "fa2", "bf16_carry", "ucker_cpu"]), overrides)
    T, D = draw.choice([1, 17, 33, 50]), draw.choice([8, 16, 24, 32])
    S = draw.choice([T, T, 1, 40])
    return inputs(1, T, D, draw.choice(DTYPES), S, seed), plan(
        sites,
        T,
        S,
        (draw.choice([16, 20, 32, 512]), draw.choice([10, 16, 48, 512])),
        causal=draw.random() < 0.7,
        scale=draw.choice([D**-0.5, 0.25, 0.3]),
        seed=draw.randint(0, 2**40),
        first_head=draw.choice([0, 5]),
    )


class TestAnySites:
    @pytest.mark.parametrize("site", SITE_NAMES)
    def test_each_site_alone(self, site: str):
        # P is rounded throughout: without any rounding of P, that of the maximum would cancel
        base = {"p_pv": "6", "sum_rounded_p": True}
        qkvg = inputs(1, 24, 16)
        with_it, without = (plan(RoundingSites(**{**base, **own}), 24, tile=(16, 8)) for own in ({site: "3"}, {}))
        results, unrounded = both(qkvg, with_it), run(reference, qkvg, without)
        assert all(share_off(*results[name]) <= 0.03 for name in NAMES), results
        assert max(share_off(results[name][1], unrounded[name]) for name in NAMES) > 0.1

    @pytest.mark.parametrize("seed", [*range(8), *(pytest.param(s, marks=pytest.mark.slow) for s in range(8, 150))])
    def test_random_sites(self, seed: int):
        qkvg, settings = random_case(seed)
        for name, (got, want) in both(qkvg, settings).items():
            agreement = Agreement()  # of one case: a single flip early on may be seen in a whole row
            agreement.add(name, got, want, settings.sites, coarsest=coarsest(settings.sites))
            assert agreement.equal >= 0.95 * agreement.compared, (name, agreement, settings)

    def test_stochastic_sites_draw_what_the_reference_draws(self):
        sites = RoundingSites(**dict.fromkeys(SITE_NAMES, "bf16:sr"))  # type: ignore[arg-type]
        qkvg = inputs(2, 33, 24, torch.bfloat16)
        settings = [plan(sites, 33, tile=(20, 24), seed=seed, first_head=3) for seed in (1, 2**63 + 5)]
        assert_agree([(qkvg, settings[0])])
        first, second = (triton_attention.forward(*qkvg[:3], each) for each in settings)
        assert all(not torch.equal(x, y) for x, y in zip(first[:2], second[:2], strict=True))  # and they are draws


@pytest.mark.slow
class TestBiasOfTies:
    """The fault at full size: logical tiles of 1024 keys in blocks of 64."""

    @pytest.mark.parametrize(("sites", "tile", "biased"), [("qiu_untiled", 1024, True), ("fa2", 512, False)])
    def test_only_a_faulty_site_biases_delta(
        self, sites: str, tile: int, biased: bool, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(triton_attention, "_blocks", lambda *_: (64, 64, 1))
        qkvg = [x[:, :1] for x in tied_rows.case("random")]
        delta, reference_delta = (
            tied_rows.bias(qkvg, sites, tile, backend=name).delta for name in ("triton", "reference")
        )
        assert delta == pytest.approx(reference_delta, abs=0.02)
        assert delta > 3 if biased else abs(delta) < 1.2


class TestExactArithmetic:
    def attend(self, sites: RoundingSites, causal: bool, tile: tuple[int, int]):
        return lambda *qkv: streaming_attention(*qkv, sites=sites, tile=tile, causal=causal, backend="triton").out

    @pytest.mark.parametrize(
        ("causal", "S", "sites"),
        [
            (True, 7, RoundingSites()),
            (False, 5, RoundingSites(sfa_beta=2.0, sfa_tolerance=3.0, delta_from="p_dp")),
            (True, 4, RoundingSites(delta_from="out_fp32", kv_order="descending")),
        ],
    )
    def test_gradients_are_derivatives(self, causal: bool, S: int, sites: RoundingSites):
        q, k, v, _ = (x[None].double().requires_grad_() for x in inputs(1, 6, 3, torch.float64, S))
        assert torch.autograd.gradcheck(self.attend(sites, causal, (3, 4)), (q, k, v), fast_mode=True)

    def test_float64_is_the_reference(self):
        sites = RoundingSites(sfa_beta=40.0, sfa_tolerance=1.0)  # also the limit of the raise
        for name, (got, want) in both(inputs(1, 40, 8, torch.float64), plan(sites, 40, scale=1.0)).items():
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, msg=name)

    @pytest.mark.parametrize("causal", [True, False])
    def test_fp32_is_scaled_dot_product_attention(self, causal: bool):
        leaves = [x[None].requires_grad_() for x in inputs(2, 50, 24)[:3]]
        wide = [x.detach().double().requires_grad_() for x in leaves]
        out = self.attend(RoundingSites(), causal, (20, 37))(*leaves)
        expected = F.scaled_dot_product_attention(*wide, is_causal=causal)
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        got = (out, *torch.autograd.grad(out, leaves, dout))
        for a, b in zip(got, (expected, *torch.autograd.grad(expected, wide, dout.double())), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5)


class TestNotFinite:
    """``both`` asserts that NaN and infinities are where the reference has them, masked blocks of a tile included."""

    SITES = ("fp32", "bf16_carry", RoundingSites.build("fa2", {"delta_from": "p_dp", "kv_order": "descending"}))

    @pytest.mark.parametrize("which", range(4))
    @pytest.mark.parametrize(
        ("value", "T", "S", "at"),
        [
            (math.nan, 40, 40, 35),
            (math.inf, 40, 40, 35),
            pytest.param(-math.inf, 50, 50, 3, marks=pytest.mark.slow),
            pytest.param(math.nan, 20, 50, 10, marks=pytest.mark.slow),
            pytest.param(math.inf, 50, 20, 10, marks=pytest.mark.slow),
        ],
    )
    def test_one_bad_element(self, value: float, T: int, S: int, at: int, which: int):
        for number, sites in enumerate(self.SITES):
            qkvg = inputs(1, T, 16, torch.bfloat16, S)
            qkvg[which][0, at, 3] = value
            if number == 0 or value != value:
                both(qkvg, plan(sites, T, S, (40, 36)))

    def test_a_score_that_overflows_its_site(self):
        sites = RoundingSites(s="fp16", s_scaled="fp16", s_bwd="fp16")  # type: ignore[arg-type]
        q, k, v, dout = inputs(1, 40, 16)
        both([q * 300, k * 300, v, dout], plan(sites, 40))
        q[0, 5], k[0] = -300.0, 300.0  # a row whose every score is -inf
        results = both([q, k, v, dout], plan(sites, 40))
        assert results["lse"][1][0, 5] == -math.inf and results["out"][1][0, 5].isnan().all()
        both([q, k[:, :1], v[:, :1], dout], plan(sites, 40, 1, causal=False))  # and whose only score is -inf

    def test_a_gradient_that_overflows_its_site(self):
        sites = RoundingSites(dp="fp16", delta="fp16")  # type: ignore[arg-type]
        q, k, v, dout = inputs(1, 50, 16)
        assert both([q, k, v * 1e3, dout * 1e3], plan(sites, 50, tile=(48, 40)))["dq"][1].isnan().any()
        sites = RoundingSites(delta="fp16")  # type: ignore[arg-type]
        one_key = [q, k[:, :1], v[:, :1] * 1e3, dout * 1e3]
        assert both(one_key, plan(sites, 50, 1, causal=False))["dq"][1].isinf().any()
