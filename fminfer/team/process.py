"""One pipeline of several, as the run sees it: the way to it, and the lines that it has."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from dataclasses import replace
from multiprocessing.connection import Connection

from fminfer.config import EngineConfig
from fminfer.engine.stats import EngineStats
from fminfer.input.lines import Line
from fminfer.output.records import Record
from fminfer.processes import Process, Processes
from fminfer.ranks import RankFacts
from fminfer.role import Manners, Role, Spread, Task
from fminfer.team.place import Place
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
    """A pipeline whose first process is this one's child."""

    def __init__(self, number: int, process: Process) -> None:
        assert process.line is not None, "a member has a line"
        super().__init__(number, Connection(process.line.detach()))
        self._process = process

    def end(self, wait_s: float) -> None:
        """Wait for the process, and then end it in any case."""
        self._process.end(wait_s)


class DistantPipeline(Pipeline):
    """A pipeline whose ranks were started apart; its first rank is at the other end."""

    def end(self, wait_s: float) -> None:
        """Wait until it hangs up."""
        until_s = time.monotonic() + wait_s
        with contextlib.suppress(OSError, EOFError):
            while self.connection.poll(max(0.0, until_s - time.monotonic())):
                self.connection.recv_bytes()


def start_pipelines(
    members: Processes, config: EngineConfig, spread: Spread, manners: Manners
) -> list[Pipeline]:
    """Give each process its pipeline, all of them on this machine."""
    count = len(members.all)
    return [
        start_pipeline(number, process, replace(config, num_engines=count), spread, manners)
        for number, process in enumerate(members.all)
    ]


def start_pipeline(
    number: int,
    process: Process,
    config: EngineConfig,
    spread: Spread,
    manners: Manners,
    facts: RankFacts | None = None,
) -> Pipeline:
    """Give a process its pipeline.

    Args:
        config: with the number of engines on this machine.
        facts: its place among the pipeline's ranks, if these were started apart.
    """
    config = replace(config, world_size=spread.num_stages, data_group_size=1, engine_number=number)
    role = Role("member", spread, facts, Place(process.descriptor))
    process.give(Task(role, config, manners))
    return PipelineProcess(number, process)
