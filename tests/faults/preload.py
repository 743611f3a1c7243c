"""Commands in forks of one warm process, whose calls on a folder fail as a plan says.

tests/faults/faults.c is preloaded: it counts the calls, faults one of them, and records changes.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

SOURCE = Path(__file__).with_name("faults.c")
KINDS = (
    "open",
    "read",
    "pread",
    "write",
    "pwrite",
    "fsync",
    "rename",
    "link",
    "unlink",
    "mkdir",
    "stat",
    "mmap",
    "close",
    "truncate",
    "lock",
)
SHORT = -1
KILL = -2
ERRORS = {"short": SHORT, "kill": KILL} | {
    name: getattr(errno, name)
    for name in (
        "EIO",
        "ENOSPC",
        "EINTR",
        "EAGAIN",
        "ESTALE",
        "EDQUOT",
        "ENOMEM",
        "ENOLCK",
    )
}
WRITING = ("EIO", "ENOSPC", "EINTR", "EAGAIN", "ESTALE", "EDQUOT")
NAMING = ("EIO", "ENOSPC", "ESTALE", "EDQUOT")
# What each kind of call can say; all can be the last call before a kill.
ERRORS_OF: dict[str, tuple[str, ...]] = {
    "open": WRITING,
    # EAGAIN is only said where O_NONBLOCK is set
    "read": ("EIO", "EINTR", "ESTALE", "short"),
    "pread": ("EIO", "EINTR", "EAGAIN", "ESTALE", "short"),
    "write": (*WRITING, "short"),
    "pwrite": (*WRITING, "short"),
    "fsync": ("EIO", "ENOSPC", "EINTR", "ESTALE", "EDQUOT"),
    "rename": NAMING,
    "link": NAMING,
    "unlink": ("EIO", "ESTALE"),
    "mkdir": NAMING,
    "stat": ("EIO", "ESTALE"),
    "mmap": ("EIO", "ENOMEM", "EAGAIN"),
    "close": ("EIO", "ENOSPC", "EINTR", "EDQUOT"),
    "truncate": ("EIO", "ENOSPC", "EINTR", "ESTALE", "EDQUOT"),
    "lock": ("EIO", "EINTR", "EAGAIN", "ESTALE", "ENOLCK"),
}
ONCE_ONLY = ("EINTR", "kill")  # Python tries again after EINTR, for ever if need be
LIMIT_S = 10.0  # a command that takes longer hangs


@dataclass(slots=True, frozen=True)
class Plan:
    """A fault at the nth call of a kind, or from then on."""

    kind: str
    nth: int
    error: str
    is_lasting: bool = False

    def __str__(self) -> str:
        return f"{self.kind}:{self.nth}:{self.error}{':on' if self.is_lasting else ''}"

    @classmethod
    def read(cls, text: str) -> Plan:
        """Read what str() gives."""
        kind, nth, error, *rest = text.split(":")
        return cls(kind, int(nth), error, bool(rest))


@dataclass(slots=True, frozen=True)
class Outcome:
    """How a command ended; None as its status: it hung, and was killed."""

    status: int | None
    text: str  # what it said
    num_faults: int
    counts: dict[str, int]


def library_path() -> Path:
    """Compile the library, once for each version of it; return where it is."""
    digest = hashlib.blake2b(SOURCE.read_bytes(), digest_size=8).hexdigest()
    path = Path(tempfile.gettempdir()) / f"fminfer-faults-{os.getuid()}-{digest}.so"
    if not path.exists():
        draft = path.with_suffix(f".{os.getpid()}")
        flags = ["-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
        subprocess.run(
            ["gcc", *flags, "-o", str(draft), str(SOURCE), "-ldl"], check=True
        )
        draft.replace(path)
    return path


def become_preloaded() -> None:
    """Begin this program again with the library preloaded, unless it is."""
    path = str(library_path())
    if os.environ.get("LD_PRELOAD") == path:
        return
    variables = {"LD_PRELOAD": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    os.execve(sys.executable, [*sys.orig_argv], os.environ | variables)


class Warm:
    """This process, which has imported everything and has one thread, and its forks.

    Args:
        folder: of the files whose calls count.
        scratch: for what the forks say, and for their temporary files.
    """

    def __init__(self, folder: Path, scratch: Path) -> None:
        import torch

        import tests.preloaded  # noqa: F401
        from tests import forked

        torch.set_num_threads(1)
        self.folder = folder
        self.scratch = scratch
        self._command = forked.COMMAND
        self._be_fminfer = forked._be_fminfer
        self._library = ctypes.CDLL(str(library_path()))
        self._library.fault_count.restype = ctypes.c_long
        (scratch / "tmp").mkdir(exist_ok=True)
        self._environ = dict(os.environ) | {
            "TMPDIR": str(scratch / "tmp"),
            "HF_HUB_OFFLINE": "1",
        }
        assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads"

    def run(
        self,
        words: Sequence[str | Path],
        plan: Plan | None = None,
        log: Path | None = None,
        beside: Sequence[Sequence[str | Path]] = (),
    ) -> Outcome:
        """Run a command by a plan, and others beside it without one."""
        others = [
            self.fork(self.runner(each), self.scratch / f"beside{place}")
            for place, each in enumerate(beside)
        ]
        said = self.scratch / "said"
        pid = self.fork(self.runner(words), said, plan or Plan("none", 0, "EIO"), log)
        status = self.wait(pid)
        for other in others:
            self.wait(other)
        text = said.read_text(errors="replace")
        for place in range(len(beside)):
            text += (self.scratch / f"beside{place}").read_text(errors="replace")
        return Outcome(status, text, self.num_faults(), self.counts())

    def counts(self) -> dict[str, int]:
        """Return how many calls of each kind the last fork with a plan has made."""
        return {
            kind: self._library.fault_count(place) for place, kind in enumerate(KINDS)
        }

    def num_faults(self) -> int:
        """Return how many of them failed."""
        return int(self._library.fault_count(len(KINDS)))

    def runner(self, words: Sequence[str | Path]) -> Callable[[], NoReturn]:
        """Return what a fork does to be a command."""
        command = [*self._command, *map(str, words)]
        return lambda: self._be_fminfer(command, self._environ)

    def fork(
        self,
        work: Callable[[], NoReturn],
        said: Path,
        plan: Plan | None = None,
        log: Path | None = None,
    ) -> int:
        """Fork a process that works by a plan, if there is one; return its id."""
        pid = os.fork()
        if pid:
            return pid
        output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for target, descriptor in enumerate(
            (os.open(os.devnull, os.O_RDONLY), output, output)
        ):
            os.dup2(descriptor, target)
        if plan is not None:
            kind = KINDS.index(plan.kind) if plan.nth else -1
            what = (kind, ctypes.c_long(plan.nth), ERRORS[plan.error], plan.is_lasting)
            log_name = None if log is None else os.fsencode(log)
            self._library.fault_plan(os.fsencode(self.folder), *what, log_name)
        work()
        os._exit(99)

    def wait(self, pid: int, limit_s: float = LIMIT_S) -> int | None:
        """Return how a fork ended, killed by a signal: less than 0; None: it did not."""
        ended = os.pidfd_open(pid)
        try:
            # A machine that has much else to do is slow, and does not hang.
            end_s = time.monotonic() + limit_s
            while not select.select([ended], [], [], 1.0)[0]:
                if time.monotonic() > end_s and _hangs(pid):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    return None
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        finally:
            os.close(ended)


def _hangs(pid: int) -> bool:
    """Tell whether a process that is late waits for nothing, or computes far too long."""
    num_ticks = 0
    before = -1
    for _ in range(10):
        time.sleep(0.2)
        stats = [
            path.read_text().rpartition(")")[2].split() for path in _threads_of(pid)
        ]
        before = num_ticks
        num_ticks = sum(int(stat[11]) + int(stat[12]) for stat in stats)
        is_running = num_ticks != before or any(stat[0] in "RD" for stat in stats)
        if num_ticks > LIMIT_S * os.sysconf("SC_CLK_TCK") or not stats:
            return bool(stats)
        if is_running and before:
            return False
    return True


def _threads_of(pid: int) -> list[Path]:
    return [path for path in Path(f"/proc/{pid}/task").glob("*/stat") if path.exists()]
