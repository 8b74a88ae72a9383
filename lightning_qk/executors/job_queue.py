"""The jobs of an experiment that are queued or run, as those who run them tell; `jobs.json` has their names."""

from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_qk.executors.attempt import now
from lightning_qk.experiment import SweepError
from lightning_qk.verdict import write_json_atomic

OVER = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "TIMEOUT"),
}


class JobQueue:
    """Names every submission before it is made, so that a sweep killed in the middle of it finds the jobs again.

    Args:
        directory: The experiment's directory.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._file = directory / "jobs.json"

    def add(self, executor: str, runs: Sequence[str], alive: Mapping[str, str]) -> str:
        """Announce a submission, whose jobs are `runs` in this order; returns the name that its jobs must have."""
        name = f"{self.directory.name}-{uuid.uuid4().hex[:8]}"
        submission = {"executor": executor, "name": name, "id": None, "runs": list(runs), "submitted": now()}
        self._write([*(one for one in self._read() if alive.keys() & set(one["runs"])), submission])
        return name

    def record(self, name: str, job_id: str) -> None:
        """Keep what the scheduler calls a submission."""
        self._write([{**one, "id": job_id} if one["name"] == name else one for one in self._read()])

    def folder(self, name: str) -> Path:
        """Where submitit keeps its files of a submission."""
        return (self.directory / ".jobs" / name).absolute()

    def alive(self) -> dict[str, str]:
        """The runs that have a job now, and the id of that job.

        Raises:
            SweepError: Nobody can tell.
        """
        return {**self._in_slurm(), **self._on_this_machine()}

    def cancel_commands(self) -> str:
        """What ends all jobs."""
        slurm = [f"scancel --name {one['name']}" for one in self._read() if one["executor"] == "slurm"]
        return "; ".join([*slurm, *(f"kill {process}" for process in self._on_this_machine().values())])

    def _in_slurm(self) -> dict[str, str]:
        submissions = {one["name"]: one["runs"] for one in self._read() if one["executor"] == "slurm"}
        jobs = _squeue(list(submissions)) if submissions else []
        return {submissions[name][int(job_id.partition("_")[2] or 0)]: job_id for job_id, name in jobs}

    def _on_this_machine(self) -> dict[str, str]:
        submissions = [one for one in self._read() if one["executor"] != "slurm"]
        processes = _controllers() if submissions else {}
        folders = {
            str(self.folder(one["name"]) / str(i)): run for one in submissions for i, run in enumerate(one["runs"])
        }
        return {run: processes[folder] for folder, run in folders.items() if folder in processes}

    def _read(self) -> list[dict[str, Any]]:
        try:
            return list(json.loads(self._file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return []
        except (ValueError, TypeError) as error:
            raise SweepError(
                f"{self._file}: broken ({error}); delete it once no job of this sweep is queued"
            ) from error

    def _write(self, submissions: list[dict[str, Any]]) -> None:
        write_json_atomic(self._file, submissions)


def _squeue(names: Sequence[str]) -> list[tuple[str, str]]:
    """Id and name of SLURM's jobs of these names that are not over."""
    command = ["squeue", "--noheader", "--array", "--states", "all", "--format", "%i|%j|%T", "--name", ",".join(names)]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except FileNotFoundError as error:
        raise SweepError(
            f"squeue: not found, but jobs.json names jobs of SLURM ({', '.join(names)}); run this on a machine of the "
            "cluster, or delete jobs.json if they are over"
        ) from error
    except subprocess.CalledProcessError as error:
        raise SweepError(f"{' '.join(command)}: {error.stderr.strip()}") from error
    jobs = [line.split("|") for line in lines]
    return [(job_id, name) for job_id, name, state in jobs if state not in OVER]


def _controllers() -> dict[str, str]:
    """The folders of submitit's local jobs on this machine, and their process ids."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended while we looked
            arguments = file.read_bytes().decode(errors="replace").split("\0")
            if "submitit.local._local" in arguments:
                found[arguments[-2]] = file.parent.name
    return found
