"""A SLURM cluster of one node, this machine, for as long as a test takes.

It needs root, `slurmctld`, `slurmd`, `munged` and the client commands; on Debian:

    apt-get install -y --no-install-recommends slurm-wlm munge

Nothing of the machine's own configuration is read or written: munged, slurmctld and slurmd run with files of a
temporary directory, on the loopback interface and on ports of their own, and the clients find them by $SLURM_CONF.
`proctrack/linuxproc` and `task/none` need no cgroups, `accounting_storage/none` no database. The node claims four CPUs
whether it has them or not. Partition `low` can be preempted by `high` after two seconds' notice.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel")
MUNGE = ("key-file", "socket", "pid-file", "log-file", "seed-file")
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge/socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.log
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=1
ReturnToService=2
KillWait=5
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=2 State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP
"""


def missing() -> str:
    """Why there can be no cluster here; empty if there can."""
    absent = [name for name in NEEDED if shutil.which(name) is None]
    if absent:
        return f"no {', '.join(absent)} here: apt-get install -y --no-install-recommends slurm-wlm munge"
    return "" if os.getuid() == 0 else "slurmd and munged run as root"


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def cluster(directory: Path) -> Iterator[dict[str, str]]:
    """Start the daemons, wait for the node, stop all at the end; yields the environment of a client."""
    munge = directory / "munge"
    for folder in (munge, directory / "state", directory / "spool"):
        folder.mkdir(parents=True)
        folder.chmod(0o755)
    (munge / "key").write_bytes(secrets.token_bytes(128))
    (munge / "key").chmod(0o400)
    conf = directory / "slurm.conf"
    conf.write_text(
        CONF.format(
            host=socket.gethostname().partition(".")[0],
            user=pwd.getpwuid(os.getuid()).pw_name,
            directory=directory,
            controller_port=_free_port(),
            node_port=_free_port(),
        )
    )
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    commands = [
        ["munged", "--foreground", "--force", *(f"--{name}={munge / name.removesuffix('-file')}" for name in MUNGE)],
        ["slurmctld", "-D", "-f", str(conf)],
        ["slurmd", "-D", "-f", str(conf)],
    ]
    daemons = []
    try:
        for command in commands:
            with (directory / f"{command[0]}.out").open("wb") as out:
                daemons.append(subprocess.Popen(command, stdout=out, stderr=out, env=environment))
            if command[0] == "munged":
                _wait(directory, daemons, lambda: (munge / "socket").exists())
        _wait(directory, daemons, lambda: _node_state(environment) == "idle")
        yield environment
    finally:
        subprocess.run(["scancel", "--user", str(os.getuid()), "--signal", "KILL"], env=environment, check=False)
        subprocess.run(["scancel", "--user", str(os.getuid())], env=environment, check=False)
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(30)


def _node_state(environment: dict[str, str]) -> str:
    command = ["sinfo", "--noheader", "--partition", "low", "--format", "%T"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout.strip()


def _wait(directory: Path, daemons: list[subprocess.Popen[bytes]], ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not ready():
        if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in daemons):
            logs = [f"{file}:\n{file.read_text(errors='replace')}" for file in directory.glob("*.out")]
            raise RuntimeError("no cluster:\n" + "\n".join(logs))
        time.sleep(0.1)
