"""One pipeline of several, as the team sees it: the way to it, and the requests that it has."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection

from fminfer.core.config import EngineConfig
from fminfer.engine.engine_core import BEHIND_ALL
from fminfer.engine.stats import EngineStats
from fminfer.pipeline.ranks import RankFacts
from fminfer.runtime.launch.place import Place
from fminfer.runtime.launch.processes import Process, Processes
from fminfer.runtime.launch.role import Manners, Role, Spread, Task
from fminfer.runtime.team.team_heard import Heard
from fminfer.runtime.team.team_messages import Ask, Broken, Loaded, Ready, send


@dataclass(slots=True, eq=False)
class Asking:
    """A request that the team has, and what was told of its choices."""

    ask: Ask
    told: dict[int, Heard] = field(default_factory=dict)  # by choice

    @property
    def is_behind(self) -> bool:
        """Whether it waits behind all others."""
        return self.ask.priority == BEHIND_ALL

    @property
    def cost(self) -> int:
        """Tokens to feed and to draw, at most."""
        prepared = self.ask.prepared
        num_sequences = len(prepared.prompts) * prepared.params.num_candidates
        num_fed = sum(len(prompt.ids) for prompt in prepared.prompts)
        return num_fed + num_sequences * prepared.params.max_tokens


class TeamPipeline(ABC):
    """What the run knows of one of its pipelines."""

    def __init__(self, number: int, connection: Connection) -> None:
        self.number, self.connection = number, connection
        self.is_alive = True
        self.failure: Broken | None = None
        self.loaded: Loaded | None = None
        self.ready: Ready | None = None
        self.stats = EngineStats()
        self.asked: dict[int, Asking] = {}  # that it has, and has not answered
        self.num_sent = self.num_begun = 0  # requests so far
        self.num_sent_behind = self.num_begun_behind = 0  # those whose priority is `BEHIND_ALL`
        self.has_begun = False
        self.num_running = self.longest_row = 0  # sequences; most tokens that one may still draw
        self.kv_usage = 0.0  # the part of its KV cache
        self.cost = 0  # of its requests

    @property
    def num_waiting(self) -> int:
        """Requests that it has not begun."""
        return self.num_sent - self.num_begun

    @property
    def num_waiting_behind(self) -> int:
        """Those of them whose priority is `BEHIND_ALL`."""
        return self.num_sent_behind - self.num_begun_behind

    def ask(self, asking: Asking) -> None:
        """Give it a request to answer."""
        self.asked[asking.ask.request_id] = asking
        self.num_sent += 1
        self.num_sent_behind += asking.is_behind
        self.cost += asking.cost
        self.tell(asking.ask)

    def tell(self, what: object) -> None:
        """Send a message; a dead pipeline is noticed when it is read from."""
        with contextlib.suppress(OSError):
            send(self.connection, what)

    def leave(self, request_id: int) -> None:
        """Take note that a request is answered, or is forgotten."""
        asking = self.asked.pop(request_id, None)
        self.cost -= 0 if asking is None else asking.cost

    def close(self) -> None:
        """Hang up, at which the process ends; it holds nothing to keep."""
        self.connection.close()

    @abstractmethod
    def end(self, wait_s: float) -> None:
        """Wait until it has ended, at most until the timeout."""


class PipelineProcess(TeamPipeline):
    """A pipeline whose first process is this one's child."""

    def __init__(self, number: int, process: Process) -> None:
        assert process.line is not None, "a member has a line"
        super().__init__(number, Connection(process.line.detach()))
        self._process = process

    def end(self, wait_s: float) -> None:
        """Wait for the process, and then end it in any case."""
        self._process.end(wait_s)


class DistantPipeline(TeamPipeline):
    """A pipeline whose ranks were started apart; its first rank is at the other end."""

    def end(self, wait_s: float) -> None:
        """Wait until it hangs up."""
        until_s = time.monotonic() + wait_s
        with contextlib.suppress(OSError, EOFError):
            while self.connection.poll(max(0.0, until_s - time.monotonic())):
                self.connection.recv_bytes()


def start_pipelines(
    members: Processes, config: EngineConfig, spread: Spread, manners: Manners
) -> list[TeamPipeline]:
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
) -> TeamPipeline:
    """Give a process its pipeline.

    Args:
        config: with the number of engines on this machine.
        facts: its place among the pipeline's ranks, if these were started apart.
    """
    config = replace(config, world_size=spread.num_stages, data_group_size=1, engine_number=number)
    role = Role("member", spread, facts, Place(process.descriptor))
    process.give(Task(role, config, manners))
    return PipelineProcess(number, process)
