"""What a process holds, seen from outside: sockets, threads and memory."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

TCP_CLOSE_WAIT = "08"
TCP_ESTABLISHED = "01"


@dataclass(slots=True, frozen=True)
class View:
    """What a process holds at one moment."""

    num_sockets: int
    num_files: int  # open descriptors, sockets among them
    num_threads: int
    rss_mb: float
    peak_mb: float


def look(pid: int) -> View:
    """Look at a process."""
    targets = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            targets.append(os.readlink(path))
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return View(
        num_sockets=sum(target.startswith("socket:") for target in targets),
        num_files=len(targets),
        num_threads=int(status["Threads"]),
        rss_mb=int(status["VmRSS"].split()[0]) / 1024,
        peak_mb=int(status["VmHWM"].split()[0]) / 1024,
    )


def count_connections(port: int) -> int:
    """Return how many connections to a port its server has not let go of."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    own = [f for f in fields if int(f[1].partition(":")[2], 16) == port]
    return sum(f[3] in (TCP_ESTABLISHED, TCP_CLOSE_WAIT) for f in own)
