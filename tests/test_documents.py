import json
from pathlib import Path

import pytest

from lightning_qk.data import HubText
from lightning_qk.documents import FileDocuments


def texts(count: int = 60) -> list[str]:
    return [f"document {i}: " + "é🙂\n " * (i % 5) for i in range(count)]


def write_jsonl(path: Path, rows: list[str]) -> str:
    # A blank line after every fourth row: it is no document.
    lines = [json.dumps({"id": i, "text": text}) + ("\n\n" if i % 4 == 0 else "\n") for i, text in enumerate(rows)]
    path.write_text("".join(lines), encoding="utf-8")
    return str(path)


def write_parquet(path: Path, rows: list[str], column: str = "text") -> str:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"id": list(range(len(rows))), column: rows})
    parquet.write_table(table, path, row_group_size=7)
    return str(path)


@pytest.mark.parametrize("span", [(0, 60), (0, 1), (3, 17), (59, 60), (20, 41)])
def test_every_format_reads_by_number(tmp_path: Path, span: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_qk.documents._JSONL_STRIDE", 5)
    rows = texts()
    (tmp_path / "txt").mkdir()
    for i, text in enumerate(rows):
        (tmp_path / "txt" / f"{i:02d}.txt").write_bytes(text.encode())
    sources = [
        [str(tmp_path / "txt" / "*.txt")],
        [write_jsonl(tmp_path / "a.jsonl", rows)],
        [write_parquet(tmp_path / "a.parquet", rows)],
        [write_jsonl(tmp_path / "b.jsonl", rows[:11]), write_parquet(tmp_path / "b.parquet", rows[11:])],
    ]
    for patterns in sources:
        documents = FileDocuments(patterns, "text")
        assert documents.load() == 60
        assert list(documents.read(*span)) == rows[slice(*span)]


def test_a_path_with_brackets_is_no_glob(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("a")
    assert FileDocuments([str(tmp_path / "a[1].txt")], "text").load() == 1


@pytest.mark.parametrize(
    ("name", "content", "error", "match"),
    [
        ("a.txt", b"ok \xff", ValueError, r"a\.txt is not valid UTF-8 \(byte 3\)"),
        ("a.jsonl", b'{"text": "ok"}\n\n{"text": \n', ValueError, r"a\.jsonl, line 3 is not valid JSON"),
        (
            "a.jsonl",
            b'{"text": "ok"}\n{"body": 1, "id": 2}\n',
            ValueError,
            r"a\.jsonl, line 2: .*it has \['body', 'id'\]",
        ),
        ("a.jsonl", b"[1]\n", ValueError, r"a\.jsonl, line 1: .*is missing: it has no columns but a list"),
        ("a.jsonl", b'{"text": null}\n', ValueError, r"a\.jsonl, line 1: text_column='text' holds NoneType"),
        ("a.jsonl", b'{"text": "\xff"}\n', ValueError, r"a\.jsonl, line 1 is not valid UTF-8"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', ValueError, r"a\.jsonl, line 1: not valid UTF-8, a lone surrogate"),
        ("a.jsonl", b"\n\n", ValueError, r"There are no documents in .*a\.jsonl"),
        ("a.csv", b"text\n", ValueError, r"a\.csv must end in \.txt"),
        ("b.txt", b"", FileNotFoundError, r"files: nothing matches '.*a\.txt'"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, error: type[Exception], match: str) -> None:
    (tmp_path / name).write_bytes(content)
    path = tmp_path / name.replace("b.txt", "a.txt")
    data = HubText(files=[str(path)], out_dir=str(tmp_path / "out"), tokenizer="bytes", num_proc=1)
    with pytest.raises(error, match=match):
        data.prepare_data()
    assert not (tmp_path / "out" / "train.bin").exists()


def test_parquet_without_the_column_and_with_nulls(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", texts(3), column="body")
    with pytest.raises(
        ValueError, match=r"text_column='text' is not a column of .*a\.parquet: it has \['id', 'body'\]"
    ):
        FileDocuments([path], "text")
    path = write_parquet(tmp_path / "b.parquet", ["a", None])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"b\.parquet, row 1: text_column='text' holds NoneType"):
        list(FileDocuments([path], "text").read(0, 2))


def test_files_named_twice_and_directories(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match=r"a\.txt is named twice"):
        FileDocuments([str(tmp_path / "*.txt"), str(tmp_path / "a.txt")], "text")
    with pytest.raises(ValueError, match=r"is not a file. For all the files of a directory"):
        FileDocuments([str(tmp_path)], "text")
