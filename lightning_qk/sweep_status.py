"""`sweep --status`: where the runs of an experiment are, from their files alone."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from lightning_qk.executors.attempt import is_resumable, is_running, read_attempt
from lightning_qk.experiment import Experiment, Run
from lightning_qk.sweep_display import duration, progress_line, read_progress, verdict_line
from lightning_qk.verdict import DONE, read_verdict

STATES = ("collapsed", "nonfinite", "completed", "running", "queued", "interrupted", "failed", "not started")
_LEFT = "run time left (h:mm:ss)"


@dataclass(frozen=True)
class RunStatus:
    """Where one run is: its state, a line about it, and what its files say of time."""

    run: Run
    state: str
    line: str
    seconds: float | None = None  # it took, if it is done
    left: float | None = None  # it still takes, if it runs and knows its speed


def run_status(run: Run, local_sweep: bool) -> RunStatus:
    """Read a run's files.

    Args:
        run: The run.
        local_sweep: Whether a sweep trains other runs of the experiment on this or another machine.
    """
    verdict, attempt, progress = read_verdict(run.path), read_attempt(run.path), read_progress(run)
    if verdict is not None and verdict["status"] in DONE:
        return RunStatus(run, verdict["status"], verdict_line(run, verdict), seconds=verdict["seconds"])
    if is_running(run.path):
        return RunStatus(run, "running", progress_line(run, progress), left=_left(progress))
    state = attempt.get("state")
    queued = state == "requeued" or (state == "queued" and (local_sweep or attempt.get("executor") != "local"))
    reached = f" at step {progress['step']} of {progress['max_steps']}" if "step" in progress else ""
    resumes = is_resumable(run.path)
    if queued:
        return RunStatus(run, "queued", f"{run.name}: queued{f', was{reached}' if reached else ''}")
    if state == "failed" or (verdict is not None and state not in ("running", "stopped")):
        problem = attempt.get("problem") or (verdict or {}).get("error") or "failed"
        log = run.path / "log.txt"  # a job that was never submitted has none
        more = f"; see {log}" if log.exists() else ""
        return RunStatus(run, "failed", f"{run.name}: FAILED{reached}, {problem}{more}")
    if state in ("running", "stopped") or resumes or reached:
        goes_on = "its last checkpoint" if resumes else "step 0, for it has no checkpoint"
        return RunStatus(run, "interrupted", f"{run.name}: interrupted{reached}, goes on from {goes_on}")
    return RunStatus(run, "not started", f"{run.name}: not started")


def _left(progress: Mapping[str, Any]) -> float | None:
    speed = progress.get("steps_per_s")
    return (progress["max_steps"] - progress["step"]) / float(speed) if speed else None


def show_status(experiment: Experiment, root: Path, only: Sequence[str] | None, stream: TextIO = sys.stdout) -> int:
    """Print a line for every run and a table of the arms."""
    runs = experiment.runs(root, only)
    local_sweep = any(is_running(run.path) and read_attempt(run.path).get("executor") == "local" for run in runs)
    found = [run_status(run, local_sweep) for run in runs]
    for status in found:
        print(status.line, file=stream)
    usual = _usual_seconds(found)
    arms = list(dict.fromkeys(run.arm for run in runs))
    rows = [_row(arm, [status for status in found if status.run.arm == arm], usual) for arm in arms]
    rows.append(_row("total", found, usual))
    shown = [state for state in STATES if any(status.state == state for status in found)]
    width = max(len(row[0]) for row in rows)
    print(f"\n{'':<{width}}  {'  '.join(shown)}  {_LEFT}", file=stream)
    for name, counts, left in rows:
        cells = "  ".join(f"{counts[state]:>{len(state)}}" for state in shown)
        print(f"{name:<{width}}  {cells}  {'-' if left is None else duration(left):>{len(_LEFT)}}", file=stream)
    active, left = rows[-1][1]["running"], rows[-1][2]
    if active and left is not None:
        longest = max(_seconds_left(status, usual) or 0.0 for status in found)
        print(f"left: {duration(max(left / active, longest))}, {active} at a time as now", file=stream)
    return 0


def _row(name: str, found: Sequence[RunStatus], usual: Mapping[str, float]) -> tuple[str, Counter[str], float | None]:
    """A name, how many runs are in which state, and the seconds that they still take; None where that is unknown."""
    left = [_seconds_left(status, usual) for status in found]
    return name, Counter(status.state for status in found), None if None in left else sum(left)  # type: ignore[arg-type]


def _usual_seconds(found: Sequence[RunStatus]) -> dict[str, float]:
    """What a run of each arm takes: the mean over those that are done, of all arms where this arm has none."""
    usual = {}
    for arm in {status.run.arm for status in found}:
        mine = [s.seconds for s in found if s.seconds is not None and s.run.arm == arm]
        took = mine or [s.seconds for s in found if s.seconds is not None]
        if took:
            usual[arm] = sum(took) / len(took)
    return usual


def _seconds_left(status: RunStatus, usual: Mapping[str, float]) -> float | None:
    return 0.0 if status.state in DONE else status.left if status.left is not None else usual.get(status.run.arm)
