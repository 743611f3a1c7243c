"""Lanes: whose turn it is, what becomes of events, cancelled requests, and an engine
that fails."""

from __future__ import annotations

import ast
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fminfer
from fminfer.core.errors import FminferError, RequestError
from fminfer.engine.engine_core import (
    BEHIND_ALL,
    EngineCore,
    Event,
    Failed,
    Finished,
    RequestCore,
)
from fminfer.engine.sequence import PreparedRequest
from fminfer.runtime.lines import lanes as lanes_module
from fminfer.runtime.lines.lanes import MOST_WAITING, Lane, Lanes


class FakeCore:
    """An engine in which every request waits."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, Any]] = []
        self.cancelled: list[int] = []
        self.has_work = True
        self.num_waiting_behind = 0

    def add(self, prepared: Any, *, priority: int, request_id: int) -> int:
        assert priority == BEHIND_ALL
        if prepared.meaning == b"too long":
            raise RequestError("out_of_memory", "it can never run")
        self.asked.append((request_id, prepared))
        self.num_waiting_behind += len(prepared.prompts)
        return self.asked[-1][0]

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)

    @property
    def order(self) -> list[bytes]:
        return [prepared.meaning for _, prepared in self.asked]


def request(meaning: str, num_prompts: int = 1) -> Any:
    prompts: Any = [None] * num_prompts
    return PreparedRequest(None, prompts, meaning=meaning.encode())  # type: ignore[arg-type]


def finished(request_id: int) -> Finished:
    return Finished(request_id, [], {}, {})


@pytest.fixture
def core() -> FakeCore:
    return FakeCore()


@pytest.fixture
def lanes(core: FakeCore) -> Lanes:
    return Lanes(core)  # type: ignore[arg-type]


def test_lanes_take_turns(core: FakeCore, lanes: Lanes) -> None:
    first, second, third = (lanes.open() for _ in range(3))
    for number in range(4):
        first.add(request(f"a{number}"))
    second.add(request("b0"))
    third.add(request("c0"))
    lanes.feed()
    assert core.order == [b"a0", b"b0", b"c0", b"a1", b"a2", b"a3"]


def test_few_wait_in_the_engine(core: FakeCore, lanes: Lanes) -> None:
    lane = lanes.open()
    for number in range(100):
        lane.add(request(str(number), num_prompts=2))
    lanes.feed()
    assert (
        core.num_waiting_behind == MOST_WAITING
        and lane.num_waiting == 200 - MOST_WAITING
    )
    lanes.feed()
    assert core.num_waiting_behind == MOST_WAITING
    core.num_waiting_behind -= 4
    lanes.feed()
    assert core.num_waiting_behind == MOST_WAITING
    assert core.order == [b"%d" % number for number in range(MOST_WAITING // 2 + 2)]


def test_events_go_to_their_lanes(core: FakeCore, lanes: Lanes) -> None:
    first = lanes.open()
    second = lanes.open()
    a = first.add(request("a"))
    b = second.add(request("b"))
    assert a != b
    lanes.feed()
    (core_a, _), (core_b, _) = core.asked
    others = lanes.sort_events([finished(core_b), finished(7), finished(core_a)])
    assert others == [finished(7)]
    assert first.step() == [finished(a)] and second.step() == [finished(b)]
    assert first.step() == [] and not first.request_ids
    assert lanes.sort_events([finished(core_a)]) == [finished(core_a)], "it was told"


def test_cancelled_requests(core: FakeCore, lanes: Lanes) -> None:
    lane = lanes.open()
    with_core = lane.add(request("a"))
    lanes.feed()
    queued = lane.add(request("b"))
    lane.cancel(queued)
    assert lane.num_waiting == 0
    lane.cancel(with_core)
    lane.cancel(with_core)
    assert core.cancelled == [core.asked[0][0]]
    lanes.feed()
    assert core.order == [b"a"] and lane.step() == []


def test_a_request_that_can_never_run_fails_alone(core: FakeCore, lanes: Lanes) -> None:
    lane = lanes.open()
    bad = lane.add(request("too long"))
    good = lane.add(request("good"))
    lanes.feed()
    (event,) = lane.step()
    assert isinstance(event, Failed) and event.request_id == bad
    assert event.error.code == "out_of_memory"
    lanes.sort_events([finished(core.asked[0][0])])
    assert lane.step() == [finished(good)]


def test_an_engine_that_fails_ends_all_runs(lanes: Lanes) -> None:
    early = lanes.open()
    lanes.fail(RuntimeError("gone"))
    for lane in (early, lanes.open()):
        lane.wait(60, wants_room=False)  # returns at once
        with pytest.raises(FminferError, match="gone"):
            lane.step()


def test_a_wait_ends(core: FakeCore, lanes: Lanes) -> None:
    """By an event, by room in the lane, or by a call from elsewhere; also one before
    the wait."""
    lane = lanes.open()
    lane.wait(60, wants_room=True)
    lane.wake()
    lane.wait(60, wants_room=False)
    for number in range(100):
        lane.add(request(str(number)))
    waiting = threading.Thread(target=lambda: lane.wait(60, wants_room=True))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    core.num_waiting_behind = 0
    lanes.feed()
    waiting.join(0.1)
    assert waiting.is_alive(), "36 are left"
    core.num_waiting_behind = 0
    lanes.feed()
    waiting.join(20)
    assert not waiting.is_alive()


def test_closed_lanes_feed_nothing(core: FakeCore, lanes: Lanes) -> None:
    lane = lanes.open()
    lane.add(request("a"))
    lanes.is_closed = True
    lanes.feed()
    assert core.order == []
    lane.close()
    lane.close()


def test_a_lane_has_what_a_run_asks_of_it_and_nothing_that_does_nothing() -> None:
    """It had six methods for runs that have the engine for themselves."""
    asked = {name for name in vars(RequestCore) if not name.startswith("_")}
    assert asked == {"add", "cancel", "step", "has_work", "num_waiting"}
    of_engine = {name for name in vars(EngineCore) if not name.startswith("_")} - asked
    assert not of_engine - {"wait", "wake"} & set(dir(Lane))
    for method in ast.walk(ast.parse(Path(lanes_module.__file__).read_text())):
        if isinstance(method, ast.FunctionDef):
            assert ast.get_docstring(method) is None or len(method.body) > 1, (
                method.name
            )


@pytest.fixture(scope="module", params=[1, 2])
def engine(request: pytest.FixtureRequest) -> Iterator[fminfer.Engine]:
    engine = fminfer.Engine(dtype="float32", max_rows=2, data_group_size=request.param)
    yield engine
    engine.close()


def test_requests_behind_all_others_are_counted_apart(engine: fminfer.Engine) -> None:
    """By one pipeline and by several."""
    core = engine._core
    asked = {"prompt": [5, 6], "max_tokens": 30, "ignore_eos": True}
    behind = [core.add(engine.prepare(asked), priority=BEHIND_ALL) for _ in range(12)]
    assert core.num_waiting_behind == 12 and engine.num_waiting == 0
    live = [engine.add(asked) for _ in range(6)]
    assert core.num_waiting_behind == 12 and engine.num_waiting == 6
    ended: list[int] = []
    while engine.has_work:
        events: list[Event] = engine.step()
        ended += [event.request_id for event in events if isinstance(event, Finished)]
        state = core.state
        assert state.num_waiting_behind <= 12 and state.num_waiting <= 6
    assert set(ended) == {*behind, *live}
    assert core.num_waiting_behind == core.num_waiting == 0
    if engine.config.data_group_size == 1:
        assert set(ended[:6]) == set(live)


def test_a_wait_ends_by_its_time_and_by_wake(engine: fminfer.Engine) -> None:
    """A request that was worked off ended the next wait of several pipelines, too."""
    engine.add({"prompt": [5, 6], "max_tokens": 2})
    while engine.has_work:
        engine.step()
    began_s = time.monotonic()
    engine.wait(0.3)
    assert time.monotonic() - began_s >= 0.29
    engine.wake()
    began_s = time.monotonic()
    engine.wait(30)
    assert time.monotonic() - began_s < 10


def test_an_answer_that_comes_before_its_request_is_noted_is_not_lost(
    core: FakeCore, lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's thread feeds an idle engine, whose own thread may answer at once."""
    takers: list[threading.Thread] = []
    add = core.add

    def answer_at_once(prepared: Any, **options: Any) -> int:
        core_id = add(prepared, **options)
        takers.append(
            threading.Thread(target=lanes.sort_events, args=([finished(core_id)],))
        )
        takers[0].start()
        takers[0].join(0.2)  # as long as it needs, unless it waits for the lock
        return core_id

    monkeypatch.setattr(core, "add", answer_at_once)
    core.has_work = False
    lane = lanes.open()
    request_id = lane.add(request("a"))
    takers[0].join()
    assert lane.step() == [finished(request_id)]
