"""How YAML files lie over each other where Lightning's own rules would lose something."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

PACKAGED = Path(__file__).parent / "configs"


def find_config(name: str, here: Path | None = None) -> Path:
    """The file ``name``, relative to ``here``; where ``configs/...`` is not there, the one that the package brings.

    A file that is there always wins. That the package's is used is said on stderr.

    Args:
        name: a path as a user gives it.
        here: the directory that it is relative to; None is the current one.
    """
    path = (here or Path()) / name
    first, _, rest = name.partition("/")
    packaged = PACKAGED / rest
    if path.exists() or first != PACKAGED.name or not packaged.is_file():
        return path
    if os.environ.get("LOCAL_RANK", "0") == "0":  # once, not once a process that Lightning starts
        print(f"{name}: not here, using the package's own {packaged}", file=sys.stderr)
    return packaged


def find_configs(args: Sequence[str]) -> list[str]:
    """Arguments whose configuration files (``-c``, ``--config``) are where :func:`find_config` finds them."""
    found = list(args)
    for index in range(len(args)):
        if file := _file(args, index):
            found[index] = args[index].removesuffix(file) + str(find_config(file))
    return found


def keep_overrides(args: Sequence[str]) -> list[str]:
    """Arguments by which ``model.overrides`` of a later file adds to an earlier file's, key by key.

    The parser takes a dictionary as one value, so that a later one replaces it whole; single keys on the command line
    are merged. What a file would lose is therefore given again, right after it.
    """
    kept: list[str] = []
    merged: dict[str, Any] = {}
    for index, argument in enumerate(args):
        kept.append(argument)
        own = _model(_file(args, index)).get("overrides")
        if isinstance(own, dict):
            kept += [f"--model.overrides.{key}={json.dumps(merged[key])}" for key in merged if key not in own]
            merged |= own
    return kept


def chooses_model(args: Sequence[str]) -> bool:
    """Whether arguments, or a configuration file among them, name the model's class (``model.class_path``)."""
    for index, argument in enumerate(args):
        name = argument.partition("=")[0]
        if name in ("--model", "--model.class_path") or "class_path" in _model(_file(args, index)):
            return True
    return False


def _file(args: Sequence[str], index: int) -> str | None:
    """The configuration file that an argument names, if it names one."""
    if index and args[index - 1] in ("-c", "--config"):
        return args[index]
    name, _, value = args[index].partition("=")
    return value if name in ("-c", "--config") else None


def _model(file: str | None) -> dict[str, Any]:
    """``model`` of a configuration file; nothing where it has none, or is not one, of which the parser will tell."""
    path = Path(file or "")
    if not path.is_file():
        return {}
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        return {}
    model = content.get("model") if isinstance(content, dict) else None
    return model if isinstance(model, dict) else {}
