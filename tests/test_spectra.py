from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor

from kernels.spectra import SingularTriplets, TopSingular


def spiked(count: int, m: int, n: int, spike: float, turn: float = 0.0, seed: int = 0) -> Tensor:
    """Random bulk with singular values up to 2, plus one direction of the given size, turned by ``turn`` radians."""
    generator = torch.Generator().manual_seed(seed)
    bulk = torch.randn(count, m, n, generator=generator) / max(m, n) ** 0.5
    u = torch.linalg.qr(torch.randn(count, m, 2, generator=generator)).Q
    v = torch.linalg.qr(torch.randn(count, n, 2, generator=generator)).Q
    angle = torch.tensor(turn)
    left, right = (x[..., 0] * angle.cos() + x[..., 1] * angle.sin() for x in (u, v))
    return bulk + spike * left[:, :, None] * right[:, None, :]


def with_spectrum(values: Tensor, m: int, n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """[1, m, n] with the given singular values and 0 for the rest."""
    generator = torch.Generator().manual_seed(seed)
    u, v = (
        torch.linalg.qr(torch.randn(side, len(values), generator=generator, dtype=torch.float64)).Q for side in (m, n)
    )
    return ((u * values.double()) @ v.T)[None].to(dtype)


def exact(w: Tensor) -> Tensor:
    return torch.linalg.svdvals(w.double()).float()


def assert_triplets_fit(w: Tensor, triplets: SingularTriplets, tolerance: float) -> None:
    """The vectors are orthonormal, W v = s u, and the residual is what it says, all worked out in float64."""
    w, (s, u, v, residual, _) = w.double(), (x.double() for x in triplets)
    identity = torch.eye(s.shape[1], dtype=torch.float64).expand(len(w), -1, -1)
    for x in (u, v):
        torch.testing.assert_close(x.mT @ x, identity, rtol=0, atol=1e-4)
    right, left = ((w @ v - u * s[:, None]).norm(dim=1), (w.mT @ u - v * s[:, None]).norm(dim=1))
    assert right.max() < tolerance
    rounding = 3e-6 * float(s[:, 0].max())
    torch.testing.assert_close(residual * s, left.maximum(right), rtol=1e-3, atol=rounding)


def start_without_freshening(top: TopSingular) -> None:
    """Takes away what ``_start`` adds to the trial vectors."""
    start = top._start
    top._start = lambda w: start(w) if top.trial_NnB is None else top.trial_NnB.mT.clone()  # type: ignore


def counted_rounds(top: TopSingular) -> list[int]:
    """Gets the number of matrices of every round that ``top`` makes from now on."""
    rounds, make = [], top._round
    top._round = lambda factors, trial: (rounds.append(len(trial)), make(factors, trial))[1]  # type: ignore
    return rounds


SQUARISH = [(3, 40, 24), (3, 24, 40), (1, 5, 5), (2, 40, 79)]
ELONGATED = [(3, 80, 24), (3, 24, 80), (2, 12, 300), (2, 300, 12), (2, 40, 80)]


@pytest.mark.parametrize("shape", SQUARISH + ELONGATED)
def test_small_matrices_are_exact(shape: tuple[int, int, int]) -> None:
    w = spiked(*shape, spike=3.0)
    triplets = TopSingular(k=3)(w)
    torch.testing.assert_close(triplets.s, exact(w)[:, :3], rtol=2e-6, atol=0)
    torch.testing.assert_close(triplets.gap, exact(w)[:, 2] / exact(w)[:, 3], rtol=1e-5, atol=0)
    assert_triplets_fit(w, triplets, 1e-5)
    assert 0 < triplets.residual.max() < 1e-5


@pytest.mark.parametrize("shape", [(1, 1, 50), (2, 50, 1), (1, 1, 1)])
def test_vectors_are_matrices_too(shape: tuple[int, int, int]) -> None:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    triplets = TopSingular()(w)
    torch.testing.assert_close(triplets.s[:, 0], w.norm(dim=(1, 2)))
    assert triplets.gap.tolist() == [torch.inf] * shape[0]  # no second singular value
    assert_triplets_fit(w, triplets, 1e-5)


@pytest.mark.parametrize("sides", [(32, 256), (256, 32), (64, 768)])
def test_ill_conditioned_heads_keep_their_small_singular_values(sides: tuple[int, int]) -> None:
    # a float32 Gram matrix resolves nothing below 3e-4 of the largest
    values = torch.tensor([1.0, 1e-2, 1e-3, 3e-5, *torch.logspace(-5, -7, 28).tolist()])
    w = with_spectrum(values, *sides)
    triplets = TopSingular(k=4)(w)
    torch.testing.assert_close(triplets.s[:, :3], exact(w)[:, :3], rtol=1e-5, atol=0)
    torch.testing.assert_close(triplets.s, exact(w)[:, :4], rtol=1e-3, atol=0)
    assert_triplets_fit(w, triplets, 1e-6)


@pytest.mark.parametrize("shape", [(512, 512), (400, 600), (600, 400)])
def test_the_first_call_on_a_large_matrix_converges(shape: tuple[int, int]) -> None:
    w = spiked(2, *shape, spike=3.0)
    triplets = TopSingular()(w)
    torch.testing.assert_close(triplets.s, exact(w)[:, :1], rtol=1e-3, atol=0)
    assert_triplets_fit(w, triplets, 1e-5)


@pytest.mark.parametrize("growth", [0.12, 0.32])
def test_a_spike_is_followed_out_of_a_drifting_bulk(growth: float) -> None:
    # it grows from 0.5, hidden, through the edge of the bulk near 2, and turns as it goes
    top, generator = TopSingular(exact_below=0), torch.Generator().manual_seed(1)
    drift = torch.zeros(2, 256, 256)
    for step in range(14):
        drift = drift + 0.03 * torch.randn(drift.shape, generator=generator) / 16
        w = spiked(2, 256, 256, spike=0.5 + growth * step, turn=0.05 * step) + drift
        triplets = top(w)
        torch.testing.assert_close(triplets.s, exact(w)[:, :1], rtol=1e-3, atol=0, msg=f"step {step}")
        assert_triplets_fit(w, triplets, 1e-5)


def test_two_spikes_that_cross_are_both_followed() -> None:
    top = TopSingular(k=2, exact_below=0)
    bulk, first, second = (spiked(1, 192, 192, spike=0.0, seed=0), *(spiked(1, 192, 192, 1.0, seed=s) for s in (1, 2)))
    first, second = (x - spiked(1, 192, 192, 0.0, seed=s) for s, x in ((1, first), (2, second)))
    for step in range(9):
        w = bulk + (6 - 0.4 * step) * first + (2.8 + 0.4 * step) * second  # they meet at step 4
        triplets = top(w)
        torch.testing.assert_close(triplets.s, exact(w)[:, :2], rtol=1e-3, atol=0, msg=f"step {step}")
        assert_triplets_fit(w, triplets, 3e-5)


def test_tied_singular_values_are_all_found() -> None:
    values = torch.cat([torch.tensor([3.0, 3.0, 3.0, 2.0]), torch.linspace(1.5, 0, 92)])
    w = with_spectrum(values, 128, 96)
    triplets = TopSingular(k=3, exact_below=0)(w)
    torch.testing.assert_close(triplets.s, torch.full((1, 3), 3.0), rtol=1e-4, atol=0)
    torch.testing.assert_close(triplets.gap, torch.tensor([1.5]), rtol=1e-3, atol=0)
    torch.testing.assert_close(TopSingular(k=2, exact_below=0)(w).gap, torch.ones(1), rtol=1e-4, atol=0)
    assert_triplets_fit(w, triplets, 3e-5)


@pytest.mark.parametrize("exact_below", [0, 384])
@pytest.mark.parametrize("sides", [(64, 64), (40, 128)])
def test_rank_deficient_matrices(exact_below: int, sides: tuple[int, int]) -> None:
    w = with_spectrum(torch.tensor([4.0, 2.0]), *sides)
    triplets = TopSingular(k=3, exact_below=exact_below)(w)
    torch.testing.assert_close(triplets.s, torch.tensor([[4.0, 2.0, 0.0]]), rtol=1e-5, atol=1e-5)
    two = TopSingular(k=2, exact_below=exact_below)(w)
    assert two.gap > 1e5 and two.residual.max() < 1e-5
    top = TopSingular(k=3, exact_below=0)
    rounds = counted_rounds(top)
    top(w)
    top(w)
    assert len(rounds) < 6  # it does not work on a residual that is rounding error
    identity = torch.eye(3)[None]
    for x in (triplets.u, triplets.v):
        torch.testing.assert_close(x.mT @ x, identity, rtol=0, atol=1e-4)


@pytest.mark.parametrize("exact_below", [0, 384])
def test_zero_matrices_have_zero_singular_values(exact_below: int) -> None:
    top = TopSingular(exact_below=exact_below)
    for _ in range(3):
        triplets = top(torch.zeros(2, 32, 32))
        assert torch.equal(triplets.s, torch.zeros(2, 1))
        assert torch.equal(triplets.residual, torch.zeros(2, 1))
        assert triplets.gap.isnan().all()


def test_gap_tells_where_the_leading_space_ends() -> None:
    values = torch.cat([torch.tensor([8.0, 7.0, 6.0, 3.0]), torch.linspace(2, 0, 92)])
    w = with_spectrum(values, 96, 128)
    expected = torch.tensor([8 / 7, 7 / 6, 2.0, 1.5])
    tops = [TopSingular(k=k, exact_below=0) for k in (1, 2, 3, 4)]
    for tolerance in (3e-2, 1e-3):  # of iteration, at the first call and the second
        gaps = torch.cat([top(w).gap for top in tops])
        torch.testing.assert_close(gaps, expected, rtol=tolerance, atol=0)
        assert (gaps > expected * (1 - 1e-4)).all()
    gaps = torch.cat([TopSingular(k=k)(w).gap for k in (1, 2, 3, 4)])
    torch.testing.assert_close(gaps, expected, rtol=1e-5, atol=0)
    assert TopSingular(k=3)(torch.eye(3)).gap.tolist() == [torch.inf]  # there is no fourth
    assert TopSingular(k=2)(torch.diag(torch.tensor([2.0, 1.0, 0.0]))).gap.tolist() == [torch.inf]


@pytest.mark.parametrize("size", [1e-25, 1e15])
def test_any_scale_is_followed_alike(size: float) -> None:
    w = spiked(2, 64, 64, spike=0.0)
    top, scaled = TopSingular(exact_below=0), TopSingular(exact_below=0)
    rounds = [counted_rounds(each) for each in (top, scaled)]
    for _ in range(2):
        plain, other = top(w), scaled(w * size)
    assert len(rounds[0]) == len(rounds[1])
    torch.testing.assert_close(other.s / size, plain.s, rtol=1e-3, atol=0)
    assert other.residual.max() < 0.01


def test_a_reading_has_the_residual_it_was_asked_for_or_is_exact() -> None:
    w = spiked(3, 128, 128, spike=0.0)
    assert TopSingular(exact_below=0, tolerance=1e-3)(w).residual.max() < 1e-3
    top = TopSingular(k=2, exact_below=0, tolerance=1e-3, max_iterations=4)
    rounds = counted_rounds(top)
    triplets = top(w)
    assert rounds == [3, 3]  # not enough from random vectors
    torch.testing.assert_close(triplets.s, exact(w)[:, :2], rtol=2e-6, atol=0)
    assert_triplets_fit(w, triplets, 1e-5)
    assert top(w).residual.max() < 1e-5  # the decomposition's vectors are the next call's trial vectors
    assert rounds == [3, 3, 3]


def test_an_unconverged_reading_says_so() -> None:
    w = spiked(1, 128, 128, spike=0.0)
    triplets = TopSingular(exact_below=0, tolerance=10.0)(w)
    assert triplets.residual > 0.05
    assert_triplets_fit(w, triplets, 1e-5)


def test_a_warm_start_needs_one_round_and_only_late_matrices_get_more() -> None:
    w = spiked(4, 128, 128, spike=3.0)
    top = TopSingular(exact_below=0)
    rounds = counted_rounds(top)
    top(w)
    assert len(rounds) > 1
    rounds.clear()
    top(w)
    assert rounds == [4]
    rounds.clear()
    w[2] = spiked(1, 128, 128, spike=0.0, seed=5)[0]
    top(w)
    assert rounds[0] == 4 and len(rounds) > 1 and set(rounds[1:]) == {1}


def test_a_spike_orthogonal_to_all_trial_vectors_is_found() -> None:
    generator = torch.Generator().manual_seed(3)
    bulk = spiked(4, 256, 256, spike=0.0)
    top, blind = TopSingular(exact_below=0), TopSingular(exact_below=0)
    start_without_freshening(blind)
    for each in (top, blind):
        each(bulk)
        x = torch.randn(4, 256, 1, generator=generator).double()
        y = torch.randn(4, 256, 1, generator=generator).double()
        assert each.trial_NnB is not None
        trial = torch.linalg.qr(each.trial_NnB.double()).Q
        images = torch.linalg.qr(bulk.double() @ trial).Q
        x, y = (side - space @ (space.mT @ side) for side, space in ((x, trial), (y, images)))
        x, y = x / x.norm(dim=1, keepdim=True), y / y.norm(dim=1, keepdim=True)
        rest = bulk.double() - y @ (y.mT @ bulk.double())
        w = (rest - (rest @ x) @ x.mT + 8.0 * y @ x.mT).float()  # 8 is a singular value that the block cannot see
        error = (each(w).s[:, 0] / 8.0 - 1).abs()
        if each is top:
            assert error.max() < 1e-3
        else:
            assert error.min() > 0.5  # so the attack is one


def test_a_slightly_larger_missed_direction_is_found_within_calls() -> None:
    values = torch.cat([torch.tensor([2.2]), torch.linspace(2.0, 0.0, 255)])
    w = with_spectrum(values, 256, 256)
    v = torch.linalg.svd(w.double()).Vh[0]
    top = TopSingular(exact_below=0)
    top.trial_NnB = v[1:7].mT[None].float().contiguous()  # all of the block but the leading direction
    errors = [float((top(w).s / 2.2 - 1).abs()) for _ in range(6)]
    assert errors[0] > 0.05 and errors[-1] < 1e-3


def test_other_weights_of_the_same_shape_are_read_at_once() -> None:
    top = TopSingular(exact_below=0)
    for seed in range(4):
        w = spiked(3, 160, 160, spike=float(seed), seed=seed)
        torch.testing.assert_close(top(w).s, exact(w)[:, :1], rtol=1e-3, atol=0)


@pytest.mark.parametrize("damage", ["zero", "equal", "nan", "inf"])
def test_spoilt_trial_vectors_are_replaced(damage: str) -> None:
    w = spiked(3, 128, 96, spike=3.0)
    top = TopSingular(exact_below=0)
    top(w)
    assert top.trial_NnB is not None
    if damage == "equal":
        top.trial_NnB[1] = top.trial_NnB[1, :, -1:]
    else:
        top.trial_NnB[1] = float(damage) if damage != "zero" else 0.0
    torch.testing.assert_close(top(w).s, exact(w)[:, :1], rtol=1e-3, atol=0)
    assert top.trial_NnB.isfinite().all()


@pytest.mark.parametrize("exact_below", [0, 384])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("n", [48, 160])
def test_a_matrix_that_blew_up_spoils_only_itself(exact_below: int, value: float, n: int) -> None:
    w = spiked(3, 64, n, spike=3.0)
    top = TopSingular(exact_below=exact_below)
    top(w)
    expected = exact(w)[:, :1]
    w[1, 5, 6] = value
    triplets = top(w)
    for values in triplets:
        assert values.flatten(1).isnan().all(1).tolist() == [False, True, False] if values.ndim > 1 else True
    assert triplets.gap.isnan().tolist() == [False, True, False]
    torch.testing.assert_close(triplets.s[[0, 2]], expected[[0, 2]], rtol=1e-3, atol=0)


@pytest.mark.parametrize("exact_below", [0, 384])
def test_what_float32_products_cannot_hold_has_blown_up(exact_below: int) -> None:
    sizes = torch.tensor([1.0, 1e18, 1e20, 3e38])
    w = spiked(1, 64, 64, spike=3.0) * sizes[:, None, None]
    top = TopSingular(exact_below=exact_below)
    for _ in range(2):
        s = top(w).s[:, 0]
        torch.testing.assert_close(s[:2], exact(w)[:2, 0], rtol=1e-3, atol=0)
        assert s[2:].isnan().all()
    assert top(w[:1] * 1e10, w[:1] * 1e10).s.isnan().all()


def test_a_matrix_that_recovers_is_followed_again() -> None:
    top, w = TopSingular(exact_below=0), spiked(2, 64, 64, spike=3.0)
    top(w)
    for _ in range(3):
        top(torch.stack([w[0], torch.full_like(w[1], torch.nan)]))
    rounds = counted_rounds(top)
    torch.testing.assert_close(top(w).s, exact(w)[:, :1], rtol=1e-3, atol=0)
    assert rounds == [2]  # from the trial vectors of before


def test_resuming_from_the_trial_vectors_alone_repeats_every_bit() -> None:
    def matrices(step: int) -> Tensor:
        return spiked(2, 96, 96, spike=0.5 + 0.3 * step, turn=0.1 * step)

    top, later = TopSingular(k=2, exact_below=0), []
    for step in range(8):
        if step == 4:
            buffer = io.BytesIO()
            torch.save({"trial_NnB": top.trial_NnB}, buffer)
        later.append(top(matrices(step)))
    buffer.seek(0)
    resumed = TopSingular(k=2, exact_below=0)
    resumed.trial_NnB = torch.load(buffer)["trial_NnB"]
    torch.manual_seed(99)  # the global generator has no part in it
    for step in range(4, 8):
        for before, after in zip(later[step], resumed(matrices(step)), strict=True):
            assert torch.equal(before, after)
    torch.testing.assert_close(top.trial_NnB, resumed.trial_NnB, rtol=0, atol=0)


def test_every_call_adds_another_random_vector_and_only_to_the_last() -> None:
    w = spiked(2, 96, 96, spike=3.0)
    top, added = TopSingular(exact_below=0), []
    for _ in range(2):
        top(w)
        assert top.trial_NnB is not None
        added.append(top._start(w) - top.trial_NnB.mT)
    for change in added:
        assert not change[:, :-1].any()
        torch.testing.assert_close(change[:, -1].norm(dim=1), torch.ones(2), rtol=0.3, atol=0)
    one, other = (change[:, -1] for change in added)
    assert torch.cosine_similarity(one, other).abs().max() < 0.5
    assert torch.cosine_similarity(one[:1], one[1:]).abs() < 0.5  # nor is it the same for all matrices


def test_other_shapes_start_afresh() -> None:
    top = TopSingular(exact_below=0)
    for shape in ((2, 64, 48), (3, 64, 48), (3, 48, 64)):
        w = spiked(*shape, spike=3.0)
        torch.testing.assert_close(top(w).s, exact(w)[:, :1], rtol=1e-3, atol=0)


@pytest.mark.parametrize("exact_below", [0, 384])
def test_the_product_of_two_factors_is_never_formed(exact_below: int) -> None:
    left, right = spiked(3, 100, 40, spike=3.0), spiked(3, 40, 90, spike=2.0, seed=1)
    product = left.double() @ right.double()
    top = TopSingular(k=2, exact_below=exact_below)
    for _ in range(2):
        triplets = top(left, right)
    torch.testing.assert_close(triplets.s, exact(product)[:, :2], rtol=1e-3 if exact_below == 0 else 2e-6, atol=0)
    torch.testing.assert_close(triplets.gap, exact(product)[:, 1] / exact(product)[:, 2], rtol=1e-2, atol=0)
    assert_triplets_fit(product, triplets, 1e-4)
    assert (top.trial_NnB is None) == (exact_below == 384)
    for factor, member in ((left, 0), (right, 2)):
        factor[member, 3, 3] = torch.nan
    assert top(left, right).s[:, 0].isnan().tolist() == [True, False, True]


def test_one_matrix_is_a_batch_of_one() -> None:
    w = spiked(1, 20, 30, spike=3.0)
    for single, batch in zip(TopSingular(k=2)(w[0]), TopSingular(k=2)(w), strict=True):
        assert torch.equal(single, batch)


@pytest.mark.parametrize("n", [30, 60])
def test_narrow_and_trainable_matrices_are_read_in_float32(n: int) -> None:
    w = spiked(1, 20, n, spike=3.0).to(torch.bfloat16).requires_grad_()
    triplets = TopSingular()(w)
    assert all(x.dtype is torch.float32 and not x.requires_grad for x in triplets)
    torch.testing.assert_close(triplets.s, exact(w.detach().float())[:, :1])


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="k=9 must be from 1 to block=8"):
        TopSingular(k=9, block=8)
    with pytest.raises(ValueError, match="k=0"):
        TopSingular(k=0)
    with pytest.raises(ValueError, match="iterations=0"):
        TopSingular(iterations=0)
    with pytest.raises(ValueError, match=r"shape \(4, 2\)|shape \(1, 4, 2\)"):
        TopSingular(k=3)(torch.zeros(4, 2))
    with pytest.raises(ValueError, match="is not"):
        TopSingular()(torch.zeros(4))
    with pytest.raises(ValueError, match=r"\(2, 4, 3\) and \(2, 5, 4\) are not"):
        TopSingular()(torch.zeros(2, 4, 3), torch.zeros(2, 5, 4))
