"""nanoGPT's token files: token ids, little-endian, no header.

Nothing in such a file says what it holds, and every mistake about it (wrong type, wrong vocabulary, cut short) still
trains, on garbage. So :func:`open_tokens` checks what can be checked. Files that this project writes have a sidecar
besides, ``<file>.json``: dtype, number of tokens, sha256, tokenizer, vocabulary size and what the file is made from.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ITEM_BYTES = {"uint16": 2, "uint32": 4}
_CHUNK_BYTES = 1 << 20
_MAX_CHUNKS = 64  # a larger file is sampled at this many evenly spaced places
_SIDECAR_KEYS = ("dtype", "tokens", "sha256", "tokenizer", "vocab_size", "made_from")


def sidecar_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def read_sidecar(path: Path) -> dict[str, Any] | None:
    """Return what the sidecar of a token file says, or None if it has none.

    Raises:
        ValueError: If there is a sidecar of another kind.
    """
    sidecar = sidecar_path(path)
    if not sidecar.is_file():
        return None
    try:
        content = json.loads(sidecar.read_text(encoding="utf-8"))
        return {key: content[key] for key in _SIDECAR_KEYS}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{sidecar} is not the sidecar of a token file ({error!r}). Move it away, or make {path.name} again."
        ) from error


def write_through(path: Path, chunks: Iterable[bytes]) -> tuple[int, str]:
    """Write chunks through to the disk and return their number of bytes and sha256."""
    size, digest = 0, hashlib.sha256()
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def open_tokens(path: Path, key: str, dtype: str, vocab_size: int) -> NDArray[Any]:
    """Memory-map a token file after checking it.

    Args:
        path: The file.
        key: The argument that names it, for error messages.
        dtype: ``uint16`` or ``uint32``.
        vocab_size: Every token must be below it. It may be larger than the tokenizer's, for padding.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file cannot be what the arguments say.
    """
    name = f"{key}={str(path)!r}"
    if not path.exists():
        raise FileNotFoundError(f"{name} does not exist (in {os.getcwd()}). HubText makes token files from text.")
    if not path.is_file():
        raise ValueError(f"{name} is a directory. Name the file in it.")
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"{name} is empty. Make it again.")
    with path.open("rb") as file:
        if file.read(6) == b"\x93NUMPY":
            raise ValueError(f"{name} is an .npy file and would be read with its header. Write it with `array.tofile`.")
    _check_sidecar(path, name, dtype, vocab_size)
    if size % ITEM_BYTES[dtype]:
        raise ValueError(f"{name} is truncated mid-token: its {size} bytes are no multiple of {dtype}. Copy it again.")
    tokens = _map(path, dtype)
    _check_tokens(tokens, path, name, dtype, vocab_size)
    return tokens


def fingerprint(path: Path, tokens: NDArray[Any]) -> dict[str, str | int]:
    """Return what identifies a token file. Of a large one without a sidecar only samples are hashed."""
    known: dict[str, str | int] = {"file": str(path), "tokens": len(tokens)}
    sidecar = read_sidecar(path)
    if sidecar is not None:
        made_from = ", ".join(f"{key} {value}" for key, value in sidecar["made_from"].items() if value is not None)
        return known | {"sha256": sidecar["sha256"], "made_from": made_from}
    digest = hashlib.sha256()
    for _, chunk in _chunks(tokens):
        digest.update(chunk.tobytes())
    return known | {"sha256_of_samples" if _is_sampled(tokens) else "sha256": digest.hexdigest()}


def _map(path: Path, dtype: str) -> NDArray[Any]:
    return np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")


def _is_sampled(tokens: NDArray[Any]) -> bool:
    return tokens.nbytes > _CHUNK_BYTES * _MAX_CHUNKS


def _chunks(tokens: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield (position, tokens there): all of a small file in order, evenly spaced chunks of a large one."""
    length = _CHUNK_BYTES // tokens.itemsize
    starts = np.arange(0, len(tokens), length)
    if _is_sampled(tokens):
        starts = np.linspace(0, len(tokens) - length, _MAX_CHUNKS).astype(np.int64)
    for start in starts.tolist():
        yield start, tokens[start : start + length]


def _check_sidecar(path: Path, name: str, dtype: str, vocab_size: int) -> None:
    sidecar = read_sidecar(path)
    if sidecar is None:
        return
    said = f"but its sidecar {sidecar_path(path).name} says"
    if sidecar["dtype"] != dtype:
        raise ValueError(f"{name} is to be read as dtype={dtype!r}, {said} {sidecar['dtype']!r}. Set dtype to that.")
    if sidecar["vocab_size"] > vocab_size:
        raise ValueError(
            f"{name} is to be read with vocab_size={vocab_size}, {said} {sidecar['vocab_size']}"
            f" (tokenizer {sidecar['tokenizer']!r}). Set vocab_size to at least that."
        )
    if sidecar["tokens"] * ITEM_BYTES[dtype] != path.stat().st_size:
        raise ValueError(
            f"{name} has {path.stat().st_size} bytes, {said} {sidecar['tokens']} tokens of {dtype}: it was cut or"
            " changed since. Delete both and make it again."
        )


def _check_tokens(tokens: NDArray[Any], path: Path, name: str, dtype: str, vocab_size: int) -> None:
    head = tokens[:4096]
    # The high half of every uint32 id is at most that of the largest id, which is 0 for vocabularies up to 65,536.
    if dtype == "uint16" and len(head) > 1 and head[1::2].max() <= (vocab_size - 1) >> 16:
        raise ValueError(
            f"{name} read as uint16 is at most {(vocab_size - 1) >> 16} at every odd position of its first {len(head)}"
            " tokens: these are the high halves of uint32 ids. Set dtype='uint32'."
        )
    for start, chunk in _chunks(tokens):
        position = int(chunk.argmax())
        if chunk[position] >= vocab_size:
            position = int((chunk >= vocab_size).argmax())
            raise ValueError(
                f"{name}: token {chunk[position]} at position {start + position}, read as {dtype}, is not below"
                f" vocab_size={vocab_size}. {_remedy(path, dtype, vocab_size)}"
            )


def _remedy(path: Path, dtype: str, vocab_size: int) -> str:
    other = "uint16" if dtype == "uint32" else "uint32"
    if path.stat().st_size % ITEM_BYTES[other] == 0:
        chunks = _chunks(_map(path, other))
        if all(chunk.max() < vocab_size for _, chunk in chunks):
            return f"Read as {other} every token is: set dtype={other!r}."
    return "Set vocab_size to that of the tokenizer that made the file."
