"""Who is there, and who lives: what processes use that find each other, as ranks or by
claims."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from fminfer.machine.control_groups import read_text

POLL_S = 0.05


def every(
    turn_s: float, work: Callable[[], None], name: str, end: threading.Event
) -> None:
    """Call a function in each turn, on a thread of its own, until the end."""

    def turn() -> None:
        while not end.wait(turn_s):
            work()

    threading.Thread(target=turn, name=name, daemon=True).start()


def wait_until(is_so: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until something is so, at most so long; return whether it is."""
    end_s = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > end_s:
            return False
        time.sleep(POLL_S)
    return True


def machine_name(namespace: Literal["pid", "net"]) -> str:
    """Name this boot of this machine, and this container's namespace; "": the system is
    no Linux.

    Processes with an equal name see each other's process ids, or share the loopback interface.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(f'/proc/self/ns/{namespace}')}"
    except OSError:
        return ""


def create_once(path: Path, data: bytes, mode: int) -> bool:
    """Create a file; return False if it is there: of several processes one is the first.

    Who reads it now may find it empty. (Some file systems have no hard links, which
    show it whole.)
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        return False
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return True


@dataclass(slots=True, frozen=True)
class Owner:
    """A process; where two differ in `machine`, nothing is known of each other's processes."""

    host: str
    pid: int
    started: str  # a process id is used again
    machine: str  # this boot of this machine, as seen from this container
    since: float  # time.time() of its host
    token: str  # of this very file: a number is used again, too
    # of the installation; None: written by an older version
    machine_id: str | None = None

    @property
    def is_near(self) -> bool:
        """Tell whether this machine's processes are the owner's as well."""
        return self.machine != "" and self.machine == machine_name("pid")

    @property
    def is_before_boot(self) -> bool:
        """Tell whether this machine has booted since, so that the process has ended.

        Hosts of one name may share a disk. `machine_id` tells them apart.
        """
        theirs, mine = (
            name.split(" ", 1) for name in (self.machine, machine_name("pid"))
        )
        is_other_boot = theirs[0] != mine[0] and theirs[1:] == mine[1:] != []
        is_here = self.host == socket.gethostname()
        return (
            is_here
            and is_other_boot
            and self.machine_id in (None, _machine_id() or "none")
        )

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
    """Return what a file of this process says of its owner; no two are equal."""
    me = Owner(
        host=socket.gethostname(),
        pid=os.getpid(),
        started=_start(os.getpid()) or "",
        machine=machine_name("pid"),
        since=time.time(),
        token=uuid.uuid4().hex,
        machine_id=_machine_id(),
    )
    return json.dumps(asdict(me)).encode() + b"\n"


def read_owner(data: bytes) -> Owner | None:
    """Parse the owner in a file's bytes; None: there is none."""
    try:
        owner = Owner(**json.loads(data))
        types = (str, int, str, str, float, str, str | None)
        return owner if all(map(isinstance, asdict(owner).values(), types)) else None
    except (ValueError, TypeError, RecursionError):
        return None


def _machine_id() -> str:
    """Return the id of this installation, which a boot does not change; "": there is none."""
    return read_text(Path("/etc/machine-id")).strip()


def _start(pid: int) -> str | None:
    """Return when a process began, in the kernel's ticks; "": it has ended; None: not known."""
    fields = read_text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    if not fields:
        return None
    return "" if fields[0] in "ZX" else fields[19]
