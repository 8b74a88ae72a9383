import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_cases import DTYPES, assert_backends_agree, assert_same_bits, inputs, run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import PRESETS, RoundingSites, streaming_attention
from kernels.sites import SITE_NAMES


class TestExactArithmetic:
    @pytest.mark.parametrize(("causal", "S"), [(True, 7), (False, 5)])
    def test_gradients_are_derivatives(self, causal: bool, S: int):
        q, k, v, _ = (x.requires_grad_() for x in inputs(1, 2, 7, 3, torch.float64, S))
        attend = lambda q, k, v: streaming_attention(q, k, v, tile=(2, 3), causal=causal).out  # noqa: E731
        assert torch.autograd.gradcheck(attend, (q, k, v))

    @pytest.mark.parametrize("backend", ["reference", "cpu"])
    @pytest.mark.parametrize(("causal", "tile", "scale"), [(True, 32, None), (True, (48, 16), 0.3), (False, 512, None)])
    def test_fp32_is_scaled_dot_product_attention(self, backend: str, causal: bool, tile: Any, scale: float | None):
        qkvg = inputs(2, 2, 100, 32)
        got = run(qkvg, backend=backend, causal=causal, tile=tile, scale=scale)
        wide = [x.double().requires_grad_() for x in qkvg[:3]]
        out = F.scaled_dot_product_attention(*wide, is_causal=causal, scale=scale)
        expected = (out, *torch.autograd.grad(out, wide, qkvg[3].double()))
        for name, want in zip(("out", "dq", "dk", "dv"), expected, strict=True):
            torch.testing.assert_close(got[name].double(), want, rtol=2e-5, atol=2e-5, msg=name)

    def test_fa2_is_as_close_to_exact_as_bfloat16_output_allows(self):
        qkvg = inputs(1, 2, 96, 32, torch.bfloat16)
        exact = F.scaled_dot_product_attention(*(x.double() for x in qkvg[:3]), is_causal=True)
        error = (run(qkvg, sites="fa2", tile=32)["out"].double() - exact).abs()
        assert (error <= 2.0**-8 * exact.abs() + 2.0**-8).all()  # one rounding of out, one of each P


class TestStatistics:
    @pytest.mark.parametrize("backend", ["reference", "cpu"])
    @pytest.mark.parametrize("causal", [True, False])
    def test_against_brute_force(self, backend: str, causal: bool):
        # small integers: scores are exact, and ties common
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randint(-2, 3, (2, 3, 50, 16), generator=generator).to(torch.bfloat16) for _ in range(3))
        result = streaming_attention(q, k, v, sites="bf16_carry", tile=(32, 16), causal=causal, backend=backend)
        s = q.double() @ k.double().transpose(-1, -2) / 4
        if causal:
            s = s.masked_fill(torch.ones(50, 50).triu(1).bool(), -torch.inf)
        rows = (s == s.amax(-1, keepdim=True)).sum(-1) > 1
        assert 0 < rows.sum() < rows.numel()
        assert torch.equal(result.tied_rows, rows.sum(-1, dtype=torch.int32))
        assert torch.equal(result.max_logit, s.amax((2, 3)).float())

    def test_lse_is_the_log_of_the_row_sums(self):
        q, k, v, _ = inputs(1, 2, 40, 16)
        s = (q.double() @ k.double().transpose(-1, -2) / 4).masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf)
        lse = streaming_attention(q, k, v, tile=16).lse
        torch.testing.assert_close(lse.double(), s.logsumexp(-1), rtol=1e-6, atol=1e-6)

    def test_a_negative_maximum_is_reported_as_it_is(self):
        q = torch.ones(1, 1, 4, 16)
        assert streaming_attention(q, -q, q).max_logit.item() == -4.0

    def test_only_the_output_is_differentiable(self):
        q, k, v, _ = (x.requires_grad_() for x in inputs(1, 1, 8, 16))
        result = streaming_attention(q, k, v)
        assert [x.requires_grad for x in result] == [True, False, False, False]


class TestBackendsAgreeBitForBit:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("preset", PRESETS)
    def test_presets(self, preset: str, dtype: torch.dtype):
        assert_backends_agree(inputs(2, 2, 96, 32, dtype), sites=preset, tile=32)

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("tile", [(32, 16), (16, 48), (24, 40), 1, 512])
    @pytest.mark.parametrize("T", [1, 33, 80])
    def test_geometry(self, T: int, tile: Any, causal: bool):
        if T == 80 and tile == 1:
            pytest.skip("6,400 tiles show nothing that 33 rows do not")
        assert_backends_agree(inputs(1, 2, T, 16, torch.bfloat16), sites="bf16_carry", tile=tile, causal=causal)

    def test_more_keys_than_queries(self):
        qkvg = inputs(1, 2, 20, 16, torch.bfloat16, S=70)
        assert_backends_agree(qkvg, sites="bf16_carry", tile=(16, 32), causal=False)

    @pytest.mark.parametrize("preset", PRESETS)
    def test_a_scale_that_is_no_power_of_two(self, preset: str):
        assert_backends_agree(inputs(1, 2, 64, 24, torch.bfloat16), sites=preset, tile=32)

    @pytest.mark.parametrize("scale", [1.0, 0.1, 2.0, 0.25])
    @pytest.mark.parametrize(
        "sites", ["bf16_carry", RoundingSites.build("bf16_carry", {"s": "fp16", "dk_chunk": "fp16"})]
    )
    def test_scales(self, sites: RoundingSites | str, scale: float):
        for dtype in DTYPES:
            assert_backends_agree(inputs(1, 2, 48, 16, dtype), sites=sites, tile=32, scale=scale)

    def test_heads_worked_on_in_chunks(self, monkeypatch: pytest.MonkeyPatch):
        qkvg = inputs(2, 3, 64, 16, torch.bfloat16)
        stochastic = RoundingSites.build("bf16_carry", carry="3:sr")
        for sites in (RoundingSites.preset("bf16_carry"), stochastic):
            monkeypatch.undo()
            whole = run(qkvg, sites=sites, tile=32, backend="reference", seed=1)
            monkeypatch.setattr("kernels.streaming._TILE_ELEMENTS", 2 * 32 * 32)
            for backend in ("cpu", "reference"):
                assert_same_bits(run(qkvg, sites=sites, tile=32, backend=backend, seed=1), whole)

    @settings(max_examples=150, deadline=None)
    @given(st.data())
    def test_any_sites(self, data):
        self.any_case(data, ["bf16", "2", "3:rz", "fp16", "bf16:rz", "12"])

    @settings(max_examples=20, deadline=None)
    @given(st.data())
    def test_any_sites_with_stochastic_ones(self, data):
        self.any_case(data, ["bf16:sr", "fp16:sr", "3:sr", "bf16"])  # the cpu backend hands these to the reference

    def any_case(self, data: st.DataObject, roundings: list[str]) -> None:
        overrides = data.draw(st.dictionaries(st.sampled_from(SITE_NAMES), st.sampled_from(roundings)))
        variants = data.draw(
            st.fixed_dictionaries(
                {},
                optional={
                    "sum_rounded_p": st.booleans(),
                    "reciprocal": st.booleans(),
                    "delta_from": st.sampled_from(["out", "out_fp32", "p_dp"]),
                    "kv_order": st.sampled_from(["ascending", "descending"]),
                    "sfa_beta": st.sampled_from([1.5, 2.0, 7.0]),
                },
            )
        )
        if "sfa_beta" in variants and overrides.get("p_pv", "").startswith("fp16"):
            del overrides["p_pv"]
        sites = RoundingSites.build(data.draw(st.sampled_from(["fp32", "bf16_carry"])), {**overrides, **variants})
        T, S, D = data.draw(st.integers(1, 96)), data.draw(st.integers(1, 96)), data.draw(st.sampled_from([16, 24, 32]))
        tile = data.draw(st.sampled_from([16, 32, 64, (32, 16), (20, 48)]))
        qkvg = inputs(1, 2, T, D, data.draw(st.sampled_from(DTYPES)), S, data.draw(st.sampled_from([1, 2])))
        assert_backends_agree(qkvg, sites=sites, tile=tile, causal=data.draw(st.booleans()), seed=3)

    @pytest.mark.parametrize("scale", [0.25, 2.0**20])
    @pytest.mark.parametrize("size", [1e-38, 1e35])
    def test_a_scale_that_would_overflow_or_underflow_q(self, size: float, scale: float):
        q, k, v, dout = inputs(1, 2, 40, 16)
        qkvg = [(q * size).to(torch.bfloat16), (k / size).to(torch.bfloat16), v.bfloat16(), dout.bfloat16()]
        assert_backends_agree(qkvg, sites="bf16_carry", tile=16, scale=scale)


class TestNotFinite:
    @pytest.mark.parametrize("sites", [RoundingSites.build("bf16_carry", carry=2), "bf16_carry", "ucker_cpu"])
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("which", [0, 1, 2])
    def test_backends_agree(self, which: int, value: float, sites: RoundingSites | str):
        qkvg = inputs(2, 2, 70, 32, torch.bfloat16)
        qkvg[which][1, 0, 50, 3] = value
        assert_backends_agree(qkvg, sites=sites, tile=32)

    @pytest.mark.parametrize("backend", ["reference", "cpu"])
    @pytest.mark.parametrize("sites", ["fp32", "fa2", "bf16_carry"])
    def test_a_masked_nan_stays_in_the_future(self, backend: str, sites: str):
        q, k, v, _ = inputs(1, 2, 64, 16, torch.bfloat16)
        clean = streaming_attention(q, k, v, sites=sites, tile=32, backend=backend)
        k[0, 1, 40] = math.nan
        result = streaming_attention(q, k, v, sites=sites, tile=32, backend=backend)
        assert torch.equal(result.out[:, :, :40], clean.out[:, :, :40])
        assert torch.equal(result.out[:, 0], clean.out[:, 0])
        assert result.out[0, 1, 40:].isnan().all() and result.lse[0, 1, 40:].isnan().all()
        assert result.max_logit.isnan().tolist() == [[False, True]]


class TestSameBitsEverywhere:
    def test_two_calls(self):
        qkvg = inputs(1, 2, 70, 16, torch.bfloat16)
        assert_same_bits(run(qkvg, sites="bf16_carry", tile=32), run(qkvg, sites="bf16_carry", tile=32))

    @pytest.mark.parametrize("backend", ["reference", "cpu"])
    def test_under_autocast(self, backend: str):
        qkvg = inputs(1, 2, 70, 16)
        expected = run(qkvg, sites="ucker_cuda", tile=32, backend=backend)
        with torch.autocast("cpu", torch.bfloat16):
            assert_same_bits(run(qkvg, sites="ucker_cuda", tile=32, backend=backend), expected)

    def test_under_a_compiled_caller(self):
        qkvg = inputs(1, 2, 32, 16, torch.bfloat16)

        def caller(*qkv: Tensor) -> Tensor:
            return streaming_attention(*qkv, sites="bf16_carry", tile=16).out * 2

        def gradients(attend: Any) -> dict[str, Tensor]:
            leaves = [x.detach().requires_grad_() for x in qkvg[:3]]
            out = attend(*leaves)
            return dict(zip("oqkv", (out.detach(), *torch.autograd.grad(out, leaves, qkvg[3])), strict=True))

        assert_same_bits(gradients(torch.compile(caller, fullgraph=True)), gradients(caller))

    @pytest.mark.parametrize("layout", ["transposed", "expanded"])
    def test_for_any_memory_layout(self, layout: str):
        qkvg = inputs(2, 2, 40, 16, torch.bfloat16)
        if layout == "transposed":  # as a model makes them: [B, T, H, D] seen as [B, H, T, D]
            views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkvg]
        else:
            qkvg = [x[:, :1].repeat(1, 2, 1, 1) for x in qkvg]
            views = [x[:, :1].expand(-1, 2, -1, -1) for x in qkvg]
        assert_same_bits(run(views, sites="bf16_carry", tile=16), run(qkvg, sites="bf16_carry", tile=16))

    @pytest.mark.parametrize("backend", ["reference", "cpu"])
    def test_the_operator_keeps_its_contract(self, backend: str):
        q, k, v, _ = (x.requires_grad_() for x in inputs(1, 2, 20, 16))
        torch.library.opcheck(
            torch.ops.lightning_qk.streaming_attention.default,
            (q, k, v, "o_carry=bf16", 16, 16, True, 0.25, 0, backend),
        )


class TestStochasticSites:
    SITES = RoundingSites.build("fa2", dict.fromkeys(("s", "s_bwd", "l_carry", "o_carry", "lse", "dq"), "4:sr"))

    def test_the_seed_decides(self):
        qkvg = inputs(1, 2, 64, 16, torch.bfloat16)
        first, again, other = (run(qkvg, sites=self.SITES, tile=32, seed=seed) for seed in (1, 1, 2))
        assert_same_bits(again, first)
        assert all(not torch.equal(other[name], first[name]) for name in ("out", "lse", "dq", "dk", "dv"))
        assert_same_bits(run(qkvg, sites=self.SITES, tile=32, seed=1, backend="reference"), first)

    @pytest.mark.parametrize("bit", range(64))
    def test_every_bit_of_the_seed_counts(self, bit: int):
        q, k, v, _ = inputs(1, 1, 32, 16)
        first, other = (
            streaming_attention(q, k, v, RoundingSites(s="2:sr"), 16, seed=seed).out  # type: ignore[arg-type]
            for seed in (5, 5 ^ (1 << bit))
        )
        assert not torch.equal(first, other)

    def test_backward_draws_the_scores_of_the_forward_pass_again(self):
        # with nothing else rounded, dv = P' dO for the P that made out: their inner products with dO and v agree
        q, k, v, dout = inputs(1, 2, 64, 16)
        sites = RoundingSites(s="3:sr", s_bwd="3:sr")  # type: ignore[arg-type]
        got = run([q, k, v, dout], sites=sites, tile=32, seed=5)
        torch.testing.assert_close((got["dv"] * v).sum(), (got["out"] * dout).sum(), rtol=1e-4, atol=1e-4)
        nearest = run([q, k, v, dout], sites=RoundingSites(s="3:sr", s_bwd="3"), tile=32, seed=5)  # type: ignore[arg-type]
        assert ((nearest["dv"] * v).sum() - (nearest["out"] * dout).sum()).abs() > 1e-2


class TestErrors:
    GOOD = inputs(1, 2, 8, 16)[:3]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda q, k, v: (q[0], k, v), "q has shape"),
            (lambda q, k, v: (q, k[0], v), "k has shape"),
            (lambda q, k, v: (q, k, v.double()), "v is torch.float64"),
            (lambda q, k, v: (q.long(), k.long(), v.long()), "q is torch.int64"),
            (lambda q, k, v: (q, k, v[:, :, :4]), "differ"),
            (lambda q, k, v: (q[:, :1], k, v), "1 query heads cannot share 2"),
            (lambda q, k, v: (q[..., :8], k, v), "differ"),
            (lambda q, k, v: (q[:, :, :0], k[:, :, :0], v[:, :, :0]), "empty"),
            (lambda q, k, v: (q.repeat(1, 2, 1, 1)[:, :3], k, v), "3 query heads cannot share 2 key heads"),
        ],
    )
    def test_tensors(self, change: Any, message: str):
        with pytest.raises(ValueError, match=message):
            streaming_attention(*change(*self.GOOD))

    @pytest.mark.parametrize(
        ("setting", "message"),
        [
            ({"sites": "fa3"}, "preset 'fa3'"),
            ({"tile": 0}, "tile=0"),
            ({"tile": (16, 0)}, "tile="),
            ({"tile": 128.0}, "tile=128.0"),
            ({"tile": (16,)}, "tile="),
            ({"tile": True}, "tile=True"),
            ({"scale": math.nan}, "scale=nan"),
            ({"scale": "0.1"}, "scale='0.1'"),
            ({"seed": 1.5}, "seed=1.5"),
            ({"sites": {"s": "bf16"}}, "sites="),
            ({"backend": "cuda"}, "backend='cuda' is not one of auto, reference, cpu"),
        ],
    )
    def test_settings(self, setting: dict[str, Any], message: str):
        with pytest.raises(ValueError, match=message):
            streaming_attention(*self.GOOD, **setting)

    def test_float64_is_for_exact_sites(self):
        with pytest.raises(ValueError, match="float64"):
            streaming_attention(*(x.double() for x in self.GOOD), sites="fa2")

    def test_the_cpu_backend_wants_cpu_tensors(self):
        with pytest.raises(ValueError, match="backend='cpu' got tensors on meta"):
            streaming_attention(*(x.to("meta") for x in self.GOOD), backend="cpu")
