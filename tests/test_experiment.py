"""The experiment's YAML and the command line of `sweep`, and what a sweep shows while it runs."""

from __future__ import annotations

import io
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from sweep_lab import Resolved

from lightning_qk.experiment import Run, parse_sweep
from lightning_qk.sweep import main
from lightning_qk.sweep_display import Display, number, progress_line

YAML = """
name: demo
base: [../base.yaml, ../proxy.yaml]
arms: {fp32: ../arms/fp32.yaml, guard: [../arms/fault.yaml, ../arms/guard.yaml]}
seeds: [0, 1]
overrides: {trainer.max_steps: 1500, model.bias: false}
arm_overrides: {guard: {trainer.max_steps: 20, trainer.logger: null, data.name: text}}
report: {reference: fp32}
"""


SIZES = """sizes:
  small: {base: ../proxy.yaml}
  large:
    base: [../large.yaml]
    overrides: {trainer.devices: 8}
    arms: {guard: ../large.yaml}
    arm_overrides: {fp32: {a.b: 1}}"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("base", "proxy", "arms/fp32", "arms/fault", "arms/guard"):
        path = tmp_path / "configs" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    path = tmp_path / "configs" / "experiments" / "demo.yaml"
    path.parent.mkdir()
    path.write_text(YAML)
    cli = types.ModuleType("lightning_qk.cli")
    cli.resolve_run = lambda args: Resolved()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lightning_qk.cli", cli)
    monkeypatch.chdir(tmp_path)
    return path


def test_fit_arguments_follow_the_yaml(config: Path, tmp_path: Path) -> None:
    _, experiment = parse_sweep(["-c", str(config)], "")
    run = experiment.runs(Path("runs"))[1]
    files = [str(tmp_path / "configs" / f"{name}.yaml") for name in ("base", "proxy", "arms/fault", "arms/guard")]
    assert list(run.fit_args) == [
        *(part for file in files for part in ("-c", file)),
        *("--seed_everything", "0", "--run.root", "runs", "--run.experiment", "demo", "--run.arm", "guard"),
        *("--trainer.max_steps=20", "--model.bias=false", "--trainer.logger=null", "--data.name=text"),
        *("--ckpt_path", "last"),
    ]
    assert run.path == Path("runs/demo/guard/seed_0")
    assert experiment.reference == "fp32"


def test_a_grid_makes_an_arm_of_every_point(config: Path) -> None:
    grid = "grid: {model.lr: [0.01, 2e-2], some.fault.block: [32, null], some.layers: [[0, 1], []]}"
    config.write_text(YAML.replace("reference: fp32", "reference: fp32-lr_0.01-block_32-layers_0_1") + grid)
    _, experiment = parse_sweep(["-c", str(config)], "")
    assert len(experiment.arms) == 2 * 2 * 2 * 2
    (run,) = [run for run in experiment.runs(Path("runs")) if run.name == "guard-lr_0.02-block_none-layers_0_1/seed_1"]
    assert run.fit_args[-7:-2] == (
        *("--trainer.logger=null", "--data.name=text"),
        *("--model.lr=0.02", "--some.fault.block=null", "--some.layers=[0, 1]"),
    )
    assert run.fit_args.count("-c") == 4, "the arm's own files"


def test_an_arm_of_the_yaml_stands_for_all_points_of_a_grid(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(YAML + "grid: {model.lr: [0.01, 0.02]}")
    _, experiment = parse_sweep(["-c", str(config), "--seeds", "0"], "")
    root = Path("runs")
    assert [run.arm for run in experiment.runs(root, ["guard"])] == ["guard-lr_0.01", "guard-lr_0.02"]
    assert [run.arm for run in experiment.runs(root, ["guard-lr_0.02", "fp32"])] == [
        *("fp32-lr_0.01", "fp32-lr_0.02", "guard-lr_0.02")
    ]
    assert main(["-c", str(config), "--only", "fault"]) == 2
    known = "fp32, guard, fp32-lr_0.01, fp32-lr_0.02, guard-lr_0.01, guard-lr_0.02"
    assert f"only: fault: not an arm; the arms are {known}" in capsys.readouterr().err


def test_the_reference_of_a_grid_is_the_twin_at_the_same_point(config: Path) -> None:
    config.write_text(YAML + "grid: {model.lr: [0.01, 0.02], model.bias: [true]}")
    _, experiment = parse_sweep(["-c", str(config)], "")
    twins = {f"{arm}-lr_{lr}-bias_true": f"fp32-lr_{lr}-bias_true" for arm in ("fp32", "guard") for lr in (0.01, 0.02)}
    assert (experiment.reference, experiment.twins) == (None, twins)
    config.write_text(YAML)
    assert parse_sweep(["-c", str(config)], "")[1].twins == {}


def test_a_second_comparison_for_all_or_by_pattern_at_the_same_point_and_for_forks(config: Path) -> None:
    config.write_text(YAML.replace("{reference: fp32}", "{reference: fp32, against: guard}"))
    assert parse_sweep(["-c", str(config)], "")[1].against == {"fp32": "guard", "guard": "guard"}
    config.write_text(config.read_text() + "grid: {model.lr: [1, 2]}")
    against = {f"{arm}-lr_{lr}": f"guard-lr_{lr}" for arm in ("fp32", "guard") for lr in (1, 2)}
    assert parse_sweep(["-c", str(config)], "")[1].against == against
    forks = "forks: {from: fp32, steps: [2, 3], arms: {none: ../arms/guard.yaml, bump: ../arms/guard.yaml}}"
    config.write_text(YAML.replace("{reference: fp32}", "{reference: fp32, against: none}") + forks)
    against = {f"{arm}-step_{step}": f"none-step_{step}" for step in (2, 3) for arm in ("none", "bump")}
    assert parse_sweep(["-c", str(config)], "")[1].against == against


@pytest.mark.parametrize(
    ("against", "said"),
    [
        ("falt", "report.against.*: 'falt' is not an arm"),
        ("{sd*: fp32}", "report.against.sd*: matches no arm"),
    ],
)
def test_a_second_comparison_that_is_not_there(
    against: str, said: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(YAML.replace("{reference: fp32}", f"{{reference: fp32, against: {against}}}"))
    assert main(["-c", str(config)]) == 2
    assert said in capsys.readouterr().err


MAPPING = "report: {reference: {guard*: fp32, sd*: sdpa, bare: bare_fp32}}"
MANY = "arms: {fp32: A, sdpa: A, guard: A, guard_late: A, sdpa_guard: A, bare: A, bare_fp32: A, lonely: A}"


def mapping(grid: str = "") -> str:
    arms = MANY.replace("A", "../arms/fp32.yaml")
    text = YAML.replace("report: {reference: fp32}", MAPPING).replace("arm_overrides", "#")
    return "\n".join(arms if line.startswith("arms") else line for line in text.splitlines()) + f"\n{grid}\n"


def test_every_arm_may_have_a_healthy_twin_of_its_own(config: Path) -> None:
    config.write_text(mapping())
    _, experiment = parse_sweep(["-c", str(config)], "")
    twins = {
        **{"fp32": "fp32", "sdpa": "sdpa", "guard": "fp32", "guard_late": "fp32", "sdpa_guard": "sdpa"},
        **{"bare": "bare_fp32", "bare_fp32": "bare_fp32"},
    }
    assert (experiment.reference, experiment.twins) == (None, twins), "lonely is compared with nothing"
    config.write_text(mapping("grid: {model.lr: [0.1, 0.2]}"))
    _, experiment = parse_sweep(["-c", str(config)], "")
    assert experiment.twins == {f"{arm}-lr_{lr}": f"{twin}-lr_{lr}" for arm, twin in twins.items() for lr in (0.1, 0.2)}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (("bare: bare_fp32", "bear: bare_fp32"), "report.reference.bear: matches no arm; the arms are fp32, sdpa"),
        (("sd*: sdpa", "sd*: spda"), "report.reference.sd*: 'spda' is not an arm; the arms are fp32, sdpa"),
        (("sd*: sdpa", "fp32: sdpa"), "report.reference.fp32: a twin of others is its own"),
    ],
)
def test_mistakes_in_twins_are_named(
    edit: tuple[str, str], message: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(mapping().replace(*edit))
    assert main(["-c", str(config)]) == 2
    assert message in capsys.readouterr().err


EXTRAPOLATE = (
    "report: {extrapolate: {key: some.bits, to: 7, log: [model.lr]}}\ngrid: {some.bits: [1, 2], model.lr: [0.1]}"
)


def test_an_extrapolation_is_told_to_the_report(config: Path) -> None:
    config.write_text(YAML.replace("report: {reference: fp32}", EXTRAPOLATE))
    _, experiment = parse_sweep(["-c", str(config)], "")
    assert experiment.extrapolate == {"key": "some.bits", "to": 7.0, "log": ["model.lr"]}
    assert experiment.points["fp32-bits_2-lr_0.1"] == {"some.bits": 2, "model.lr": 0.1}
    assert len(experiment.points) == 4


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            ("log: [model.lr]", "log: [model.lr, lr]"),
            "report.extrapolate: lr is not a key of the grid, which has some.b",
        ),
        (("log: [model.lr]", "log: []"), "report.extrapolate: model.lr of the grid is neither key nor in log"),
        (("model.lr: [0.1]", "model.lr: [0]"), "report.extrapolate: grid.model.lr: [0] must be numbers"),
        (("some.bits: [1, 2]", "some.bits: [1, x]"), "report.extrapolate: grid.some.bits: [1, 'x'] must be numbers"),
        (("to: 7", "too: 7"), "report.extrapolate"),
    ],
)
def test_mistakes_in_an_extrapolation_are_named(
    edit: tuple[str, str], message: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(YAML.replace("report: {reference: fp32}", EXTRAPOLATE.replace(*edit)))
    assert main(["-c", str(config)]) == 2
    assert message in capsys.readouterr().err


def test_executor_of_the_yaml(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(YAML + "executor: slurm\nslurm: {time: 60, setup: [module load cuda]}\njobs: 3\n")
    options, _ = parse_sweep(["-c", str(config), "--slurm.time", "90"], "")
    assert (options.executor, options.slurm) == ("slurm", {"time": 90, "setup": ["module load cuda"]})
    assert main(["-c", str(config), "--dry_run"]) == 0
    out = capsys.readouterr().out
    assert "#SBATCH --array=0-3%3\n" in out and "module load cuda\n" in out
    assert main(["-c", str(config), "--executor", "local", "--dry_run"]) == 0
    assert "#SBATCH" not in capsys.readouterr().out


@pytest.mark.parametrize("time", ["0-12:00:00", "'0-12:00:00'", "720"])
def test_hours_of_slurm(time: str, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(YAML + f"executor: slurm\nslurm: {{time: {time}}}\n")
    assert main(["-c", str(config), "--dry_run"]) == 0
    assert "#SBATCH --time=720\n" in capsys.readouterr().out


def test_sizes_lie_between_the_base_and_the_arm(config: Path, tmp_path: Path) -> None:
    config.write_text(YAML.replace("base: [../base.yaml, ../proxy.yaml]", f"base: ../base.yaml\n{SIZES}"))
    (tmp_path / "configs" / "large.yaml").touch()
    for args, name, files in (
        ([], "demo", ["base", "proxy"]),
        (["--size", "small"], "demo", ["base", "proxy"]),
        (["--size", "large"], "demo_large", ["base", "large"]),
    ):
        _, experiment = parse_sweep(["-c", str(config), *args], "")
        assert experiment.name == name and [path.stem for path in experiment.base] == files
        assert experiment.overrides.get("trainer.devices") == (8 if name == "demo_large" else None)
        assert experiment.overrides["trainer.max_steps"] == 1500
        assert [path.stem for path in experiment.arms["guard"]] == (
            ["large"] if name == "demo_large" else ["fault", "guard"]
        )
        assert experiment.arm_overrides["fp32"] == ({"a.b": 1} if name == "demo_large" else {})


def test_a_size_has_arms_and_a_grid_of_its_own(config: Path) -> None:
    own = """sizes:
  proxy: {arms: {few: ../arms/fault.yaml}}
  paper: {arms: {many: ../arms/guard.yaml}, arm_overrides: {many: {a.b: 1}}, grid: {model.lr: [0.1, 0.2]}}
  bare: {grid: {}}"""
    config.write_text(YAML + f"{own}\ngrid: {{model.lr: [0.01]}}\n")
    for size, arms in (
        ("proxy", ["fp32-lr_0.01", "guard-lr_0.01", "few-lr_0.01"]),
        ("paper", [f"{arm}-lr_{lr}" for arm in ("fp32", "guard", "many") for lr in (0.1, 0.2)]),
        ("bare", ["fp32", "guard"]),
    ):
        assert list(parse_sweep(["-c", str(config), "--size", size], "")[1].arms) == arms
    _, experiment = parse_sweep(["-c", str(config), "--size", "paper"], "")
    assert [path.stem for path in experiment.arms["many-lr_0.2"]] == ["guard"]
    assert experiment.arm_overrides["many-lr_0.2"] == {"a.b": 1, "model.lr": 0.2}
    assert (experiment.points["many-lr_0.2"], experiment.twins["many-lr_0.2"]) == ({"model.lr": 0.2}, "fp32-lr_0.2")


def test_a_grid_that_a_size_would_replace_is_refused(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(YAML + "sizes: {paper: {grid: {model.lr: [0.1]}}}")
    assert main(["-c", str(config), '--grid={"model.lr": [0.2]}']) == 2
    assert "--grid: the size has a grid of its own" in capsys.readouterr().err


def test_named_points_may_set_different_keys(config: Path) -> None:
    config.write_text(YAML + "grid: {size: {small: {model.lr: 0.01}, large: {model.lr: 0.02, model.bias: true}}}")
    _, experiment = parse_sweep(["-c", str(config)], "")
    assert experiment.points["fp32-small"] == {"model.lr": 0.01}
    assert experiment.points["fp32-large"] == {"model.lr": 0.02, "model.bias": True}


def test_points_of_a_grid_that_share_a_name_are_refused(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(YAML + 'grid: {some.name: ["a b", "a_b"]}')
    assert main(["-c", str(config)]) == 2
    assert "two points are called fp32-name_a_b" in capsys.readouterr().err


def test_command_line_overrides_the_yaml(config: Path) -> None:
    args = ["-c", str(config), "--seeds", "3,4", "--only", "fp32", "--report", "false", "--root", "elsewhere"]
    options, experiment = parse_sweep(args, "")
    assert (experiment.seeds, options.only, options.report_after, options.root) == (
        (3, 4),
        ["fp32"],
        False,
        "elsewhere",
    )
    assert experiment.reference == "fp32", "switching the report off keeps its reference"
    assert parse_sweep(["-c", str(config), "--seeds=7"], "")[1].seeds == (7,)


def test_dry_run_from_the_command_line(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-c", str(config), "--dry_run", "--only", "guard"]) == 0
    out = capsys.readouterr().out
    assert out.count(" -m lightning_qk fit -c ") == 2
    assert "# guard/seed_1: to run" in out
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (("seeds:", "seedz:"), "seedz"),
        (("seeds: [0, 1]", "seeds: [0, x]"), "seeds"),
        (("seeds: [0, 1]", "seeds: [1, 1]"), "seeds: [1, 1] must be different"),
        (("name: demo", "name: ../demo"), "name: '../demo' names a directory"),
        (("name: demo", "jobs: 1"), "name: missing"),
        (("arms/fault.yaml", "arms/fualt.yaml"), "arm guard: no such file: "),
        (("arm_overrides: {guard", "arm_overrides: {gaurd"), "arm_overrides: 'gaurd' is not an arm"),
        (("name: demo", "name: demo\ngrid: {model.lr: []}"), "grid.model.lr: [] must be a list of different values"),
        (("name: demo", "name: demo\ngrid: {size: {}}"), "grid.size: {} must be a list of different values, or named"),
        (("name: demo", "name: demo\ngrid: {model.lr: [1, 1]}"), "grid.model.lr: [1, 1] must be a list of different"),
        (("name: demo", "name: demo\ngrid: {model.lr: 1}"), "grid"),
        (("name: demo", "name: demo\nsize: large"), "size: 'large' is not a size; this experiment has none"),
        (("name: demo", f"name: demo\nsize: huge\n{SIZES}"), "size: 'huge' is not a size; the sizes are small, large"),
        (("name: demo", "name: demo\nsizes: {small: {bases: x}}"), "sizes: 'bases' is not one of its keys. See --help"),
        (("name: demo", "name: demo\nsizes: {small: {arms: {gaurd: x}}}"), "arm gaurd: no such file"),
        (("reference: fp32", "reference: fp23"), "report.reference: 'fp23' is not an arm"),
        (("reference: fp32", "refrence: fp32"), "refrence"),
        (("name: demo", "name: ["), "demo.yaml"),
        (("model.bias: false", "run.overwrite: true"), "overrides: run.overwrite is the sweep's own"),
        (("name: demo", "name: demo\nexecutor: pbs"), "executor"),
        (("name: demo", "name: demo\nexecutor: slurm"), "slurm.time: missing"),
        (("name: demo", "name: demo\nexecutor: slurm\nslurm: {time: 12:00:00}"), "slurm.time: 43200 must be minutes"),
        (("name: demo", "name: demo\nexecutor: slurm\nslurm: {time: '12:00:00'}"), "such as 0-12:00:00"),
    ],
)
def test_mistakes_in_the_yaml_are_named(
    edit: tuple[str, str], message: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(YAML.replace(*edit))
    assert main(["-c", str(config)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "-c: give exactly one experiment"),
        (["-c", "nowhere.yaml"], "nowhere.yaml"),
        (["-c", "CONFIG", "--only", "fp32,fp8"], "only: fp8: not an arm; the arms are fp32, guard"),
        (["-c", "CONFIG", "--jobs", "0"], "jobs: 0 must be at least 1"),
        (["-c", "CONFIG", "--seeds", "a"], "seeds: 'a' is not a whole number"),
        (["-c", "CONFIG", "--job", "2"], "--job"),
        (["-c", "CONFIG", "--detach"], "detach: runs of executor local end with the sweep"),
    ],
)
def test_mistakes_on_the_command_line_are_named(
    args: list[str], message: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(config) if arg == "CONFIG" else arg for arg in args]) == 2
    assert message in capsys.readouterr().err


# ---- display -------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def progress(run: Run, step: int) -> None:
    state = {"step": step, "max_steps": 100, "loss": 2.5, "sigma_q": None, "max_logit": "inf", "guard": "fired"}
    run.path.mkdir(parents=True, exist_ok=True)
    (run.path / "progress.json").write_text(json.dumps({**state, "steps_per_s": 2.0, "phase": "training"}))


def test_progress_line(tmp_path: Path) -> None:
    run = Run("fault", 3, tmp_path, ())
    progress(run, 50)
    line = progress_line(run, json.loads((tmp_path / "progress.json").read_text()))
    assert line.split() == [
        *("fault", "seed", "3", "[########--------]", "50/100", "loss", "2.50", "sigma_q", "-", "logit", "inf"),
        *("guard", "fired", "2.0", "it/s", "ETA", "0:25"),
    ]


def test_terminal_lines_are_redrawn_in_place(tmp_path: Path) -> None:
    stream, run = Terminal(), Run("fault", 0, tmp_path, ())
    with Display(stream) as display:
        display.begin(total=1, done=0, how="1 at a time")
        display.started(run)
        display.update([run], 0)
        assert stream.getvalue().endswith("0/1 done, 1 running, 0 waiting\n")
        display.print("a lasting line")
        assert stream.getvalue().endswith("\x1b[2F\x1b[Ja lasting line\n")


def test_log_gets_one_line_a_quarter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_qk.sweep_display.REFRESH_S", 0.0)
    stream, run = io.StringIO(), Run("fault", 0, tmp_path, ())
    display = Display(stream)
    display.started(run)
    for step in range(0, 101, 5):
        progress(run, step)
        display.update([run], 0)
    lines = stream.getvalue().splitlines()[1:]
    assert [line.split()[4] for line in lines] == ["25/100", "50/100", "75/100"]


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (3.14159, "3.14"), (378880.0, "378,880"), ("nan", "nan")])
def test_numbers_are_short(value: Any, text: str) -> None:
    assert number(value) == text
