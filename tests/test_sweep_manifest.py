"""`experiment.json`: what a sweep says of itself and of its runs."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path

import pytest
from sweep_lab import Lab

from lightning_qk.experiment import SweepError
from lightning_qk.manifest import code_version
from lightning_qk.runs import read_experiment
from lightning_qk.verdict import versions


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def test_every_run_and_every_sweep_is_recorded(lab: Lab) -> None:
    assert lab.sweep(only=["fp32"], experiment=lab.experiment((3,), reference="fp32")).run() == 0
    assert lab.sweep(experiment=lab.experiment(reference="fp32")).run() == 0
    assert lab.sweep(experiment=lab.experiment(reference="fp32")).run() == 0, "nothing to do is no sweep"
    manifest = json.loads(lab.path("experiment.json").read_text())
    assert list(manifest["runs"]) == ["fp32/seed_3", "fp32/seed_0", "fault/seed_0", "fp32/seed_1", "fault/seed_1"]
    run = manifest["runs"]["fault/seed_1"]
    assert run["command"][-2:] == [str(lab.path("fault/seed_1")), "ok"]
    assert (run["config_hash"], run["started"]) == ("hash", manifest["sweeps"][1]["started"])
    assert [sweep["runs"] for sweep in manifest["sweeps"]] == [1, 4]
    sweep = manifest["sweeps"][0]
    assert (sweep["executor"], sweep["host"], sweep["versions"]) == ("local", socket.gethostname(), versions())
    assert manifest["seeds"] == [0, 1, 3]
    assert read_experiment(lab.path(""))["reference"] == "fp32"


def test_twins_are_recorded(lab: Lab) -> None:
    assert lab.sweep(experiment=lab.experiment((0,), twins={"fault": "fp32"})).run() == 0
    assert json.loads(lab.path("experiment.json").read_text())["twins"] == {"fault": "fp32"}


def test_broken_manifest_is_named(lab: Lab) -> None:
    lab.path("").mkdir(parents=True)
    lab.path("experiment.json").write_text("{")
    with pytest.raises(SweepError, match=r"experiment.json: broken .*; delete it and run the sweep again"):
        lab.sweep().run()


def test_a_changed_manifest_is_named(lab: Lab) -> None:
    assert lab.sweep(experiment=lab.experiment((0,))).run() == 0
    path = lab.path("experiment.json")
    path.write_text(path.read_text().replace('"fault"', '"faulty"'))
    with pytest.raises(SweepError, match=r"experiment.json: broken \(.*was changed or damaged after it was written"):
        lab.sweep().run()
    with pytest.raises(ValueError, match=r"experiment.json: broken \(.*was changed or damaged after it was written"):
        read_experiment(lab.path(""))


def test_version_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    assert code_version(package) is None, "no repository"
    for command in ("init -q", "add .", "-c user.name=a -c user.email=b commit -qm c"):
        subprocess.run(["git", "-C", str(tmp_path), *command.split()], check=True)
    clean = code_version(package)
    assert clean is not None and len(clean["commit"]) == 40 and not clean["dirty"]
    (package / "__init__.py").write_text("changed")
    assert code_version(package) == {**clean, "dirty": True}
    stranger = tmp_path / "venv"
    stranger.mkdir()
    (stranger / "__init__.py").touch()
    assert code_version(stranger) is None, "installed inside somebody else's repository"
    monkeypatch.setenv("PATH", "")
    assert code_version(package) is None, "no git"
