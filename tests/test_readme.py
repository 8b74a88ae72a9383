"""Every command of README, results log and speed page: `fit` runs two steps, `sweep` checks the arms it would run."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from made_up_runs import write_run

from lightning_qk.__main__ import main
from lightning_qk.verdict import read_verdict

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/guide/results.md", "docs/guide/speed.md")
README = "".join((ROOT / name).read_text() for name in PAGES).replace("\\\n", "")  # lines that go on are joined
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
OURS = re.compile(r"(?:python -m lightning_qk |lightning-qk |(?=sweep ))(.*)")
# environments, CI's own steps, servers and builders of pages, which have tests of their own
OTHERS = ("python3 -m venv ", ". .venv/", "pip install ", "pytest", "pdoc ", "tensorboard ")


def commands() -> list[str]:
    """What stands in shell blocks, and in single backquotes where it looks like a command; once each."""
    shell = "\n".join(text for language, text in BLOCK.findall(README) if language in ("", "bash"))
    found = [part.strip() for line in shell.splitlines() for part in line.split("&&")]
    inline = re.findall(r"`([^`\n]+)`", BLOCK.sub("", README))
    found += [one for one in inline if re.match(r"(python3?|lightning-qk|sweep|pip|pdoc|pytest|tensorboard) \S", one)]
    return list(
        dict.fromkeys(one for one in found if one and not one.startswith("#") and "<" not in one and "..." not in one)
    )


COMMANDS = [one for one in commands() if not one.startswith(OTHERS)]


def test_all_kinds_of_commands_are_found() -> None:
    heads = {match[1].split()[0] for one in COMMANDS if (match := OURS.match(one))}
    assert heads == {"fit", "sweep", "report", "doctor"} and len(COMMANDS) >= 12


@pytest.mark.parametrize("command", [one for one in COMMANDS if not OURS.match(one)])
def test_scripts_are_there(command: str) -> None:
    python, script, *_ = command.split()
    assert python == "python" and compile((ROOT / script).read_text(), script, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("command", [match[1] for one in COMMANDS if (match := OURS.match(one))])
def test_the_command_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = shlex.split(command)
    if args[0] == "fit":
        args += ["--run.root", str(tmp_path), "--trainer.max_steps=2"]
    elif args[0] == "sweep":
        args += ["--root", str(tmp_path), "--dry_run"]
    elif args[0] == "report":
        write_run(tmp_path / "demo", "fp32", 0)
        args = [arg.replace("runs/demo", str(tmp_path / "demo")) for arg in args]
    monkeypatch.chdir(ROOT)  # the configurations are named from here
    monkeypatch.setattr(sys, "argv", ["lightning-qk", *args])
    assert main() == 0
    if args[0] == "fit":
        (path,) = tmp_path.glob("*/*/seed_*")
        verdict = read_verdict(path)
        assert verdict is not None and (verdict["status"], verdict["step"]) == ("completed", 2)
