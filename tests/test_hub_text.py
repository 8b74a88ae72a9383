import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpt2_bpe import gpt2_bpe_cache

from lightning_qk import hub_text
from lightning_qk.data import HubText
from lightning_qk.documents import Documents, FileDocuments, HubDocuments
from lightning_qk.hub_text import prepare

EOT = 256


def texts(count: int = 60) -> list[str]:
    return [f"document {i}: " + "é🙂\n " * (i % 5) for i in range(count)]


def write_jsonl(path: Path, rows: list[str]) -> str:
    # A blank line after every fourth row: it is no document.
    lines = [json.dumps({"id": i, "text": text}) + ("\n\n" if i % 4 == 0 else "\n") for i, text in enumerate(rows)]
    path.write_text("".join(lines), encoding="utf-8")
    return str(path)


def make(out_dir: Path, documents: Documents, **kwargs: Any) -> tuple[bytes, bytes]:
    defaults: dict[str, Any] = {"tokenizer": "bytes", "val_fraction": 0.1, "num_proc": 1, "shard_documents": 8}
    prepare(documents, out_dir, **defaults | kwargs)
    return (out_dir / "train.bin").read_bytes(), (out_dir / "val.bin").read_bytes()


def split_documents(tokens: bytes) -> list[str]:
    ids = np.frombuffer(tokens, dtype="<u2")
    assert ids[-1] == EOT
    parts = np.split(ids, np.flatnonzero(ids == EOT) + 1)[:-1]
    return [bytes(part[:-1].tolist()).decode() for part in parts]


# ---------------------------------------------------------------------------------------------------------- splits


def test_documents_are_kept_whole_in_order_and_end_in_eot(tmp_path: Path) -> None:
    rows = texts()
    train, val = make(tmp_path / "out", FileDocuments([write_jsonl(tmp_path / "a.jsonl", rows)], "text"))
    parts = [split_documents(train), split_documents(val)]
    assert sorted(parts[0] + parts[1]) == sorted(rows)
    assert all(part == [row for row in rows if row in part] for part in parts)
    assert 1 <= len(parts[1]) < 20
    assert not (tmp_path / "out" / ".parts").exists()
    meta = json.loads((tmp_path / "out" / "val.bin.json").read_text())
    assert (meta["dtype"], meta["tokens"], meta["vocab_size"]) == ("uint16", len(val) // 2, 257)


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_two_documents_give_each_split_one(tmp_path: Path, fraction: float) -> None:
    documents = FileDocuments([write_jsonl(tmp_path / "a.jsonl", texts(2))], "text")
    train, val = make(tmp_path / "out", documents, val_fraction=fraction)
    assert len(split_documents(train)) == len(split_documents(val)) == 1


def test_one_document_is_cut(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 99)
    train, val = make(tmp_path / "out", FileDocuments([str(tmp_path / "a.txt")], "text"))
    assert (len(train), len(val)) == (180, 20)
    assert np.frombuffer(val, "<u2").tolist() == [ord("x")] * 9 + [EOT]


# --------------------------------------------------------------------------------------------- processes, kills, reuse


def test_tokens_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    documents = FileDocuments([write_jsonl(tmp_path / "a.jsonl", texts())], "text")
    one = make(tmp_path / "one", documents)
    assert make(tmp_path / "two", documents, num_proc=2) == one
    assert make(tmp_path / "shards", documents, shard_documents=7) == one


def test_an_error_in_a_process_stops_the_run(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts())
    with open(path, "a") as file:
        file.write("{\n")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 76 is not valid JSON"):
        make(tmp_path / "out", FileDocuments([path], "text"), num_proc=2)


def test_resume_after_an_exception_skips_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = FileDocuments([write_jsonl(tmp_path / "a.jsonl", texts())], "text")
    whole = make(tmp_path / "whole", documents)
    read, started = FileDocuments.read, []

    def failing(self: FileDocuments, start: int, stop: int) -> Iterator[str]:
        started.append(start)
        for number, text in enumerate(read(self, start, stop), start):
            if number == 37 and len(started) == 5:
                raise KeyboardInterrupt
            yield text

    monkeypatch.setattr(FileDocuments, "read", failing)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "out", documents)
    assert not (tmp_path / "out" / "train.bin").exists()
    assert make(tmp_path / "out", documents) == whole
    assert started == [0, 8, 16, 24, 32, 32, 40, 48, 56]


@pytest.mark.parametrize("dies_at", range(8))
def test_resume_from_every_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: int) -> None:
    """Two shards make four renames, the final files and their sidecars four more. Die just before each."""
    documents = FileDocuments([write_jsonl(tmp_path / "a.jsonl", texts(16))], "text")
    whole = make(tmp_path / "whole", documents)
    replace, renamed = os.replace, []

    def dying(source: Any, target: Any) -> None:
        if len(renamed) == dies_at:
            raise KeyboardInterrupt
        renamed.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", dying)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "out", documents)
    monkeypatch.setattr(os, "replace", replace)
    for name, content in zip(("train.bin", "val.bin"), whole, strict=True):
        path = tmp_path / "out" / name
        assert not path.exists() or path.read_bytes() == content
    assert make(tmp_path / "out", documents) == whole


SCRIPT = """
import sys, time
from pathlib import Path
from lightning_qk.documents import FileDocuments
from lightning_qk.hub_text import prepare

class Slow(FileDocuments):
    def read(self, start, stop):
        for text in super().read(start, stop):
            time.sleep(float(sys.argv[3]))
            yield text

if __name__ == "__main__":
    prepare(Slow([sys.argv[1]], "text"), Path(sys.argv[2]), "bytes", 0.1, 2, 8)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_resume_after_sigkill(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts())
    whole = make(tmp_path / "whole", FileDocuments([path], "text"))
    out_dir, script = tmp_path / "out", tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen([sys.executable, str(script), path, str(out_dir), "0.05"], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(list(out_dir.glob(".parts/*/*.val"))) < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out_dir / "train.bin").exists()
    time.sleep(1)  # the workers notice and leave, rather than wait for ever
    left = sorted(out_dir.glob(".parts/*/*"))
    time.sleep(1)
    assert sorted(out_dir.glob(".parts/*/*")) == left
    assert make(out_dir, FileDocuments([path], "text")) == whole


def test_two_runs_at_once_share_the_files(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts())
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), path, str(tmp_path / "out"), "0.001"]
    runs = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for _ in range(2)]
    assert [run.wait(60) for run in runs] == [0, 0]
    assert make(tmp_path / "out", FileDocuments([path], "text")) == make(
        tmp_path / "whole", FileDocuments([path], "text")
    )


def test_a_dead_worker_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 60)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("time.sleep(float(sys.argv[3]))", "__import__('os')._exit(9)"))
    command = [sys.executable, str(script), str(tmp_path / "a.jsonl"), str(tmp_path / "out"), "0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "RuntimeError: A tokenizing process died (num_proc=2)" in result.stderr


def test_finished_files_are_reused_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts())
    arguments: dict[str, Any] = {"files": [path], "out_dir": str(tmp_path / "out"), "tokenizer": "bytes", "num_proc": 1}
    arguments |= {"context": 8, "seed": 0, "val_fraction": 0.1}
    HubText(**arguments).prepare_data()
    with monkeypatch.context() as patch:
        patch.setattr(hub_text, "_tokenize", None)  # nothing is tokenized again
        HubText(**arguments).prepare_data()
    data = HubText(**arguments)
    data.setup("fit")
    described = data.describe()
    assert described["vocab_size"] == 257 and "files a.jsonl" in str(described["train_made_from"])
    assert data.train_dataloader()[0][0].shape == (16, 8)
    with pytest.raises(ValueError, match=r"'val_fraction': 0.1.*but this run asks for.*0.2.*Choose another out_dir"):
        HubText(**arguments | {"val_fraction": 0.2}).prepare_data()
    with open(path, "a") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(
        ValueError, match=r"holds train.bin made from .*a.jsonl.*but this run asks for.*delete this one"
    ):
        HubText(**arguments).prepare_data()


def test_foreign_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(b"from nanoGPT")
    documents = FileDocuments([write_jsonl(tmp_path / "a.jsonl", texts())], "text")
    with pytest.raises(ValueError, match=r"train.bin exists and has no sidecar.*Read it with TokenFile"):
        make(tmp_path, documents)
    assert (tmp_path / "train.bin").read_bytes() == b"from nanoGPT"


def test_setup_before_prepare_data_and_a_short_split(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts(2))
    data = HubText(files=[path], out_dir=str(tmp_path / "out"), tokenizer="bytes", num_proc=1, context=1000)
    with pytest.raises(FileNotFoundError, match=r"train.bin' does not exist.*HubText makes token files"):
        data.setup("fit")
    data.prepare_data()
    with pytest.raises(ValueError, match=r"train.bin\) has \d+ tokens.*val_fraction"):
        data.setup("fit")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"tokenizer": "gpt4"}, r"tokenizer='gpt4' must be one of \['gpt2', 'bytes'\]"),
        ({"val_fraction": 0.0}, r"val_fraction=0.0 must lie between"),
        ({"num_proc": 0}, r"num_proc=0 must be at least 1"),
        ({"files": []}, r"files is an empty list"),
        ({"dataset": None}, r"dataset and files are both None"),
    ],
)
def test_arguments(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        HubText(**arguments)


# ------------------------------------------------------------------------------------------------- hub and GPT-2's BPE


def test_hub_dataset_gives_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    rows = texts()
    table = datasets.Dataset.from_dict({"id": list(range(60)), "text": rows})
    asked = []

    def load_dataset(*args: Any, **kwargs: Any) -> Any:
        asked.append((args, kwargs))
        return table

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    hub = HubDocuments("owner/name", "plain", "refs/pr/1", "train", "text")
    files = FileDocuments([write_jsonl(tmp_path / "a.jsonl", rows)], "text")
    assert make(tmp_path / "hub", hub, num_proc=2) == make(tmp_path / "files", files)
    assert asked == [(("owner/name", "plain"), {"revision": "refs/pr/1", "split": "train"})]
    with pytest.raises(ValueError, match=r"text_column='body' is not a column of dataset 'owner/name': it has \['id',"):
        make(tmp_path / "other", HubDocuments("owner/name", None, None, "train", "body"))


@pytest.mark.parametrize(
    ("raised", "error", "match"),
    [
        (ConnectionError("no route"), ConnectionError, r"dataset='owner/name'.*HF_HOME.*HF_HUB_OFFLINE.*local `files`"),
        (RuntimeError("Dataset scripts are no longer supported"), ValueError, r"loading script.*`revision`.*refs/pr"),
        (RuntimeError("something else"), RuntimeError, "something else"),
    ],
)
def test_hub_errors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, raised: Exception, error: type[Exception], match: str
) -> None:
    datasets = pytest.importorskip("datasets")

    def load_dataset(*args: Any, **kwargs: Any) -> Any:
        raise raised

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(error, match=match):
        make(tmp_path, HubDocuments("owner/name", None, None, "train", "text"))


def test_missing_bpe_names_both_ways_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    requests = pytest.importorskip("requests")
    timeouts = []

    def head(url: str, timeout: float) -> Any:
        timeouts.append(timeout)
        raise requests.ConnectionError("no route")

    monkeypatch.setattr(requests, "head", head)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    hub_text.load_encoder.cache_clear()
    name = "0ea1e91bbb3a60f729a8dc8f777fd2fc07cd8df4"
    with pytest.raises(ConnectionError, match=f"connect to the internet.*r50k_base.tiktoken at .*cache/{name}.*local"):
        HubText(out_dir=str(tmp_path / "out")).prepare_data()
    assert timeouts == [20]


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return gpt2_bpe_cache(tmp_path_factory.mktemp("bpe")).parent
    except ConnectionError as error:
        pytest.skip(str(error))


def test_gpt2_tokens(tmp_path: Path, bpe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(bpe))
    hub_text.load_encoder.cache_clear()
    rows = ["Hello world", "<|endoftext|> is plain text here", *texts(10)]
    data = HubText(
        files=[write_jsonl(tmp_path / "a.jsonl", rows)], out_dir=str(tmp_path / "out"), num_proc=1, context=4, seed=0
    )
    data.prepare_data()
    data.setup("fit")
    encoding = tiktoken.get_encoding("r50k_base")
    decoded = [encoding.decode(np.asarray(tokens).tolist()) for tokens in (data.train_tokens, data.val_tokens)]
    assert [text.endswith("<|endoftext|>") for text in decoded] == [True, True]
    held_out = decoded[1].removesuffix("<|endoftext|>")
    rows.remove(held_out)
    assert decoded[0] == "".join(row + "<|endoftext|>" for row in rows)
    assert encoding.encode_ordinary("Hello world") == [15496, 995]
    assert data.vocab_size == 50257 and data.train_tokens.max() == 50256
    hub_text.load_encoder.cache_clear()
