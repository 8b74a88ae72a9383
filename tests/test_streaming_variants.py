"""Heads that share keys, sequences of different lengths, and the variants of the recurrence that are no rounding."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_cases import assert_backends_agree, assert_same_bits, inputs, run
from torch import Tensor

from kernels import RoundingSites, streaming_attention

BACKENDS = ["reference", "cpu"]


def exact(qkvg: list[Tensor], causal: bool = True) -> dict[str, Tensor]:
    """float64 attention and its gradients; causal is aligned at the last query, and rows without keys are 0."""
    q, k, v = (x.double().requires_grad_() for x in qkvg[:3])
    T, S = q.shape[2], k.shape[2]
    mask = torch.ones(T, S, dtype=torch.bool).tril(S - T) if causal else torch.ones(T, S, dtype=torch.bool)
    seen = mask.any(-1)
    out = F.scaled_dot_product_attention(q[:, :, seen], k, v, attn_mask=mask[seen], enable_gqa=True)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), qkvg[3].double()[:, :, seen])
    whole = torch.zeros(q.shape, dtype=torch.float64).index_copy(2, seen.nonzero()[:, 0], out.detach())
    return {"out": whole, "dq": dq, "dk": dk, "dv": dv}


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 2e-5) -> None:
    for name, value in want.items():
        torch.testing.assert_close(got[name].double(), value, rtol=tolerance, atol=tolerance, msg=name)


class TestGroupedQueryHeads:
    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("G", [1, 2, 3, 6])
    def test_against_sdpa(self, G: int, backend: str):
        qkvg = inputs(2, 6, 40, 16, G=G)
        assert_close(run(qkvg, tile=16, backend=backend), exact(qkvg))

    def test_a_shared_head_is_a_repeated_head(self):
        q, k, v, dout = inputs(1, 4, 50, 16, torch.bfloat16, G=2)
        shared = run([q, k, v, dout], sites="bf16_carry", tile=16)
        apart = run([q, *(x.repeat_interleave(2, 1) for x in (k, v)), dout], sites="bf16_carry", tile=16)
        for name in ("dk", "dv"):
            apart[name] = apart[name].view(1, 2, 2, 50, 16).float().sum(2).to(torch.bfloat16)
        assert_same_bits(shared, apart)

    def test_gradients_are_derivatives(self):
        q, k, v, _ = (x.requires_grad_() for x in inputs(1, 4, 6, 8, torch.float64, S=9, G=2))
        assert torch.autograd.gradcheck(lambda *qkv: streaming_attention(*qkv, tile=(4, 5)).out, (q, k, v))

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_the_operator_keeps_its_contract(self, backend: str):
        q, k, v, _ = (x.requires_grad_() for x in inputs(1, 4, 20, 16, S=30, G=2))
        torch.library.opcheck(
            torch.ops.lightning_qk.streaming_attention.default,
            (q, k, v, "o_carry=bf16,kv_order=descending", 16, 16, True, 0.25, 0, backend),
        )


class TestLengths:
    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("kv_order", ["ascending", "descending"])
    @pytest.mark.parametrize("tile", [16, (24, 10), (5, 40)])
    @pytest.mark.parametrize(("T", "S"), [(20, 50), (1, 33), (50, 20), (33, 1), (40, 40)])
    def test_causal_is_aligned_at_the_last_query(self, T: int, S: int, tile: Any, kv_order: str, backend: str):
        qkvg = inputs(1, 2, T, 16, S=S)
        got = run(qkvg, sites=RoundingSites(kv_order=kv_order), tile=tile, backend=backend)
        assert_close(got, exact(qkvg))
        blind = max(0, T - S)
        assert (got["out"][:, :, :blind] == 0).all() and (got["dq"][:, :, :blind] == 0).all()
        assert (got["lse"][:, :, :blind] == -torch.inf).all() and got["lse"][:, :, blind:].isfinite().all()
        assert (got["tied_rows"] == 0).all()

    def test_rows_without_keys_are_not_tied(self):
        qkvg = inputs(1, 2, 50, 16, S=20)
        assert run(qkvg, tile=16)["tied_rows"].tolist() == [[0, 0]]

    @pytest.mark.parametrize("D", [8, 24, 80, 256])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_head_dimensions(self, D: int, dtype: torch.dtype):
        qkvg = inputs(1, 2, 37, D, dtype)
        assert_backends_agree(qkvg, sites="ucker_cuda", tile=16)
        tolerance = 2e-5 if dtype is torch.float32 else 2e-2
        assert_close(run(qkvg, tile=16), exact(qkvg), tolerance)

    @pytest.mark.parametrize("kv_order", ["ascending", "descending"])
    def test_appended_keys_that_are_masked_change_nothing(self, kv_order: str):
        # one more key tile for the last rows only, so that earlier rows meet tiles they see nothing of
        sites = RoundingSites.build("bf16_carry", {"kv_order": kv_order})
        qkvg = inputs(1, 2, 64, 16, torch.bfloat16)
        long = run(qkvg, sites=sites, tile=(64, 16))
        short = run(qkvg, sites=sites, tile=(16, 16))
        assert torch.equal(long["out"], short["out"]) and torch.equal(long["lse"], short["lse"])


class TestVariants:
    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize(
        "variant",
        [
            {"reciprocal": True},
            {"delta_from": "out_fp32"},
            {"delta_from": "p_dp"},
            {"kv_order": "descending"},
            {"sfa_beta": 2.0},
            {"sfa_beta": 7.0, "sfa_tolerance": 1.0},
        ],
    )
    def test_none_changes_exact_attention(self, variant: dict[str, Any], backend: str):
        qkvg = inputs(1, 2, 60, 16)
        assert_close(run(qkvg, sites=RoundingSites(**variant), tile=(24, 16), backend=backend), exact(qkvg))

    @pytest.mark.parametrize(
        ("variant", "same"),
        [
            ({"delta_from": "out_fp32"}, {"out", "lse", "dv"}),
            ({"delta_from": "p_dp"}, {"out", "lse", "dv"}),
            ({"kv_order": "descending"}, set()),
            ({"sfa_beta": 2.0, "sfa_tolerance": 1.0}, set()),
            ({"reciprocal": True}, {"lse", "dv"}),
        ],
    )
    def test_each_changes_a_faulty_recurrence_where_it_acts(self, variant: dict[str, Any], same: set[str]):
        qkvg = inputs(1, 2, 60, 16)
        settings = {"tile": 16, "backend": "cpu"}
        wide = dict.fromkeys(("o_div", "o_out", "delta", "dp", "ds", "dq_chunk", "dq"), "fp32")
        plain = run(qkvg, sites=RoundingSites.build("bf16_carry", wide), **settings)
        changed = run(qkvg, sites=RoundingSites.build("bf16_carry", {**wide, **variant}), **settings)
        equal = {name for name in ("out", "lse", "dv") if torch.equal(plain[name], changed[name])}
        assert equal == same
        assert not torch.equal(plain["dq"], changed["dq"])


class TestStabilisedSoftmax:
    def one_row(
        self, scores: list[float], beta: float, tolerance: float = 0.0, tile: int = 8
    ) -> tuple[float, list[float]]:
        """lse and the rounded probabilities of one row of scores, read off one-hot values."""
        k = torch.tensor(scores)[:, None] * torch.eye(8)[0]
        q, v = torch.eye(8)[:1], torch.eye(8)[: len(scores)]
        sites = RoundingSites(p_pv="bf16", sfa_beta=beta, sfa_tolerance=tolerance)  # type: ignore[arg-type]
        result = streaming_attention(
            q[None, None], k[None, None], v[None, None], sites, tile, causal=False, scale=1.0, backend="reference"
        )
        return result.lse.item(), result.out[0, 0, 0, : len(scores)].tolist()

    def p_of_the_maximum(self, scores: list[float], **settings: Any) -> float:
        """exp(h - m), which is 1 when the maximum was not raised, found through the rounding it received."""
        lse, p = self.one_row(scores, **settings)
        top = max(scores)
        true = torch.tensor(top - lse, dtype=torch.float64).exp().item()
        return p[scores.index(top)] / true

    def test_no_tie_leaves_the_maximum(self):
        assert self.p_of_the_maximum([3.3, 2.0, 1.0], beta=2.0) == pytest.approx(1.0, abs=1e-6)

    @pytest.mark.parametrize(
        ("top", "beta", "raised_by"), [(3.3, 2.0, 3.3), (3.1, 7.0, 18.6), (-3.3, 2.0, 3.3), (0.0, 2.0, 0.0)]
    )
    def test_ties_raise_it(self, top: float, beta: float, raised_by: float):
        p = torch.tensor(-raised_by).exp()
        expected = (p.bfloat16().double() / p.double()).item()  # the error that rounding such a P makes
        assert self.p_of_the_maximum([top, top - 4, top], beta=beta) == pytest.approx(expected, abs=5e-6)
        assert raised_by == 0 or abs(expected - 1) > 1e-4

    def test_the_tolerance_decides_what_is_a_tie(self):
        close = [3.3, 3.2, 1.0]
        assert self.p_of_the_maximum(close, beta=2.0) == pytest.approx(1.0, abs=1e-6)
        assert abs(self.p_of_the_maximum(close, beta=2.0, tolerance=0.2) - 1) > 1e-4

    @pytest.mark.parametrize("top", [40.0, 100.0, 1e4, 1.4e38, -100.0, -1e4])
    @pytest.mark.parametrize("beta", [2.0, 8.0])
    def test_any_size_of_logit_is_survived(self, top: float, beta: float):
        lse, p = self.one_row([top, top, top - 5], beta)
        exact = torch.tensor([top, top, top - 5], dtype=torch.float64)
        assert lse == pytest.approx(exact.logsumexp(0).item(), rel=1e-6)
        assert p == pytest.approx(exact.softmax(0).tolist(), rel=2.0**-8)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_masked_keys_are_not_ties(self, backend: str):
        # logits near -100: raising the maximum of a tile that is masked whole to 0 would leave nothing
        q, k, v, _ = inputs(1, 1, 40, 16)
        q, k = torch.full_like(q, 10.0), -torch.full_like(k, 2.5) - 0.01 * torch.arange(40)[:, None]
        sites = RoundingSites(sfa_beta=2.0)
        got = streaming_attention(q, k, v, sites, (40, 8), backend=backend).out
        torch.testing.assert_close(got, F.scaled_dot_product_attention(q, k, v, is_causal=True), rtol=1e-4, atol=1e-5)

    def test_reports_the_true_maximum(self):
        q, k, v, _ = inputs(1, 2, 40, 16, torch.bfloat16)
        plain = streaming_attention(q, k, v, RoundingSites(s="2", s_scaled="2"), 16)  # type: ignore[arg-type]
        raised = streaming_attention(q, k, v, RoundingSites(s="2", s_scaled="2", sfa_beta=3.0), 16)  # type: ignore[arg-type]
        assert torch.equal(plain.max_logit, raised.max_logit) and torch.equal(plain.tied_rows, raised.tied_rows)
        assert plain.tied_rows.sum() > 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"sfa_beta": 0.5}, "sfa_beta=0.5 must be a finite number of at least 1"),
        ({"sfa_beta": True}, "sfa_beta=True"),
        ({"sfa_beta": "two"}, "sfa_beta='two'"),
        ({"sfa_tolerance": 0.1}, "set sfa_beta too"),
        ({"sfa_beta": 2, "sfa_tolerance": -1}, "sfa_tolerance=-1"),
        ({"sfa_beta": 2, "p_pv": "fp16"}, "p_pv=fp16 cannot hold"),
        ({"delta_from": "dO"}, "delta_from='dO' must be out or out_fp32 or p_dp"),
        ({"kv_order": "random"}, "kv_order='random' must be ascending or descending"),
        ({"reciprocal": 1}, "reciprocal=1 must be True or False"),
    ],
)
def test_a_wrong_variant_is_an_error(overrides: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        RoundingSites.build(overrides=overrides)


def test_variants_survive_encoding():
    variants = {
        "reciprocal": True,
        "delta_from": "p_dp",
        "kv_order": "descending",
        "sfa_beta": 2,
        "sfa_tolerance": 1e-3,
    }
    sites = RoundingSites.build("bf16_carry", variants)
    assert RoundingSites.decode(sites.encode()) == sites
    assert sites.encode().endswith(
        "reciprocal=True,delta_from=p_dp,kv_order=descending,sfa_beta=2.0,sfa_tolerance=0.001"
    )
