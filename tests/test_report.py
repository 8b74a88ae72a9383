"""The report: what is counted, what is named, twins, and the files that it writes."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
from made_up_runs import cells, write_run
from scipy.stats import fisher_exact
from statsmodels.stats.multitest import multipletests

from lightning_qk.report import main, make_report
from lightning_qk.runs import find_runs, group_arms, pick_opponents, pick_twins
from lightning_qk.tables import Table, as_latex, as_text, spread

OUTPUTS = {
    *("report.md", "report.tex", "report.csv", "arms.csv", "figure.png", "figure.svg"),
    *("survival.png", "survival.svg", "aggregate"),
}


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    root = tmp_path / "runs" / "demo"
    for seed, loss in enumerate((1.0, 2.0, 3.0)):
        write_run(root, "fp32", seed, loss=loss)
    write_run(
        root, "fault", 0, "collapsed", collapse_step=30, loss=5.0, max_logit=1000.0, max_logit_peak=2000.0, step=60
    )
    write_run(root, "fault", 1, "nonfinite", collapse_step=50, loss="nan", sigma_q="inf", max_logit="nan", step=60)
    write_run(root, "fault", 2, "unfinished")
    write_run(root, "arm_z", 0, "failed", error="Traceback\nRuntimeError: out of memory")
    write_run(root, "arm_z", 1, guard_step=40)
    (root / "experiment.json").write_text(json.dumps({"arms": ["fp32", "fault", "arm_z"], "reference": "fp32"}))
    return root


def markdown(directory: Path, **options: Any) -> str:
    """The Markdown report of an experiment."""
    _, out = make_report([directory], **options)
    return (out / "report.md").read_text()


def test_table_counts_and_statistics(experiment: Path) -> None:
    text = markdown(experiment)
    assert cells(text, "fp32") == ["fp32", "0/3", "0.00..0.56", "-", "2 [1..3]", "4", "40", "50", "-"]
    fault = cells(text, "fault")
    assert fault[1:4] == ["2/2 (1 not finite)", "0.34..1.00", "40 [30..50]"]
    assert fault[4:8] == ["5 + 1 not finite", "4 + 1 not finite", "1,000 + 1 not finite", "2,000"]
    assert cells(text, "arm_z")[1] == "0/1"
    assert cells(text, "arm_z")[8] == "1/1 at 40"
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    assert rows[2:5] == ["fp32", "fault", "arm_z"], "arms keep the order of the sweep"
    assert cells(text, "fault", "## Survival")[1:] == ["2", "2", "50", "0.00", "-", "30"]


def test_one_seed_an_arm_is_told_without_statistics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "demo"
    write_run(root, "fp32", 0)
    write_run(root, "fault", 0, "collapsed", collapse_step=30)
    (root / "experiment.json").write_text(json.dumps({"arms": ["fp32", "fault"], "reference": "fp32"}))
    statistics = ("95 %", "Wilson", "Survival", "Against", "Fisher", "crash rules\n", "Logits ran away")
    assert main([str(root)]) == 0
    out = capsys.readouterr().out
    assert not [word for word in statistics if word in out]
    assert [line.split()[:3] for line in out.splitlines() if line.startswith("fault ")] == [["fault", "1/1", "30"]]
    assert "--seeds 0,1,2,3,4" in out and f"figures: {root}/figure.png, {root}/survival.png, and" in out
    assert "## Against fp32" in (root / "report.md").read_text()
    write_run(root, "fault", 1)
    assert main([str(root)]) == 0
    out = capsys.readouterr().out
    assert [word for word in statistics if word in out] == list(statistics) and "--seeds" not in out


def test_a_run_that_its_sweep_saw_fail_is_no_unfinished_one(experiment: Path) -> None:
    (experiment / "fault" / "seed_2" / "attempt.json").write_text('{"state": "failed", "problem": "exit status 2"}')
    assert "not counted: failed (exit status 2): fault/seed_2\n" in markdown(experiment)


def test_failed_and_unfinished_are_named_and_not_counted(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(experiment)]) == 0
    out = capsys.readouterr().out
    assert "not counted: unfinished: fault/seed_2\n" in out
    assert "not counted: failed (RuntimeError: out of memory): arm_z/seed_0\n" in out
    with (experiment / "report.csv").open() as file:
        rows = {(row["arm"], row["seed"]): row for row in csv.DictReader(file)}
    assert len(rows) == 8
    assert rows["fault", "2"]["status"] == "unfinished"
    assert rows["fault", "2"]["loss"] == ""
    assert rows["fault", "1"]["loss"] == "nan"


def test_what_is_missing_broken_or_not_finite_is_named(experiment: Path) -> None:
    for seed, name in ((3, "none"), (4, "cut"), (5, "gap"), (6, "wild")):
        path = write_run(experiment, "fp32", seed, logged={"sigma/q": None} if name == "gap" else None)
        (events,) = path.glob("events.*")
        if name == "none":
            events.unlink()
        if name == "cut":
            events.write_bytes(events.read_bytes()[:-1])
    wild = experiment / "fp32" / "seed_7"
    write_run(experiment, "fp32", 7, "collapsed", logged={"loss/train": [1.0, math.nan, math.inf]}, loss="inf")
    remarks = markdown(experiment).split("## Remarks")[1]
    assert "no scalars in its event files: fp32/seed_3\n" in remarks
    assert "what comes before was read: fp32/seed_4\n" in remarks
    assert "did not log sigma/q: fp32/seed_5\n" in remarks
    assert "2 of 3 values of loss/train are not finite: fp32/seed_7\n" in remarks
    assert "verdict: loss is inf: fp32/seed_7\n" in remarks
    assert "verdict without collapse_step; its last step stands in: fp32/seed_7\n" in remarks
    assert "verdict: loss is nan: fault/seed_1\n" in remarks
    assert "seed_6" not in remarks
    (wild / "verdict.json").unlink()
    assert "not counted: unfinished: fp32/seed_7, fault/seed_2\n" in markdown(experiment)


def test_many_runs_with_one_fault_are_counted(experiment: Path) -> None:
    for seed in range(10, 20):
        write_run(experiment, "fp32", seed, "unfinished")
    names = ", ".join(f"fp32/seed_{seed}" for seed in range(10, 18))
    assert f"not counted: unfinished: {names} and 3 more\n" in markdown(experiment)


def test_verdict_that_is_no_number_names_file_and_key(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(experiment, "fp32", 9, loss="much")
    assert main([str(experiment)]) == 2
    assert f"{path / 'verdict.json'}: loss is 'much', not a number; delete it and run again" in capsys.readouterr().err


def test_differences_from_the_reference_are_paired_by_seed(experiment: Path) -> None:
    text = markdown(experiment)
    # Seed 0: 5.0 - 1.0; the loss of seed 1 is not finite.
    fault = cells(text, "fault", "## Against fp32")
    assert fault[1:3] == ["+1.00", "+0.14..+1.00"]
    assert fault[3:5] == ["0.1", "0.2"]
    assert fault[6:] == ["4 + 1 not finite", "-", "0", "-", "1 of 2", "2"]
    assert cells(text, "arm_z", "## Against fp32")[-2:] == ["1", "0"]
    assert "Ended early: pairs with a run that stopped before its last step" in text
    # 3 runs against 2, the best that can be: 1 of the 10 ways to choose; two tests
    assert "for the table's 2 tests, the least of which is never below 0.2 with these numbers of runs" in text


def test_second_comparison(experiment: Path) -> None:
    text = markdown(experiment, against="fault")
    assert cells(text, "fp32", "## Against fault")[1] == "-1.00"
    assert "| fault" not in text[text.index("## Against fault") : text.index("## Collapsed")]


def test_validation_losses_are_paired_too(tmp_path: Path) -> None:
    for seed, (healthy, faulty) in enumerate(((1.0, 1.5), (2.0, 2.25), (3.0, 3.75))):
        write_run(tmp_path / "demo", "fp32", seed, val_loss=healthy)
        write_run(tmp_path / "demo", "fault", seed, val_loss=faulty)
    text = markdown(tmp_path / "demo", reference="fp32")
    headings = cells(text, "arm", "## Against fp32")
    found = dict(zip(headings, cells(text, "fault", "## Against fp32"), strict=True))
    assert found["validation loss"] == "0.500 [0.250..0.750]" and found["95 % (validation)"].startswith("0.250..")
    assert "ended early" not in found
    rows = [line.split(",") for line in (tmp_path / "demo" / "arms.csv").read_text().splitlines()]
    row = next(dict(zip(rows[0], row, strict=True)) for row in rows[1:] if row[0] == "fault")
    assert float(row["twin_val_loss_difference"]) == 0.5 and float(row["twin_val_loss_low"]) == 0.25


def test_the_second_comparison_may_be_the_experiments_own(experiment: Path) -> None:
    write_run(experiment, "arm_y", 0)
    against = {"fp32": "fault", "arm_z": "fault", "arm_y": "fault", "gone": "fault"}
    stated = {"arms": ["fp32", "fault", "arm_z", "arm_y"], "reference": "fp32", "against": against}
    (experiment / "experiment.json").write_text(json.dumps(stated))
    text = markdown(experiment)
    second = text[text.index("## Against fault") : text.index("## Collapsed")]
    assert [line.split()[1] for line in second.splitlines() if line.startswith("| arm_")] == ["arm_z", "arm_y"]
    assert "| fp32" not in second, "a healthy twin is compared with the fault in the first table"
    rows = (experiment / "arms.csv").read_text().splitlines()
    assert dict(zip(rows[0].split(","), rows[3].split(","), strict=True))["against"] == "fault"


def test_a_twin_without_runs_and_runs_that_differ_are_named(tmp_path: Path) -> None:
    root = tmp_path / "demo"
    write_run(root, "fault", 0)
    write_run(root, "fault", 1, max_steps=200, step=200, versions={"torch": "2.9"})
    write_run(root, "fault", 2, "unfinished", max_steps=300)
    stated = {"arms": ["fp32", "fault"], "reference": "fp32", "against": {"fault": "mild"}}
    (root / "experiment.json").write_text(json.dumps(stated))
    text = markdown(root)
    assert "- not compared: fp32 has no runs: fault\n" in text
    assert "- not compared: mild has no runs: fault\n" in text
    assert "- runs of different max_steps in one arm (100; 200): fault\n" in text
    assert 'runs of different versions in one arm ({"torch": "2.9"}; {}): fault\n' in text
    assert "runs of different threads" not in text


def grid(root: Path) -> Path:
    """Two arms at two points of a grid; the twins as a sweep writes them."""
    names = [f"{arm}-lr_{rate}" for arm in ("fp32", "fault", "fault-b") for rate in ("0.1", "0.2")]
    for name in names:
        write_run(root, name, 0, "completed" if name.startswith("fp32") else "collapsed", collapse_step=30)
    twins = {name: f"fp32-lr_{name[-3:]}" for name in names}
    (root / "experiment.json").write_text(json.dumps({"arms": names, "reference": None, "twins": twins}))
    return root


def test_twins_of_a_grid_are_at_the_same_point(tmp_path: Path) -> None:
    root = grid(tmp_path / "demo")
    text = markdown(root)
    assert cells(text, "fault-lr_0.1", "## Against the healthy twin")[:3] == ["fault-lr_0.1", "fp32-lr_0.1", "+1.00"]
    assert cells(text, "fault-lr_0.2", "## Against the healthy twin")[1] == "fp32-lr_0.2"
    assert "\n| fp32" not in text[text.index("## Against the") : text.index("## Collapsed")]
    arms = group_arms(find_runs([root]))
    twins = pick_twins(arms, None).arms
    assert {arm: other.name for arm, other in pick_opponents(arms, twins, "fault").arms.items()} == {
        arm.name: f"fault-lr_{arm.name[-3:]}" for arm in arms
    }
    assert pick_opponents(arms, twins, "fault-b").arms["fault-lr_0.2"].name == "fault-b-lr_0.2"
    assert set(pick_opponents(arms, twins, "fault-lr_0.1").arms) == {arm.name for arm in arms}, "one arm for all"
    with pytest.raises(ValueError, match="--against fp3: give one of the arms"):
        pick_opponents(arms, twins, "fp3")
    assert {twin.name for twin in pick_twins(arms, "fp32-lr_0.1").arms.values()} == {"fp32-lr_0.1"}


def test_twin_without_runs_is_named(experiment: Path) -> None:
    for seed in range(3):
        (experiment / "fp32" / f"seed_{seed}" / "verdict.json").unlink()
    text = markdown(experiment)
    assert "not compared: fp32 has no run that counts: fault, arm_z\n" in text


def test_runaway_counts_peaks_with_intervals(tmp_path: Path) -> None:
    for seed, peak in enumerate((50.0, 100.0, 5000.0, "nan")):
        write_run(tmp_path / "demo", "fault", seed, max_logit_peak=peak)
    row = cells(markdown(tmp_path / "demo"), "fault", "## Logits ran away")
    assert row == ["fault", "2/4 (0.15..0.85)", "2/4 (0.15..0.85)", "1/4 (0.05..0.70)"]


def test_runaway_rates_are_tested_against_the_twin(tmp_path: Path) -> None:
    root = tmp_path / "demo"
    passed = {"fp32": (0, 5), "sdpa": (1, 4), "fault": (5, 5), "mx": (3, 4), "mild": (1, 5)}
    twins = {"fp32": "fp32", "sdpa": "sdpa", "fault": "fp32", "mx": "sdpa", "mild": "fp32"}
    for arm, (k, n) in passed.items():
        for seed in range(n):
            write_run(root, arm, seed, max_logit_peak="inf" if seed == 0 and k else 1000.5 if seed < k else 1000.0)
    write_run(root, "mild", 9, "unfinished")
    (root / "experiment.json").write_text(json.dumps({"arms": list(passed), "reference": None, "twins": twins}))
    text = markdown(root, against="mild")
    compared = [arm for arm in passed if twins[arm] != arm]
    fishers = [fisher_exact([[k, n - k] for k, n in (passed[arm], passed[twins[arm]])])[1] for arm in compared]
    with (root / "arms.csv").open() as file:
        rows = {row["arm"]: row for row in csv.DictReader(file)}
    for arm, p, corrected in zip(compared, fishers, multipletests(fishers, method="holm")[1], strict=True):
        cell = cells(text, arm, "## Logits ran away")
        assert cell[4:7] == [twins[arm], f"{p:.2g}", f"{corrected:.2g}"]
        assert float(rows[arm]["twin_runaway_fisher"]) == pytest.approx(p)
        assert float(rows[arm]["twin_runaway_fisher_holm"]) == pytest.approx(corrected)
        assert (rows[arm]["logit_above_1000"], rows[arm]["logits_logged"]) == tuple(map(str, passed[arm]))
    assert cells(text, "fp32", "## Logits ran away")[4:] == ["-", "-", "-", "mild", "1", "1"]
    assert rows["sdpa"]["twin_runaway_fisher"] == ""
    latex = (root / "report.tex").read_text()
    assert r"Fisher p (twin) & Holm (twin)" in latex
    assert any(line.startswith("fault & ") and f"& fp32 & {fishers[0]:.2g} & " in line for line in latex.splitlines())


def test_files_are_complete_and_leave_nothing_behind(experiment: Path) -> None:
    before = {path.name for path in experiment.iterdir()}
    make_report([experiment])
    make_report([experiment])
    assert {path.name for path in experiment.iterdir()} == before | OUTPUTS
    for name in ("figure", "survival"):
        assert (experiment / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "</svg>" in (experiment / f"{name}.svg").read_text()


def test_json_format_and_other_directory(experiment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(experiment), "--out", str(tmp_path / "out"), "--format", "json", "--reference", "arm_z"]) == 0
    summary = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert summary["healthy"] == ["arm_z"]
    assert [(arm["arm"], arm["collapsed"], arm["counted"]) for arm in summary["arms"]][1] == ("fault", 2, 2)
    assert summary["arms"][1]["runs"][1]["loss"] == "nan"
    assert summary["problems"]["not counted: unfinished"] == ["fault/seed_2"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == OUTPUTS
    assert not (experiment / "report.md").exists()


@pytest.mark.parametrize("part", ["fp32", "fp32/seed_0"])
def test_a_part_does_not_replace_the_report_of_all(
    part: str, experiment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(experiment / part)]) == 2
    assert "is only a part of" in (error := capsys.readouterr().err) and "--out DIR" in error
    assert not (experiment / "report.md").exists()
    assert main([str(experiment / part), "--out", str(tmp_path / "out")]) == 0
    assert main([str(experiment.parent)]) == 0, "above it"
    assert (experiment / "report.md").exists()


def test_latex_is_escaped_and_ruled(experiment: Path) -> None:
    make_report([experiment])
    text = (experiment / "report.tex").read_text()
    assert r"arm\_z & 0/1 & 0.00..0.79 & - & 2 & 4 & 40 & 50 & 1/1 at 40 \\" in text
    assert r"95 \% interval" in text
    assert r"logit $>$ 100" in text
    for rule in ("toprule", "midrule", "bottomrule"):
        assert text.count(f"\\{rule}") == text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") >= 5
    assert "_" not in text.replace(r"\_", "")


def test_tables_fill_missing_cells() -> None:
    table = Table("T", [{"arm": "a", "x": "1"}, {"arm": "b&c", "y": "2"}], "Note.")
    assert as_text([table]) == "T\n\narm  x  y\n---  -  -\na    1  -\nb&c  -  2\n\nNote."
    assert "| b&c | - | 2 |" in as_text([table], markdown=True)
    assert r"b\&c & - & 2 \\" in as_latex([table])


def test_broken_verdict_names_the_file(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = experiment / "fp32" / "seed_1" / "verdict.json"
    broken.write_text('{"status": "comp')
    assert main([str(experiment)]) == 2
    assert str(broken) in capsys.readouterr().err
    assert not (experiment / "report.md").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere"], "nowhere: no such directory"),
        (["."], "holds no runs"),
        (["runs/demo", "--reference", "fp23"], "--reference fp23: give one of the arms fp32, fault, arm_z"),
        (["runs/demo", "--against", "falt"], "--against falt: give one of the arms fp32, fault, arm_z"),
        (["runs/demo", "--outt", "x"], "--outt"),
        (["runs/demo", "--format", "xml"], "xml"),
    ],
)
def test_bad_input_is_named(
    args: list[str],
    message: str,
    experiment: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty" if args == ["."] else tmp_path)
    assert main(args) == 2
    assert message in capsys.readouterr().err


def test_broken_experiment_json_names_the_file(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (experiment / "experiment.json").write_text("[]")
    assert main([str(experiment)]) == 2
    assert f"{experiment / 'experiment.json'}: broken" in capsys.readouterr().err


def test_two_experiments_get_full_names_and_need_out(experiment: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "runs" / "other", "fp32", 0).parent.parent
    with pytest.raises(ValueError, match="--out DIR"):
        make_report([experiment, other])
    assert [arm.name for arm in group_arms(find_runs([experiment, other]))] == [
        *("demo/fp32", "demo/fault", "demo/arm_z", "other/fp32")
    ]


def test_overlapping_directories_count_once(experiment: Path) -> None:
    assert len(find_runs([experiment, experiment / "fp32", experiment / "fp32" / "seed_0"])) == 8


def test_nothing_finished_still_reports(tmp_path: Path) -> None:
    write_run(tmp_path / "demo", "fp32", 0, "unfinished")
    assert "not counted: unfinished: fp32/seed_0" in markdown(tmp_path / "demo")
    assert (tmp_path / "demo" / "figure.png").exists()


def test_spread_shows_range_only_where_there_is_one() -> None:
    assert spread([], max) == "-"
    assert spread([3.0, 3.0], max) == "3"
    assert spread([math.nan], max) == "not finite"
    assert spread([1.25, 378880.0], max) == "378,880 [1.25..378,880]"


def test_an_amplified_error_is_named_with_the_arm(tmp_path: Path) -> None:
    for arm, gain in (("mx", 1.0), ("loud", 16.0)):
        write_run(tmp_path / "demo", arm, 0, error_gain=gain)
    write_run(tmp_path / "demo", "fp32", 0)
    write_run(tmp_path / "demo", "shaped", 0, error_magnitude=1.0, error_relative_magnitude=0.5)
    arms = group_arms(find_runs([tmp_path / "demo"]))
    assert [arm.name for arm in arms] == ["fp32", "loud (error x 16)", "mx", "shaped (error 0.5 x gradient)"]
    make_report([tmp_path / "demo"], against="loud")
    for file in ("report.md", "report.tex", "arms.csv"):
        assert "loud (error x 16)" in (tmp_path / "demo" / file).read_text()
