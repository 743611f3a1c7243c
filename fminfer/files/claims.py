"""Which of several runs answers an output: a claim is a file beside it, kept young by its owner.

Runs on one machine or many share a folder by them. The claim of a process of this machine can be
taken over once that has ended, any other once it has not been touched for a minute. Claims stand in
a folder of their own, `<output>.claim`, by numbers: a later owner's is higher.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from fminfer.files.disk import beside, told


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


CLAIM = ".claim"  # added to the output's name
NUMBER = re.compile("[1-9][0-9]{0,17}")  # a claim's name
BEAT_S = 5.0
STALE_S = 60.0  # without a beat: its owner is dead, or cannot reach the disk
TRUSTED_S = 20.0  # so long after its own last beat an owner need not look


@dataclass(slots=True, frozen=True)
class Found:
    """A claim that is there."""

    path: Path
    number: int
    owner: Owner | None  # None: it was not written yet, or by another version
    age_s: float  # since its last beat

    @property
    def is_dead(self) -> bool:
        if self.owner is not None and self.owner.is_near:
            return not self.owner.is_alive()  # also one that sleeps lives
        return self.age_s > STALE_S


class Claim:
    """An output that is this process's to answer.

    Args:
        data: what stands in its file.
        on_end: called once it is given back.
    """

    def __init__(self, path: Path, data: bytes, on_end: Callable[[Claim], None]) -> None:
        self.path = path
        self._data = data
        self._on_end = on_end
        self._beat_s = time.time()
        self._is_lost = False

    def beat(self) -> None:
        """Touch it, and then see whether another process has taken over.

        In this order: whoever looks for a dead one sees it young, or is seen.
        """
        try:
            os.utime(self.path)
            is_mine = self.path.read_bytes() == self._data
            newest = _numbers(self.path.parent)[-1:]  # none, if the folder was emptied just now
            self._is_lost = not is_mine or newest != [int(self.path.name)]
            self._beat_s = time.time()
        except FileNotFoundError:
            self._is_lost = True
        except OSError:
            pass  # the disk may come back

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
            if self.path.read_bytes() == self._data:
                self.path.unlink()
            self.path.parent.rmdir()  # if nobody else has one there


class Claims:
    """The claims of this process, and the thread that keeps them young."""

    def __init__(self) -> None:
        self._held: set[Claim] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._end = threading.Event()  # never set: the thread ends with the process

    def take(self, output: Path) -> Claim | None:
        """Claim an output; None: it is another living process's.

        The claims of dead ones stay until `remove_dead`: whoever slept is to find its own.

        Raises:
            OutputError: the folder cannot be written.
        """
        found = look_at(output)
        if any(not claim.is_dead for claim in found):
            return None
        number = 1 + max((claim.number for claim in found), default=0)
        path, data = _folder_of(output) / str(number), describe_me()
        with told(path):
            if not _create(path, data):
                return None
        # Two may have seen the same dead one at different times: both look again, and at most one
        # finds itself alone.
        rivals = [claim for claim in look_at(output) if claim.path != path]
        claim = Claim(path, data, self._drop)
        if any(rival.number > number or not rival.is_dead for rival in rivals):
            claim.release()
            return None
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
        while not self._end.wait(BEAT_S):
            with self._lock:
                held = list(self._held)
            for claim in held:
                claim.beat()


def look_at(output: Path, now_s: float | None = None) -> list[Found]:
    """Read an output's claims, the newest owner's last.

    Args:
        now_s: None: by the clock that dates files here, which may be a server's.
    """
    folder = _folder_of(output)
    found = []
    for number in _numbers(folder):
        path = folder / str(number)
        with contextlib.suppress(FileNotFoundError):  # given back just now
            owner, beat_s = read_owner(path), path.stat().st_mtime
            if now_s is None and not (owner and owner.is_near):
                now_s = _disk_time(output.parent)
            found.append(Found(path, number, owner, (now_s or beat_s) - beat_s))
    return found


def claimed(outputs: Iterable[Path]) -> set[Path]:
    """Return the outputs that have a claim, alive or dead; each folder is listed once."""
    outputs = list(outputs)
    there = {
        folder / name
        for folder in {output.parent for output in outputs}
        if folder.is_dir()
        for name in os.listdir(folder)
        if name.endswith(CLAIM)
    }
    return {output for output in outputs if _folder_of(output) in there}


def remove_dead(output: Path) -> None:
    """Remove the claims of processes that are gone."""
    for claim in look_at(output):
        if claim.is_dead:
            with contextlib.suppress(OSError):
                claim.path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        _folder_of(output).rmdir()  # if it is empty


def drop_claims(output: Path) -> None:
    """Remove all claims of an output, for who knows that no other process writes it."""
    for number in _numbers(_folder_of(output)):
        with contextlib.suppress(OSError):
            (_folder_of(output) / str(number)).unlink(missing_ok=True)


def _folder_of(output: Path) -> Path:
    return beside(output, CLAIM)


def _numbers(folder: Path) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(folder) if NUMBER.fullmatch(name))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _create(path: Path, data: bytes) -> bool:
    """Make a claim; return False if it is there, or its folder is being removed."""
    path.parent.mkdir(exist_ok=True)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except (FileExistsError, FileNotFoundError):
        return False
    try:
        with open(fd, "wb") as file:
            file.write(data)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return True


def _disk_time(folder: Path) -> float:
    """Return the time by the clock that dates the folder's files."""
    probe = folder / f".fminfer-{uuid.uuid4().hex}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    except OSError:  # it may only be read
        return time.time()
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
