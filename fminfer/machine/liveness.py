"""Which processes live: for processes that find each other, as ranks or by claims."""

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

from fminfer.machine.control_groups import read_system_file

POLL_S = 0.05


def start_repeating(
    interval_s: float, work: Callable[[], None], name: str, end: threading.Event
) -> None:
    """Call a function after each interval, on its own thread, until the end."""

    def repeat() -> None:
        while not end.wait(interval_s):
            work()

    threading.Thread(target=repeat, name=name, daemon=True).start()


def wait_until(is_true: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until a condition is true, at most so long; return whether it is."""
    end_s = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > end_s:
            return False
        time.sleep(POLL_S)
    return True


def make_machine_name(namespace: Literal["pid", "net"]) -> str:
    """Name this boot of this machine and this container's namespace; "": no Linux.

    Processes with an equal name see each other's process ids, or share the loopback interface.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(f'/proc/self/ns/{namespace}')}"
    except OSError:
        return ""


def create_file_once(path: Path, data: bytes, mode: int) -> bool:
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
        return self.machine != "" and self.machine == make_machine_name("pid")

    @property
    def is_before_boot(self) -> bool:
        """Tell whether this machine has booted since, so that the process has ended.

        Hosts of one name may share a disk. `machine_id` tells them apart.
        """
        theirs, mine = (
            name.split(" ", 1) for name in (self.machine, make_machine_name("pid"))
        )
        is_other_boot = theirs[0] != mine[0] and theirs[1:] == mine[1:] != []
        is_here = self.host == socket.gethostname()
        return (
            is_here
            and is_other_boot
            and self.machine_id in (None, _read_machine_id() or "none")
        )

    def is_alive(self) -> bool:
        """Tell whether the process has not ended; it must be of this machine."""
        started = _read_start_time(self.pid)
        if started is not None:
            return started == self.started
        try:  # it may be another user's, and not be shown
            os.kill(self.pid, 0)
        except PermissionError:
            return True
        except (ProcessLookupError, OverflowError):
            return False
        return True


def describe_this_process() -> bytes:
    """Return what a file of this process says of its owner; no two are equal."""
    me = Owner(
        host=socket.gethostname(),
        pid=os.getpid(),
        started=_read_start_time(os.getpid()) or "",
        machine=make_machine_name("pid"),
        since=time.time(),
        token=uuid.uuid4().hex,
        machine_id=_read_machine_id(),
    )
    return json.dumps(asdict(me)).encode() + b"\n"


def parse_owner(data: bytes) -> Owner | None:
    """Parse the owner in a file's bytes; None: there is none."""
    try:
        owner = Owner(**json.loads(data))
        types = (str, int, str, str, float, str, str | None)
        return owner if all(map(isinstance, asdict(owner).values(), types)) else None
    except (ValueError, TypeError, RecursionError):
        return None


def _read_machine_id() -> str:
    """Return the id of this installation, which a boot does not change; "": there is none."""
    return read_system_file(Path("/etc/machine-id")).strip()


def _read_start_time(pid: int) -> str | None:
    """Return when a process began, in the kernel's ticks; "": it has ended; None: not known.

    While threads of a killed one still end, it is a zombie that holds its locks.
    """
    fields = read_system_file(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    if not fields:
        return None
    has_ended = fields[0] in "ZX" and int(fields[17]) < 2  # its threads
    return "" if has_ended else fields[19]
