"""How YAML files lie over each other where Lightning's own rules would lose something."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml


def keep_overrides(args: Sequence[str]) -> list[str]:
    """Arguments by which ``model.overrides`` of a later file adds to an earlier file's, key by key.

    The parser takes a dictionary as one value, so that a later one replaces it whole; single keys on the command line
    are merged. What a file would lose is therefore given again, right after it.
    """
    kept: list[str] = []
    merged: dict[str, Any] = {}
    for index, argument in enumerate(args):
        kept.append(argument)
        name, _, value = argument.partition("=")
        if index and args[index - 1] in ("-c", "--config"):
            own = _overrides(argument)
        else:
            own = _overrides(value) if name in ("-c", "--config") else {}
        if own:
            kept += [f"--model.overrides.{key}={json.dumps(merged[key])}" for key in merged if key not in own]
            merged |= own
    return kept


def _overrides(file: str) -> dict[str, Any]:
    """Of a configuration file; nothing where it has none, or is not one, of which the parser will tell."""
    path = Path(file)
    if not path.is_file():
        return {}
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        return {}
    model = content.get("model") if isinstance(content, dict) else None
    own = model.get("overrides") if isinstance(model, dict) else None
    return own if isinstance(own, dict) else {}
