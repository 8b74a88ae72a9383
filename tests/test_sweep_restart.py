"""A campaign that is killed again and again ends as if nobody had touched it: with the same runs and verdicts."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from campaign import finished, write_campaign
from sweep_lab import Lab

from lightning_qk.manifest import Manifest
from lightning_qk.sweep import main

KILLS = 5
DRIVER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    sys.path.insert(0, str(Path(sys.argv[1]).parent))
    from sweep_lab import Lab
    names = [f"{arm}/seed_{seed}" for arm in ("fp32", "fault") for seed in range(3)]
    lab = Lab(Path(sys.argv[2]), how=dict.fromkeys(names, "train"), out=sys.stdout)
    sys.exit(lab.sweep(jobs=2, experiment=lab.experiment((0, 1, 2))).run())
    """
)


def resumptions(directory: Path) -> int:
    logs = [file.read_text() for file in directory.glob("*/seed_*/log.txt")]
    return sum(log.count("from the last checkpoint: ") for log in logs)


def killed_again_and_again(
    command: list[str], log: Path, progress: Callable[[], int], most: int, jitter: float, check: Callable[[], None]
) -> None:
    """Start a sweep, kill it without notice after some more checkpoints, look, and so on; then let it be.

    The moments are counted in checkpoints, not in seconds, so that they lie within the runs on any machine.

    Args:
        command: The sweep.
        log: Where its output goes.
        progress: How many checkpoints all runs have written by now.
        most: The most checkpoints until a kill.
        jitter: The most seconds after that, so that a kill can come at any moment between two checkpoints.
        check: Looks at what there is.
    """
    draw = random.Random(0)
    for last in [False] * KILLS + [True]:
        goal = progress() + draw.randint(1, most)
        with log.open("w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        while not last and process.poll() is None and progress() < goal:
            time.sleep(0.005)
        if not last:
            time.sleep(draw.uniform(0, jitter))
            process.send_signal(signal.SIGKILL)
        code = process.wait(600)
        check()
        assert code == 0 or (code == -signal.SIGKILL and not last), log.read_text()


def test_killed_at_random_moments(tmp_path: Path) -> None:
    calm, lab = Lab(tmp_path / "calm"), Lab(tmp_path / "killed")
    calm.how = {f"{arm}/seed_{seed}": "train" for arm in ("fp32", "fault") for seed in range(3)}
    assert calm.sweep(jobs=2, experiment=calm.experiment((0, 1, 2))).run() == 0
    expected = calm.verdicts()
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    done: Counter[str] = Counter()  # starts of the runs that were done

    def check() -> None:
        starts = Counter(lab.launched())
        assert Manifest(lab.path("")).hashes().keys() <= expected.keys()  # its checksum holds
        for name, found in lab.verdicts().items():
            assert found == expected[name]
            label = name.replace("/", "-")
            assert done.setdefault(label, starts[label]) == starts[label], f"{name} was done and was run again"

    command = [sys.executable, str(driver), __file__, str(lab.root)]

    def checkpoints() -> int:
        files = lab.path("").glob("*/seed_*/checkpoints/last.ckpt")
        return sum(json.loads(file.read_text())[0] // 5 for file in files)

    killed_again_and_again(command, tmp_path / "out.txt", checkpoints, most=4, jitter=0.1, check=check)
    assert lab.verdicts() == expected
    assert resumptions(lab.path("")) >= 2


@pytest.mark.slow
def test_trainings_killed_at_random_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    config = write_campaign(tmp_path, tmp_path / "tokens", steps=120)
    assert main(["-c", str(config), "--root", str(tmp_path / "calm"), "--jobs", "2", "--report", "false"]) == 0
    expected = finished(tmp_path / "calm")
    assert len(expected) == 4
    root = tmp_path / "killed"
    seen: dict[str, Any] = {}

    def check() -> None:
        for name, run in finished(root).items():
            assert seen.setdefault(name, run) == run
            assert run == expected[name]

    command = [sys.executable, "-m", "lightning_qk", "sweep", "-c", str(config), "--root", str(root)]
    command += ["--jobs", "2", "--report", "false"]

    seen_checkpoints: set[Path] = set()  # old ones are removed

    def checkpoints() -> int:
        seen_checkpoints.update(root.glob("campaign/*/seed_*/checkpoints/step_*.ckpt"))
        return len(seen_checkpoints)

    # 160 in all: five kills leave some to be written
    killed_again_and_again(command, tmp_path / "out.txt", checkpoints, most=24, jitter=0.1, check=check)
    assert finished(root).keys() == expected.keys()
    assert resumptions(root / "campaign") >= 2
