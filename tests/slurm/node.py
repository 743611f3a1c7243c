"""A Slurm of one node in a folder: munged, slurmctld and slurmd, started and ended by
their ids."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NUM_CPUS = 4  # jobs at a time; more than there are is fine
# No control groups, no accounting, no systemd: it runs in a container. Requeued jobs wait for
# cred_expire, two minutes by default.
CONFIG = """\
ClusterName=try
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2
KillWait=20
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def one_node(folder: Path) -> Iterator[None]:
    """Have a Slurm run, which the commands find by SLURM_CONF; end it with all that it runs."""
    folder.chmod(0o755)  # munged wants it so
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    ports = _free_ports(2)
    config = folder / "slurm.conf"
    config.write_text(
        CONFIG.format(folder=folder, host=host, ports=ports, cpus=NUM_CPUS)
    )
    os.environ["SLURM_CONF"] = str(config)
    daemons: list[subprocess.Popen[bytes]] = []
    names = ("key-file=munge.key", "socket=munge.sock", "pid-file=munged.pid")
    names = (*names, "log-file=munged.log", "seed-file=munge.seed")
    munge = [f"--{name.replace('=', f'={folder}/')}" for name in names]
    commands = [
        ["munged", "--foreground", "--force", *munge],
        ["slurmctld", "-D", "-c", "-f", str(config)],
        ["slurmd", "-D", "-c", "-f", str(config), "-N", host],
    ]
    try:
        for command in commands:
            with (folder / f"{command[0]}.out").open("wb") as out:
                # A session of its own: who tells all of us to end leaves it to us to
                # end it, last.
                daemons.append(
                    subprocess.Popen(
                        command, stdout=out, stderr=out, start_new_session=True
                    )
                )
            time.sleep(1)
        _wait_until_idle(folder, daemons)
        yield
    finally:
        subprocess.run(
            ["scancel", "--full", "--signal=KILL", f"--user={os.getuid()}"], check=False
        )
        subprocess.run(["scancel", f"--user={os.getuid()}"], check=False)
        wait_until(is_empty, 25, "the last jobs to end", is_needed=False)
        for daemon in reversed(daemons):
            _end(daemon)


def job_field(job: str, name: str) -> str:
    """Return a field of what Slurm knows of a job."""
    shown = subprocess.run(
        ["scontrol", "--oneliner", "show", "job", job],
        capture_output=True,
        text=True,
        check=True,
    )
    fields = dict(word.partition("=")[::2] for word in shown.stdout.split())
    return fields[name]


def wait_until(holds, limit_s: float, what: str, *, is_needed: bool = True) -> None:  # type: ignore[no-untyped-def]
    """Wait, but not for ever."""
    ends_s = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > ends_s:
            assert not is_needed, f"waited {limit_s:g} s for {what}"
            return
        time.sleep(0.5)


def is_gone(job: str) -> bool:
    """Tell whether no task of a job is in the queue."""
    return job not in _squeue()


def is_empty() -> bool:
    """Tell whether the queue is."""
    return not _squeue()


def _squeue() -> list[str]:
    listing = subprocess.run(
        ["squeue", "--noheader", "--format=%F"],
        capture_output=True,
        text=True,
        check=False,
    )
    return listing.stdout.split()


def _wait_until_idle(folder: Path, daemons: list[subprocess.Popen[bytes]]) -> None:
    def is_idle() -> bool:
        for daemon in daemons:
            if daemon.poll() is not None:
                logs = "".join(
                    path.read_text()[-2000:] for path in folder.glob("*.log")
                )
                raise AssertionError(f"{daemon.args} ended: {logs}")
        listing = subprocess.run(
            ["sinfo", "--noheader", "--format=%T"],
            capture_output=True,
            text=True,
            check=False,
        )
        return listing.stdout.strip() == "idle"

    wait_until(is_idle, 60, f"the node, whose logs are in {folder}")


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.send_signal(signal.SIGTERM)
    try:
        daemon.wait(10)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
