"""Several runs over lines behind the other requests of one engine: each has a lane.

A run works in a thread of its own: it reads and tokenizes lines there, and puts
requests into its lane. Before each step, the engine's thread moves some of them to the
engine, one of each lane in turn, so that a short run does not wait for a long one. They
have the lowest priority.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from itertools import count

from fminfer.core.errors import FminferError, line_error
from fminfer.engine.engine_core import BEHIND_ALL, Delta, EngineCore, Event, Failed
from fminfer.engine.sequence import PreparedRequest

# prompts of all lanes that wait in the engine: as many as it looks at in a step
MOST_WAITING = 64
FIRST_ID = 2**40  # of lanes' requests; others' ids are below it
FEW = 32  # with fewer in its lane, a run brings more


class Lane:
    """One run's way to the engine. It is a `RequestCore`, whose methods the run's
    thread calls."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._news = threading.Condition(lanes.lock)
        self.queue: dict[int, PreparedRequest] = {}  # not yet with the engine, in order
        self.num_waiting = 0  # prompts of these
        self.request_ids: set[int] = set()  # ids of the requests that the engine has
        self._events: list[Event] = []
        self._failure: BaseException | None = None
        self._is_woken = False

    def add(self, prepared: PreparedRequest, *, is_counted: bool = False) -> int:
        """Queue a request; return the id by which events name it."""
        with self._lanes.lock:
            request_id = next(self._lanes.ids)
            self.queue[request_id] = prepared
            self.num_waiting += len(prepared.prompts)
        if not self._lanes.core.has_work:  # one that computes feeds itself
            self._lanes.feed()
        return request_id

    def cancel(self, request_id: int) -> None:
        """Forget a request."""
        with self._lanes.lock:
            queued = self.queue.pop(request_id, None)
            if queued is not None:
                self.num_waiting -= len(queued.prompts)
            elif request_id in self.request_ids:
                self.request_ids.remove(request_id)
                self._lanes.core.cancel(request_id)

    def step(self) -> list[Event]:
        """Return the events since the last call.

        Raises:
            FminferError: the engine has failed.
        """
        with self._lanes.lock:
            if self._failure is not None:
                raise FminferError(
                    f"the engine failed: {self._failure}"
                ) from self._failure
            events = self._events
            self._events = []
            return events

    def wait(self, timeout_s: float, *, wants_room: bool) -> None:
        """Wait for events, for `wake`, or, if it wants room, until few requests are in
        the lane."""
        with self._news:
            self._news.wait_for(
                lambda: (
                    self._is_woken
                    or self.has_work
                    or (wants_room and self.num_waiting < FEW)
                ),
                timeout_s,
            )
            self._is_woken = False

    def wake(self) -> None:
        """End a wait, or the next one. Any thread may call it."""
        with self._news:
            self._is_woken = True
            self._news.notify_all()

    def close(self) -> None:
        """Leave the engine. The run has cancelled what is still asked."""
        with self._lanes.lock, suppress(ValueError):  # it was closed before
            self._lanes.all.remove(self)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to tell."""
        return bool(self._events) or self._failure is not None

    # For `Lanes`, which has its lock:

    def hand_one(self, core: EngineCore) -> None:
        """Give the engine the lane's first request."""
        request_id = next(iter(self.queue))
        prepared = self.queue.pop(request_id)
        self.num_waiting -= len(prepared.prompts)
        if self.num_waiting < FEW:
            self._news.notify_all()
        self.request_ids.add(request_id)
        try:
            core.add(prepared, priority=BEHIND_ALL, request_id=request_id)
        except Exception as error:  # it can never run here
            try:
                self.add_event(Failed(request_id, line_error(error, "a line")))
            except FminferError as failure:
                self.fail(failure)

    def add_event(self, event: Event) -> None:
        """Add an event of this lane."""
        if not isinstance(event, Delta):
            self.request_ids.discard(event.request_id)
        self._events.append(event)
        self._news.notify_all()

    def fail(self, failure: BaseException) -> None:
        """Have the run end."""
        self._failure = failure
        self._news.notify_all()


class Lanes:
    """All lanes of one engine. `feed`, `sort_events` and `fail` are for its thread."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.lock = threading.RLock()  # of the lanes, too
        self.all: deque[Lane] = deque()  # in the order of their turns
        self.ids = count(FIRST_ID)
        self._failure: BaseException | None = None
        # the engine gets no more requests; those that it has go on
        self.is_closed = False

    def open(self) -> Lane:
        """Return a new lane. Any thread may call it."""
        lane = Lane(self)
        with self.lock:
            self.all.append(lane)
            if self._failure is not None:
                lane.fail(self._failure)
        return lane

    def feed(self) -> None:
        """Give the engine requests, if few of the lanes wait there."""
        if not self.all or self.is_closed:
            return
        with self.lock:
            num_waiting = self.core.num_waiting_behind
            while num_waiting < MOST_WAITING and (lane := self._next()) is not None:
                num_prompts = lane.num_waiting
                lane.hand_one(self.core)
                num_waiting += num_prompts - lane.num_waiting

    def sort_events(self, events: list[Event]) -> list[Event]:
        """Give each lane its events; return those of others."""
        if not events:
            return events
        others = []
        with self.lock:
            for event in events:
                lane = next(
                    (each for each in self.all if event.request_id in each.request_ids),
                    None,
                )
                if lane is None:
                    others.append(event)
                else:
                    lane.add_event(event)
        return others

    def fail(self, failure: BaseException) -> None:
        """Have every run end: the engine has failed."""
        with self.lock:
            self._failure = failure
            for lane in self.all:
                lane.fail(failure)

    def _next(self) -> Lane | None:
        """Return the lane whose turn it is among those with requests, and put it last."""
        for _ in range(len(self.all)):
            lane = self.all[0]
            self.all.rotate(-1)
            if lane.queue:
                return lane
        return None
