import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_qk.data import TokenFile

CONTEXT = 8


def token_file(path: Path, tokens: Any, dtype: str = "<u2") -> str:
    np.asarray(tokens).astype(dtype).tofile(path)
    return str(path)


IDS = np.random.default_rng(0).integers(1, 50257, 5000)


@pytest.mark.parametrize(("dtype", "written"), [("uint16", "<u2"), ("uint32", "<u4")])
def test_token_file(tmp_path: Path, dtype: Any, written: str) -> None:
    train = token_file(tmp_path / "train.bin", IDS, written)
    val = token_file(tmp_path / "val.bin", IDS[:100], written)
    data = TokenFile(train, val, dtype, context=CONTEXT, seed=0)
    data.setup("fit")
    assert isinstance(data.train_tokens, np.memmap)
    assert data.train_tokens.tolist() == IDS.tolist()
    described = data.describe()
    assert (described["train_tokens"], described["val_file"], len(str(described["val_sha256"]))) == (5000, val, 64)
    assert data.train_dataloader()[0][0].max() < 50257


def test_a_large_file_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_qk.token_file._CHUNK_BYTES", 64)
    path = token_file(tmp_path / "train.bin", IDS)
    data = TokenFile(path, path, context=CONTEXT, seed=0)
    data.setup("fit")
    assert "train_sha256_of_samples" in data.describe()
    with pytest.raises(ValueError, match=r"is not below vocab_size=50000. Set vocab_size to that of the tokenizer"):
        TokenFile(path, path, vocab_size=50000, context=CONTEXT).setup("fit")


def test_token_file_that_is_not_there(tmp_path: Path) -> None:
    good = token_file(tmp_path / "good.bin", IDS)
    missing = str(tmp_path / "missing.bin")
    with pytest.raises(FileNotFoundError, match=r"val='.*missing.bin' does not exist.*HubText makes"):
        TokenFile(good, missing, context=CONTEXT).setup("fit")
    with pytest.raises(ValueError, match=r"train='.*' is a directory. Name the file"):
        TokenFile(str(tmp_path), good, context=CONTEXT).setup("fit")


@pytest.mark.parametrize(
    ("content", "dtype", "match"),
    [
        (b"", "uint16", "is empty"),
        (b"\x01\x00\x02", "uint16", "truncated mid-token: its 3 bytes are no multiple of uint16"),
        (IDS.astype("<u4").tobytes()[:-2], "uint32", "truncated mid-token"),
        (b"\x93NUMPY\x01\x00" + bytes(100), "uint16", r"is an .npy file.*array.tofile"),
        (IDS.astype("<u2").tobytes()[: 2 * CONTEXT], "uint16", r"\) has 8 tokens, fewer than one window"),
        (IDS.astype("<u4").tobytes(), "uint16", r"at most 0 at every odd position.*Set dtype='uint32'"),
        (IDS.astype("<u2").tobytes(), "uint32", r"at position 0, read as uint32.*Read as uint16 every token is"),
        (np.array([*IDS, 50257], "<u2").tobytes(), "uint16", r"token 50257 at position 5000.*Set vocab_size to"),
    ],
)
def test_token_file_with_wrong_content(tmp_path: Path, content: bytes, dtype: Any, match: str) -> None:
    good = token_file(tmp_path / "good.bin", IDS, "<u2" if dtype == "uint16" else "<u4")
    (tmp_path / "bad.bin").write_bytes(content)
    with pytest.raises(ValueError, match=r"bad\.bin.*" + match):
        TokenFile(good, str(tmp_path / "bad.bin"), dtype, context=CONTEXT).setup("fit")


def test_uint32_ids_of_a_large_vocabulary_are_noticed(tmp_path: Path) -> None:
    path = token_file(tmp_path / "train.bin", np.random.default_rng(0).integers(1, 100_277, 5000), "<u4")
    with pytest.raises(ValueError, match="at most 1 at every odd position"):
        TokenFile(path, path, vocab_size=100_277, context=CONTEXT).setup("fit")
    TokenFile(path, path, "uint32", vocab_size=100_277, context=CONTEXT).setup("fit")


@pytest.mark.parametrize(
    ("sidecar", "match"),
    [
        ({"dtype": "uint32"}, r"dtype='uint16', but its sidecar train.bin.json says 'uint32'. Set dtype"),
        ({"vocab_size": 60000}, r"vocab_size=50257, but its sidecar train.bin.json says 60000"),
        ({"tokens": 5001}, r"has 10000 bytes, but its sidecar train.bin.json says 5001 tokens.*cut or changed"),
        ({"tokens": None}, r"train.bin.json is not the sidecar of a token file"),
        (None, r"train.bin.json is not the sidecar of a token file"),
    ],
)
def test_token_file_at_odds_with_its_sidecar(tmp_path: Path, sidecar: dict[str, Any] | None, match: str) -> None:
    path = token_file(tmp_path / "train.bin", IDS)
    fields = {"dtype": "uint16", "tokens": 5000, "sha256": "", "tokenizer": "gpt2", "vocab_size": 50257}
    fields |= {"made_from": {}} | (sidecar or {})
    fields = {key: value for key, value in fields.items() if value is not None}
    Path(path + ".json").write_text("not json" if sidecar is None else json.dumps(fields))
    with pytest.raises(ValueError, match=match):
        TokenFile(path, path, context=CONTEXT).setup("fit")


def test_dtype_must_be_known() -> None:
    with pytest.raises(ValueError, match=r"dtype='int64' must be one of \['uint16', 'uint32'\]"):
        TokenFile("a", "b", dtype="int64")  # type: ignore[arg-type]
