"""`add`, `cancel`, `wait` and `step`: from many threads, at any moment, and after failures."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fminfer.contract.envelope import Line
from fminfer.core.errors import RequestError, StepLimitError
from fminfer.engine.engine_core import Delta, Event, Finished
from tests.conftest import IS_ALL
from tests.engine import test_contract
from tests.engine.test_prefix import Bench
from tests.streams import answer_in, check_stream, events_of, of_request, within

SIZES: dict[str, Any] = {
    "has_cache": True,
    "block_size": 4,
    "num_blocks": 60,
    "chunk": 16,
}
LONG = {
    "prompt": [5] * 40,
    "max_tokens": 12,
    "temperature": 0,
    "return_token_ids": True,
}


def make_rows(seed: int, count: int) -> list[dict[str, Any]]:
    """Draw requests of all kinds that share prefixes."""
    rng = random.Random(seed)
    return [
        {
            "prompt": [i % 2] * rng.randint(1, 30) + [rng.randrange(256)],
            "max_tokens": rng.randint(0, 12),
            "temperature": rng.choice([0, 1]),
            "n": rng.choice([1, 1, 3]),
            "echo": rng.random() < 0.5,
            "logprobs": rng.choice([None, 0, 2]),
            "stop_token_ids": list(range(20)),
            "return_token_ids": True,
        }
        for i in range(count)
    ]


def alone(request: dict[str, Any]) -> list[dict[str, Any]]:
    bench = Bench(**SIZES)
    request_id = bench.add(**request)
    return answer_in(events_of(bench.loop), request_id)


def check_books(bench: Any) -> None:
    bench.scheduler.check_books()
    stats = bench.loop.stats
    read = bench.loop.stats.read
    # What was in flight for a cancelled row is drawn, too.
    num_told = stats.num_generated_tokens + stats.num_undrawn
    is_done = stats.num_ended == read.num_sequences and num_told >= read.max_draws
    assert is_done, "work that nobody does any more"
    assert not (bench.loop._open or bench.loop._streams)


@pytest.mark.parametrize("at", range(20))
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3, "temperature": 1},
        {"echo": True, "logprobs": 1, "max_tokens": 3},
        {"echo": True, "logprobs": 1, "max_tokens": 0},
        {"prompt": [[5] * 40, [6] * 30, [7]]},
    ],
)
def test_a_cancelled_request_leaves_nothing_behind(
    at: int, fields: dict[str, Any]
) -> None:
    """While it waits, is fed, is between steps or in one, and once it is finished."""
    others = [LONG | {"prompt": [5] * (30 + i)} for i in range(4)]
    bench = Bench(**SIZES)
    first = [bench.add(is_streamed=True, **request) for request in others[:2]]
    victim = bench.add(is_streamed=True, **LONG | fields)
    last = [bench.add(is_streamed=True, **request) for request in others[2:]]
    events: list[Event] = []
    for _ in range(at):
        events += bench.loop.step()
    bench.loop.cancel(victim)
    bench.loop.cancel(victim)
    bench.loop.cancel(10**6)
    assert bench.loop.has_work
    has_ended = any(
        not isinstance(event, Delta) for event in of_request(events, victim)
    )
    later = bench.loop.step()
    later += events_of(bench.loop)
    assert not of_request(later, victim), "it is told nothing more"
    events += later
    if has_ended:
        check_stream(events, victim)
    for request, request_id in zip(others, first + last, strict=True):
        assert check_stream(events, request_id) == alone(request)
    check_books(bench)


def test_cancelled_while_it_waits_it_costs_nothing() -> None:
    bench = Bench(**SIZES)
    bench.loop.cancel(bench.add(**LONG))
    assert events_of(bench.loop) == []
    assert bench.loop.stats.num_steps == 0
    check_books(bench)


@pytest.mark.parametrize("has_cache", [False, True])
def test_how_busy_it_is(has_cache: bool) -> None:
    """Blocks that only the prefix cache keeps can be had at once: they count as free."""
    bench = Bench(**SIZES | {"has_cache": has_cache, "chunk": 64}, max_rows=2)
    loop = bench.loop

    def state() -> tuple[int, int, float]:
        return loop.num_waiting, loop.num_running, round(loop.state.kv_usage, 9)

    assert state() == (0, 0, 0)
    for token in range(3):
        bench.add(prompt=[token] * 40, max_tokens=2, temperature=0)
    assert state() == (3, 0, 0)
    loop.step()
    assert state() == (1, 2, round(2 * 11 / 60, 9))  # 42 tokens in blocks of 4
    events_of(loop)
    assert state() == (0, 0, 0)
    assert (bench.pool.num_idle > 0) is has_cache


def test_other_threads_may_ask_how_busy_it_is() -> None:
    bench = Bench(**SIZES)
    asked: list[tuple[int, int, float]] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            asked.append(
                (
                    bench.loop.num_waiting,
                    bench.loop.num_running,
                    bench.loop.state.kv_usage,
                )
            )

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for row in make_rows(1, 100):
            bench.add(**row)
            bench.loop.step()
        events_of(bench.loop)
    finally:
        is_over.set()
        thread.join()
    assert len(asked) > 100 and all(0 <= usage <= 1 for _, _, usage in asked)
    assert all(0 <= waiting <= 400 and 0 <= rows <= 12 for waiting, rows, _ in asked)


@settings(
    max_examples=240 if IS_ALL else 24,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
)
@given(
    seed=st.integers(0, 9999),
    priorities=st.lists(st.integers(-1, 2), min_size=20, max_size=20),
    cancels=st.dictionaries(st.integers(0, 40), st.integers(0, 19), max_size=12),
    every=st.integers(1, 4),
    num_blocks=st.sampled_from([30, 60, 400]),
    max_rows=st.sampled_from([3, 12]),
)
def test_any_order_of_calls(
    seed: int,
    priorities: list[int],
    cancels: dict[int, int],
    every: int,
    num_blocks: int,
    max_rows: int,
) -> None:
    """Whatever is added, cancelled and put back: each answer is the one that it has alone."""
    requests = make_rows(seed, 20)
    bench = Bench(**SIZES | {"num_blocks": num_blocks}, max_rows=max_rows)
    events: list[Event] = []
    ids: list[int] = []
    cancelled = set()
    for turn in range(41):
        if turn % every == 0 and len(ids) < 20:
            number = len(ids)
            ids.append(
                bench.add(priorities[number], is_streamed=True, **requests[number])
            )
        if cancels.get(turn, 20) < len(ids):
            bench.loop.cancel(ids[cancels[turn]])
            cancelled.add(ids[cancels[turn]])
        if bench.loop.has_work:
            events += bench.loop.step()
    events += events_of(bench.loop)
    for request, request_id in zip(requests, ids, strict=False):
        if request_id not in cancelled:
            assert check_stream(events, request_id) == alone(request)
    check_books(bench)


def test_adders_and_cancellers_in_eight_threads() -> None:
    bench = Bench(**SIZES)
    requests = make_rows(1, 8 * 30)
    ids: dict[int, int] = {}
    cancelled: set[int] = set()
    num_left = 8
    lock = threading.Lock()

    def add(first: int) -> None:
        nonlocal num_left
        rng = random.Random(first)
        for number in range(first, 240, 8):
            ids[number] = bench.add(is_streamed=number % 2 == 0, **requests[number])
            if number % 5 == 0:
                bench.loop.cancel(ids[number])
                cancelled.add(ids[number])
            if rng.random() < 0.3:
                time.sleep(0.001)
        with lock:
            num_left -= 1
        bench.loop.wake()

    events: list[Event] = []
    num_idle = 0

    def serve() -> None:
        nonlocal num_idle
        while num_left or bench.loop.has_work:
            num_idle += not bench.loop.wait()
            events.extend(bench.loop.step())
            assert bench.loop.num_waiting >= 0

    threads = [threading.Thread(target=add, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    within(60, serve)
    for thread in threads:
        thread.join()
    assert num_idle <= 8, "it waits, and does not look again and again"
    assert not bench.loop.has_work and len(set(ids.values())) == 240
    for number, request_id in ids.items():
        if request_id not in cancelled:
            assert answer_in(events, request_id) == alone(requests[number])
    assert {e.request_id for e in events if isinstance(e, Finished)} <= set(
        ids.values()
    )
    check_books(bench)


def test_wait_ends_with_an_add() -> None:
    bench = Bench(**SIZES)
    added_s: list[float] = []

    def add() -> None:
        added_s.append(time.perf_counter())
        bench.add(**LONG)

    timer = threading.Timer(0.3, add)
    timer.start()
    assert bench.loop.wait(20)
    assert time.perf_counter() - added_s[0] < 0.2
    timer.join()


def test_wait_does_not_end_for_work_that_was_done() -> None:
    """It returned at once after each request that had not been waited for."""
    bench = Bench(**SIZES)
    bench.add(**LONG)
    events_of(bench.loop)
    started_s = time.perf_counter()
    assert not bench.loop.wait(0.2)
    assert time.perf_counter() - started_s > 0.19


def test_waking_is_not_lost() -> None:
    bench = Bench(**SIZES)
    bench.loop.wake()
    within(5, bench.loop.wait)
    assert not bench.loop.wait(0.01)


class FilledLate(deque[Any]):
    """A queue into which another thread puts something just when it was found empty."""

    def __bool__(self) -> bool:
        if len(self) == 0 and self.fill is not None:
            fill = self.fill
            self.fill = None
            fill()
            return False
        return len(self) > 0

    fill: Any = None


def test_a_cancel_right_behind_its_add_counts() -> None:
    """What was added while the loop took in was cancelled before it was taken in, and so not."""
    bench = Bench(**SIZES)
    bench.add(**LONG)
    bench.loop._added = queue = FilledLate(bench.loop._added)
    late: list[int] = []

    def add_and_cancel() -> None:
        late.append(bench.add(**LONG))
        bench.loop.cancel(late[0])

    queue.fill = add_and_cancel
    events = bench.loop.step()
    assert late
    assert not of_request(events + events_of(bench.loop), late[0])
    check_books(bench)


def test_lines_that_ask_for_no_computing_are_answered() -> None:
    """A run of a file that had only such lines did not end."""
    bench = Bench(**SIZES, is_only_run=True)
    runner = bench.start_run()
    runner.read_from(iter([Line(0, 1, b'{"prompt": "x", "max_tokens": 0}')]))
    assert [record.line.number for _ in range(3) for record in runner.step()] == [1]
    assert not runner.has_work


def test_what_can_never_run_is_refused_at_once() -> None:
    bench = Bench(**SIZES)
    for fields in (
        {"max_tokens": 10**6},
        {"n": 13, "temperature": 1},
        {"n": 0},
        {"prompt": [999]},
    ):
        with pytest.raises(RequestError):
            bench.add(**LONG | fields)
    assert not bench.loop.has_work
    check_books(bench)


def test_a_loop_goes_on_after_a_failure() -> None:
    """All requests are dropped, also those that were just added, and what they held."""
    bench = test_contract.Bench()
    for i in range(12):
        bench.add(prompt=">" * (i + 1), is_streamed=i % 2 == 0, n=1 + i % 3)
    bench.loop.step()
    bench.add(prompt=">")
    bench.loop.cancel(0)
    bench.pipeline.fails = True
    with pytest.raises(RuntimeError, match="the stage failed"):
        bench.loop.step()
    assert not bench.loop.has_work
    bench.pipeline.fails = False
    request = {
        "prompt": ">",
        "max_tokens": 3,
        "temperature": 0,
        "return_token_ids": True,
    }
    request_id = bench.add(is_streamed=True, **request)
    events = events_of(bench.loop)
    assert {event.request_id for event in events} == {request_id}
    assert check_stream(events, request_id)[0]["text"] == "abc"
    bench.scheduler.check_books()


def test_a_long_answer_is_built_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of thousands of choices held up a step for seconds; a stream looked at all of them."""
    request = {"prompt": [[3, 4]] * 20, "max_tokens": 3, "temperature": 0}
    whole = alone(request)
    monkeypatch.setattr("fminfer.engine.answer.PIECE_TOKENS", 7)
    bench = Bench(**SIZES)
    long_id = bench.add(**request)
    events: list[Event] = []
    while bench.loop._open:
        events += bench.loop.step()
    short_id = bench.add(prompt=[5], max_tokens=1)
    while bench.loop.has_work:
        events += bench.loop.step()
    assert [event.request_id for event in events] == [short_id, long_id]
    assert answer_in(events, long_id) == whole
    check_books(bench)


def test_an_answer_in_pieces_is_told_before_the_limit_of_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another row was left then, and the finished one was lost with it."""
    monkeypatch.setattr("fminfer.engine.answer.PIECE_TOKENS", 7)
    bench = Bench(**SIZES)
    short_id = bench.add(prompt=[[3, 4]] * 4, max_tokens=3, temperature=0)
    bench.add(**LONG)
    bench.loop._max_steps = 5
    events: list[Event] = []
    with pytest.raises(StepLimitError):
        while bench.loop.has_work:
            events += bench.loop.step()
    assert [event.request_id for event in events] == [short_id]


def test_many_prompts_are_not_passed_by_all_that_come() -> None:
    """With more requests than rows, prompts behind the first four waited for ever."""
    bench = Bench(**SIZES, max_rows=2)
    many = bench.add(prompt=[[3, 4]] * 12, max_tokens=3, temperature=0)
    events: list[Event] = []
    for _ in range(200):
        while bench.loop.num_waiting < 12:  # others of one prompt always wait
            bench.add(prompt=[5, 6], max_tokens=3)
        events += bench.loop.step()
    assert many in [event.request_id for event in events]
