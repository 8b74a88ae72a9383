"""The YAML of MX runs: the student-teacher proxy's sizes, arms and switches, and a GPT's formats."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_qk.cli import build, main, resolve_run
from lightning_qk.experiment import parse_sweep
from lightning_qk.model import GPT, GPTConfig
from lightning_qk.mx_policy import CHANGES, OPERANDS, PRESETS, MXPolicy
from lightning_qk.operand_format import OperandFormat
from lightning_qk.precision import MXTraining
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
    assert {path.stem for path in ARMS} >= set(PRESETS) and {path.stem for path in FORMATS} == {*PRESETS, "no_mx"}
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


def arm(experiment: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The precision plugin of an arm of an experiment."""
    _, parsed = parse_sweep(["-c", str(CONFIGS / "experiments" / f"{experiment}.yaml")], "")
    monkeypatch.chdir(tmp_path)
    (found,) = [run for run in parsed.runs(tmp_path, [name]) if run.seed == parsed.seeds[0]]
    args = [arg for arg in found.fit_args if not arg.startswith("--ckpt_path")]
    return build(args[:-1], run=False).trainer.precision_plugin  # without --ckpt_path's value


MXFP4, TRUNCATED = (OperandFormat("mxfp4_e2m1", rounding=rounding) for rounding in ("rne", "rz"))
WEIGHT_GRADIENT: dict[str, Any] = {"x_wgrad": TRUNCATED, "dy_wgrad": TRUNCATED}


@pytest.mark.parametrize(
    ("name", "route", "operands", "gain"),
    [
        ("all", "all", {}, MXFP4),
        *((route, route, {}, None) for route in ("qk", "mlp", "v")),
        ("ln", "all", dict.fromkeys(OPERANDS), MXFP4),
        ("truncated", "all", WEIGHT_GRADIENT, MXFP4),
        *((f"truncated_{route}", route, WEIGHT_GRADIENT, None) for route in ("qk", "mlp", "v")),
        ("truncated_everywhere", "all", dict.fromkeys(OPERANDS, TRUNCATED), TRUNCATED),
        ("truncated_ln", "all", dict.fromkeys(OPERANDS), TRUNCATED),
    ],
)
def test_an_arm_that_meets_the_channel_is_what_its_name_says(
    name: str, route: str, operands: Any, gain: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Besides its products an arm is the control, bfloat16; LayerNorm gains, which no route has, are an arm."""
    matmul = arm("mx_meets_qk", name, monkeypatch, tmp_path).matmul
    expected: dict[str, Any] = {**dict.fromkeys(OPERANDS, MXFP4), **operands}
    seen = matmul.policy
    assert (matmul.route, seen.operands) == (route, expected)
    assert (seen.ln_affine, seen.gain if seen.ln_affine == "mx" else None) == ("mx" if gain else "bf16", gain)
    rest = dataclasses.replace(seen.without(*OPERANDS), gain=None, ln_affine="bf16") if seen.gain else seen
    assert rest == MXPolicy.preset("bf16")


@pytest.mark.parametrize("experiment", ["mx_formats", "mx_meets_qk", "scaling"])
def test_the_float32_reference_is_float32(experiment: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    point = "-d32-s70" if experiment == "scaling" else ""
    for name, base in (("fp32", "fp32"), ("no_mx", "bf16")):
        plugin = arm(experiment, name + point, monkeypatch, tmp_path)
        assert plugin.base == base and plugin.matmul.policy.is_exact


def plugin_of(paths: Iterable[Path]) -> Any:
    """Of files, merged by hand: thirty times faster than by the command line, which the tests above go through."""
    arguments: dict[str, Any] = {}
    for path in paths:
        arguments |= yaml.safe_load(path.read_text())["trainer"]["plugins"]["init_args"]
    return MXTraining(**arguments)


def test_the_grid_of_formats_has_every_pair_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, parsed = parse_sweep(["-c", str(CONFIGS / "experiments" / "mx_formats.yaml")], "")
    plugins = {name: plugin_of(paths) for name, paths in parsed.arms.items()}
    policies = {name: plugin.matmul.policy for name, plugin in plugins.items() if plugin.base == "bf16"}
    as_run = arm("mx_formats", "w_e2m3-a_e3m2", monkeypatch, tmp_path).matmul.policy
    assert as_run == policies["w_e2m3-a_e3m2"]  # the files do add up
    without_gain = [dataclasses.replace(one, gain=None) if one.ln_affine != "mx" else one for one in policies.values()]
    assert len(set(without_gain)) == len(policies)  # no two arms are the same
    of = {"e2m3": "mxfp6_e2m3", "e3m2": "mxfp6_e3m2", "e4m3": "mxfp8_e4m3", "e5m2": "mxfp8_e5m2", "bf16": None}
    grid = {name: policy for name, policy in policies.items() if name.startswith("w_")}
    grid |= {"w_bf16-a_bf16": policies["bf16"], "w_e4m3-a_bf16": policies["weights_only"]}
    assert grid.keys() == {f"w_{w}-a_{a}" for w in of for a in of}
    for name, policy in grid.items():
        w, a = (of[part.partition("_")[2]] for part in name.split("-"))
        formats = {key: None if one is None else one.fmt for key, one in policy.operands.items()}
        assert formats == {key: w if key in ("w", "w_dgrad") else a for key in OPERANDS}, name
        assert policy.ln_affine == "bf16"
    for fmt in filter(None, of.values()):
        assert policies[fmt] == MXPolicy.preset(fmt) and policies[fmt].ln_affine == "mx"


OLMO = yaml.safe_load((CONFIGS / "olmo.yaml").read_text())
BUDGETS = {"2e17": 2e17, "4e17": 4.37e17, "1e18": 9.56e17, "2e18": 2.09e18, "5e18": 4.57e18}
BUDGETS |= {"1e19": 1e19, "2e19": 2.2e19, "5e19": 4.84e19}


@functools.cache
def olmo(**fields: Any) -> tuple[GPTConfig, int]:
    """Configuration and number of parameters of ``olmo.yaml`` with these fields."""
    config = GPTConfig.preset(OLMO["model"]["preset"], **{**OLMO["model"]["overrides"], **fields})
    with torch.device("meta"):
        return config, sum(p.numel() for p in GPT(config).parameters())


def model_fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key.rpartition(".")[2]: value for key, value in settings.items() if key.startswith("model.overrides.")}


def test_every_point_of_the_compute_budget_is_its_budget_in_batches_of_512() -> None:
    _, experiment = parse_sweep(["-c", str(CONFIGS / "experiments" / "compute_budget.yaml")], "")
    points = {arm.removeprefix("bf16-"): point for arm, point in experiment.points.items() if arm.startswith("bf16-")}
    layers = {point["model.overrides.n_layers"] for point in points.values()}
    assert (len(points), len(layers)) == (45, 11)
    assert points.keys() == {
        f"n{n}-{label}"
        for n in layers
        for label, flops in BUDGETS.items()
        if 2 < flops / 6 / olmo(n_layers=n, n_heads=n, d_model=64 * n)[1] ** 2 < 200
    }
    for name, point in points.items():
        config, n = olmo(**model_fields(point))
        size, _, label = name.partition("-")
        assert (size, config.n_heads, config.head_dim) == (f"n{config.n_layers}", config.n_layers, 64)
        data = {key: point.get(f"data.init_args.{key}", value) for key, value in OLMO["data"]["init_args"].items()}
        accumulated = point.get("trainer.accumulate_grad_batches", OLMO["trainer"]["accumulate_grad_batches"])
        assert data["batch_size"] * accumulated == 512 and config.context == 512, name
        assert data["batch_size"] * data["val_batches"] == 4096, name  # all validate on the same tokens
        steps = point["trainer.max_steps"]
        assert steps == round(BUDGETS[label] / (6 * n * 262_144)), name
        assert point["model.warmup_steps"] == round(steps / 5), name
        assert point["trainer.val_check_interval"] == steps * accumulated, name
        # the estimate in the file's first lines
        tokens, channels = data["batch_size"] * config.context, config.n_layers * config.d_model
        assert tokens * (93 * channels + 16 * config.vocab_size) + 18 * n < 70e9, name


def test_arms_of_the_compute_budget_have_gains_in_bfloat16_but_for_one() -> None:
    content = yaml.safe_load((CONFIGS / "experiments" / "compute_budget.yaml").read_text())
    for name, listed in content["arms"].items():
        paths = [listed] if isinstance(listed, str) else listed
        policy = plugin_of(CONFIGS / "experiments" / path for path in paths).matmul.policy
        affine: Any = "mx" if name.endswith("_gains") else "bf16"
        assert policy == dataclasses.replace(MXPolicy.preset(name.removesuffix("_gains")), ln_affine=affine), name


def test_the_papers_size_of_the_grid_of_formats_is_its_pair_of_runs() -> None:
    _, experiment = parse_sweep(["-c", str(CONFIGS / "experiments" / "mx_formats.yaml"), "--size", "paper"], "")
    config, n = olmo(**model_fields(experiment.overrides))
    steps = experiment.overrides["trainer.max_steps"]
    assert (config.n_layers, config.n_heads, config.d_model, steps) == (9, 9, 576, 50_000)
    assert experiment.overrides["model.warmup_steps"] == steps // 5
    assert (round(n / 1e6), round(steps * 262_144 / n)) == (94, 140)


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
    assert verdict is not None and verdict["mx_products"].startswith("Y emulated (the device is cpu, not cuda), dW ")
    assert verdict["sigma_q"] > 0


def test_interventions_have_two_placebos_and_a_parent_that_trains_to_its_end_and_keeps_all() -> None:
    _, experiment = parse_sweep(["-c", str(CONFIGS / "experiments" / "mx_interventions.yaml")], "")
    assert len(experiment.seeds) >= 5
    draws = [yaml.safe_load((STUDENT / f"{name}.yaml").read_text()) for name in ("other_batches", "yet_other_batches")]
    assert len({one["data"]["init_args"]["seed"] for one in draws}) == 2
    assert {f"{one['run']['arm']}-before_{step}" for one in draws for step in (50, 200)} <= experiment.forks.keys()
    divergence, ring = yaml.safe_load((STUDENT / "keep.yaml").read_text())["trainer"]["callbacks+"]
    assert not divergence.get("init_args", {}).get("stop", False)  # a run that comes back is not cut off
    assert ring["init_args"]["save_top_k"] == -1 and ring["init_args"]["every_n_train_steps"] == 50
