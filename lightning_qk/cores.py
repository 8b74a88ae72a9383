"""The CPU cores there are for this process."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """The cores that this process may use: in a SLURM job not all of the node."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
