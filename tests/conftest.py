"""Every test starts from the same process: one thread, no seed left by another test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def clean_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    monkeypatch.delenv("LIGHTNING_QK_THREADS", raising=False)
    monkeypatch.delenv("LIGHTNING_QK_TRACEBACK", raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def complaint(capsys: pytest.CaptureFixture[str]) -> Callable[[Callable[[list[str]], int], list[str]], str]:
    """Runs a command that must fail, and returns all that it says on stderr, which is one line."""

    def run(command: Callable[[list[str]], int], args: list[str]) -> str:
        capsys.readouterr()
        assert command(args) == 2
        said = capsys.readouterr().err
        assert "Traceback" not in said and "usage:" not in said
        line = said.rstrip("\n").splitlines()[-1]
        assert said.count("\n") == 1, said
        assert line.startswith("error: ") and len(line) < 800, line
        return line

    return run
