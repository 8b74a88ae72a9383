"""What is wrong, in a line: the parser buries it in its usage and in every type that did not fit."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import yaml

from lightning_qk.overlays import callback_names, files_of, has_key, read_mapping

_KEY = re.compile(r"Parser key \"?([\w.+]+)\"?:")
_CLASS = re.compile(r"Problem with given class_path '([\w.]+)':")
_UNKNOWN_CLASS = re.compile(
    r"Expected a dot import path string: (\S+)|No module named '(\S+)'|Unable to import '(\S+)'"
)
_NOT_ACCEPTED = re.compile(r"(?:Option|Key) '([\w.+]+)' is not (?:accepted|expected)")
_UNEXPECTED = re.compile(r"Unexpected keys: \{'([^']+)'")
_NO_OPTION = re.compile(r"(?:Subcommand '\w+'|Group '([\w.]+)') does not accept option '([\w.+]+)'")
_EXPECTED = re.compile(r"Expected an? (.+?)(?:\. Got value: (.*))?$")
_GIVEN = re.compile(r"Given value: (?:NestedArg\(key='[^']*', val=(.*)\)|(.*))$", re.MULTILINE)
_NESTED = re.compile(r"NestedArg\(key='([^']*)'")
_NOT_FINITE = re.compile(r"[-+]?(nan|inf|infinity)", re.IGNORECASE)
_PARSERS = re.compile(f"{_KEY.pattern}|{_CLASS.pattern}|{_NOT_ACCEPTED.pattern}|Does not validate against")
_OTHER_TYPE = re.compile(r"Expected a <class '(NoneType|list|dict)'>")  # of a union, mostly: what fits least
_NO_SUCH_NAME = re.compile(r"\W(\w+)'? (?:is not one of|does not exist; it takes) (.*)")
# lines that only say which other types did not fit, or what they are
_NOISE = re.compile(
    r"Import path \S+ does not correspond to a subclass|Expected a path but"
    r"|Subtypes: |Errors:|Does not validate against|Given value|Subclass types expect|a class path \(str\)|a dict with"
    r"|Not a valid subclass of|Expect one of"
)


def complain(error: Exception, args: Sequence[str]) -> int:
    """Says on stderr what is wrong, in one line, and returns the exit status for that.

    Raises:
        Exception: the error itself, where LIGHTNING_QK_TRACEBACK asks for it.
    """
    if os.environ.get("LIGHTNING_QK_TRACEBACK"):
        raise error
    said = " ".join(explain(str(error), args).split())
    print(f"error: {said}", file=sys.stderr)
    return 2


def explain(message: str, args: Sequence[str], keys: Collection[str] = ()) -> str:
    """The parser's message as a line that names the key, what is wrong with it, the file it is in, and a remedy.

    What is not recognised is returned as it is.

    Args:
        message: the parser's own.
        args: the arguments that it parsed.
        keys: the dotted keys that it knows, among which a misspelt one's neighbours are looked for.
    """
    message = message.strip()
    if message.startswith("unrecognized arguments:"):
        given = message.partition(": ")[2].split()
        if given[0].endswith((".yaml", ".yml")):
            return f"{given[0]}: write -c before a configuration file."
        key = given[0].partition("=")[0].lstrip("-")
        return f"{given[0]}: {_did_you_mean(key, keys)}"
    if found := _NO_OPTION.search(message):
        key = ".".join(filter(None, found.groups()))
        return f"{key}: {_did_you_mean(key, keys)}{in_file(key, args)}"
    if message.startswith(("Problems parsing config", "Unexpected config")):
        return _broken_file(args) or message
    if found := re.match(r"Parser key \"config\": File does not exist: '(.*)'", message):
        path = Path(found[1])
        close = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*.yaml")], n=1)
        return f"-c {path}: no such file.{f' Did you mean {path.parent / close[0]}?' if close else ''}"
    if message.startswith("the following arguments are required:") and not files_of(args):
        return (
            f"{message.rstrip('.')}. No configuration file is given; write "
            "-c configs/base.yaml -c configs/proxy.yaml -c configs/arms/fault.yaml"
        )
    if not _PARSERS.search(message):
        return message
    labels, reason = _innermost(message)
    if reason is None:
        return message
    if not labels and (found := _NOT_ACCEPTED.match(reason)):
        return f"{found[1]}: {_did_you_mean(found[1], keys)}{in_file(found[1], args)}"
    key = labels[0] if labels else ""
    return ": ".join([*labels, _reworded(reason, labels, message)]) + (in_file(key, args) if key else "")


def refusal(message: str, key: str, class_path: str, args: Sequence[str]) -> str:
    """What a constructor says of its arguments, with the key that it is given at, a suggestion, and the file.

    Args:
        message: the constructor's own.
        key: of the configuration: ``model``, ``data``, ``trainer.plugins`` or ``trainer.callbacks``.
        class_path: the class, whose arguments are looked for in the message.
        args: the arguments that were parsed.
    """
    message = explain(message, ())  # the parser buries it where the key takes several types
    mentioned = next((name for name in re.findall(r"\w+", message) if name in _arguments(class_path)), None)
    where = ""
    if key == "trainer.callbacks":  # a list, in which several may be of the class
        files = [file for file in files_of(args) if class_path.rpartition(".")[2] in callback_names(read_mapping(file))]
        where = f" (in {files[0]})" if len(files) == 1 and not _is_argument(key, args) else ""
    elif mentioned is not None:
        where = in_file(f"{key}.init_args.{mentioned}", args) or in_file(f"{key}.{mentioned}", args)
    joint = ": "
    if mentioned is not None and re.match(rf"{mentioned}[.=]", message):
        joint = "." if key == "model" else ".init_args."
    return f"{key}{joint}{_with_suggestion(message)}{where}"


def _with_suggestion(message: str) -> str:
    """A message of a name that is not one of those that there are, with the one that is nearest."""
    found = _NO_SUCH_NAME.search(message)
    if found is None:
        return message
    close = difflib.get_close_matches(found[1], re.findall(r"[\w.-]*\w", found[2]), n=1, cutoff=0.6)
    return f"{message} Did you mean {close[0]}?" if close else message


def _innermost(message: str) -> tuple[list[str], str | None]:
    """The line that says what is wrong, and the keys and classes that it stands under."""
    above: list[tuple[int, str]] = []
    best: tuple[tuple[bool, int], list[str], str] | None = None
    for line in message.splitlines():
        text = line.strip().removeprefix("- ")
        if not text:
            continue
        indent = len(line) - len(line.lstrip(" -"))
        above = [(depth, label) for depth, label in above if depth < indent]
        label = _KEY.match(text) or _CLASS.match(text)
        if label is not None:
            above.append((indent, label[1]))
            text = text[label.end() :].strip()
        rank = not _OTHER_TYPE.match(text), len(above)
        if text and not _NOISE.match(text) and (best is None or best[0] < rank):
            best = rank, [name for _, name in above], text
    return (best[1], best[2]) if best is not None else ([], None)


def _reworded(reason: str, labels: Sequence[str], message: str) -> str:
    if found := _UNKNOWN_CLASS.match(reason):
        name = next(filter(None, found.groups()))
        return f"no class {name!r}. {_nearest(name, class_names(), 'Give the full import path of one of your own')}"
    if found := _NOT_ACCEPTED.match(reason):
        return _did_you_mean(found[1], _arguments(labels[-1] if labels else ""), named=True)
    if found := _UNEXPECTED.match(reason):
        return f"{found[1]!r} is not one of its keys. See --help."
    if found := _EXPECTED.match(reason):
        given = found[2]
        if given is None and (value := _GIVEN.search(message, message.index(reason))):  # not that of what is around it
            given = value[1] or value[2]
        if "<class 'float'>" in message and _NOT_FINITE.fullmatch(str(given)):
            return f"expected a finite number, got {given}."
        wanted = re.sub(r"<class '([\w.]+)'>", r"\1", found[1])
        wanted = re.sub(r"typing\.Literal\[(.*)\]", r"one of \1", wanted).replace("NoneType", "null")
        if nested := _NESTED.match(str(given)):
            return f"has no key {nested[1]!r}; it is {wanted}."
        return f"expected {wanted}, got {given}."
    return reason


def _did_you_mean(key: str, keys: Iterable[str], named: bool = False) -> str:
    start = f"{key!r} is not an argument" if named else "no such key"
    return f"{start}. {_nearest(key, keys, 'See --help')}"


def _nearest(name: str, names: Iterable[str], otherwise: str) -> str:
    names = sorted(set(names))
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"Did you mean {close[0]}?"
    return f"It takes {', '.join(names)}." if 0 < len(names) <= 20 else f"{otherwise}."


def class_names() -> list[str]:
    """Short names of the project's classes and of Lightning's callbacks, which a YAML may give as ``class_path``."""
    modules = ("callbacks", "lightning_qk", "lightning_qk.precision", "lightning.pytorch.callbacks")
    return [name for module in modules for name in getattr(importlib.import_module(module), "__all__", ())]


def _arguments(class_path: str) -> list[str]:
    module, _, name = class_path.rpartition(".")
    try:
        return [key for key in inspect.signature(getattr(importlib.import_module(module), name)).parameters]
    except (ImportError, AttributeError, ValueError, TypeError):  # the label is a key, not a class
        return []


def in_file(key: str, args: Sequence[str]) -> str:
    """The last configuration file that has the key, unless the command line has it too and so the last word."""
    if _is_argument(key, args):
        return ""
    files = [file for file in files_of(args) if has_key(read_mapping(file), key)]
    return f" (in {files[-1]})" if files else ""


def _is_argument(key: str, args: Sequence[str]) -> bool:
    """Whether the command line has the key, one below it, or one that it is below."""
    given = [arg.partition("=")[0].lstrip("-").rstrip("+") for arg in args if arg.startswith("--")]
    return any(name.startswith(key) or key.startswith(f"{name}.") for name in given)


def _broken_file(args: Sequence[str]) -> str | None:
    for file in files_of(args):
        try:
            content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            return f"-c {file}: not YAML: {' '.join(str(error).split())}"
        except (OSError, UnicodeDecodeError) as error:
            return f"-c {file}: {error}"
        if not isinstance(content, dict):
            return f"-c {file}: holds {str(content)[:40]!r}; a configuration is a mapping of keys."
    return None
