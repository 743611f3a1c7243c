"""Which of several runs answers an output: a claim is a file beside it, kept young by its owner.

Runs on one machine or many share a folder by them. The claim of a process that is known to be dead,
or that has not touched it for a minute, can be taken over. It knows nothing of what is answered.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from fminfer.output.disk import told

CLAIM = ".claim-"  # and a number, added to the output's name: a later owner's is higher
BEAT_S = 5.0
STALE_S = 60.0  # without a beat: its owner is dead, or cannot reach the disk
TRUSTED_S = 20.0  # so long after its own last beat an owner need not look


@dataclass(slots=True, frozen=True)
class Owner:
    """A process; where two differ in `machine`, nothing is known of each other's processes."""

    host: str
    pid: int
    started: str  # a process id is used again
    machine: str  # this boot of this machine, as seen from this container
    since: float  # time.time() of its host

    def is_gone(self) -> bool:
        """Tell whether the process is known to have ended."""
        return (
            self.machine != "" and self.machine == _machine() and self.started != _start(self.pid)
        )


@dataclass(slots=True, frozen=True)
class Found:
    """A claim that is there."""

    path: Path
    number: int
    owner: Owner | None  # None: it was not written yet, or by another version
    age_s: float  # since its last beat, by the clock of the disk

    @property
    def is_dead(self) -> bool:
        return self.age_s > STALE_S or (self.owner is not None and self.owner.is_gone())


class Claim:
    """An output that is this process's to answer.

    Args:
        on_end: called once it is given back.
    """

    def __init__(self, path: Path, on_end: Callable[[Claim], None]) -> None:
        self.path = path
        self._on_end = on_end
        self._beat_s = time.time()
        self._is_lost = False

    def beat(self) -> None:
        """Touch it; another process that has taken over is noticed."""
        with contextlib.suppress(OSError):  # the disk may come back
            if find_claims(_output_of(self.path))[-1:] != [self.path]:
                self._is_lost = True
                return
            os.utime(self.path)
            self._beat_s = time.time()

    def holds(self) -> bool:
        """Tell whether it is still this process's: one that slept for long may have lost it."""
        if not self._is_lost and time.time() - self._beat_s > TRUSTED_S:
            self.beat()
            # The disk does not answer, and another machine may have taken over meanwhile.
            self._is_lost = self._is_lost or time.time() - self._beat_s > STALE_S
        return not self._is_lost

    def release(self) -> None:
        """Give it back."""
        self._on_end(self)
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)


class Claims:
    """The claims of this process, and the thread that keeps them young."""

    def __init__(self) -> None:
        self._held: set[Claim] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def take(self, output: Path) -> Claim | None:
        """Claim an output; None: it is another living process's.

        Raises:
            OutputError: the folder cannot be written.
        """
        found = look_at(output)
        if any(not claim.is_dead for claim in found):
            return None
        number = 1 + max((claim.number for claim in found), default=0)
        path = output.with_name(f"{output.name}{CLAIM}{number}")
        with told(path):
            if not _create(path):
                return None
            # Two may have seen the same dead one at different times: both look again, and at most
            # one finds itself alone.
            rivals = [claim for claim in look_at(output) if claim.path != path]
            if any(claim.number > number or not claim.is_dead for claim in rivals):
                path.unlink(missing_ok=True)
                return None
        remove_dead(output)
        return self._hold(Claim(path, self._drop))

    def close(self) -> None:
        """Give all back."""
        self._stop.set()
        for claim in list(self._held):
            claim.release()

    def _hold(self, claim: Claim) -> Claim:
        with self._lock:
            self._held.add(claim)
            if self._thread is None:
                self._thread = threading.Thread(target=self._beat, name="claims", daemon=True)
                self._thread.start()
        return claim

    def _drop(self, claim: Claim) -> None:
        with self._lock:
            self._held.discard(claim)

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            with self._lock:
                held = list(self._held)
            for claim in held:
                claim.beat()


def find_claims(output: Path) -> list[Path]:
    """List an output's claims, the newest owner's last."""
    prefix = output.name + CLAIM
    names = [name for name in os.listdir(output.parent) if name.startswith(prefix)]
    numbers = sorted(int(name[len(prefix) :]) for name in names if name[len(prefix) :].isdigit())
    return [output.with_name(f"{prefix}{number}") for number in numbers]


def claimed_outputs(folder: Path) -> set[Path]:
    """List the outputs in a folder that have a claim, alive or dead."""
    names = os.listdir(folder) if folder.is_dir() else []
    return {folder / name.rpartition(CLAIM)[0] for name in names if CLAIM in name}


def look_at(output: Path) -> list[Found]:
    """Read an output's claims, the newest owner's last."""
    if not output.parent.is_dir():
        return []
    paths = find_claims(output)
    now_s = _disk_time(output.parent) if paths else 0.0
    found = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # given back just now
            age_s = now_s - path.stat().st_mtime
            number = int(path.name.rpartition(CLAIM)[2])
            found.append(Found(path, number, _read_owner(path), age_s))
    return found


def remove_dead(output: Path) -> None:
    """Remove the claims of processes that are gone."""
    for claim in look_at(output):
        if claim.is_dead:
            with contextlib.suppress(OSError):
                claim.path.unlink(missing_ok=True)


def _create(path: Path) -> bool:
    """Make a claim; return False if it is there."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return False
    pid = os.getpid()
    owner = Owner(socket.gethostname(), pid, _start(pid), _machine(), time.time())
    with open(fd, "w") as file:
        file.write(json.dumps(asdict(owner)) + "\n")
    return True


def _read_owner(path: Path) -> Owner | None:
    try:
        fields = json.loads(path.read_text())
        owner = Owner(**fields)
        types = (str, int, str, str, float)
        values = (owner.host, owner.pid, owner.started, owner.machine, owner.since)
        return owner if all(map(isinstance, values, types)) else None
    except (ValueError, TypeError, RecursionError):
        return None


def _output_of(claim: Path) -> Path:
    return claim.with_name(claim.name.rpartition(CLAIM)[0])


def _disk_time(folder: Path) -> float:
    """Return the time by the clock that dates the folder's files, which may be a server's."""
    probe = folder / f".fminfer-{uuid.uuid4().hex}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    except OSError:  # it may only be read
        return time.time()
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)


def _machine() -> str:
    """Name this boot of this machine and this container's processes; "": that is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start(pid: int) -> str:
    """Return when a process began, in the kernel's ticks; "": there is none, or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
