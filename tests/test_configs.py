"""Every YAML under ``configs`` parses, and an arm changes an arm's keys and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_qk.cli import QKCLI, build, resolve_run
from lightning_qk.experiment import parse_sweep

CONFIGS = Path(__file__).parents[1] / "configs"
ARMS = sorted((CONFIGS / "arms").glob("*.yaml"))
EXPERIMENTS = sorted((CONFIGS / "experiments").glob("*.yaml"))
MODELS = sorted([*(CONFIGS / "model").glob("*.yaml"), *(CONFIGS / "optimizers").glob("*.yaml")])
HARDWARE = sorted((CONFIGS / "hardware").glob("*.yaml"))
SIZES = sorted(path for path in CONFIGS.glob("*.yaml") if path.name != "base.yaml")
ARM_KEYS = ("run.arm", "trainer.plugins.init_args.", "trainer.callbacks")


def stem(path: Path) -> str:
    return path.stem


def files(*paths: Path) -> list[str]:
    return [part for path in paths for part in ("-c", str(path))]


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for name, item in value.items() for k, v in flat(item, f"{prefix}{name}.").items()}
    return {prefix.rstrip("."): value}


def merged(*paths: Path) -> dict[str, Any]:
    """The parsed configuration of these files, by dotted key."""
    captured: list[dict[str, Any]] = []

    class Parsed(QKCLI):
        def instantiate_classes(self) -> None:
            captured.append(self.config.as_dict())

    import lightning_qk.cli as cli

    original, cli.QKCLI = cli.QKCLI, Parsed  # type: ignore[misc]
    try:
        build(files(*paths), run=False)
    finally:
        cli.QKCLI = original  # type: ignore[misc]
    (config,) = captured
    config.pop("config", None)
    return flat(config)


def test_there_is_something_to_check() -> None:
    assert {path.stem for path in ARMS} >= {"fp32", "fault", "clean_qk", "clean_mlp", "qk_norm", "guard"}
    assert {path.stem for path in SIZES} >= {"proxy"} and EXPERIMENTS


@pytest.mark.parametrize("size", SIZES, ids=stem)
def test_arms_of_every_size_are_runs_of_their_own(size: Path) -> None:
    _check_arms(size, ARMS[::12])  # an arm does not depend on the size


@pytest.mark.slow
@pytest.mark.parametrize("size", ["proxy", "gpt2_small"])
def test_every_arm_is_a_run_of_its_own(size: str) -> None:
    _check_arms(CONFIGS / f"{size}.yaml", ARMS)


def _check_arms(size: Path, arms: list[Path]) -> None:
    if "core: sdpa" in size.read_text():  # in which attention cannot round
        arms = [arm for arm in arms if "sites:" not in arm.read_text()]
    resolved = {arm.stem: resolve_run(files(CONFIGS / "base.yaml", size, arm)) for arm in arms}
    assert {name: run.run_dir.parts[-2:] for name, run in resolved.items()} == {
        name: (name, "seed_0") for name in resolved
    }
    assert len({run.config_hash for run in resolved.values()}) == len(arms)


@pytest.mark.parametrize("arm", ARMS, ids=stem)
def test_an_arm_changes_the_keys_of_arms_only(arm: Path) -> None:
    base = CONFIGS / "base.yaml", CONFIGS / "proxy.yaml"
    without, with_arm = merged(*base), merged(*base, arm)
    every = without.keys() | with_arm.keys()  # a gradient fault has keys of its own, where without it there is a null
    changed = {key for key in every if str(without.get(key)) != str(with_arm.get(key))}
    assert "run.arm" in changed
    assert not [key for key in changed if not key.startswith(ARM_KEYS)]
    before, after = (config["trainer.callbacks"] for config in (without, with_arm))
    assert after[: len(before)] == before  # an arm adds callbacks and takes none away
    assert [one["class_path"].split(".")[-1] for one in before] == [
        one["class_path"].split(".")[-1] for one in after[: len(before)]
    ]


@pytest.mark.parametrize("path", MODELS, ids=stem)
def test_a_model_option_changes_what_it_names_only(path: Path) -> None:
    base = [CONFIGS / "base.yaml", CONFIGS / "proxy.yaml"]
    if path.stem == "softcap":
        base.append(CONFIGS / "arms" / "sdpa.yaml")  # the streaming core refuses it
    without, with_option = merged(*base), merged(*base, path)
    named = flat(yaml.safe_load(path.read_text()))
    changed = {key for key in without.keys() | with_option.keys() if without.get(key) != with_option.get(key)}
    assert changed == named.keys()  # model.overrides.context of the size is still there
    assert {key: with_option[key] for key in named} == named


@pytest.mark.parametrize("hardware", HARDWARE, ids=stem)
def test_every_hardware_resolves(hardware: Path) -> None:
    base = CONFIGS / "base.yaml", CONFIGS / "gpt2_small.yaml"
    run = resolve_run(files(*base, hardware))
    assert run.config_hash != resolve_run(files(*base)).config_hash


def test_there_is_hardware_of_every_kind() -> None:
    assert {path.stem for path in HARDWARE} == {"cpu", "gpu", "ddp", "fsdp2", "slurm"}


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "slurm"])
def test_hardware_of_several_devices_makes_its_strategy(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    several = files(CONFIGS / "base.yaml", CONFIGS / "proxy.yaml", CONFIGS / "hardware" / f"{name}.yaml")
    cli = build([*several, "--trainer.accelerator", "cpu", "--trainer.devices", "2"], run=False)
    assert type(cli.trainer.strategy).__name__ == {"fsdp2": "ModelParallelStrategy"}.get(name, "DDPStrategy")
    assert cli.trainer.world_size == 2
    assert type(cli.trainer.strategy.checkpoint_io).__name__ == "WholeCheckpointIO"


def sizes(path: Path) -> list[str]:
    return list(yaml.safe_load(path.read_text()).get("sizes", {})) or [""]


def resolve_all(path: Path, size: str, root: Path, at_most: int | None = None) -> None:
    """Parses the runs of one seed, or some of them from first to last: each is where it should be, and its own."""
    _, experiment = parse_sweep(["-c", str(path), "--seeds", "0", *(["--size", size] if size else [])], "")
    runs = experiment.runs(root)
    assert len({(run.path, *run.fit_args) for run in runs}) == len(runs)
    every = 1 if at_most is None else max(1, len(runs) // at_most)
    resolved = {run.path: resolve_run(list(run.fit_args)) for run in (*runs[::every], runs[-1])}
    assert {one.run_dir for one in resolved.values()} == resolved.keys()
    assert len({one.config_hash for one in resolved.values()}) == len(resolved)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=stem)
def test_an_experiment_resolves_to_different_runs(path: Path, tmp_path: Path) -> None:
    for size in sizes(path):
        resolve_all(path, size, tmp_path, at_most=6)


@pytest.mark.slow
@pytest.mark.parametrize("path", EXPERIMENTS, ids=stem)
def test_every_run_of_every_experiment_resolves(path: Path, tmp_path: Path) -> None:
    for size in sizes(path):
        resolve_all(path, size, tmp_path)


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=stem)
def test_no_file_sets_the_precision_that_the_plugin_owns(path: Path) -> None:
    content = yaml.safe_load(path.read_text())
    assert "precision" not in content.get("trainer", {})
    assert path.read_text().startswith("# ")  # says what it is


def test_the_entry_experiment_reads_the_error_of_the_fault_itself() -> None:
    experiment = yaml.safe_load((CONFIGS / "experiments" / "entry.yaml").read_text())
    read, fault = (yaml.safe_load((CONFIGS / "arms" / f"{arm}.yaml").read_text()) for arm in ("error_itself", "fault"))
    assert experiment["arms"]["error_itself"] == "../arms/error_itself.yaml"
    callback = {"class_path": "ErrorShaping", "init_args": {"mode": "itself"}}
    assert read["trainer"] == {**fault["trainer"], "callbacks+": [callback]}
