"""One pipeline of several, as the team sees it: the way to it, and the requests that it has."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from fminfer.core.config import EngineConfig
from fminfer.core.messages import RankMemory
from fminfer.engine.engine_core import BEHIND_ALL, Delta
from fminfer.engine.stats import EngineState, EngineStats
from fminfer.pipeline.ranks import RankPlace, Spread
from fminfer.pipeline.watch import Fault
from fminfer.runtime.launch.processes import Process
from fminfer.runtime.launch.role import ChildOptions, Role, Task
from fminfer.runtime.load.properties import LoadedPipeline
from fminfer.runtime.team.team_messages import Ask, Report, receive, send


@dataclass(slots=True)
class StreamPosition:
    """How much of a streamed choice was sent, and how much a new pipeline will repeat.

    Another pipeline begins the choice anew after one has died; nothing is sent twice.
    """

    # Numbers of characters of the thought and of the text, token ids, parts of tool calls,
    # and tokens with logprobs.
    num_sent: tuple[int, ...] = (0, 0, 0, 0, 0)
    num_again: tuple[int, ...] = (0, 0, 0, 0, 0)
    is_over: bool = False  # its end was told

    def begin_anew(self) -> None:
        """Expect everything that was sent once more."""
        self.num_again = self.num_sent

    def cut_repeated(self, delta: Delta) -> Delta | None:
        """Return the new part of a delta; None: nothing is new."""
        logprobs = delta.logprobs
        skip = self.num_again[-1]
        listed = (
            logprobs["content" if "content" in logprobs else "tokens"]
            if logprobs
            else []
        )
        calls = _split_calls(delta.tool_calls)
        texts = (delta.reasoning, delta.text)
        parts: tuple[Any, ...] = *texts, delta.token_ids, calls, listed
        new = [part[again:] for part, again in zip(parts, self.num_again, strict=True)]
        counts = [*zip(parts, new, self.num_sent, self.num_again, strict=True)]
        if logprobs is not None:
            logprobs = {k: v if v is None else v[skip:] for k, v in logprobs.items()}
        self.num_again = tuple(
            max(0, again - len(part)) for part, _, _, again in counts
        )
        self.num_sent = tuple(sent + len(each) for _, each, sent, _ in counts)
        is_end = delta.finish_reason is not None and not self.is_over
        if not (any(new) or is_end):
            return None
        self.is_over = is_end
        reasoning, text, ids, calls, _ = new
        return replace(
            delta,
            reasoning=reasoning,
            text=text,
            token_ids=ids,
            logprobs=logprobs,
            tool_calls=_join_calls(calls),
        )


def _split_calls(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the parts of calls: each one's head, and the characters of its arguments."""
    parts = []
    for call in calls:
        function = call["function"]
        if "id" in call:
            parts.append(call | {"function": function | {"arguments": ""}})
        parts += [
            {"index": call["index"], "function": {"arguments": character}}
            for character in function["arguments"]
        ]
    return parts


def _join_calls(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the calls of such parts, or the rest of one."""
    calls = list[dict[str, Any]]()
    for part in parts:
        if "id" in part or not calls:
            calls.append(part | {"function": dict(part["function"])})
        else:
            calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    return calls


@dataclass(slots=True, eq=False)
class SentRequest:
    """A request that the team has, and what was told of its choices."""

    ask: Ask
    # by choice
    positions: dict[int, StreamPosition] = field(default_factory=dict)

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


class TeamPipeline:
    """What the run knows of one of its pipelines; it may have started its first process."""

    def __init__(
        self, number: int, connection: Connection, process: Process | None = None
    ) -> None:
        self.number = number
        self.connection = connection
        self._process = process
        self.is_alive = True
        self.failure: Fault | None = None
        self.file_digests: dict[str, str] | None = None  # None: it has not loaded
        self.loaded: LoadedPipeline | None = None  # None: it cannot answer yet
        self.stats = EngineStats()
        self.state = EngineState()  # as it last said it
        self.memory: list[RankMemory] = []  # of its ranks, numbered from 0
        self.requests: dict[int, SentRequest] = {}  # that it has, and has not answered
        # requests so far, and those behind all others
        self.num_sent = self.num_sent_behind = 0
        self.cost = 0  # of its requests

    def update(self, report: Report) -> None:
        """Take note of what it tells."""
        for name in ("state", "stats", "memory", "loaded", "failure", "file_digests"):
            if (news := getattr(report, name)) is not None:
                setattr(self, name, news)

    @property
    def num_waiting(self) -> int:
        """Requests that it has not begun."""
        return self.num_sent - self.state.num_begun

    @property
    def num_waiting_behind(self) -> int:
        """Requests behind all others that it has not begun."""
        return self.num_sent_behind - self.state.num_begun_behind

    def send_request(self, asking: SentRequest) -> None:
        """Give it a request to answer."""
        self.requests[asking.ask.request_id] = asking
        self.num_sent += 1
        self.num_sent_behind += asking.is_behind
        self.cost += asking.cost
        self.send(asking.ask)

    def send(self, what: object) -> None:
        """Send a message; a dead pipeline is noticed when it is read from."""
        with contextlib.suppress(OSError):
            send(self.connection, what)

    def remove(self, request_id: int) -> None:
        """Take note that a request is answered, or is forgotten."""
        asking = self.requests.pop(request_id, None)
        self.cost -= 0 if asking is None else asking.cost

    def close(self) -> None:
        """Hang up, at which the process ends; it holds nothing to keep."""
        self.connection.close()

    def end(self, wait_s: float) -> None:
        """Read its last reports, at most until the timeout; then end a process of ours."""
        until_s = time.monotonic() + wait_s
        with contextlib.suppress(OSError, EOFError):
            while self.connection.poll(max(0.0, until_s - time.monotonic())):
                self.memory = receive(self.connection).memory or self.memory
        if self._process is not None:
            self._process.end(max(0.0, until_s - time.monotonic()))


def start_pipeline(
    place: Spread,
    process: Process,
    config: EngineConfig,
    child_options: ChildOptions,
    facts: RankPlace | None = None,
) -> TeamPipeline:
    """Give a process its pipeline; it has a place on this machine, or among ranks apart."""
    process.send_task(
        Task(Role("member", place, facts, process.descriptor), config, child_options)
    )
    assert process.line is not None, "a member has a line"
    return TeamPipeline(place.engine_number, Connection(process.line.detach()), process)
