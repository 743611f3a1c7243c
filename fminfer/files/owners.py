"""The process that owns a claim: which one it is, and whether it lives."""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(slots=True, frozen=True)
class Owner:
    """A process; where two differ in `machine`, nothing is known of each other's processes."""

    host: str
    pid: int
    started: str  # a process id is used again
    machine: str  # this boot of this machine, as seen from this container
    since: float  # time.time() of its host
    token: str  # of this very claim: a number is used again, too

    @property
    def is_near(self) -> bool:
        """Tell whether this machine's processes are the owner's as well."""
        return self.machine != "" and self.machine == _machine()

    def is_alive(self) -> bool:
        """Tell whether the process has not ended; it must be of this machine."""
        started = _start(self.pid)
        if started is not None:
            return started == self.started
        try:  # it may be another user's, and not be shown
            os.kill(self.pid, 0)
        except PermissionError:
            return True
        except (ProcessLookupError, OverflowError):
            return False
        return True


def describe_me() -> bytes:
    """Return what a new claim of this process says; no two are equal."""
    pid, token = os.getpid(), uuid.uuid4().hex
    me = Owner(socket.gethostname(), pid, _start(pid) or "", _machine(), time.time(), token)
    return json.dumps(asdict(me)).encode() + b"\n"


def read_owner(path: Path) -> Owner | None:
    """Read whose a claim is; None: it does not say."""
    try:
        owner = Owner(**json.loads(path.read_bytes()))
        types = (str, int, str, str, float, str)
        return owner if all(map(isinstance, asdict(owner).values(), types)) else None
    except (ValueError, TypeError, RecursionError):
        return None


def _machine() -> str:
    """Name this boot of this machine and this container's processes; "": that is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start(pid: int) -> str | None:
    """Return when a process began, in the kernel's ticks; "": it has ended; None: not known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return "" if fields[0] in "ZX" else fields[19]
