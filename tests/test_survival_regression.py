"""Accelerated failure times against lifelines, and what the report makes of them."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from lifelines import LogNormalAFTFitter, WeibullAFTFitter
from made_up_runs import cells, write_run

from lightning_qk.report import make_report
from lightning_qk.survival_regression import FAMILIES, fit

NAMES = ("one", "bits", "log_lr")


def runs(seed: int, noise: str, censor: float, count: int = 90) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Settings, steps and collapses of runs whose logarithms of steps are linear in the settings."""
    draw = np.random.default_rng(seed)
    x_np = np.column_stack(
        [np.ones(count), np.tile(np.arange(1, 7), count // 6), np.log(draw.choice([1e-3, 4e-3], count))]
    )
    error = draw.normal(size=count) if noise == "log-normal" else np.log(draw.exponential(size=count))
    steps = np.exp(x_np @ [1.0, 0.8, -0.6] + 0.4 * error)
    return x_np, np.minimum(steps, censor), steps < censor


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("seed", "censor"), [(0, math.inf), (1, 2_000.0), (2, 400.0)])
def test_fits_are_those_of_lifelines(family: str, seed: int, censor: float) -> None:
    x_np, steps, collapsed = runs(seed, family, censor)
    found = fit(family, x_np, steps, collapsed)
    frame = pd.DataFrame(x_np, columns=NAMES).assign(step=steps, collapsed=collapsed)
    fitter = {"log-normal": LogNormalAFTFitter, "Weibull": WeibullAFTFitter}[family](fit_intercept=False)
    ancillary = "sigma_" if family == "log-normal" else "rho_"
    fitter.fit(frame, "step", "collapsed")
    location = {"log-normal": "mu_", "Weibull": "lambda_"}[family]
    assert found.coefficients == pytest.approx([fitter.params_[location, name] for name in NAMES], rel=1e-3)
    log_scale = float(fitter.params_[ancillary].iloc[0]) * (1 if family == "log-normal" else -1)
    assert found.scale == pytest.approx(math.exp(log_scale), rel=1e-3)
    assert found.log_likelihood == pytest.approx(fitter.log_likelihood_, abs=1e-3)
    limits = fitter.confidence_intervals_.loc[location]
    for index, name in enumerate(NAMES):
        assert found.interval(index) == pytest.approx(tuple(limits.loc[name]), rel=1e-2)
    at = pd.DataFrame([[1.0, 7.0, math.log(2e-3)]], columns=NAMES)
    middle, low, high = found.log_median(at.iloc[0])
    assert math.exp(middle) == pytest.approx(float(np.squeeze(fitter.predict_median(at))), rel=1e-2)
    assert low < middle < high


def test_the_interval_of_the_median_covers(seed_count: int = 200) -> None:
    truth = np.array([1.0, 7.0, math.log(2e-3)]) @ [1.0, 0.8, -0.6]
    found = [fit("log-normal", *runs(seed, "log-normal", 400.0)) for seed in range(100, 100 + seed_count)]
    inside = sum(low < truth < high for _, low, high in (one.log_median([1.0, 7.0, math.log(2e-3)]) for one in found))
    assert 0.88 < inside / seed_count < 0.99


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_of_the_likelihood_is_its_gradient(family: str) -> None:
    z = np.linspace(-3, 3, 25)
    for part in (FAMILIES[family].density, FAMILIES[family].survival):
        value, first, second = part(z)
        low, high = part(z - 1e-5), part(z + 1e-5)
        assert first == pytest.approx((high[0] - low[0]) / 2e-5, abs=1e-6)
        assert second == pytest.approx((high[1] - low[1]) / 2e-5, abs=1e-6)
        assert len(value) == len(z)


def test_no_maximum_is_said_and_not_made_up() -> None:
    x_np, steps, _ = runs(0, "log-normal", math.inf)
    with pytest.raises(ValueError, match="15 collapses, at too few different settings for 3 coefficients"):
        fit("log-normal", x_np, steps, x_np[:, 1] == 1)
    with pytest.raises(ValueError, match="0 collapses"):
        fit("Weibull", x_np, steps, np.zeros(len(steps), bool))


def experiment(root: Path, collapses: int) -> Path:
    """A grid of bits and learning rates: with fewer bits runs collapse sooner, from some number of bits on never."""
    points = {f"fault-bits_{bits}-lr_{lr}": {"a.bits": bits, "m.lr": lr} for bits in range(1, 6) for lr in (0.1, 0.2)}
    for arm, point in points.items():
        for seed in range(3):
            step = round(8 * 2 ** point["a.bits"] * (0.1 / point["m.lr"]) * (1 + 0.1 * seed))
            kind = "collapsed" if point["a.bits"] <= collapses and step < 100 else "completed"
            write_run(root, arm, seed, kind, collapse_step=step if kind == "collapsed" else None)
    stated = {"arms": list(points), "bases": dict.fromkeys(points, "fault"), "points": points}
    stated["extrapolate"] = {"key": "a.bits", "to": 7.0, "log": ["m.lr"]}
    (root / "experiment.json").write_text(json.dumps(stated))
    return root


def test_the_report_extrapolates_where_it_is_asked_to(tmp_path: Path) -> None:
    report, out = make_report([experiment(tmp_path / "demo", 5)])
    (one,) = report.extrapolations
    text = (out / "report.md").read_text()
    row = cells(text, "fault", "## Collapse step over the grid")
    assert row[1:3] == ["log-normal", f"{sum(run.collapsed for run, _ in one.runs)}/30"]
    assert float(row[3].split(" ")[0]) == pytest.approx(2, abs=0.1)
    assert float(row[4].split(" ")[0]) == pytest.approx(-1, abs=0.15)
    assert "AN EXTRAPOLATION" in text and "## Extrapolation to bits = 7" in text
    middle = cells(text, "fault", "## Extrapolation to bits = 7")
    assert middle[1:3] == ["log-normal", "0.1"] and 800 < float(middle[3].replace(",", "")) < 1_600
    assert middle[5] == "-"
    with (out / "extrapolation.csv").open() as file:
        numbers = {(row["family"], row["number"]): row for row in csv.DictReader(file)}
    found = one.fits[1]
    assert float(numbers["Weibull", "coefficient of a.bits"]["value"]) == found.coefficients[1]
    assert float(numbers["Weibull", "coefficient of log m.lr"]["high"]) == found.interval(2)[1]
    assert float(numbers["Weibull", "log median at a.bits = 7, m.lr = 0.2"]["low"]) == pytest.approx(
        found.log_median([1, 7, math.log(0.2)])[1]
    )
    assert (out / "extrapolation.png").read_bytes().startswith(b"\x89PNG")
    assert "extrapolation.png" in text and "AN EXTRAPOLATION" in (out / "report.tex").read_text()


def test_too_little_to_extrapolate_from_is_named(tmp_path: Path) -> None:
    _, out = make_report([experiment(tmp_path / "demo", 1)])
    text = (out / "report.md").read_text()
    assert (
        "not extrapolated to a.bits = 7: 6 collapses, at too few different settings for 3 coefficients: fault" in text
    )
    assert "Extrapolation" not in text and not (out / "extrapolation.png").exists()
