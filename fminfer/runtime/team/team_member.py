"""One of several pipelines that answer one input: it gets requests, and sends events."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, get_args

from fminfer.core.errors import FminferError, line_error
from fminfer.engine.engine_core import BEHIND_ALL, Event, Failed
from fminfer.pipeline.group import Group
from fminfer.pipeline.ranks import Spread
from fminfer.pipeline.watch import Fault
from fminfer.plan.run_plan import RunPlan
from fminfer.runtime.launch.role import Role
from fminfer.runtime.load.assembly import load_tokenizer
from fminfer.runtime.load.one_pipeline import OnePipeline
from fminfer.runtime.team.team_messages import (
    END,
    GO_ON,
    Ask,
    Cancel,
    Order,
    Report,
    receive,
    send,
)

STATS_EVERY_S = 0.5


def serve_pipeline(
    group: Group | None,
    role: Role,
    plan_run: Callable[[Group | None], RunPlan],
) -> None:
    """Answer the run's requests until there are no more; tell the run why that ends early."""
    assert role.link is not None, "a member has a way to the run"
    connection = Connection(role.link)
    try:
        TeamMember(plan_run(group), group, connection, role.spread).serve()
    except (EOFError, ConnectionError, TimeoutError):
        os._exit(1)  # the run is gone, or the network to it
    except Exception as error:
        name = "" if isinstance(error, FminferError) else f"{type(error).__name__}: "
        send(connection, Report(failure=Fault.from_error(error, name)))
        raise


class TeamMember:
    """Keeps an engine busy with what comes over a connection."""

    def __init__(
        self,
        plan: RunPlan,
        group: Group | None,
        connection: Connection,
        spread: Spread,
    ) -> None:
        self._connection = connection
        # What was asked and can never run, and whether its priority is `BEHIND_ALL`.
        self._refused: deque[tuple[Failed, bool]] = deque()
        self._orders: deque[Order] = deque()
        self._has_ended = False
        self._failure: Exception | None = None  # of the listener
        self._told_s = 0.0
        self._told = (0, False)  # what was said of how it stands

        def wait_for_others(file_digests: dict[str, str]) -> None:
            send(connection, Report(file_digests=file_digests))
            assert receive(connection) == GO_ON

        tokenizer = load_tokenizer(plan.config, plan.checkpoint)
        self._computing = OnePipeline(
            plan,
            tokenizer,
            group=group,
            spread=spread,
            on_loaded=wait_for_others,
        )
        self._core = self._computing.core

    def serve(self) -> None:
        """Answer until no more is asked."""
        computing = self._computing
        core = self._core
        threading.Thread(target=self._listen, name="listener", daemon=True).start()
        send(self._connection, Report(loaded=computing.loaded, memory=computing.memory))
        while not self._has_ended:
            core.wait()
            if self._failure is not None:
                raise self._failure
            while self._orders:
                getattr(core, self._orders.popleft())()
            self._send_report(core.step() if core.has_work else [])
        computing.close()
        send(self._connection, Report([], core.state, core.stats, computing.memory))

    def _send_report(self, events: list[Event]) -> None:
        """Send events, and now and then counts."""
        core = self._core
        now_s = time.monotonic()
        while self._refused:
            failed, is_behind = self._refused.popleft()
            events.append(failed)
            core.stats.num_begun += 1  # it waits no longer
            core.stats.num_begun_behind += is_behind
        stands = core.stats.num_begun, core.has_begun
        is_due = now_s - self._told_s > STATS_EVERY_S or not core.has_work
        if events or is_due or stands != self._told:
            stats, memory = (
                (core.stats, self._computing.memory) if is_due else (None, None)
            )
            send(self._connection, Report(events, core.state, stats, memory))
            self._told = stands
            self._told_s = now_s if is_due else self._told_s

    def _listen(self) -> None:
        """Receive the run's messages; the run may also hang up."""
        core = self._core
        while True:
            try:
                said = receive(self._connection)
            except (EOFError, OSError):
                sys.stderr.flush()
                os._exit(1)
            try:
                self._follow_message(said)
            except Exception as error:  # the main thread says so, and ends
                self._failure = error
            core.wake()

    def _follow_message(self, said: Any) -> None:
        """Take note of what the run has said."""
        if isinstance(said, Ask):
            self._add_request(said)
        elif isinstance(said, Cancel):
            self._core.cancel(said.request_id)
        elif said == END:
            self._has_ended = True
        elif said in get_args(Order):
            self._orders.append(said)

    def _add_request(self, ask: Ask) -> None:
        try:
            self._core.add(
                ask.prepared,
                priority=ask.priority,
                is_streamed=ask.is_streamed,
                is_counted=ask.is_counted,
                request_id=ask.request_id,
            )
        except Exception as error:
            failed = Failed(ask.request_id, line_error(error, "a request"))
            self._refused.append((failed, ask.priority == BEHIND_ALL))
