"""`.ci/matrix` with a Python that installs nothing: which PyTorch it takes, and when it passes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MATRIX = Path(__file__).parents[1] / ".ci" / "matrix"
PYTHON = """#!{python}
import pathlib, shutil, sys
args = sys.argv[1:]
if args[:1] == ["-"]:
    sys.argv = args
    exec(sys.stdin.read())
elif args[:3] == ["-m", "pip", "index"]:
    print("torch\\nAvailable versions: {versions}\\n  INSTALLED: 2.10.0+cpu")
elif args[:2] == ["-m", "venv"]:
    home = pathlib.Path(args[2], "bin")
    home.mkdir(parents=True)
    for name in ("python", "pip"):
        shutil.copy(__file__, home / name)
elif args[:1] == ["install"] and "-r" in args:
    taken = [line for line in open(args[-1]).read().split() if line.startswith("torch=")]
    open("{root}/taken", "a").write(taken[0] + "\\n")
    sys.exit({install})
elif args[:1] == ["list"]:
    print("torch==0")
elif args[:2] == ["-m", "pytest"]:
    print("pytest's last line")
    sys.exit({tests})
"""
PYPI = "2.14.1, 2.13.1, 2.13.0, 2.9.1, 2.9.0, 2.8.0"


def matrix(root: Path, versions: str = PYPI, install: str = "0", tests: str = "0") -> tuple[int, str, list[str]]:
    """Exit status, all that is said, and the PyTorch of every row."""
    fake = root / "python3.99"
    fake.write_text(PYTHON.format(python=sys.executable, versions=versions, root=root, install=install, tests=tests))
    fake.chmod(0o755)
    environment = {**os.environ, "PATH": f"{root}:{os.environ['PATH']}"}
    command = ["bash", str(MATRIX), "3.99"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    taken = root / "taken"
    return done.returncode, done.stdout, taken.read_text().split() if taken.exists() else []


@pytest.mark.parametrize(
    ("versions", "oldest", "newest"),
    [
        (PYPI, "2.9.0", "2.13.1"),
        (f"{PYPI}, 2.12.0+cu126, 2.12.0+cpu, 2.10.0+cpu", "2.10.0+cpu", "2.12.0+cpu"),
    ],
    ids=["plain where there is no CPU build", "a CPU build where there is one"],
)
def test_it_takes_the_oldest_and_the_newest_torch(tmp_path: Path, versions: str, oldest: str, newest: str) -> None:
    code, said, taken = matrix(tmp_path, versions)
    assert (code, taken) == (0, [f"torch=={oldest}", f"torch=={newest}"]), said
    assert said.count("passed: pytest's last line, torch==0") == 2


@pytest.mark.parametrize("settings", [{"install": "1"}, {"versions": "2.8.0, 2.14.0"}], ids=["no install", "no torch"])
def test_it_fails_where_no_row_passes(tmp_path: Path, settings: dict[str, str]) -> None:
    code, said, _ = matrix(tmp_path, **settings)
    assert code == 1 and said.count("skipped") == 2
    assert said.endswith("FAILED: no row has passed, so nothing is known to work\n")


def test_a_row_that_passes_does_not_make_up_for_one_that_fails(tmp_path: Path) -> None:
    code, said, _ = matrix(tmp_path, tests="'oldest' in __file__")
    assert code == 1 and "oldest: FAILED" in said and "newest: passed" in said and "no row" not in said


def test_one_that_passes_is_enough_beside_one_that_cannot_be_installed(tmp_path: Path) -> None:
    code, said, _ = matrix(tmp_path, install="'oldest' in __file__")
    assert code == 0 and "oldest: skipped" in said and "newest: passed" in said
