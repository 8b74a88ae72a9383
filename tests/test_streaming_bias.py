"""What makes the bias of tied maxima, what hides it, what removes it."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import RoundingSites, streaming_attention
from kernels.tied_rows import D, bias, case

SCORES = {"s": "bf16", "s_scaled": "bf16", "s_bwd": "bf16"}
NARROW_SCORES = RoundingSites.build("fa2", SCORES)
FAULT, REPAIRED = 3.0, 1.2


@pytest.mark.parametrize(
    ("sites", "tile", "ties"),
    [
        ("qiu_untiled", 1024, "random"),
        ("pv_only", 1024, "random"),
        ("o_carry_only", 512, "random"),
        ("l_only", 512, "random"),
        ("bf16_carry", 1024, "random"),
        ("ucker_cpu", 1024, "random"),
        *((preset, tile, "one tile") for preset in ("bf16_carry", "ucker_cuda") for tile in (64, 128, 512)),
    ],
)
def test_any_one_faulty_site_biases_every_delta_upwards(sites: str, tile: int, ties: str):
    measured = bias(case(ties), sites, tile)
    assert measured.out == pytest.approx(-0.205, abs=0.01)
    assert measured.delta > FAULT and measured.upwards > 0.995


@pytest.mark.parametrize(("tile", "ties"), [(64, "random"), (512, "random"), (1024, "random"), (64, "one tile")])
def test_narrow_scores_with_one_final_rounding_do_not(tile: int, ties: str):
    measured = bias(case(ties), NARROW_SCORES, tile)
    assert measured.out == pytest.approx(-0.018, abs=0.01)
    assert measured.delta == pytest.approx(-0.9, abs=0.2) and measured.upwards < 0.3


@pytest.mark.parametrize(
    ("sites", "tile", "out", "delta", "upwards"),
    [
        ("bf16_carry", 512, -0.10, 0.93, 0.77),
        ("bf16_carry", 128, -0.02, 0.26, 0.54),
        ("bf16_carry", 64, -0.005, 0.15, 0.51),
        ("pv_only", 512, 0.0, 0.02, 0.51),
    ],
)
def test_tiles_that_part_the_ties_hide_the_fault(sites: str, tile: int, out: float, delta: float, upwards: float):
    measured = bias(case("random"), sites, tile)
    assert measured.out == pytest.approx(out, abs=0.015)
    assert measured.delta == pytest.approx(delta, abs=0.1) and measured.upwards == pytest.approx(upwards, abs=0.05)


@pytest.mark.parametrize(("value_mean", "out", "delta"), [(2.0, 0.207, -4.13), (0.0, 0.0, 0.0)])
def test_the_sign_of_the_values_is_the_sign_of_the_bias(value_mean: float, out: float, delta: float):
    measured = bias(case("random", value_mean=value_mean), "qiu_untiled", 1024)
    # in last places of outputs around zero: over seeds and orders of the sum it spreads by 0.02
    assert measured.out == pytest.approx(out, abs=0.05) and measured.delta == pytest.approx(delta, abs=0.5)


class TestRepairs:
    def test_stochastic_rounding_of_the_faulty_site(self):
        sites = RoundingSites.build("pv_only", {"pv": "bf16:sr", "o_out": "bf16:sr"})
        measured = bias(case("random"), sites, 1024, seed=1)
        assert abs(measured.out) < 0.015 and abs(measured.delta) < 0.2

    def test_stochastic_rounding_of_every_carry(self):
        names = ("l_carry", "pv", "o_rescaled", "o_carry", "o_div", "o_out", "lse")
        sites = RoundingSites.build("bf16_carry", dict.fromkeys(names, "bf16:sr"))
        measured = bias(case("one tile"), sites, 512, seed=1)
        assert abs(measured.out) < 0.015 and abs(measured.delta) < 0.2

    @pytest.mark.parametrize("beta", [1.5, 2.0, 4.0, 7.0])
    @pytest.mark.parametrize(
        ("sites", "tile", "ties"), [("qiu_untiled", 1024, "random"), ("bf16_carry", 512, "one tile")]
    )
    def test_the_stabilised_softmax(self, sites: str, tile: int, ties: str, beta: float):
        qkvg = case(ties, logits=(12.0, 16.0))
        assert bias(qkvg, sites, tile).delta > FAULT
        measured = bias(qkvg, RoundingSites.build(sites, {"sfa_beta": beta}), tile)
        assert abs(measured.out) < 0.08 and abs(measured.delta) < 0.5

    def test_the_stabilised_softmax_needs_maxima_that_differ(self):
        # one maximum for all rows makes one P, rounded the same way in every row: the bias of a fixed offset
        sites = RoundingSites.build("qiu_untiled", {"sfa_beta": 2.0})
        assert abs(bias(case("random"), sites, 1024).delta) > 2.0

    @pytest.mark.parametrize("logits", [(20.0, 40.0), (60.0, 100.0), (200.0, 400.0)])
    def test_the_stabilised_softmax_does_not_shrink_saturated_rows(self, logits: tuple[float, float]):
        # a row sum clamped at 1e-10 would scale these rows to nothing
        sites = RoundingSites.build("qiu_untiled", {"sfa_beta": 2.0})
        q, k, v, _ = case("random", logits)
        out = streaming_attention(q, k, v, sites=sites, tile=1024, causal=False).out.double()
        exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
        torch.testing.assert_close(out, exact, rtol=3 * 2.0**-8, atol=2.0**-7)


class TestDeltaFormulas:
    """delta reaches dQ along a feature that all keys share and no query has: dQ there is minus the error of delta."""

    def error(self, delta_from: str) -> Tensor:
        q, k, v, dout = (F.pad(x, (0, 8)) for x in case("random"))
        k[..., D] = 1.0
        sites = RoundingSites.build(
            "qiu_untiled", {"dp": "fp32", "ds": "fp32", "p_pv": "fp32", "delta_from": delta_from}
        )
        q.requires_grad_()
        out = streaming_attention(q, k, v, sites=sites, tile=1024, causal=False, scale=0.125).out
        (dq,) = torch.autograd.grad(out, q, dout)
        return -dq[..., D].double() / 0.125

    @pytest.mark.parametrize("delta_from", ["out_fp32", "p_dp"])
    def test_an_unrounded_delta_has_no_bias(self, delta_from: str):
        faulty, clean = self.error("out"), self.error(delta_from)
        assert faulty.mean() / faulty.std() > FAULT
        assert clean.abs().max() < 1e-2 * faulty.abs().mean()
