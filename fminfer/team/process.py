"""One pipeline of several, as the run sees it: the way to it, and the lines that it has."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from multiprocessing.connection import Connection
from types import MappingProxyType

from fminfer.engine.stats import EngineStats
from fminfer.input.lines import Line
from fminfer.output.records import Record
from fminfer.team.place import PLACE, Place
from fminfer.team.wire import Ended, Failed, Loaded, Ready, send

Key = tuple[int, int]  # a line's source and number


class Pipeline(ABC):
    """What the run knows of one of its pipelines."""

    def __init__(self, number: int, connection: Connection) -> None:
        self.number, self.connection = number, connection
        self.is_alive = True
        self.failure: Failed | None = None
        self.loaded: Loaded | None = None
        self.ready: Ready | None = None
        self.ended: Ended | None = None
        self.stats = EngineStats()
        self.lines: dict[Key, Line] = {}  # that it has, and has not answered
        self.num_untaken = 0
        self.cost = 0  # of its lines

    def send(self, lines: list[Line]) -> None:
        """Give it lines to answer."""
        self.lines.update(((line.source, line.number), line) for line in lines)
        self.num_untaken += len(lines)
        self.cost += sum(len(line.raw) for line in lines)
        self.tell(lines)

    def tell(self, what: object) -> None:
        """Say something; one that died meanwhile is noticed when it is listened to."""
        with contextlib.suppress(OSError):
            send(self.connection, what)

    def finish(self, record: Record) -> bool:
        """Take note that a line is answered; return False if it is not this one's."""
        line = self.lines.pop((record.line.source, record.line.number), None)
        self.cost -= 0 if line is None else len(line.raw)
        return line is not None

    def close(self) -> None:
        """Hang up, at which a process that has not ended ends; nothing in it is worth keeping."""
        self.connection.close()

    @abstractmethod
    def end(self, wait_s: float) -> None:
        """Wait until it is gone, so long at most."""


class PipelineProcess(Pipeline):
    """A pipeline whose first process is this one's child.

    Args:
        share: which of the engines on this machine it is, and how many there are.
        arguments: of `fminfer run`.
        environ: variables that it has beside those of this process.
    """

    def __init__(
        self,
        number: int,
        share: tuple[int, int],
        arguments: list[str],
        environ: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            place = Place(theirs.fileno(), *share)
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fminfer", "run", *arguments],
                env={**os.environ, **environ, PLACE: place.to_text()},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the run, which tells it
            )
        super().__init__(number, Connection(ours.detach()))

    def end(self, wait_s: float) -> None:
        """Wait for the process, and then end it in any case."""
        try:
            self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class DistantPipeline(Pipeline):
    """A pipeline whose ranks were started apart; its first rank is at the other end."""

    def end(self, wait_s: float) -> None:
        """Wait until it hangs up."""
        until_s = time.monotonic() + wait_s
        with contextlib.suppress(OSError, EOFError):
            while self.connection.poll(max(0.0, until_s - time.monotonic())):
                self.connection.recv_bytes()


def start_pipelines(count: int, arguments: list[str]) -> list[Pipeline]:
    """Start so many pipelines on this machine."""
    return [PipelineProcess(number, (number, count), arguments) for number in range(count)]
