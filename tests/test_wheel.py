"""The wheel: everything is in it, and it runs where there is no clone of the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from lightning_qk.verdict import read_verdict

ROOT = Path(__file__).parents[1]
PACKAGES = ("lightning_qk", "kernels", "callbacks")

pytestmark = pytest.mark.slow


def call(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in (*PACKAGES, "configs"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    call(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", built, source, cwd=built)
    (file,) = built.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``bin`` of an environment that has the wheel, and this one's packages behind it."""
    home = tmp_path_factory.mktemp("venv")
    call(sys.executable, "-m", "venv", "--without-pip", home, cwd=home)
    (site,) = home.glob("lib/python*/site-packages")
    # as a plain path: the .pth files there, of which one may lead to the clone, are not read
    (site / "behind.pth").write_text(str(Path(np.__file__).parents[1]))
    python = home / "bin" / "python"
    call(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel, cwd=home)
    where = call(python, "-c", "import lightning_qk; print(lightning_qk.__file__)", cwd=home).stdout
    assert where.startswith(str(home))
    return home / "bin"


def test_every_module_and_configuration_is_in_it(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    configs = (ROOT / "configs").rglob("*.yaml")
    expected = {str(path.relative_to(ROOT)) for path in modules}
    expected |= {f"lightning_qk/{path.relative_to(ROOT)}" for path in configs}
    assert expected == {name for name in names if ".dist-info/" not in name}


def test_it_trains_from_an_empty_directory(installed: Path, tmp_path: Path) -> None:
    files = [part for name in ("base", "proxy", "arms/fault") for part in ("-c", f"configs/{name}.yaml")]
    done = call(installed / "lightning-qk", "fit", *files, "--trainer.max_steps=2", cwd=tmp_path)
    assert "configs/proxy.yaml: not here, using the package's own" in done.stderr
    verdict = read_verdict(tmp_path / "runs" / "default" / "fault" / "seed_0")
    assert verdict is not None and (verdict["status"], verdict["step"]) == ("completed", 2)


def test_experiments_can_name_its_arms(installed: Path, tmp_path: Path) -> None:
    text = "{name: mine, base: [configs/base.yaml, configs/proxy.yaml], arms: {a: configs/arms/fp32.yaml, b: b.yaml}}"
    (tmp_path / "mine.yaml").write_text(text)
    (tmp_path / "b.yaml").write_text("trainer: {plugins: {init_args: {sites: bf16_carry}}}")
    for experiment in ("configs/experiments/demo.yaml", "mine.yaml"):
        done = call(installed / "lightning-qk", "sweep", "-c", experiment, "--dry_run", cwd=tmp_path)
        assert "configs/arms/fp32.yaml" in done.stdout
