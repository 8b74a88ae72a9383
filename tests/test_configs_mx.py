"""The YAML of MX runs: the student-teacher proxy's sizes, arms and switches, and a GPT's formats."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lightning_qk.cli import main, resolve_run
from lightning_qk.mx_policy import CHANGES, PRESETS
from lightning_qk.verdict import read_verdict

CONFIGS = Path(__file__).parents[1] / "configs"
STUDENT = CONFIGS / "student_teacher"
ARMS = sorted((STUDENT / "arms").glob("*.yaml"))
SWITCHES = sorted((STUDENT / "switches").glob("*.yaml"))
OPTIONS = sorted(path for path in STUDENT.glob("*.yaml") if path.stem not in ("base", "small"))
FORMATS = sorted((CONFIGS / "mx").glob("*.yaml"))


def files(*paths: Path) -> list[str]:
    return [part for path in paths for part in ("-c", str(path))]


def test_there_is_an_arm_for_every_preset_and_a_switch_for_every_change() -> None:
    assert {path.stem for path in ARMS} >= set(PRESETS) and {path.stem for path in FORMATS} == set(PRESETS)
    assert {path.stem for path in SWITCHES} == set(CHANGES)
    for path in (*ARMS, *SWITCHES, *FORMATS):
        arm = yaml.safe_load(path.read_text())["run"]["arm"]
        assert arm == (f"switch_{path.stem}" if path in SWITCHES else path.stem)


@pytest.mark.parametrize("size", ["base", "small"])
def test_every_file_makes_another_run(size: str) -> None:
    sizes = [STUDENT / "base.yaml", *([STUDENT / "small.yaml"] if size == "small" else [])]
    chosen = [*ARMS, *SWITCHES, *OPTIONS] if size == "small" else [*ARMS[::4], *SWITCHES[::4]]
    resolved = [resolve_run(files(*sizes, path)) for path in chosen]
    assert len({run.config_hash for run in resolved}) == len(chosen)
    for path, run in zip(chosen, resolved, strict=True):
        arm = yaml.safe_load(path.read_text()).get("run", {}).get("arm", "base")
        assert run.run_dir.parts[-2:] == (arm, "seed_0")


def test_a_format_is_a_run_of_the_gpt() -> None:
    resolved = [resolve_run(files(CONFIGS / "base.yaml", CONFIGS / "proxy.yaml", path)) for path in FORMATS[::3]]
    assert len({run.config_hash for run in resolved}) == len(resolved)


def test_a_switched_and_monitored_run(tmp_path: Path) -> None:
    paths = (
        STUDENT / "base.yaml",
        STUDENT / "small.yaml",
        STUDENT / "arms" / "mxfp8_e4m3.yaml",
        STUDENT / "switches" / "fp32.yaml",
        STUDENT / "monitors.yaml",
    )
    args = [
        *files(*paths, STUDENT / "rescaled.yaml"),
        *("--run.root", str(tmp_path), "--trainer.max_steps=4", "--model.init_args.width=32"),
        *("--data.init_args.batch_size=64", "--trainer.log_every_n_steps=1"),
    ]
    assert main(["fit", *args]) == 0
    verdict = read_verdict(tmp_path / "default" / "switch_fp32" / "seed_0")
    assert verdict is not None
    assert (verdict["precision_switch"], verdict["precision_switch_step"]) == ("fp32", 0)
    assert verdict["divergence_step"] is None and verdict["status"] == "completed"
    assert set(verdict["warnings"]) >= {"zeta/mlp", "attribution/zeta_ln/mlp", "last_bin_gains", "grad_norm_drift"}


def test_a_gpt_trains_in_mx_from_the_command_line(tmp_path: Path) -> None:
    args = files(CONFIGS / "base.yaml", CONFIGS / "proxy.yaml", CONFIGS / "mx" / "mxfp8_mix.yaml")
    args += ["--run.root", str(tmp_path), "--trainer.max_steps=2", "--data.init_args.batch_size=2"]
    assert main(["fit", *args, "--trainer.limit_val_batches=1"]) == 0
    verdict = read_verdict(tmp_path / "default" / "mxfp8_mix" / "seed_0")
    assert verdict is not None and verdict["mx_products"].startswith("emulated") and verdict["sigma_q"] > 0
