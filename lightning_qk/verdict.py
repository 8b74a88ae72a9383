"""What a run leaves behind as its result: ``verdict.json`` in its directory, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VERDICT_FILE = "verdict.json"
SCHEMA = 1
DONE = ("completed", "collapsed", "nonfinite")
"""Statuses of a run that is over and counts; what failed does not."""
STATUSES = (*DONE, "failed")


def write_text_atomic(path: Path | str, text: str) -> None:
    """Writes a temporary name in the same directory, syncs it and renames it over ``path``.

    A kill leaves the old file, or none, and the temporary one, which :func:`remove_stale` removes.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def remove_stale(directory: Path, *names: str) -> None:
    """Removes the temporary files of a killed process; only for files that nobody else may be writing now."""
    for name in names:
        for stale in directory.glob(f".{name}.*"):
            stale.unlink()


def write_json_atomic(path: Path | str, value: Any) -> None:
    """:func:`write_text_atomic` of JSON.

    Floats that are not finite become the strings ``"nan"``, ``"inf"`` and ``"-inf"``, which JSON can hold.
    """
    write_text_atomic(path, json.dumps(encode(value), indent=1, allow_nan=False) + "\n")


def write_sealed(path: Path | str, value: Mapping[str, Any]) -> None:
    """:func:`write_json_atomic` with a ``checksum`` of all else, which :func:`unsealed` checks."""
    write_json_atomic(path, {**value, "checksum": _checksum(value)})


def unsealed(value: dict[str, Any], path: Path) -> dict[str, Any]:
    """What a file that was written sealed holds, without its checksum; one that has none is taken as it is.

    Raises:
        ValueError: the content is not that of the checksum.
    """
    rest = {key: item for key, item in value.items() if key != "checksum"}
    if "checksum" in value and value["checksum"] != _checksum(rest):
        raise ValueError(
            f"{path} was changed or damaged after it was written: its checksum is not that of its content. Put back "
            "the file, or delete it and run again."
        )
    return rest


def _checksum(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(encode(value), sort_keys=True).encode()).hexdigest()[:16]


def read_verdict(run_dir: Path | str) -> dict[str, Any] | None:
    """The verdict of a run directory, None if it has none yet.

    Raises:
        ValueError: the file is not a verdict, or not the one that was written; the message has its path.
    """
    path = Path(run_dir) / VERDICT_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        verdict = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); delete it and run again.") from error
    if not isinstance(verdict, dict) or verdict.get("schema") != SCHEMA or verdict.get("status") not in STATUSES:
        raise ValueError(f"{path} is not a verdict of schema {SCHEMA}; delete it and run again.")
    decoded: dict[str, Any] = _decode(unsealed(verdict, path))
    return decoded


def is_done(run_dir: Path | str) -> bool:
    """Whether the run has its verdict; a failed one has none that counts."""
    verdict = read_verdict(run_dir)
    return verdict is not None and verdict["status"] in DONE


def in_words(verdict: Mapping[str, Any]) -> str:
    """How a run ended: ``collapsed at step 321 of 900, final loss 3.27, min loss 1.94, ..., 41 s``."""
    status, last = verdict["status"], verdict["max_steps"]
    of = f" of {last}" if last > 0 else ""  # -1 where epochs or time end a run
    said = [f"{status} at step {verdict['collapse_step' if status == 'collapsed' else 'step']}{of}"]
    numbers = {"final loss": "loss", "min loss": "min_loss", "sigma_q": "sigma_q", "max logit": "max_logit"}
    said += [f"{label} {number(verdict[key])}" for label, key in numbers.items() if verdict[key] is not None]
    if verdict["guard_step"] is not None:
        said.append(f"guard fired at {verdict['guard_step']}")
    return ", ".join([*said, f"{verdict['seconds']:.0f} s"])


def number(value: Any) -> str:
    """A number as short as it reads well; "nan" and "inf" come as text from JSON."""
    parsed = as_float(value)
    if parsed is None:
        return "-"
    return f"{parsed:,.0f}" if math.isfinite(parsed) and abs(parsed) >= 1000 else f"{parsed:#.3g}"


def as_float(value: Any) -> float | None:
    """A number, or the text that stands for one in JSON."""
    return None if value is None else float(value)


def versions() -> dict[str, str]:
    """Versions of what decides a run's numbers."""
    from importlib.metadata import version

    names = ("lightning-qk", "torch", "lightning", "numpy")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def encode(value: Any) -> Any:
    """What JSON has no word for: numbers that are not finite as "nan", "inf" and "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode(item) for item in value]
    return float(value) if value in ("nan", "inf", "-inf") else value
