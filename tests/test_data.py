import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_qk.data import BatchLoader, StdlibCorpus, TokenData, WindowLoader, window_starts
from lightning_qk.hub_text import counter_hash

CONTEXT = 8
PINNED = [6946, 8158, 38, 2064]


class Tokens(TokenData):
    """Numbered tokens, so that a batch says where it comes from."""

    vocab_size = 65536

    def load(self) -> None:
        self.train_tokens = np.arange(5000, dtype=np.uint16)
        self.val_tokens = np.arange(10000, 12000, dtype=np.uint16)
        self.fingerprint = {"source": "numbers", "sha256": "0" * 64}


class Recorder(LightningModule):
    """Records the first token of every sequence it is given."""

    context = CONTEXT

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.trained: list[tuple[int, list[int]]] = []
        self.evaluated: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.trained.append((batch_idx, batch[0][:, 0].tolist()))
        return self.weight * batch[1].float().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluated.append(batch[0][:, 0].tolist())

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture(autouse=True)
def no_global_seed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    yield


def trainer(tmp_path: Path, **kwargs: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "default_root_dir": tmp_path,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
    }
    return Trainer(**defaults | kwargs)


# ------------------------------------------------------------------------------------------------- what a batch is


def test_counter_hash_is_splitmix64() -> None:
    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    for seed in (0, 1, 2**63, -1):
        key = mix((seed + 0x9E3779B97F4A7C15) % 2**64)
        expected = [mix((key + (i + 1) * 0x9E3779B97F4A7C15) % 2**64) for i in range(5)]
        assert counter_hash(seed, np.arange(5, dtype=np.uint64)).tolist() == expected
    # The reference stream of SplitMix64 seeded with 0 starts so.
    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF


def test_starts_are_pinned() -> None:
    """Runs of different versions must see the same data: these numbers may not change."""
    assert window_starts(1337, 0, 0, 1, 4, 10_000).tolist() == PINNED


def test_starts_are_uniform_and_differ_between_seeds() -> None:
    starts = window_starts(0, 0, 0, 1, 100_000, 10)
    assert np.abs(np.bincount(starts, minlength=10) / 10_000 - 1).max() < 0.05
    assert set(starts) == set(range(10))
    other = window_starts(1, 0, 0, 1, 100_000, 10)
    assert abs((starts == other).mean() - 0.1) < 0.01


@pytest.mark.parametrize(("world", "micro"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (8, 2)])
def test_global_batch_is_the_same_for_every_layout(world: int, micro: int) -> None:
    tokens = np.arange(5000, dtype=np.uint16)
    size = 16 // world // micro

    def step(index: int) -> torch.Tensor:
        batches = range(index * micro, (index + 1) * micro)
        loaders = [BatchLoader(tokens, 3, size, CONTEXT, 100, rank, world) for rank in range(world)]
        return torch.cat([loader[b][0] for b in batches for loader in loaders])

    whole = BatchLoader(tokens, 3, 16, CONTEXT, 100)
    for index in (0, 1, 7):
        assert torch.equal(step(index), whole[index][0])


def test_batch_is_shifted_int64_and_contiguous() -> None:
    x, y = BatchLoader(np.arange(5000, dtype=np.uint16), 0, 4, CONTEXT, 1)[0]
    assert x.shape == y.shape == (4, CONTEXT)
    assert x.dtype == y.dtype == torch.int64
    assert x.is_contiguous() and y.is_contiguous()
    assert torch.equal(y, x + 1)


def test_shortest_split_has_one_window() -> None:
    tokens = np.arange(CONTEXT + 1, dtype=np.uint16)
    for batch in [*BatchLoader(tokens, 0, 2, CONTEXT, 3), *WindowLoader(tokens, 2, CONTEXT, 3)]:
        assert batch[1][:, -1].tolist() == [CONTEXT, CONTEXT]


def test_loader_goes_on_over_epochs_and_abandoned_iterations() -> None:
    loader = BatchLoader(np.arange(5000, dtype=np.uint16), 0, 2, CONTEXT, 3)
    assert len(loader) == 3
    first, second = list(loader), list(loader)
    assert [len(first), len(second), loader.state_dict()] == [3, 3, {"batch": 6}]
    assert all(torch.equal(batch[0], loader[i][0]) for i, batch in enumerate(first + second))
    next(iter(loader))
    assert loader.state_dict() == {"batch": 7}


# ------------------------------------------------------------------------------------------------------ validation


@pytest.mark.parametrize("num_tokens", [200, 8 * 16 + 1, 100])
def test_validation_windows(num_tokens: int) -> None:
    tokens = np.arange(num_tokens, dtype=np.uint16)
    starts = WindowLoader(tokens, 4, CONTEXT, 4).starts.ravel()
    assert (starts[0], starts[-1]) == (0, num_tokens - CONTEXT - 1)
    if num_tokens > 16 * CONTEXT:
        assert np.diff(starts).min() >= CONTEXT
    ranks = [WindowLoader(tokens, 2, CONTEXT, 4, rank, 2) for rank in range(2)]
    assert np.concatenate([loader.starts for loader in ranks], axis=1).ravel().tolist() == starts.tolist()


def test_validation_is_the_same_for_every_seed_and_stage(tmp_path: Path) -> None:
    seen = []
    for seed in (0, 1):
        model, data = Recorder(), Tokens(batch_size=4, seed=seed, val_batches=3)
        runner = trainer(tmp_path, max_steps=2)
        runner.fit(model, datamodule=data)
        runner.validate(model, datamodule=data, verbose=False)
        runner.test(model, datamodule=data, verbose=False)
        seen.append(model.evaluated)
    assert seen[0] == seen[1]
    assert len(seen[0]) == 9 and seen[0][:3] == seen[0][3:6] == seen[0][6:]


def test_validate_alone_needs_no_seed(tmp_path: Path) -> None:
    model = Recorder()
    trainer(tmp_path).validate(model, datamodule=Tokens(val_batches=3), verbose=False)
    assert len(model.evaluated) == 3


# ---------------------------------------------------------------------------------------------- resume, in a Trainer


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("at", [2, 4, 8])
def test_resume_is_exact(tmp_path: Path, accumulate: int, at: int) -> None:
    """Saves at step 4 and 8 coincide with validation, at 8 also with the end of the epoch."""

    def fit(max_steps: int, ckpt_path: str | None = None) -> list[tuple[int, list[int]]]:
        model = Recorder()
        saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
        runner = trainer(
            tmp_path,
            max_steps=max_steps,
            accumulate_grad_batches=accumulate,
            val_check_interval=4 * accumulate,
            check_val_every_n_epoch=None,
            enable_checkpointing=True,
            callbacks=[saver],
        )
        runner.fit(model, datamodule=Tokens(batch_size=4, seed=5, val_batches=1), ckpt_path=ckpt_path)
        assert runner.global_step == max_steps
        return model.trained

    if at == 8:
        fit(8)
    whole = fit(12)
    assert len(whole) == 12 * accumulate
    path = tmp_path / f"step={at}.ckpt"
    state = torch.load(path, weights_only=True)["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    assert state == [{"batch": at * accumulate}]
    assert [x for _, x in fit(12, str(path))] == [x for _, x in whole[at * accumulate :]]


def test_epochs_without_max_steps_resume_exactly(tmp_path: Path) -> None:
    def fit(max_epochs: int, ckpt_path: str | None = None) -> list[tuple[int, list[int]]]:
        model = Recorder()
        saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=7, save_top_k=-1)
        runner = trainer(tmp_path, max_epochs=max_epochs, enable_checkpointing=True, callbacks=[saver])
        runner.fit(model, datamodule=Tokens(batch_size=64, seed=5, val_batches=1), ckpt_path=ckpt_path)
        return model.trained

    whole = fit(3)
    epoch = 5000 // (CONTEXT * 64)
    assert [index for index, _ in whole] == [*range(epoch)] * 3
    assert len({tuple(x) for _, x in whole}) == 3 * epoch
    for step in (7, 14):  # inside the first epoch and inside the second
        assert fit(3, str(tmp_path / f"step={step}.ckpt")) == whole[step:]


def test_resume_on_other_data_warns(tmp_path: Path) -> None:
    runner = trainer(tmp_path, max_steps=2)
    runner.fit(Recorder(), datamodule=Tokens(batch_size=4, seed=5))
    runner.save_checkpoint(tmp_path / "two.ckpt")
    changed = Tokens(batch_size=8, seed=6)
    with pytest.warns(UserWarning, match=r"seed 5 -> 6, sequences_per_batch 4 -> 8"):
        trainer(tmp_path, max_steps=4).fit(Recorder(), datamodule=changed, ckpt_path=str(tmp_path / "two.ckpt"))


def test_limit_train_batches_leaves_no_gap(tmp_path: Path) -> None:
    model, data = Recorder(), Tokens(batch_size=4, seed=5)
    trainer(tmp_path, max_epochs=2, limit_train_batches=3, limit_val_batches=0).fit(model, datamodule=data)
    loader = data.train_dataloader()
    assert [x for _, x in model.trained] == [loader[i][0][:, 0].tolist() for i in range(6)]


def test_rank_and_world_come_from_the_trainer() -> None:
    class Two:
        world_size, global_rank, max_steps, accumulate_grad_batches = 2, 1, 5, 3
        lightning_module = Recorder()

    data = Tokens(batch_size=8, seed=0)
    data.trainer = Two()  # type: ignore[assignment]
    data.setup("fit")
    loader, whole = data.train_dataloader(), BatchLoader(data.train_tokens, 0, 16, CONTEXT, 15)
    assert len(loader) == 15
    assert torch.equal(loader[4][0], whole[4][0][8:])


# -------------------------------------------------------------------------------------------------------- arguments


def test_seed_is_that_of_seed_everything_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Tokens(context=CONTEXT)
    data.setup("fit")
    with pytest.raises(MisconfigurationException, match="seed=None takes the seed of `seed_everything`"):
        data.train_dataloader()
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    assert data.train_dataloader().seed == 7
    data.seed = 0
    assert data.train_dataloader().seed == 0


def test_context_is_that_of_the_module_unless_given(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match="context=None takes the `context` of the LightningModule"):
        Tokens().setup("fit")
    with pytest.raises(ValueError, match=r"The val split \(numbers\) has 2000 tokens.*context=2000.*Use a shorter"):
        Tokens(context=2000).setup("fit")


@pytest.mark.parametrize("key", ["batch_size", "context", "val_batches"])
def test_counts_must_be_positive(key: str) -> None:
    with pytest.raises(ValueError, match=f"Tokens: {key}=0 must be at least 1"):
        Tokens(**{key: 0})


# ----------------------------------------------------------------------------------------------------- StdlibCorpus


def test_stdlib_corpus() -> None:
    first, second = StdlibCorpus(context=128, seed=0), StdlibCorpus(context=128, seed=0)
    first.setup("fit")
    second.setup("validate")
    described = first.describe()
    assert described == second.describe()
    assert all(isinstance(value, str | int) for value in described.values())
    total = len(first.train_tokens) + len(first.val_tokens)
    assert 5e6 < total < 20e6
    assert len(first.train_tokens) == total * 95 // 100
    assert first.train_tokens.dtype == np.uint8 and first.vocab_size == 256
    assert b"import" in first.val_tokens.tobytes()


def test_stdlib_corpus_skips_what_is_installed_or_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b.py", "a/z.py", "a.py", "site-packages/x.py", "a/tests/x.py", "__pycache__/x.py", "a/data.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name} " + "." * 100)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    data = StdlibCorpus(context=4, seed=0)
    data.setup("fit")
    text = np.concatenate([data.train_tokens, data.val_tokens]).tobytes()
    assert text == b"\n".join(f"# {name} ".encode() + b"." * 100 for name in ("a.py", "a/z.py", "b.py"))


def test_stdlib_corpus_without_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path / "python311.zip")})
    with pytest.raises(FileNotFoundError, match=r"no \*.py in .*python311.zip.*HubText or TokenFile"):
        StdlibCorpus(context=4).setup("fit")


def test_import_is_light() -> None:
    heavy = ["datasets", "tiktoken", "pyarrow", "requests", "filelock", "multiprocessing.pool"]
    heavy.append("concurrent.futures.process")
    # where transformers is installed, torchmetrics brings filelock by itself
    code = (
        "import sys, torchmetrics; theirs = {'filelock'} & sys.modules.keys(); import lightning_qk.data; "
        f"print([name for name in {heavy} if name in sys.modules and name not in theirs])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
