"""Text in, token files out: the pipeline behind :class:`~lightning_qk.data.HubText`.

Every document becomes its token ids followed by end-of-text (EOT), as in nanoGPT.

Documents are numbered in the order of their source and cut into shards of a fixed number of documents. A process takes
one shard at a time and leaves finished parts under ``<out_dir>/.parts``. So a killed run goes on from its finished
shards, the tokens do not depend on the number of processes, and ``train.bin`` and ``val.bin`` appear only complete.

This module imports neither torch nor Lightning, because every worker process imports it.
"""

import hashlib
import json
import multiprocessing
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_qk.documents import Documents
from lightning_qk.token_file import read_sidecar, sidecar_path, write_through

# EOT is the last id of each vocabulary.
VOCAB_SIZES = {"gpt2": 50257, "bytes": 257}
BPE_URL = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"
_MASK64 = 2**64 - 1
_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def counter_hash(seed: int, counters: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash each counter under a seed: output number ``counter`` of SplitMix64 started at the mixed seed.

    For one seed this is a bijection of the 64-bit integers, so distinct counters never collide.
    """

    def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    key = mix(np.array([seed & _MASK64], dtype=np.uint64) + _GAMMA)
    return mix(key + (counters + np.uint64(1)) * _GAMMA)


def bpe_cache_path() -> Path:
    """Return where tiktoken keeps GPT-2's BPE: the sha1 of its address, in the first cache directory that is set."""
    directory = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR"))
    if directory is None:
        directory = os.path.join(tempfile.gettempdir(), "data-gym-cache")
    return Path(directory) / hashlib.sha1(BPE_URL.encode()).hexdigest()


@cache
def load_encoder(tokenizer: str) -> Callable[[str], Iterable[int]]:
    """Return the function from a document's text to its token ids, without EOT.

    ``gpt2`` is tiktoken's ``r50k_base``: the vocabulary and merges of GPT-2, in one file instead of two.
    ``bytes`` is UTF-8 and needs no file.

    Raises:
        ConnectionError: If the BPE is neither in tiktoken's cache nor to be had from the network.
    """
    if tokenizer == "bytes":
        return str.encode
    import requests
    import tiktoken

    try:
        if not bpe_cache_path().is_file():
            # tiktoken's own download has no timeout.
            requests.head(BPE_URL, timeout=20).raise_for_status()
        return tiktoken.get_encoding("r50k_base").encode_ordinary
    except OSError as error:
        path = bpe_cache_path()
        raise ConnectionError(
            f"tokenizer='gpt2': GPT-2's BPE is not in tiktoken's cache and {BPE_URL} cannot be reached ({error})."
            f" Either connect to the internet once, or put r50k_base.tiktoken at {path}: TIKTOKEN_CACHE_DIR names the"
            f" directory, and the file must be called {path.name}. Offline you also need local `files` in place of a"
            " hub `dataset`. tokenizer='bytes' needs no download."
        ) from error


@dataclass(frozen=True)
class _Job:
    """All that a worker process needs to turn one shard of documents into its parts."""

    documents: Documents
    count: int
    shard_documents: int
    tokenizer: str
    val_fraction: float
    val_below: int  # a document is held out when its hash is below this
    parts: Path

    def part(self, shard: int, split: str) -> Path:
        return self.parts / f"{shard:06d}.{split}"

    def shards(self) -> range:
        return range(-(-self.count // self.shard_documents))

    def run(self, shard: int) -> int:
        """Write the parts of a shard and return its number of documents. The val part comes last: it marks the end."""
        start = shard * self.shard_documents
        stop = min(start + self.shard_documents, self.count)
        hashes = counter_hash(0, np.arange(start, stop, dtype=np.uint64))
        encode, end_of_text = load_encoder(self.tokenizer), VOCAB_SIZES[self.tokenizer] - 1
        held_out: list[bytes] = []

        def train_chunks() -> Iterator[bytes]:
            for text, hashed in zip(self.documents.read(start, stop), hashes, strict=True):
                tokens = np.array([*encode(text), end_of_text], dtype="<u2")
                if self.count == 1:
                    cut = len(tokens) - max(1, round(self.val_fraction * len(tokens)))
                else:
                    cut = 0 if int(hashed) < self.val_below else len(tokens)
                held_out.append(tokens[cut:].tobytes())
                yield tokens[:cut].tobytes()

        for split, chunks in (("train", train_chunks()), ("val", held_out)):
            # The process id keeps apart two writers of one part, should an orphan outlive a killed run.
            temporary = self.parts / f"{shard:06d}.{split}.{os.getpid()}.tmp"
            write_through(temporary, chunks)
            os.replace(temporary, self.part(shard, split))
        return stop - start


def _val_threshold(count: int, val_fraction: float) -> int:
    """Return the hash below which a document is held out: the fraction asked for, and at least one on either side."""
    hashes = counter_hash(0, np.arange(count, dtype=np.uint64))
    return min(max(int(val_fraction * 2**64), int(hashes.min()) + 1), int(hashes.max()))


_job: _Job | None = None  # this worker process's job


def _start_worker(job: _Job) -> None:
    global _job
    _job = job
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow_parent() -> None:
        parent.join()
        os._exit(1)

    # Workers of a killed run would otherwise wait for their next shard for ever.
    threading.Thread(target=follow_parent, daemon=True).start()


def _run_in_worker(shard: int) -> int:
    assert _job is not None
    return _job.run(shard)


def _tokenize(job: _Job, num_proc: int) -> None:
    """Make the parts that are missing, in ``num_proc`` processes."""
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool

    from tqdm import tqdm

    missing = [shard for shard in job.shards() if not job.part(shard, "val").is_file()]
    todo = sum(min(job.shard_documents, job.count - shard * job.shard_documents) for shard in missing)
    num_proc = min(num_proc, len(missing))
    with tqdm(total=job.count, initial=job.count - todo, unit="doc", desc=f"Tokenizing ({job.tokenizer})") as bar:
        if num_proc <= 1:
            for shard in missing:
                bar.update(job.run(shard))
            return
        # spawn, because forking a process in which torch has started threads can deadlock.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(num_proc, context, initializer=_start_worker, initargs=(job,)) as executor:
            try:
                for future in as_completed([executor.submit(_run_in_worker, shard) for shard in missing]):
                    bar.update(future.result())
            except BrokenProcessPool as error:
                raise RuntimeError(
                    f"A tokenizing process died (num_proc={num_proc}): out of memory, or started from a script without"
                    " `if __name__ == '__main__':`. Run again with a smaller num_proc; 1 starts no process. Finished"
                    " shards are kept."
                ) from error
            except BaseException:
                executor.shutdown(cancel_futures=True)
                raise


def _is_finished(out_dir: Path, made_from: dict[str, Any]) -> bool:
    """Say whether the token files are there. Raise if what is there was made from something else."""
    finished = True
    for path in (out_dir / "train.bin", out_dir / "val.bin"):
        sidecar = read_sidecar(path)
        if sidecar is None and path.exists():
            raise ValueError(
                f"{path} exists and has no sidecar {sidecar_path(path).name}, so HubText did not make it. Read it with"
                " TokenFile, or choose another out_dir."
            )
        if sidecar is not None and sidecar["made_from"] != made_from:
            raise ValueError(
                f"out_dir={str(out_dir)!r} holds {path.name} made from {sidecar['made_from']}, but this run asks for"
                f" {made_from}. Choose another out_dir, or delete this one."
            )
        finished = finished and path.exists()
    return finished


def _assemble(job: _Job, out_dir: Path, made_from: dict[str, Any]) -> None:
    """Join the parts. A sidecar is written before its file: a file without one is therefore never ours."""
    for split in ("val", "train"):
        joined = job.parts / f"{split}.bin"
        size, sha256 = write_through(joined, (job.part(shard, split).read_bytes() for shard in job.shards()))
        sidecar = {
            "dtype": "uint16",
            "tokens": size // 2,
            "sha256": sha256,
            "tokenizer": job.tokenizer,
            "vocab_size": VOCAB_SIZES[job.tokenizer],
            "made_from": made_from,
        }
        write_through(job.parts / "sidecar", [json.dumps(sidecar, indent=2).encode()])
        os.replace(job.parts / "sidecar", sidecar_path(out_dir / joined.name))
        os.replace(joined, out_dir / joined.name)


def prepare(
    documents: Documents,
    out_dir: Path,
    tokenizer: str,
    val_fraction: float,
    num_proc: int,
    shard_documents: int = 1024,
) -> None:
    """Make ``train.bin`` and ``val.bin`` in ``out_dir``, unless they are there already.

    A document belongs to the validation split when the hash of its number falls below ``val_fraction``; with two or
    more documents each split gets at least one. A single document is cut: its last ``val_fraction`` is held out.

    Raises:
        ValueError: If ``out_dir`` holds token files made from something else, or there are no documents.
        ConnectionError: If something has to be downloaded and cannot be.
    """
    from filelock import FileLock

    made_from = {"tokenizer": tokenizer, "val_fraction": val_fraction, **documents.describe()}
    out_dir.mkdir(parents=True, exist_ok=True)
    # Of two runs that share an out_dir the second waits, then finds the files. The lock dies with its owner.
    with FileLock(out_dir / ".lock"):
        if _is_finished(out_dir, made_from):
            return
        load_encoder(tokenizer)  # fails here, before a dataset is downloaded
        count = documents.load()
        if count == 0:
            raise ValueError(f"There are no documents in {documents.describe()}. Name a source that is not empty.")
        identity = json.dumps([made_from, count, shard_documents], sort_keys=True)
        parts = out_dir / ".parts" / hashlib.sha256(identity.encode()).hexdigest()[:16]
        parts.mkdir(parents=True, exist_ok=True)
        below = _val_threshold(count, val_fraction)
        job = _Job(documents, count, shard_documents, tokenizer, val_fraction, below, parts)
        _tokenize(job, num_proc)
        _assemble(job, out_dir, made_from)
        shutil.rmtree(out_dir / ".parts")
