"""The fit of L(N, D): it finds a known law again, its intervals cover, and the report shows it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lightning_qk import scaling_law
from lightning_qk.runs import find_runs, group_arms
from lightning_qk.scaling_law import ScalingLaw, fit, shift
from lightning_qk.scaling_tables import points_of, scaling_tables

CHINCHILLA = ScalingLaw(E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28)
TINY = ScalingLaw(E=1.2, A=40.0, B=120.0, alpha=0.45, beta=0.4)  # of models of thousands of parameters


def grid(N: tuple[float, float], D: tuple[float, float], points: int = 6) -> tuple[np.ndarray, np.ndarray]:
    axes = np.meshgrid(np.geomspace(*N, points), np.geomspace(*D, points))
    return axes[0].ravel(), axes[1].ravel()


@pytest.mark.parametrize(
    ("law", "N", "D"), [(CHINCHILLA, (2e7, 2e9), (3e8, 4e10)), (TINY, (5e3, 3e5), (1e5, 3e6))], ids=["large", "tiny"]
)
def test_a_known_law_is_found_again(law: ScalingLaw, N: tuple[float, float], D: tuple[float, float]) -> None:
    sizes, tokens = grid(N, D)
    found = fit(sizes, tokens, law.loss(sizes, tokens), resamples=5)
    assert found.law == pytest.approx(law, rel=0.02) and found.error < 1e-4


def test_one_outlier_does_not_move_it() -> None:
    sizes, tokens = grid((2e7, 2e9), (3e8, 4e10))
    losses = CHINCHILLA.loss(sizes, tokens)
    losses[7] *= 1.5  # a run that diverged
    assert fit(sizes, tokens, losses, resamples=5).law == pytest.approx(CHINCHILLA, rel=0.1)


def test_intervals_cover_the_law() -> None:
    """12 experiments with noise of 0.2 %: of 36 limits of 95 % at least 29 cover, where less than 80 % is a mistake."""
    sizes, tokens = grid((5e3, 3e5), (1e5, 3e6))
    generator = np.random.default_rng(1)
    covered, width = 0, []
    for _ in range(12):
        noise = generator.normal(0, 0.002, len(sizes))
        found = fit(sizes, tokens, TINY.loss(sizes, tokens) * np.exp(noise), resamples=40)
        for key in ("E", "alpha", "beta"):
            low, high = found.interval(key)
            covered += low <= getattr(TINY, key) <= high
        width.append(found.interval("alpha")[1] - found.interval("alpha")[0])
    assert covered >= 29
    assert np.median(width) < 0.3  # limits that are wide enough always cover


def test_shift_between_two_laws() -> None:
    sizes, tokens = grid((5e3, 3e5), (1e5, 3e6))
    worse = TINY._replace(E=TINY.E + 0.05)
    generator = np.random.default_rng(2)
    noisy = [law.loss(sizes, tokens) * np.exp(generator.normal(0, 0.001, len(sizes))) for law in (worse, TINY)]
    value, (low, high) = shift(*(fit(sizes, tokens, losses, resamples=60) for losses in noisy), N=5e4, D=5e5)
    assert value == pytest.approx(0.05, abs=0.01) and 0 < low < 0.05 < high


@pytest.mark.parametrize(
    ("N", "D", "L", "message"),
    [
        ([1.0] * 9, list(range(1, 10)), [2.0] * 9, "three sizes and three lengths, got 9 of 1 and 9"),
        ([1, 2, 3], [1, 2, 3], [2, 2, 2], "at least 8 runs"),
        (list(range(1, 10)), list(range(1, 10)), [2.0] * 8 + [np.inf], "positive and finite"),
    ],
)
def test_what_cannot_be_fitted_is_refused(N: list[float], D: list[float], L: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(N, D, L)


def write_runs(root: Path, laws: dict[str, ScalingLaw], scaling_law: bool = True) -> None:
    sizes, tokens = grid((5e3, 3e5), (1e5, 3e6), points=4)
    generator = np.random.default_rng(3)
    bases = {}
    for arm, law in laws.items():
        for index, (N, D) in enumerate(zip(sizes, tokens, strict=True)):
            bases[f"{arm}-p{index}"] = arm
            loss = float(law.loss(N, D) * np.exp(generator.normal(0, 1e-3)))
            verdict = {"schema": 1, "status": "completed", "arm": f"{arm}-p{index}", "seed": 0, "step": 10}
            verdict |= {"max_steps": 10, "loss": loss, "val_loss": loss, "parameters": N, "tokens": D}
            path = root / f"{arm}-p{index}" / "seed_0"
            path.mkdir(parents=True)
            (path / "verdict.json").write_text(json.dumps(verdict))
    twins = {arm: f"fp32-{arm.partition('-')[2]}" for arm in bases}
    manifest = {"arms": list(bases), "reference": None, "twins": twins, "bases": bases, "scaling_law": scaling_law}
    (root / "experiment.json").write_text(json.dumps(manifest))


@pytest.fixture
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling_law, "RESAMPLES", 20)


@pytest.mark.usefixtures("few_resamples")
def test_the_report_fits_every_arm_and_their_difference(tmp_path: Path) -> None:
    laws = {"fp32": TINY, "mxfp4": TINY._replace(E=1.4)}
    write_runs(tmp_path / "scaling", laws)
    law, between = scaling_tables(group_arms(find_runs([tmp_path / "scaling"])))
    assert [(row["arm"], row["runs"]) for row in law.rows] == [("fp32", "16"), ("mxfp4", "16")]
    assert all("(" in row["alpha"] for row in law.rows)
    (row,) = between.rows
    assert between.title == "Shift of the law against fp32" and row["arm"] == "mxfp4"
    assert row.pop("pairs") == "16"
    shifts = [float(cell.split()[0]) for key, cell in row.items() if key != "arm"]
    assert len(shifts) == 3 and shifts == pytest.approx([0.2] * 3, abs=0.03)


def change(path: Path, **fields: object) -> None:
    path = path / "seed_0" / "verdict.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.usefixtures("few_resamples")
def test_runs_that_collapsed_or_ended_early_are_left_out_and_counted(tmp_path: Path) -> None:
    root = tmp_path / "scaling"
    write_runs(root, {"fp32": TINY, "mxfp4": TINY})
    change(root / "mxfp4-p3", status="collapsed", collapse_step=5, val_loss=9.0)
    change(root / "mxfp4-p4", status="nonfinite", val_loss=9.0)
    change(root / "mxfp4-p5", step=7, val_loss=9.0)
    for point in range(16):
        change(root / f"fp32-p{point}", status="collapsed")
    law, *between = scaling_tables(group_arms(find_runs([root])))
    fp32, mxfp4 = law.rows
    assert (mxfp4["runs"], mxfp4["left out"]) == ("13", "2 collapsed, 1 ended early")
    assert float(mxfp4["error"]) < 3e-3
    assert (fp32["runs"], fp32["left out"]) == ("0", "16 collapsed") and "at least 8 runs" in fp32["E"]
    assert not between  # nothing to compare with


@pytest.mark.usefixtures("few_resamples")
@pytest.mark.parametrize("lost", [None, 5])
def test_the_shift_of_paired_runs_is_resampled_in_pairs(tmp_path: Path, lost: int | None) -> None:
    """Arms whose losses differ by a factor share their noise, so what is uncertain of each is not of the shift."""
    root = tmp_path / "scaling"
    write_runs(root, {"fp32": TINY, "mxfp4": TINY})
    generator = np.random.default_rng(4)
    for point in range(16):
        verdict = json.loads((root / f"fp32-p{point}" / "seed_0" / "verdict.json").read_text())
        loss = verdict["val_loss"] * float(np.exp(generator.normal(0, 0.02)))
        change(root / f"fp32-p{point}", val_loss=loss)
        change(root / f"mxfp4-p{point}", val_loss=loss * 1.05)
    if lost is not None:
        change(root / f"mxfp4-p{lost}", status="failed")
    _, between = scaling_tables(group_arms(find_runs([root])))
    (row,) = between.rows
    assert row["pairs"] == str(16 - (lost is not None))
    for cell in list(row.values())[2:]:
        value, (low, high) = float(cell.split()[0]), map(float, cell.split("(")[1].rstrip(")").split(".."))
        assert 0.04 < value < 0.3 and high - low < 0.1 * value + 0.01, cell


@pytest.mark.usefixtures("few_resamples")
def test_an_arm_with_too_few_runs_says_so(tmp_path: Path) -> None:
    write_runs(tmp_path / "scaling", {"fp32": TINY})
    for index in range(9):
        path = tmp_path / "scaling" / f"fp32-p{index}" / "seed_0" / "verdict.json"
        path.write_text(path.read_text().replace("completed", "failed"))
    (law,) = scaling_tables(group_arms(find_runs([tmp_path / "scaling"])))
    assert law.rows[0]["E"].startswith("not fitted: a scaling law needs at least 8 runs")


def test_no_table_where_none_was_asked_for(tmp_path: Path) -> None:
    write_runs(tmp_path / "scaling", {"fp32": TINY}, scaling_law=False)
    assert scaling_tables(group_arms(find_runs([tmp_path / "scaling"]))) == []


def test_points_leave_out_what_is_not_finite(tmp_path: Path) -> None:
    write_runs(tmp_path / "scaling", {"fp32": TINY})
    path = tmp_path / "scaling" / "fp32-p0" / "seed_0" / "verdict.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"val_loss": "nan"}))
    runs = find_runs([tmp_path / "scaling"])
    assert len(points_of(runs, {})) == 15 and len(points_of(runs, {run.arm: "fp32" for run in runs})["fp32"]) == 15
