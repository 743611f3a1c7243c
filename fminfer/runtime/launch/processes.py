"""Starts the other processes of a run on this machine, watches them, and ends them.

Each is `python -m fminfer`, never the program that made the engine. It starts early,
imports what it needs, and then waits on its stdin for its task.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from fminfer.core.config import EngineConfig
from fminfer.machine.liveness import start_repeating, wait_until
from fminfer.machine.stopper import WARNINGS, Stopper
from fminfer.pipeline.ranks import RankPlace, Spread
from fminfer.runtime.launch.role import ChildOptions, Role, Task

COMMAND = [sys.executable, "-m", "fminfer", "serve-part"]
# Terminals and schedulers send these to all processes: only the run's own is to hear them.
MEANT_FOR_FIRST = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, *WARNINGS)
LOOPBACK = "127.0.0.1"
OUTLIVE_S = 5.0  # time for a process to end by itself once its parent is dead


class Process:
    """A process of the run that this one has started.

    Args:
        name: what its words begin with.
        num_ranks: that it is to start itself.
        has_line: give it a connection, whose end here is `line`.
    """

    def __init__(
        self, name: str, *, num_ranks: int = 0, has_line: bool = False
    ) -> None:
        self.name = name
        self.line: socket.socket | None = None
        self.descriptor = -1  # of the other end, in that process
        theirs: socket.socket | None = None
        if has_line:
            self.line, theirs = socket.socketpair()
            self.descriptor = theirs.fileno()
        # which it inherits
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, MEANT_FOR_FIRST)
        try:
            self._process = subprocess.Popen(
                [*COMMAND, name, "--ranks", str(num_ranks)],
                env=_environ(),
                stdin=subprocess.PIPE,
                stdout=2,  # this one's stderr
                stderr=2,
                pass_fds=() if theirs is None else (self.descriptor,),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if theirs is not None:
            theirs.close()

    def send_task(self, task: Task) -> None:
        """Send it its task; a dead process is noticed elsewhere."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(task.to_json().encode() + b"\n")
            self._process.stdin.flush()

    @property
    def status(self) -> int | None:
        """Its exit status, below 0 the signal that ended it; None: it runs."""
        return self._process.poll()

    def end(self, wait_s: float = 0.0) -> None:
        """Wait until it has ended by itself, at most until the timeout; then kill it."""
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def kill(self) -> None:
        """End it at once, also if it is stopped."""
        self._process.kill()


class Processes:
    """The other ranks of a pipeline whose rank 0 is this process, or the members of a team.

    Each may start so many ranks itself.
    """

    def __init__(
        self, names: Sequence[str], *, num_ranks: int = 0, has_line: bool = False
    ) -> None:
        self.all: list[Process] = []
        self._is_over = False
        try:
            for name in names:
                self.all.append(Process(name, num_ranks=num_ranks, has_line=has_line))
        except BaseException:
            self.end()
            raise

    @classmethod
    def of(cls, role: Role) -> Processes:
        """Start the processes that one of this role starts."""
        is_team = role.spread.num_pipelines > 1
        num_ranks = role.spread.num_ranks - 1 if is_team else 0
        return cls(role.children, num_ranks=num_ranks, has_line=is_team)

    def assign_ranks(
        self, config: EngineConfig, spread: Spread, child_options: ChildOptions
    ) -> RankPlace:
        """Give each its rank; return rank 0's place, with a socket that is open already."""
        listener = socket.create_server((LOOPBACK, 0), backlog=1024)
        facts = RankPlace(
            0,
            len(self.all) + 1,
            LOOPBACK,
            listener.getsockname()[1],
            listen_fd=listener.detach(),
            source="the engine",
            is_one_machine=True,
            secret=secrets.token_hex(32),
        )
        for rank, process in enumerate(self.all, start=1):
            its = replace(facts, rank=rank, listen_fd=None, parent=os.getpid())
            process.send_task(Task(Role("rank", spread, its), config, child_options))
        return facts

    def why_ended(self) -> str:
        """Say which process has ended without being told to, and how; "": none."""
        ended = [process for process in self.all if process.status is not None]
        if self._is_over or not ended:
            return ""
        # who was killed died first
        first = min(ended, key=lambda process: process.status or 0)
        if (status := first.status or 0) >= 0:
            return f"{first.name} ended by itself, with exit status {status}; see what it said"
        why = (
            " (the system does so when memory runs out)"
            if status == -signal.SIGKILL
            else ""
        )
        return f"{first.name} was ended by {signal.Signals(-status).name}{why}"

    def why_killed(self, wait_s: float) -> str:
        """Say which process a signal has ended within this time; "": none."""

        def is_known() -> bool:
            return self._is_over or any(
                (process.status or 0) < 0 for process in self.all
            )

        return self.why_ended() if wait_until(is_known, wait_s) else ""

    def end(self, wait_s: float = 0.0) -> None:
        """End all processes; each has this time to end by itself."""
        self._is_over = True
        until_s = time.monotonic() + wait_s
        for process in self.all:
            process.end(max(0.0, until_s - time.monotonic()))

    def kill(self) -> None:
        """End all at once, and wait for none."""
        self._is_over = True
        for process in self.all:
            process.kill()


def end_after(parent: int) -> None:
    """End this process soon after its parent, also while it imports or waits for a
    stuck disk."""

    def end_orphan() -> None:
        if os.getppid() != parent:
            time.sleep(OUTLIVE_S)
            os._exit(1)

    start_repeating(1.0, end_orphan, "parent", end=threading.Event())  # for ever


def end_parent(parent: int, wait_s: float) -> None:
    """Wait until the process that started this one has ended; then end it: it may be stuck."""
    if not wait_until(lambda: os.getppid() != parent, wait_s):
        with suppress(OSError):
            os.kill(parent, signal.SIGKILL)


def _environ() -> dict[str, str]:
    """Return the variables of a process that is to find the same fminfer as this one."""
    environ = {"TORCH_CPP_LOG_LEVEL": "ERROR"} | os.environ
    home = str(Path(__file__).parents[3])  # the folder in which the package lies
    # perhaps this process was told only while it ran
    if not home.startswith(sys.prefix):
        environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, (environ.get("PYTHONPATH"), home))
        )
    # `python -m` must not look there if we did not
    if sys.path[0] not in ("", os.getcwd()):
        environ["PYTHONSAFEPATH"] = "1"
    return environ


@dataclass(slots=True, frozen=True)
class ProcessContext:
    """One of the processes of a command that has an engine."""

    config: EngineConfig
    role: Role
    children: Processes  # what this process has started
    stopper: Stopper  # hears that the command is to stop
    # ends this process at once; it is told the kind of an error
    end: Callable[[str], None]
    elapsed_s: Callable[[], float]  # since the command started
    is_quiet: bool
    is_verbose: bool

    @property
    def child_options(self) -> ChildOptions:
        """How the processes that this one has started should behave."""
        return ChildOptions(self.stopper.grace_s, self.is_verbose, is_of_command=True)
