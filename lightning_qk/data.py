"""Token data for language modelling.

**A batch is a pure function of (seed, batch index, rank, world size).** Sequence ``i`` of batch ``b`` on rank ``r`` of
``w`` ranks, with ``n`` sequences a batch, has the global index ``g = (b * w + r) * n + i``. It is the ``context + 1``
tokens that start at ``counter_hash(seed, g) mod (N - context)`` in the training split of ``N`` tokens; ``x`` is all but
the last of them, ``y`` all but the first. Batch indices count micro-batches. So one rank with 16 sequences sees the
same global batch as two ranks with 8, or two accumulated micro-batches of 8, and the loader's state is one integer.

Starts are uniform up to the bias of the modulo: the probability of each differs from ``1 / (N - context)`` by less than
2**-64, which is less than 2**-40 of it for the standard library and 2**-30 of it for OpenWebText. Windows are drawn
with replacement, and an epoch is only a number of batches.
"""

import hashlib
import os
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from numpy.typing import NDArray
from typing_extensions import override

from lightning_qk.cores import usable_cores
from lightning_qk.counted_loader import Batch, CountedLoader
from lightning_qk.documents import Documents, FileDocuments, HubDocuments
from lightning_qk.hub_text import VOCAB_SIZES, counter_hash, prepare
from lightning_qk.token_file import ITEM_BYTES, fingerprint, open_tokens


def window_starts(
    seed: int, batch_idx: int, rank: int, world: int, batch_size: int, num_starts: int
) -> NDArray[np.int64]:
    """Return where the sequences of a batch start, as the module's docstring defines it."""
    first = (batch_idx * world + rank) * batch_size
    hashes = counter_hash(seed, np.arange(first, first + batch_size, dtype=np.uint64))
    return (hashes % np.uint64(num_starts)).astype(np.int64)


def read_windows(tokens: NDArray[Any], starts: NDArray[np.int64], context: int) -> Batch:
    """Return inputs and targets, each int64 ``[len(starts), context]``, the targets shifted by one."""
    windows = torch.from_numpy(tokens[starts[:, None] + np.arange(context + 1)].astype(np.int64))
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


class BatchLoader(CountedLoader):
    """Training batches of one rank, by their index.

    Args:
        tokens: The training split.
        seed: Selects the sequence of windows.
        batch_size: Sequences in a batch of this rank.
        context: Tokens in a sequence.
        length: Batches in an epoch.
        rank: This process among the data-parallel ones.
        world: Number of data-parallel processes.
    """

    def __init__(
        self, tokens: NDArray[Any], seed: int, batch_size: int, context: int, length: int, rank: int = 0, world: int = 1
    ) -> None:
        super().__init__(length)
        self.tokens = tokens
        self.seed = seed
        self.batch_size = batch_size
        self.context = context
        self.rank = rank
        self.world = world

    @override
    def __getitem__(self, batch_idx: int) -> Batch:
        num_starts = len(self.tokens) - self.context
        starts = window_starts(self.seed, batch_idx, self.rank, self.world, self.batch_size, num_starts)
        return read_windows(self.tokens, starts, self.context)


class WindowLoader:
    """Evaluation batches of one rank: evenly spaced windows over a split, the same every time and for every seed.

    The ``length * world * batch_size`` windows are dealt to the ranks batch by batch. They reach from the first token
    to the last and do not overlap if the split is long enough for that.
    """

    def __init__(
        self, tokens: NDArray[Any], batch_size: int, context: int, length: int, rank: int = 0, world: int = 1
    ) -> None:
        self.tokens = tokens
        self.context = context
        last_start = len(tokens) - context - 1
        count = length * world * batch_size
        starts = np.arange(count, dtype=np.int64) * last_start // max(count - 1, 1)
        self.starts = starts.reshape(length, world, batch_size)[:, rank]

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[Batch]:
        for starts in self.starts:
            yield read_windows(self.tokens, starts, self.context)


class TokenData(LightningDataModule, ABC):
    """Two splits of tokens, served as batches of ``(x, y)``. Subclasses say where the tokens come from.

    All ranks are taken to be data-parallel. Set ``use_distributed_sampler: false`` in the Trainer for clarity: these
    loaders are sharded by construction and Lightning has nothing to inject. Also works without a Trainer, as one rank.

    Args:
        batch_size: Sequences per rank per micro-batch.
        context: Tokens per sequence. None takes the ``context`` of the LightningModule.
        seed: Selects the training windows. None takes the seed that ``seed_everything`` set.
        val_batches: Validation batches per rank.

    Attributes:
        train_tokens: The training split, one-dimensional, after ``setup``.
        val_tokens: The validation split, after ``setup``.
        vocab_size: Every token is below it.
        fingerprint: What the data is, in plain values, after ``setup``.
    """

    train_tokens: NDArray[Any]
    val_tokens: NDArray[Any]
    vocab_size: int
    short_split_remedy = "Use a shorter context or more text."

    def __init__(
        self, batch_size: int = 16, context: int | None = None, seed: int | None = None, val_batches: int = 8
    ) -> None:
        super().__init__()
        for key, value in (("batch_size", batch_size), ("context", context), ("val_batches", val_batches)):
            if value is not None and value < 1:
                raise ValueError(f"{type(self).__name__}: {key}={value} must be at least 1.")
        self.batch_size = batch_size
        self.context = context
        self.seed = seed
        self.val_batches = val_batches
        self.fingerprint: dict[str, str | int] = {}

    @abstractmethod
    def load(self) -> None:
        """Set ``train_tokens``, ``val_tokens`` and ``fingerprint``. Called once in each process."""

    def describe(self) -> dict[str, str | int]:
        """Return plain values for a logger's hyper-parameters."""
        return {"data": type(self).__name__, "vocab_size": self.vocab_size, **self.fingerprint}

    @override
    def setup(self, stage: str) -> None:
        if not self.fingerprint:
            self.load()
            rank_zero_info(", ".join(f"{key}: {value}" for key, value in self.describe().items()))
        context = self._context()
        for split, tokens in (("train", self.train_tokens), ("val", self.val_tokens)):
            if len(tokens) <= context:
                where = self.fingerprint.get(f"{split}_file", self.fingerprint["source"])
                raise ValueError(
                    f"The {split} split ({where}) has {len(tokens)} tokens, fewer than one window: context={context}"
                    f" and the target of its last token. {self.short_split_remedy}"
                )

    @override
    def train_dataloader(self) -> BatchLoader:
        rank, world = self._rank_and_world()
        context = self._context()
        if self.trainer is not None and self.trainer.max_steps != -1:
            length = self.trainer.max_steps * self.trainer.accumulate_grad_batches
        else:
            length = max(1, len(self.train_tokens) // (context * self.batch_size * world))
        return BatchLoader(self.train_tokens, self._seed(), self.batch_size, context, length, rank, world)

    @override
    def val_dataloader(self) -> WindowLoader:
        rank, world = self._rank_and_world()
        return WindowLoader(self.val_tokens, self.batch_size, self._context(), self.val_batches, rank, world)

    @override
    def test_dataloader(self) -> WindowLoader:
        return self.val_dataloader()

    @override
    def state_dict(self) -> dict[str, str | int]:
        # What a batch depends on besides its index, which the loader saves.
        hashes = {key: value for key, value in self.fingerprint.items() if "sha256" in key}
        sequences = self.batch_size * self._rank_and_world()[1]
        return {"seed": self._seed(), "context": self._context(), "sequences_per_batch": sequences, **hashes}

    @override
    def load_state_dict(self, state_dict: dict[str, str | int]) -> None:
        if self.trainer is None or self.trainer.state.fn != "fit":
            return  # evaluation does not depend on it
        now = self.state_dict()
        changed = [f"{key} {state_dict.get(key)} -> {now.get(key)}" for key in now if state_dict.get(key) != now[key]]
        if changed:
            rank_zero_warn(f"The data is not that of the checkpoint, so the resume is not exact: {', '.join(changed)}.")

    def _rank_and_world(self) -> tuple[int, int]:
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def _context(self) -> int:
        if self.context is not None:
            return self.context
        context = getattr(self.trainer.lightning_module, "context", None) if self.trainer is not None else None
        if context is None:
            raise MisconfigurationException(
                f"{type(self).__name__}: context=None takes the `context` of the LightningModule, which has none."
                " Set the data's context to the tokens of a sequence."
            )
        return int(context)

    def _seed(self) -> int:
        seed = self.seed if self.seed is not None else os.environ.get("PL_GLOBAL_SEED")
        if seed is None:
            raise MisconfigurationException(
                f"{type(self).__name__}: seed=None takes the seed of `seed_everything`, which was not called."
                " Set the data's seed, or seed_everything."
            )
        return int(seed)


class StdlibCorpus(TokenData):
    """The source code of the running Python's standard library, as bytes: real text that every machine has.

    All ``*.py`` files, sorted by relative path and joined by a newline, except installed packages, test directories
    (``test``, ``tests``, ``idle_test``) and ``encodings``, which is tables of code points. About 11 MB, the first 95 %
    of it for training. It differs between Python versions, hence the sha256 in the fingerprint.
    """

    vocab_size = 256
    excluded = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings"})

    @override
    def load(self) -> None:
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = []
        for directory, subdirectories, files in os.walk(root):
            subdirectories[:] = set(subdirectories) - self.excluded  # os.walk does not enter the others
            paths += [Path(directory, file).relative_to(root).as_posix() for file in files if file.endswith(".py")]
        paths.sort()
        if not paths:
            raise FileNotFoundError(
                f"StdlibCorpus: there is no *.py in {root}; this Python ships its standard library zipped or without"
                " sources. Use a full installation of Python, or HubText or TokenFile as data."
            )
        text = b"\n".join((root / path).read_bytes() for path in paths)
        tokens = np.frombuffer(text, dtype=np.uint8)
        self.train_tokens, self.val_tokens = np.split(tokens, [len(tokens) * 95 // 100])
        self.fingerprint = {
            "source": f"standard library of Python {sysconfig.get_python_version()} at {root}",
            "files": len(paths),
            "train_tokens": len(self.train_tokens),
            "val_tokens": len(self.val_tokens),
            "sha256": hashlib.sha256(text).hexdigest(),
        }


class TokenFile(TokenData):
    """Token files in nanoGPT's format: raw little-endian token ids without a header, memory-mapped.

    Args:
        train: File of the training split.
        val: File of the validation split.
        dtype: Type of an id. It is not written in the file, so it is checked against the sidecar ``<file>.json`` (which
            HubText writes; other files have none) and against the ids found.
        vocab_size: Every id must be below it. All ids of a file under 64 MiB are checked, and samples of a larger one.
        batch_size: Sequences per rank per micro-batch.
        context: Tokens per sequence. None takes the ``context`` of the LightningModule.
        seed: Selects the training windows. None takes the seed that ``seed_everything`` set.
        val_batches: Validation batches per rank.
    """

    def __init__(
        self,
        train: str,
        val: str,
        dtype: Literal["uint16", "uint32"] = "uint16",
        vocab_size: int = 50257,
        batch_size: int = 16,
        context: int | None = None,
        seed: int | None = None,
        val_batches: int = 8,
    ) -> None:
        super().__init__(batch_size, context, seed, val_batches)
        if dtype not in ITEM_BYTES:
            raise ValueError(f"{type(self).__name__}: dtype={dtype!r} must be one of {list(ITEM_BYTES)}.")
        self.files = {"train": Path(train), "val": Path(val)}
        self.dtype = dtype
        self.vocab_size = vocab_size

    @override
    def load(self) -> None:
        tokens = {key: open_tokens(path, key, self.dtype, self.vocab_size) for key, path in self.files.items()}
        self.train_tokens, self.val_tokens = tokens["train"], tokens["val"]
        self.fingerprint = {"source": f"token files of {self.dtype}"}
        for split, path in self.files.items():
            self.fingerprint |= {f"{split}_{key}": value for key, value in fingerprint(path, tokens[split]).items()}


class HubText(TokenFile):
    """Text from the Hugging Face hub or from local files, tokenized once into token files and then read from them.

    ``prepare_data`` makes ``<out_dir>/train.bin`` and ``val.bin``, in several processes; killed, it goes on from what
    it had finished. If they are there already, made from the same text with the same arguments, it does nothing.

    Args:
        dataset: Dataset on the hub, or a directory that ``datasets.load_dataset`` understands.
        name: Configuration of the dataset.
        revision: Branch, tag, commit or ``refs/pr/<number>`` of the dataset.
        split: Split of the dataset that is tokenized; it is divided into training and validation here.
        text_column: The column, or key, that holds the text.
        files: Local files or globs, in place of ``dataset``. A .txt is one document, a .jsonl has one a line, a
            .parquet one a row.
        out_dir: Where the token files are put.
        num_proc: Tokenizing processes. None is one per core that this process may use. The tokens do not depend on it.
        val_fraction: The share of documents held out for validation, chosen by a hash of their number.
        tokenizer: ``gpt2`` (needs its BPE once from the internet or tiktoken's cache), or ``bytes`` (UTF-8).
        batch_size: Sequences per rank per micro-batch.
        context: Tokens per sequence. None takes the ``context`` of the LightningModule.
        seed: Selects the training windows. None takes the seed that ``seed_everything`` set.
        val_batches: Validation batches per rank.
    """

    short_split_remedy = "Use a shorter context, more text, or a val_fraction nearer the middle, with another out_dir."

    def __init__(
        self,
        dataset: str | None = "Skylion007/openwebtext",
        name: str | None = None,
        revision: str | None = None,
        split: str = "train",
        text_column: str = "text",
        files: list[str] | None = None,
        out_dir: str = "data/openwebtext",
        num_proc: int | None = None,
        val_fraction: float = 0.0005,
        tokenizer: Literal["gpt2", "bytes"] = "gpt2",
        batch_size: int = 16,
        context: int | None = None,
        seed: int | None = None,
        val_batches: int = 8,
    ) -> None:
        if tokenizer not in VOCAB_SIZES:
            raise ValueError(f"HubText: tokenizer={tokenizer!r} must be one of {list(VOCAB_SIZES)}.")
        if not 0 < val_fraction < 1:
            raise ValueError(f"HubText: val_fraction={val_fraction} must lie between 0 and 1.")
        if num_proc is not None and num_proc < 1:
            raise ValueError(f"HubText: num_proc={num_proc} must be at least 1, or None for one per core.")
        if files is not None and not files:
            raise ValueError("HubText: files is an empty list. Name files or globs, or leave it out to use `dataset`.")
        if files is None and dataset is None:
            raise ValueError("HubText: dataset and files are both None. Name a dataset on the hub, or local files.")
        train, val = (str(Path(out_dir) / f"{part}.bin") for part in ("train", "val"))
        super().__init__(train, val, "uint16", VOCAB_SIZES[tokenizer], batch_size, context, seed, val_batches)
        self.dataset = dataset
        self.config_name = name
        self.revision = revision
        self.split = split
        self.text_column = text_column
        self.text_files = files
        self.out_dir = Path(out_dir)
        self.num_proc = num_proc or usable_cores()
        self.val_fraction = val_fraction
        self.tokenizer = tokenizer

    @override
    def prepare_data(self) -> None:
        prepare(self._documents(), self.out_dir, self.tokenizer, self.val_fraction, self.num_proc)

    def _documents(self) -> Documents:
        if self.text_files is not None:
            return FileDocuments(self.text_files, self.text_column)
        assert self.dataset is not None
        return HubDocuments(self.dataset, self.config_name, self.revision, self.split, self.text_column)
