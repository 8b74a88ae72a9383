"""Where the documents of :class:`~lightning_qk.data.HubText` come from: a dataset on the hub, or local files.

Documents are numbered from 0 in the order of their source and can be read by number, in any process. A .txt file is one
document, a .jsonl file has one a line (blank lines do not count), a .parquet file one a row.
"""

import glob
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

_JSONL_STRIDE = 1024  # documents between two entries of a JSON Lines file's index


class Documents(Protocol):
    """An ordered collection of texts that can be sent to another process."""

    def describe(self) -> dict[str, Any]:
        """Return what makes these documents these and no others. Must not need the network."""

    def load(self) -> int:
        """Make the documents readable and return their number."""

    def read(self, start: int, stop: int) -> Iterator[str]:
        """Yield documents ``start`` to ``stop - 1``."""


@dataclass
class HubDocuments:
    """The rows of a dataset on the Hugging Face hub, or in a local directory that ``datasets`` can load."""

    dataset: str
    name: str | None
    revision: str | None
    split: str
    text_column: str
    rows: Any = field(default=None, repr=False)

    def describe(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in ("dataset", "name", "revision", "split", "text_column")}

    def load(self) -> int:
        import datasets

        try:
            self.rows = datasets.load_dataset(self.dataset, self.name, revision=self.revision, split=self.split)
        except ConnectionError as error:
            raise ConnectionError(
                f"dataset={self.dataset!r} is not in the cache of Hugging Face datasets and the hub cannot be reached"
                f" ({error}). Either connect to the internet once (or point HF_HOME at a cache that holds it, with"
                " HF_HUB_OFFLINE=1), or pass local `files` (.txt, .jsonl, .parquet) in place of `dataset`."
            ) from error
        except RuntimeError as error:
            if "scripts are no longer supported" not in str(error):
                raise
            raise ValueError(
                f"dataset={self.dataset!r} (revision={self.revision!r}) is made by a loading script, which is code and"
                " not run. Give a `revision` of it that holds data files (conversions are among the discussions on its"
                " page and named refs/pr/<number>), or name another `dataset`."
            ) from error
        if self.text_column not in self.rows.column_names:
            raise ValueError(
                f"text_column={self.text_column!r} is not a column of dataset {self.dataset!r}:"
                f" it has {self.rows.column_names}."
            )
        return len(self.rows)

    def read(self, start: int, stop: int) -> Iterator[str]:
        for number, text in enumerate(self.rows[start:stop][self.text_column], start):
            yield _checked(text, f"row {number} of dataset {self.dataset!r}", self.text_column)


@dataclass
class TextFile:
    """A local file: how many documents it has, its digest and, for JSON Lines, (offset, line) of every 1024th."""

    path: Path
    documents: int
    sha256: str
    index: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def scan(cls, path: Path, text_column: str) -> "TextFile":
        digest = hashlib.sha256()
        index: list[tuple[int, int]] = []
        documents, offset = 0, 0
        with path.open("rb") as file:
            if path.suffix == ".jsonl":
                for line_number, line in enumerate(file, 1):
                    digest.update(line)
                    if line.strip():
                        if documents % _JSONL_STRIDE == 0:
                            index.append((offset, line_number))
                        documents += 1
                    offset += len(line)
                return cls(path, documents, digest.hexdigest(), index)
            for chunk in iter(lambda: file.read(1 << 20), b""):
                digest.update(chunk)
        if path.suffix == ".parquet":
            import pyarrow.parquet

            parquet = pyarrow.parquet.ParquetFile(path)
            if text_column not in parquet.schema_arrow.names:
                raise ValueError(
                    f"text_column={text_column!r} is not a column of {path}: it has {parquet.schema_arrow.names}."
                )
            return cls(path, parquet.metadata.num_rows, digest.hexdigest())
        if path.suffix == ".txt":
            return cls(path, 1, digest.hexdigest())
        raise ValueError(f"files: {path} must end in .txt (one document), .jsonl or .parquet.")

    def read(self, start: int, stop: int, text_column: str) -> Iterator[str]:
        if self.path.suffix == ".parquet":
            return self._read_parquet(start, stop, text_column)
        if self.path.suffix == ".jsonl":
            return self._read_jsonl(start, stop, text_column)
        return iter([_decoded(self.path.read_bytes(), str(self.path))])

    def _read_jsonl(self, start: int, stop: int, text_column: str) -> Iterator[str]:
        offset, first_line = self.index[start // _JSONL_STRIDE]
        document = start - start % _JSONL_STRIDE
        with self.path.open("rb") as file:
            file.seek(offset)
            for line_number, line in enumerate(file, first_line):
                if not line.strip():
                    continue
                if document >= stop:
                    return
                if document >= start:
                    yield _json_text(line, f"{self.path}, line {line_number}", text_column)
                document += 1

    def _read_parquet(self, start: int, stop: int, text_column: str) -> Iterator[str]:
        import pyarrow.parquet

        parquet = pyarrow.parquet.ParquetFile(self.path)
        row = 0
        for group in range(parquet.num_row_groups):
            end = row + parquet.metadata.row_group(group).num_rows
            # Row groups are decoded whole, so skip those that hold none of these rows.
            if end <= start or row >= stop:
                row = end
                continue
            for batch in parquet.iter_batches(batch_size=256, row_groups=[group], columns=[text_column]):
                for value in batch.column(0):
                    if start <= row < stop:
                        yield _parquet_text(value, f"{self.path}, row {row}", text_column)
                    row += 1


@dataclass
class FileDocuments:
    """The documents of local files, in the order of ``patterns`` and, within a glob, of sorted paths."""

    patterns: list[str]
    text_column: str
    files: list[TextFile] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        paths = [path for pattern in self.patterns for path in self._expand(pattern)]
        if len(set(paths)) < len(paths):
            twice = next(path for path in paths if paths.count(path) > 1)
            raise ValueError(f"files: {twice} is named twice in {self.patterns}.")
        self.files = [TextFile.scan(path, self.text_column) for path in paths]

    @staticmethod
    def _expand(pattern: str) -> list[Path]:
        # A path is taken literally first, since its name may hold a bracket.
        found = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not found:
            raise FileNotFoundError(
                f"files: nothing matches {pattern!r} (in {os.getcwd()}). If its tokens are made already, use TokenFile."
            )
        for path in map(Path, found):
            if not path.is_file():
                raise ValueError(f"files: {path} is not a file. For all the files of a directory, give {path}/*.txt.")
        return [Path(path) for path in found]

    def describe(self) -> dict[str, Any]:
        digest = hashlib.sha256("".join(file.sha256 for file in self.files).encode())
        more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        files = f"{self.files[0].path.name}{more}"
        return {"files": files, "sha256": digest.hexdigest(), "text_column": self.text_column}

    def load(self) -> int:
        return sum(file.documents for file in self.files)

    def read(self, start: int, stop: int) -> Iterator[str]:
        first = 0
        for file in self.files:
            low, high = max(start - first, 0), min(stop - first, file.documents)
            if low < high:
                yield from file.read(low, high, self.text_column)
            first += file.documents


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not valid UTF-8 (byte {error.start}). Convert it, with iconv say.") from error


def _checked(text: Any, where: str, text_column: str) -> str:
    if not isinstance(text, str):
        raise ValueError(f"{where}: text_column={text_column!r} holds {type(text).__name__}, not text.")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"{where}: not valid UTF-8, a lone surrogate at character {error.start}.") from error
    return text


def _json_text(line: bytes, where: str, text_column: str) -> str:
    try:
        row = json.loads(_decoded(line, where))
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not valid JSON: {error}.") from error
    if not isinstance(row, dict) or text_column not in row:
        has = list(row) if isinstance(row, dict) else f"no columns but a {type(row).__name__}"
        raise ValueError(f"{where}: text_column={text_column!r} is missing: it has {has}.")
    return _checked(row[text_column], where, text_column)


def _parquet_text(value: Any, where: str, text_column: str) -> str:
    try:
        return _checked(value.as_py(), where, text_column)
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not valid UTF-8 (byte {error.start}).") from error
