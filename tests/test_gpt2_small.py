"""GPT-2 small takes real steps on real tokens: local text, GPT-2's BPE, ``HubText`` to token files, ``TokenFile``."""

import sysconfig
from pathlib import Path

import pytest
from gpt2_bpe import gpt2_bpe_cache

from lightning_qk.cli import main
from lightning_qk.data import HubText
from lightning_qk.events import read_scalars
from lightning_qk.verdict import read_verdict

ROOT = Path(__file__).parents[1]
BASE = ["-c", str(ROOT / "configs/base.yaml"), "-c", str(ROOT / "configs/gpt2_small.yaml")]


@pytest.fixture(scope="module")
def token_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gpt2")
    with pytest.MonkeyPatch.context() as patch:
        try:
            patch.setenv("TIKTOKEN_CACHE_DIR", str(gpt2_bpe_cache(tmp_path_factory.mktemp("bpe")).parent))
        except ConnectionError as error:
            pytest.skip(f"needs GPT-2's BPE: {error}")
        library = Path(sysconfig.get_paths()["stdlib"])
        texts = directory / "texts"
        texts.mkdir()
        for source in sorted(library.glob("*.py"))[:40]:
            (texts / f"{source.stem}.txt").write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
        HubText(
            files=[str(texts / "*.txt")], out_dir=str(directory / "tokens"), num_proc=2, val_fraction=0.1
        ).prepare_data()
    return directory / "tokens"


@pytest.mark.slow
@pytest.mark.parametrize("plugin", ["sdpa", "fault"])
def test_five_steps(token_files: Path, tmp_path: Path, plugin: str) -> None:
    """Must hold: five optimizer steps on CPU, finite and falling, with SDPA and with the fault plugin."""
    arm = {
        "sdpa": ["--trainer.plugins.init_args.core", "sdpa"],
        "fault": ["--trainer.plugins.init_args.sites", "bf16_carry", "--trainer.plugins.init_args.tile", "128"],
    }[plugin]
    options = {
        "run.root": tmp_path,
        "run.arm": plugin,
        "trainer.accelerator": "cpu",
        "trainer.max_steps": 5,
        "trainer.accumulate_grad_batches": 1,
        "trainer.log_every_n_steps": 1,
        "model.compile": "false",
        "model.warmup_steps": 1,
        "model.schedule": "constant",
        "model.lr": 3e-4,
        "data": "TokenFile",
        "data.train": token_files / "train.bin",
        "data.val": token_files / "val.bin",
        "data.batch_size": 1,
        "data.val_batches": 1,
    }
    status = main(["fit", *BASE, *arm, *(f"--{key}={value}" for key, value in options.items())])
    assert status == 0
    run_dir = tmp_path / "default" / plugin / "seed_0"
    verdict = read_verdict(run_dir)
    assert verdict is not None and verdict["status"] == "completed" and verdict["step"] == 5
    losses = read_scalars(run_dir, ["loss/train"])["loss/train"].values
    assert len(losses) == 5
    assert 10 < losses[0] < 11.5  # ln 50,304 = 10.83
    assert losses[-1] < losses[0] - 0.5
