import pytest
import torch
from torch import Tensor

from kernels import SingularTriplets, TopSingular


def spiked(count: int, m: int, n: int, spike: float, turn: float = 0.0, seed: int = 0) -> Tensor:
    """Random bulk with singular values up to 2, plus one direction of the given size, turned by ``turn`` radians."""
    generator = torch.Generator().manual_seed(seed)
    bulk = torch.randn(count, m, n, generator=generator) / max(m, n) ** 0.5
    u = torch.linalg.qr(torch.randn(count, m, 2, generator=generator)).Q
    v = torch.linalg.qr(torch.randn(count, n, 2, generator=generator)).Q
    angle = torch.tensor(turn)
    left, right = (x[..., 0] * angle.cos() + x[..., 1] * angle.sin() for x in (u, v))
    return bulk + spike * left[:, :, None] * right[:, None, :]


def assert_triplets_fit(w: Tensor, triplets: SingularTriplets, tolerance: float) -> None:
    """The vectors are orthonormal, W v = s u, and the residual is what it says."""
    s, u, v, residual = triplets
    identity = torch.eye(s.shape[1]).expand(len(w), -1, -1)
    for x in (u, v):
        torch.testing.assert_close(x.transpose(1, 2) @ x, identity, rtol=0, atol=1e-4)
    torch.testing.assert_close(w @ v, u * s[:, None], rtol=0, atol=tolerance)
    torch.testing.assert_close(residual, (w.transpose(1, 2) @ u - v * s[:, None]).norm(dim=1) / s, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 40, 24), (3, 24, 40), (1, 5, 5)])
def test_small_matrices_are_exact(shape: tuple[int, int, int]):
    w = spiked(*shape, spike=3.0)
    triplets = TopSingular(k=3)(w)
    torch.testing.assert_close(triplets.s, torch.linalg.svdvals(w)[:, :3])
    assert_triplets_fit(w, triplets, 1e-4)
    assert triplets.residual.max() < 1e-5


@pytest.mark.parametrize("shape", [(512, 512), (400, 600), (600, 400)])
def test_the_first_call_on_a_large_matrix_converges(shape: tuple[int, int]):
    w = spiked(2, *shape, spike=3.0)
    triplets = TopSingular()(w)
    torch.testing.assert_close(triplets.s, torch.linalg.svdvals(w)[:, :1], rtol=1e-3, atol=0)
    assert_triplets_fit(w, triplets, 1e-4)


def test_a_spike_is_followed_out_of_the_bulk():
    # it grows from 0.5, hidden, through the edge of the bulk near 2, to 4, and turns as it goes
    top = TopSingular(k=1, exact_below=0)
    for step in range(12):
        w = spiked(2, 256, 256, spike=0.5 + 0.32 * step, turn=0.05 * step)
        torch.testing.assert_close(top(w).s, torch.linalg.svdvals(w)[:, :1], rtol=1e-3, atol=0, msg=f"step {step}")


def test_a_warm_start_needs_fewer_rounds_than_a_cold_one():
    w = spiked(1, 128, 128, spike=0.0)
    cold, warm = (TopSingular(exact_below=0, iterations=1, tolerance=1.0, max_iterations=1) for _ in range(2))
    for _ in range(30):
        error = (warm(w).s - torch.linalg.svdvals(w)[:, :1]).abs().item()
    assert error < 1e-3 < (cold(w).s - torch.linalg.svdvals(w)[:, :1]).abs().item()


@pytest.mark.parametrize("exact_below", [0, 384])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_matrix_that_blew_up_spoils_only_itself(exact_below: int, value: float):
    w = spiked(3, 64, 48, spike=3.0)
    top = TopSingular(exact_below=exact_below)
    top(w)
    expected = torch.linalg.svdvals(w)[:, :1]
    w[1, 5, 6] = value
    triplets = top(w)
    assert triplets.s.isnan().squeeze(1).tolist() == [False, True, False]
    assert triplets.residual.isnan().squeeze(1).tolist() == [False, True, False]
    torch.testing.assert_close(triplets.s[[0, 2]], expected[[0, 2]], rtol=1e-3, atol=0)


def test_a_matrix_that_recovers_is_followed_again():
    top, w = TopSingular(exact_below=0), spiked(2, 64, 64, spike=3.0)
    top(w)
    top(torch.stack([w[0], torch.full_like(w[1], torch.nan)]))
    torch.testing.assert_close(top(w).s, torch.linalg.svdvals(w)[:, :1], rtol=1e-3, atol=0)


@pytest.mark.parametrize("exact_below", [0, 384])
def test_zero_matrices_have_zero_singular_values(exact_below: int):
    triplets = TopSingular(exact_below=exact_below)(torch.zeros(2, 32, 32))
    assert torch.equal(triplets.s, torch.zeros(2, 1))
    assert torch.equal(triplets.residual, torch.zeros(2, 1))


def test_other_shapes_start_afresh():
    top = TopSingular(exact_below=0)
    for shape in ((2, 64, 48), (3, 64, 48), (3, 48, 64)):
        w = spiked(*shape, spike=3.0)
        torch.testing.assert_close(top(w).s, torch.linalg.svdvals(w)[:, :1], rtol=1e-3, atol=0)


def test_one_matrix_is_a_batch_of_one():
    w = spiked(1, 20, 30, spike=3.0)
    for single, batch in zip(TopSingular(k=2)(w[0]), TopSingular(k=2)(w), strict=True):
        assert torch.equal(single, batch)


def test_narrow_and_trainable_matrices_are_read_in_float32():
    w = spiked(1, 20, 30, spike=3.0).to(torch.bfloat16).requires_grad_()
    s = TopSingular()(w).s
    assert s.dtype is torch.float32 and not s.requires_grad
    torch.testing.assert_close(s, torch.linalg.svdvals(w.detach().float())[:, :1])


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match="k=9 must be from 1 to block=8"):
        TopSingular(k=9)
    with pytest.raises(ValueError, match="k=0"):
        TopSingular(k=0)
    with pytest.raises(ValueError, match=r"shape \(4, 2\)|shape \(1, 4, 2\)"):
        TopSingular(k=3)(torch.zeros(4, 2))
    with pytest.raises(ValueError, match="is not"):
        TopSingular()(torch.zeros(4))
