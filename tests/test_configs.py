"""Every YAML under ``configs`` parses, and an arm changes an arm's keys and nothing else."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_qk.cli import QKCLI, build, resolve_run
from lightning_qk.data import HubText
from lightning_qk.experiment import Experiment, parse_sweep

CONFIGS = Path(__file__).parents[1] / "configs"
ARMS = sorted((CONFIGS / "arms").glob("*.yaml"))
EXPERIMENTS = sorted((CONFIGS / "experiments").glob("*.yaml"))
MODELS = sorted([*(CONFIGS / "model").glob("*.yaml"), *(CONFIGS / "optimizers").glob("*.yaml")])
GUARDS = sorted([*(CONFIGS / "arms").glob("guard*.yaml"), *(CONFIGS / "guards").glob("*.yaml")])
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


EXPERIMENT_SIZES = [pytest.param(path, size, id=f"{path.stem}-{size}") for path in EXPERIMENTS for size in sizes(path)]


def experiment_of(path: Path, size: str) -> Experiment:
    return parse_sweep(["-c", str(path), "--seeds", "0", *(["--size", size] if size else [])], "")[1]


def by_key(deciding: str) -> dict[str, Any]:
    """What decides a run's numbers, by dotted key; callbacks by their place."""
    config = yaml.safe_load(deciding)
    config["trainer"]["callbacks"] = dict(enumerate(config["trainer"]["callbacks"]))
    return flat(config)


def keys_named(experiment: Experiment, arm: str, without: dict[str, Any]) -> list[str]:
    """The keys that an arm's files, overrides and grid point name, over what there is without an arm."""
    callbacks = len({key.split(".")[2] for key in without if key.startswith("trainer.callbacks.")})
    keys = ["run.fork"] if arm in experiment.forks else []
    for file in experiment.arms[arm]:
        content = yaml.safe_load(file.read_text())
        appended = content.get("trainer", {}).pop("callbacks+", [])
        keys += [key.removesuffix(".class_path") for key in flat(content)]  # another class has other arguments
        keys += [f"trainer.callbacks.{callbacks + place}" for place in range(len(appended))]
        callbacks += len(appended)
    last = f"trainer.callbacks.{callbacks - 1}."
    keys += [key.replace("trainer.callbacks.", last) for key in experiment.arm_overrides[arm]]
    # what was null is named as a whole: a gradient fault has defaults too
    return [next((null for null in without if key.startswith(f"{null}.")), key) for key in keys]


def is_named(key: str, names: list[str]) -> bool:
    return any(f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.") for name in names)


def resolve_all(path: Path, size: str, root: Path, at_most: int | None = None) -> None:
    """Parses the runs of one seed, or some of them from first to last.

    Each is where it should be and its own, and differs from one without an arm in what its arm names.
    """
    experiment = experiment_of(path, size)
    runs = experiment.runs(root)
    assert len({(run.path, *run.fit_args) for run in runs}) == len(runs)
    every = 1 if at_most is None else max(1, len(runs) // at_most)
    resolved = {run.path: resolve_run(list(run.fit_args)) for run in (*runs[::every], runs[-1])}
    assert {one.run_dir for one in resolved.values()} == resolved.keys()
    assert len({one.config_hash for one in resolved.values()}) == len(resolved)
    bare = dataclasses.replace(experiment, arms={"bare": ()}, arm_overrides={}, reference=None)
    without = by_key(resolve_run(list(bare.runs(root)[0].fit_args)).deciding)
    for run_dir, one in resolved.items():
        arm, config = run_dir.parent.name, by_key(one.deciding)
        names = keys_named(experiment, arm, without)
        changed = {key for key in without.keys() | config.keys() if without.get(key) != config.get(key)}
        assert not [key for key in changed if not is_named(key, names)], arm
        assert config["trainer.val_check_interval"] % config["trainer.accumulate_grad_batches"] == 0, arm


@pytest.mark.parametrize(("path", "size"), EXPERIMENT_SIZES)
def test_an_experiment_resolves_to_different_runs(path: Path, size: str, tmp_path: Path) -> None:
    resolve_all(path, size, tmp_path, at_most=6)


@pytest.mark.slow
@pytest.mark.parametrize(("path", "size"), EXPERIMENT_SIZES)
def test_every_run_of_every_experiment_resolves(path: Path, size: str, tmp_path: Path) -> None:
    resolve_all(path, size, tmp_path)


TABLE = "accumulator dissociation probe entry guard threshold optimizers mantissa scale"


@pytest.mark.parametrize("name", TABLE.split())
def test_an_experiment_of_the_paper_has_a_proxy_and_a_paper_size(name: str) -> None:
    first, *others = sizes(CONFIGS / "experiments" / f"{name}.yaml")
    assert first == "proxy" and "paper" in others


@pytest.mark.parametrize("size", SIZES, ids=stem)
def test_validation_does_not_split_an_accumulation(size: Path) -> None:
    base, own = (yaml.safe_load(path.read_text())["trainer"] for path in (CONFIGS / "base.yaml", size))
    trainer = {"accumulate_grad_batches": 1, **base, **own}
    assert trainer["val_check_interval"] % trainer["accumulate_grad_batches"] == 0


def guard_settings(experiment: Experiment) -> dict[str, dict[str, Any]]:
    """By arm, what its guard is given, where it has one that waits."""
    found = {}
    for arm, files in experiment.arms.items():
        (*_, callback) = yaml.safe_load(files[-1].read_text()).get("trainer", {}).get("callbacks+", [{}])
        if callback.get("class_path") == "QKGuard" and callback["init_args"].get("mode") != "always_on":
            overrides = experiment.arm_overrides[arm].items()
            own = {key.removeprefix("trainer.callbacks.init_args."): value for key, value in overrides}
            found[arm] = {**callback["init_args"], **own}
    return found


@pytest.mark.parametrize(("size", "threshold"), [("proxy", 60), ("paper", 30), ("paper_medium", 30)])
def test_all_actions_of_the_guard_wait_for_one_logit(size: str, threshold: int) -> None:
    settings = guard_settings(experiment_of(CONFIGS / "experiments" / "guard.yaml", size))
    numbered = {arm: own for arm, own in settings.items() if arm.rpartition("_")[2].isdecimal()}
    assert all(own == {"threshold": int(arm.removeprefix("guard_"))} for arm, own in numbered.items())
    others = [own for arm, own in settings.items() if arm not in numbered]
    assert len(others) == 14 and {own["threshold"] for own in others} == {threshold}
    assert settings["guard_qk_clip"]["action_args"] == {"tau": threshold}
    alone = [own["threshold"] for own in settings.values() if set(own) == {"threshold"}]
    assert sorted(alone) == [10, 20, 30, 45, 60, 100]


@pytest.mark.parametrize("path", GUARDS, ids=stem)
def test_a_guard_spells_its_threshold_out(path: Path) -> None:
    (callback,) = yaml.safe_load(path.read_text())["trainer"]["callbacks+"]
    assert callback["init_args"].keys() & {"threshold", "mode"}  # or two arms that are one run look different


def test_text_is_tokenized_by_the_cores_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 8}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert HubText().num_proc == 3 and HubText(num_proc=7).num_proc == 7


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
