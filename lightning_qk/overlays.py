"""How YAML files lie over each other where Lightning's own rules would lose something."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

PACKAGED = Path(__file__).parent / "configs"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's, ten times as fast, where PyYAML was built with it


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


def files_of(args: Sequence[str]) -> list[str]:
    """The configuration files that arguments name, in their order."""
    return [file for index in range(len(args)) if (file := _file(args, index)) is not None]


def read_mapping(file: str) -> dict[str, Any]:
    """What a configuration file holds; nothing where it is not one, of which the parser will tell."""
    try:
        content = yaml.load(Path(file).read_text(encoding="utf-8"), LOADER)
    except (yaml.YAMLError, UnicodeDecodeError, OSError):
        return {}
    return content if isinstance(content, dict) else {}


def refuse_duplicates(args: Sequence[str]) -> None:
    """Sees to it that no configuration file gives a key twice, of which YAML's reader keeps the last without a word.

    A key that is also in what ``<<`` merges is not given twice: that is what merging is for.

    Raises:
        ValueError: a key is given twice; the message names the file, the key and the lines.
    """
    for file in files_of(args):
        try:
            root = yaml.compose(Path(file).read_text(encoding="utf-8"), LOADER)
        except (yaml.YAMLError, UnicodeDecodeError, OSError):  # the parser will tell
            continue
        if twice := next(_duplicates(root, "", set()), None):
            key, first, second = twice
            raise ValueError(f"{file}: {key} is given twice, in lines {first} and {second}. Keep one of them.")


def _duplicates(node: yaml.Node | None, path: str, seen: set[int]) -> Iterator[tuple[str, int, int]]:
    """Dotted keys that a mapping below ``node`` has twice, and the lines of both."""
    if node is None or id(node) in seen:  # an alias is the node that it names, which may be around it
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for one in node.value:
            yield from _duplicates(one, path, seen)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            name = f"{path}.{key.value}" if path else str(key.value)
            line = key.start_mark.line + 1
            if name in lines:
                yield name, lines[name], line
            lines[name] = line
            yield from _duplicates(value, name, seen)


def has_key(content: Any, key: str) -> bool:
    """Whether a dotted key is in a configuration, or, with a ``+`` at its end, is appended to."""
    first, _, rest = key.partition(".")
    if not isinstance(content, dict):
        return False
    if rest:
        return has_key(content.get(first), rest)
    return first in content or f"{first}+" in content


def refuse_dropped_callbacks(args: Sequence[str]) -> None:
    """Sees to it that ``callbacks:`` without ``+`` does not silently drop those of an earlier file.

    Among them may be the run's judge. Whoever wants to replace them says so by an empty list first.

    Raises:
        ValueError: an argument or a file replaces callbacks that are there.
    """
    names: list[str] = []
    for index, argument in enumerate(args):
        file = _file(args, index)
        if file is not None:
            trainer, source = read_mapping(file).get("trainer"), file
        elif (name := argument.partition("=")[0]) in ("--trainer.callbacks", "--trainer.callbacks+"):
            value = argument.partition("=")[2] or "".join(args[index + 1 : index + 2])
            trainer, source = {name.rpartition(".")[2]: value}, "--trainer.callbacks"
        else:
            continue
        if not isinstance(trainer, dict):
            continue
        mine = _names(trainer.get("callbacks"))
        if mine and names:
            raise ValueError(
                f"trainer.callbacks: {source} would drop {', '.join(names)}. Write callbacks+ to add to them; to "
                "replace them, write callbacks: [] in a file before it."
            )
        names = (mine if "callbacks" in trainer else names) + _names(trainer.get("callbacks+"))


def callback_names(content: dict[str, Any]) -> list[str]:
    """Short class names of the callbacks that a configuration file has or appends."""
    trainer = content.get("trainer")
    if not isinstance(trainer, dict):
        return []
    return [*_names(trainer.get("callbacks")), *_names(trainer.get("callbacks+"))]


def _names(callbacks: Any) -> list[str]:
    """Short class names of what a configuration has as callbacks: a list, one of them, or the text of either."""
    if isinstance(callbacks, str):
        try:
            loaded = yaml.safe_load(callbacks)
        except yaml.YAMLError:  # the parser will tell
            return []
        return [callbacks] if isinstance(loaded, str) else _names(loaded)
    every = callbacks if isinstance(callbacks, list) else [callbacks] if callbacks else []
    paths = [one.get("class_path") if isinstance(one, dict) else one for one in every]
    return [str(path).rpartition(".")[2] for path in paths]


def nest_nulls(args: Sequence[str]) -> list[str]:
    """Arguments whose null below an argument of a class that is itself a mapping is given as a mapping.

    ``--trainer.plugins.init_args.gradient.block=null`` reaches the inner parser as the text "None".
    """
    key = re.compile(r"(--[\w.]+\.init_args\.\w+)\.([\w.]+)")
    kept = list(args)
    for index, argument in enumerate(args):
        name, equals, value = argument.partition("=")
        found = key.fullmatch(name)
        value = value if equals else "".join(args[index + 1 : index + 2])
        if found is None or value not in ("null", "Null", "NULL", "~"):
            continue
        nested: Any = None
        for part in reversed(found[2].split(".")):
            nested = {part: nested}
        kept[index : index + (1 if equals else 2)] = [found[1] + "=" + json.dumps(nested)]
        return nest_nulls(kept)
    return kept


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
            kept += [f"--model.overrides.{key}={_as_argument(merged[key])}" for key in merged if key not in own]
            merged |= own
    return kept


def _as_argument(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)  # the parser would keep a text's quotes


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
    name, equals, value = args[index].partition("=")
    return value if equals and name in ("-c", "--config") else None


def _model(file: str | None) -> dict[str, Any]:
    """``model`` of a configuration file; nothing where it has none."""
    model = read_mapping(file).get("model") if file else None
    return model if isinstance(model, dict) else {}
