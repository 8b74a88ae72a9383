"""`experiment.json`: what an experiment consists of, and what its runs were started with, when, where and by what."""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_qk.executors.attempt import now
from lightning_qk.experiment import Experiment, SweepError
from lightning_qk.verdict import unsealed, versions, write_sealed


class Manifest:
    """The file of one experiment; written whole or not at all.

    Args:
        directory: The experiment's directory.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / "experiment.json"

    def read(self) -> dict[str, Any]:
        """Its content, empty where no sweep has started.

        Raises:
            SweepError: The file is broken.
        """
        try:
            return unsealed(json.loads(self.path.read_text(encoding="utf-8")), self.path)
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, AttributeError) as error:
            raise SweepError(f"{self.path}: broken ({error}); delete it and run the sweep again") from error

    def hashes(self) -> dict[str, str]:
        """The hash of the configuration that each run was last started with."""
        return {name: run["config_hash"] for name, run in self.read().get("runs", {}).items()}

    def write(
        self,
        experiment: Experiment,
        executor: str,
        commands: Mapping[str, Sequence[str]],
        hashes: Mapping[str, str],
    ) -> None:
        """Tell the report the arms and their order, and the next sweep what each run was started with.

        Args:
            experiment: What is run.
            executor: Who runs it.
            commands: The command of every run that is started now.
            hashes: The configuration hash of every run.
        """
        before, started = self.read(), now()
        runs = {
            name: {"config_hash": hashes[name], "command": list(command), "started": started}
            for name, command in commands.items()
        }
        forks = {arm: dataclasses.asdict(fork) for arm, fork in experiment.forks.items()}
        sweep = {
            "started": started,
            "executor": executor,
            "host": socket.gethostname(),
            "command": sys.argv,
            "directory": str(Path.cwd()),
            "git": code_version(),
            "versions": versions(),
            "runs": len(runs),
        }
        content = {
            "name": experiment.name,
            "arms": list(experiment.arms),
            "seeds": sorted({*before.get("seeds", []), *experiment.seeds}),
            "reference": experiment.reference,
            "twins": dict(experiment.twins),
            "against": dict(experiment.against),
            "bases": dict(experiment.bases),
            "points": {arm: dict(point) for arm, point in experiment.points.items()},
            "extrapolate": experiment.extrapolate,
            "forks": forks,
            "scaling_law": experiment.scaling_law,
            "runs": {**before.get("runs", {}), **runs},
            "sweeps": [*before.get("sweeps", []), *([sweep] if runs else [])],
        }
        write_sealed(self.path, content)


def code_version(directory: Path = Path(__file__).parent) -> dict[str, Any] | None:
    """Commit of the repository that holds the code and whether its files differ from it; None if there is none."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(directory), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # an installed package may lie in somebody else's repository
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
