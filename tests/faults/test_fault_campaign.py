"""The campaign of faults, small and whole; and single faults that it does not draw."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import callback, finish, outcome, run_args, run_dir, start, write_tokens

from lightning_qk.verdict import read_verdict

HERE = Path(__file__).parent


@pytest.mark.parametrize(("kills", "runs"), [(2, 1), pytest.param(200, 20, marks=pytest.mark.slow)])
def test_killed_runs_end_as_their_twins(tmp_path: Path, kills: int, runs: int) -> None:
    command = [sys.executable, str(HERE / "fault_campaign.py"), "--kills", str(kills), "--runs", str(runs)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path), "PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    assert f"{kills} kills over {runs} runs: 0 verdicts lost, 0 changed, 0 half files\n" in done.stdout
    assert kills < 100 or " mistaken resumes;" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_ends_the_run_which_goes_on_later(tmp_path: Path, rank: int) -> None:
    """Two processes over gloo; the one that is left must not wait for the other for ever."""
    tokens = write_tokens(tmp_path / "tokens")

    def args(root: Path, *extra: str) -> list[str]:
        watch = callback("SpectralMonitor", every_n_steps=2), callback("QKGuard", mode="fire_at_step", fire_step=5)
        ranks = ["--trainer.devices=2", "--trainer.strategy=ddp"]
        return ["fit", *run_args(root, tokens, *watch, steps=9), *ranks, "--ckpt_path", "last", *extra]

    finish(start(args(tmp_path / "calm"), tmp_path))
    kill = f"--trainer.callbacks+={callback('runs.Kill', hook='on_train_batch_end', call=8, rank=rank)}"
    killed = start(args(tmp_path / "killed", kill), tmp_path)
    said = killed.communicate(timeout=300)[0]  # ends only when both ranks have closed their output
    assert killed.returncode != 0, said
    verdict: dict[str, Any] | None = read_verdict(run_dir(tmp_path / "killed"))
    assert verdict is None or verdict["status"] == "failed"
    assert rank != 0 or killed.returncode == -signal.SIGKILL
    finish(start(args(tmp_path / "killed"), tmp_path))
    assert outcome(run_dir(tmp_path / "killed")) == outcome(run_dir(tmp_path / "calm"))
