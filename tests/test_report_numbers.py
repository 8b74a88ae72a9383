"""Every number of the report, computed a second time from the events with other tools.

The runs are made up, but judged step by step by `CollapseStop` and logged at every step, so that the events say all.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from lifelines import KaplanMeierFitter
from lifelines.statistics import logrank_test
from made_up_runs import train
from scipy.stats import fisher_exact
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import confint_proportions_2indep, proportion_confint
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from callbacks import CollapseStop
from lightning_qk.report import Report, make_report
from lightning_qk.tables import short

STEPS, ARMS = 240, ("fp32", "fault", "clean_qk", "guard")
EXCESS, MARGIN = 0.75, 0.375
TWIN, AGAINST = "fp32", "fault"


class Told(NamedTuple):
    """What the events of a run say."""

    loss: list[float]
    warning: list[float]

    @property
    def stopped(self) -> bool:
        return len(self.loss) < STEPS

    @property
    def excess(self) -> list[float]:
        """Of the mean over ten steps over its least value, which counts once ten steps are there."""
        found, low = [], math.inf
        for step in range(1, len(self.loss) + 1):
            recent = self.loss[max(0, step - 10) : step]
            if not math.isfinite(recent[-1]):
                break
            mean = sum(recent) / len(recent)
            low = min(low, mean) if step >= 10 else low
            found.append(max(0.0, mean - low))
        return found

    def onset(self, threshold: float, margin: float) -> int | None:
        """The collapse step by a rule, by going through the steps."""
        begun = None
        for step, excess in enumerate(self.excess, start=1):
            if begun is None and excess > threshold:
                begun = step
            elif excess <= margin:
                begun = None
        exploded = next((step for step, loss in enumerate(self.loss, start=1) if not math.isfinite(loss)), None)
        return begun if begun is not None else exploded


def losses(arm: str, seed: int) -> list[float]:
    """Noise about a fall, and in two arms a climb that begins at some step in most seeds."""
    draw = np.random.default_rng([ARMS.index(arm), seed])
    at = np.arange(STEPS)
    values = 2 + 3 * np.exp(-at / 30) + draw.normal(0, 0.05, STEPS)
    if arm == "fault" or (arm == "guard" and seed % 3 == 0):
        values += np.maximum(0, at - draw.integers(60, 200)) * draw.choice([0.004, 0.01, 0.03])
    if (arm, seed) == ("fault", 4):
        values[150] = math.nan
    return [float(value) for value in values.astype(np.float32)]


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs") / "demo"
    for arm in ARMS:
        for seed in range(7 if arm == "fault" else 6):
            found = losses(arm, seed)
            reading = [float(np.float32(loss / 10 + 0.01 * math.sin(at * (seed + 2)))) for at, loss in enumerate(found)]
            rule = CollapseStop(excess=EXCESS, margin=MARGIN, stop=arm == "guard", patience=15)
            train(root, arm, seed, found, rule, {"rise": reading}, {"rise": {"threshold": None, "alarm_step": None}})
    (root / "experiment.json").write_text(json.dumps({"arms": list(ARMS), "reference": TWIN}))
    return root


@pytest.fixture(scope="module")
def report(experiment: Path) -> Report:
    return make_report([experiment], against=AGAINST)[0]


@pytest.fixture(scope="module")
def told(experiment: Path) -> dict[str, dict[int, Told]]:
    def read(path: Path) -> Told:
        events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
        return Told(*([event.value for event in events.Scalars(tag)] for tag in ("loss/train", "warning/rise")))

    return {arm: {int(path.name[5:]): read(path) for path in sorted((experiment / arm).glob("seed_*"))} for arm in ARMS}


def rows(path: Path) -> dict[str, dict[str, str]]:
    with path.open() as file:
        return {row["arm"] + "/" + row.get("seed", ""): row for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def arms(experiment: Path, report: Report) -> dict[str, dict[str, str]]:
    return {name.rstrip("/"): row for name, row in rows(experiment / "arms.csv").items()}


def number(cell: str) -> float | None:
    return None if cell == "" else float(cell)


def durations(runs: dict[int, Told]) -> tuple[list[float], list[bool]]:
    onsets = [run.onset(EXCESS, MARGIN) for run in runs.values()]
    ends = [len(run.loss) if onset is None else onset for run, onset in zip(runs.values(), onsets, strict=True)]
    return [float(end) for end in ends], [onset is not None for onset in onsets]


Arms = dict[str, dict[str, str]]
All = dict[str, dict[int, Told]]


def test_the_made_up_runs_are_of_every_kind(told: All) -> None:
    kinds = {(run.onset(EXCESS, MARGIN) is not None, run.stopped) for runs in told.values() for run in runs.values()}
    assert kinds >= {(True, True), (True, False), (False, False)}
    assert any(math.isnan(run.loss[-1]) for run in told["fault"].values())


@pytest.mark.parametrize("arm", ARMS)
def test_collapses(arm: str, arms: Arms, told: All) -> None:
    row, onsets = arms[arm], [run.onset(EXCESS, MARGIN) for run in told[arm].values()]
    found = [onset for onset in onsets if onset is not None]
    assert (row["collapsed"], row["counted"]) == (str(len(found)), str(len(onsets)))
    assert [number(row[f"wilson_{side}"]) for side in ("low", "high")] == pytest.approx(
        proportion_confint(len(found), len(onsets), method="wilson"), abs=1e-12
    )
    statistics_of = ((statistics.median, "median"), (min, "min"), (max, "max"))
    for statistic, name in statistics_of:
        assert number(row[f"collapse_step_{name}"]) == (statistic(found) if found else None)


@pytest.mark.parametrize("arm", ARMS)
def test_survival(arm: str, arms: Arms, told: All) -> None:
    fitter = KaplanMeierFitter().fit(*durations(told[arm]))
    row, end = arms[arm], float(fitter.survival_function_.iloc[-1, 0])
    assert number(row["survival"]) == pytest.approx(end, abs=1e-12)
    assert number(row["last_step"]) == max(durations(told[arm])[0])
    median = fitter.median_survival_time_
    assert number(row["survival_median_step"]) == (None if math.isinf(median) else median)
    limits = [number(row[f"survival_{side}"]) for side in ("low", "high")]
    assert limits == (
        [None] * 2 if end in (0, 1) else pytest.approx(list(fitter.confidence_interval_.iloc[-1]), abs=1e-9)
    )


def final(run: Told) -> float:
    """Mean of the last fifty losses that are numbers."""
    return statistics.fmean([loss for loss in run.loss if math.isfinite(loss)][-50:])


@pytest.mark.parametrize(("side", "other"), [("twin", TWIN), ("against", AGAINST)])
def test_comparisons(side: str, other: str, arms: Arms, told: All) -> None:
    against = [arm for arm in ARMS if arm != other]
    counts = {arm: (sum(durations(runs)[1]), len(runs)) for arm, runs in told.items()}
    fishers = [
        fisher_exact([[k, n - k], [counts[other][0], counts[other][1] - counts[other][0]]])[1]
        for k, n in (counts[arm] for arm in against)
    ]
    for arm, p, adjusted in zip(against, fishers, multipletests(fishers, method="holm")[1], strict=True):
        row = {key.removeprefix(f"{side}_"): value for key, value in arms[arm].items()}
        assert row[side] == other
        assert number(row["fisher"]) == pytest.approx(p, abs=1e-12)
        assert number(row["fisher_holm"]) == pytest.approx(adjusted, abs=1e-12)
        (k, n), (j, m) = counts[arm], counts[other]
        assert number(row["rate_difference"]) == pytest.approx(k / n - j / m)
        assert [number(row["rate_low"]), number(row["rate_high"])] == pytest.approx(
            confint_proportions_2indep(k, n, j, m, compare="diff", method="newcomb"), abs=1e-12
        )
        (one, seen), (two, seen_too) = durations(told[arm]), durations(told[other])
        expected = logrank_test(one, two, seen, seen_too).p_value if k + j else None
        assert number(row["log_rank"]) == (None if expected is None else pytest.approx(expected, abs=1e-9))
        seeds = told[arm].keys() & told[other].keys()
        pairs = np.array([final(told[arm][seed]) - final(told[other][seed]) for seed in sorted(seeds)])
        assert number(row["pairs"]) == len(pairs)
        assert number(row["loss_difference"]) == pytest.approx(pairs.mean())
        resampled = pairs[np.random.default_rng(0).integers(0, len(pairs), (9_999, len(pairs)))].mean(1)
        assert [number(row["loss_low"]), number(row["loss_high"])] == pytest.approx(
            np.percentile(resampled, [2.5, 97.5])
        )
    assert arms[other][side] == ""


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("rule", ["0.5/0.25", "0.75/0.375", "1/0.5", "1/0.75", "1.5/0.5", "1.5/1", "2/0.5", "2/0.75"])
def test_other_crash_rules(rule: str, arm: str, arms: Arms, told: All, experiment: Path) -> None:
    threshold, margin = (float(part) for part in rule.split("/"))
    onsets = {seed: run.onset(threshold, margin) for seed, run in told[arm].items()}
    stopped = [seed for seed, run in told[arm].items() if run.stopped and onsets[seed] is None]
    assert number(arms[arm][f"collapsed {rule}"]) == sum(onset is not None for onset in onsets.values())
    assert number(arms[arm][f"open {rule}"]) == len(stopped)
    runs = rows(experiment / "report.csv")
    for seed, onset in onsets.items():
        expected = "?" if seed in stopped else "" if onset is None else str(onset)
        assert runs[f"{arm}/{seed}"][f"collapse {rule}"] == expected


@pytest.mark.parametrize("arm", ARMS)
def test_learned_alarms(arm: str, told: All, experiment: Path, report: Report) -> None:
    leads, alarms, false_alarms = [], 0, 0
    for seed, run in told[arm].items():
        others = [twin for other, twin in told[TWIN].items() if other != seed]
        threshold = max(reading for twin in others for reading in twin.warning)
        alarm = next((step for step, reading in enumerate(run.warning, start=1) if not reading <= threshold), None)
        onset = run.onset(EXCESS, MARGIN)
        alarms += alarm is not None
        false_alarms += alarm is not None and onset is None
        if alarm is not None and onset is not None and alarm < onset:
            leads.append(onset - alarm)
    text = (experiment / "report.md").read_text()
    row = next(
        line
        for line in text[text.index("thresholds of the healthy twin") :].splitlines()
        if line.startswith(f"| {arm} ")
    )
    cell = [part.strip() for part in row.strip("|").split("|")]
    assert cell[3].split("/")[0] == str(alarms)
    assert cell[5].split("/")[0] == (str(len(leads)) if any(durations(told[arm])[1]) else "-")
    assert cell[7].split("/")[0] == str(false_alarms)
    if leads:
        assert cell[6].split(" ")[0] == short(statistics.median(leads))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("loss", final),
        ("sigma_q", lambda run: run.loss[-1]),
        ("max_logit", lambda run: 10 * run.loss[-1]),
        ("max_logit_peak", lambda run: 10 * max(run.loss)),
    ],
)
def test_means_and_medians(key: str, value: Callable[[Told], Any], arms: Arms, told: All) -> None:
    for arm, runs in told.items():
        values = [value(run) for run in runs.values()]
        for statistic in (np.mean, np.median):
            expected = pytest.approx(statistic(values), rel=1e-6, nan_ok=True)
            assert number(arms[arm][f"{key}_{statistic.__name__}"]) == expected
