"""`add`, `cancel`, `wait` and `step`: from many threads, at any moment, and after failures."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import fminfer
from fminfer.contract.line import Line
from fminfer.core.errors import PipelineError, RequestError, StoppedError, UsageError
from fminfer.engine.events import Delta, Event, Finished
from tests.conftest import num_examples
from tests.engine import test_contract
from tests.engine.test_prefix import Bench
from tests.streams import answer_in, check_stream, events_of, of_request, within
from tests.worker.test_own_ranks import own_ranks

SIZES: dict[str, Any] = {"has_cache": True, "block_size": 4, "num_blocks": 60, "chunk": 16}
LONG = {"prompt": [5] * 40, "max_tokens": 12, "temperature": 0, "return_token_ids": True}


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


def check_idle(bench: Any) -> None:
    bench.scheduler.check_idle()
    read = bench.loop.stats.read
    assert (read.num_open, read.max_open_draws) == (0, 0), "work that nobody does any more"
    assert not (bench.loop._open or bench.loop._streams or bench.loop._leaving)


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
def test_a_cancelled_request_leaves_nothing_behind(at: int, fields: dict[str, Any]) -> None:
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
    has_ended = any(not isinstance(event, Delta) for event in of_request(events, victim))
    later = bench.loop.step()
    later += events_of(bench.loop)
    assert not of_request(later, victim), "it is told nothing more"
    events += later
    if has_ended:
        check_stream(events, victim)
    for request, request_id in zip(others, first + last, strict=True):
        assert check_stream(events, request_id) == alone(request)
    check_idle(bench)


def test_cancelled_while_it_waits_it_costs_nothing() -> None:
    bench = Bench(**SIZES)
    bench.loop.cancel(bench.add(**LONG))
    assert events_of(bench.loop) == []
    assert bench.loop.stats.num_steps == 0
    check_idle(bench)


@settings(
    max_examples=num_examples(240),
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
            ids.append(bench.add(priorities[number], is_streamed=True, **requests[number]))
        if cancels.get(turn, 20) < len(ids):
            bench.loop.cancel(ids[cancels[turn]])
            cancelled.add(ids[cancels[turn]])
        if bench.loop.has_work:
            events += bench.loop.step()
    events += events_of(bench.loop)
    for request, request_id in zip(requests, ids, strict=False):
        if request_id not in cancelled:
            assert check_stream(events, request_id) == alone(request)
    check_idle(bench)


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
    assert {e.request_id for e in events if isinstance(e, Finished)} <= set(ids.values())
    check_idle(bench)


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
            fill, self.fill = self.fill, None
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
    check_idle(bench)


def test_lines_that_ask_for_no_computing_are_answered() -> None:
    """A run of a file that had only such lines did not end."""
    bench = Bench(**SIZES, is_only_run=True)
    runner = bench.start_run()
    runner.add(Line(0, 1, b'{"prompt": "x", "max_tokens": 0}'))
    runner.end_input()
    assert [record.line.number for _ in range(3) for record in runner.step()] == [1]
    assert not runner.has_work


def test_what_can_never_run_is_refused_at_once() -> None:
    bench = Bench(**SIZES)
    for fields in ({"max_tokens": 10**6}, {"n": 13, "temperature": 1}, {"n": 0}, {"prompt": [999]}):
        with pytest.raises(RequestError):
            bench.add(**LONG | fields)
    assert not bench.loop.has_work
    check_idle(bench)


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
    request = {"prompt": ">", "max_tokens": 3, "temperature": 0, "return_token_ids": True}
    request_id = bench.add(is_streamed=True, **request)
    events = events_of(bench.loop)
    assert {event.request_id for event in events} == {request_id}
    assert check_stream(events, request_id)[0]["text"] == "abc"
    bench.scheduler.check_idle()


# With a real model.

QUESTION = {
    "prompt": "Question: How do you go",
    "return_token_ids": True,
    "logit_bias": {"0": -100},  # the end
}


@pytest.fixture(scope="module")
def engine() -> Iterator[fminfer.Engine]:
    engine = fminfer.Engine(dtype="float32", max_rows=2)
    yield engine
    engine.close()


def answers(engine: fminfer.Engine, *requests: dict[str, Any]) -> list[list[dict[str, Any]]]:
    ids = [engine.add(request, is_streamed=True) for request in requests]
    events = events_of(engine)
    return [check_stream(events, request_id) for request_id in ids]


def test_a_higher_priority_enters_first_and_changes_no_answer(engine: fminfer.Engine) -> None:
    low = [QUESTION | {"max_tokens": 40, "seed": i} for i in range(4)]
    high = [QUESTION | {"max_tokens": 5, "seed": i, "n": 2} for i in range(2)]
    expected = [answers(engine, request)[0] for request in low + high]
    num_put_back = engine.stats.num_put_back
    ids = [engine.add(request, is_streamed=True) for request in low]
    events = [event for _ in range(6) for event in engine.step()]
    assert {event.request_id for event in events} == set(ids[:2])
    ids += [engine.add(request, priority=1, is_streamed=True) for request in high]
    events += events_of(engine)
    assert [check_stream(events, request_id) for request_id in ids] == expected
    order = [event.request_id for event in events if isinstance(event, Finished)]
    assert set(order[:2]) == set(ids[4:])
    assert engine.stats.num_put_back - num_put_back >= 2


def test_a_wrong_request_costs_nothing(engine: fminfer.Engine) -> None:
    for fields in ({"n": 0}, {"prompt": []}, {"max_tokens": 10**6}, {"n": 3}, {"stream": True}):
        with pytest.raises(RequestError):
            engine.add({"prompt": "x"} | fields)
    assert not engine.has_work


def test_a_stage_that_raises(engine: fminfer.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answers(engine, QUESTION | {"max_tokens": 4, "seed": 1})
    stages: Any = engine.pipeline.stages
    run = stages._run

    def fail(step: Any) -> Any:
        raise RuntimeError("the stage failed")

    monkeypatch.setattr(stages, "_run", fail)
    for _ in range(3):
        engine.add(QUESTION)
        with pytest.raises(RuntimeError, match="the stage failed"):
            engine.step()
        assert not engine.has_work
    monkeypatch.setattr(stages, "_run", run)
    assert answers(engine, QUESTION | {"max_tokens": 4, "seed": 1}) == expected


def test_a_closed_engine_says_so() -> None:
    engine = fminfer.Engine(dtype="float32")
    engine.close()
    engine.close()
    engine.add(QUESTION)
    with pytest.raises(UsageError, match="the engine is closed"):
        engine.step()
    assert not engine.has_work and not engine.wait(0.01)


def test_events_that_a_run_does_not_need_are_left_for_step(engine: fminfer.Engine) -> None:
    """They were lost, and nothing ever told of the request again."""
    request_id = engine.add(LONG, is_streamed=True)
    records = list(engine.run([LONG | {"max_tokens": 40, "ignore_eos": True}] * 3))
    assert [record.error for record in records] == [None] * 3
    assert engine.has_work and engine.wait(0)
    check_stream(events_of(engine), request_id)
    assert not engine.has_work


def test_requests_are_answered_after_a_run_that_was_stopped(engine: fminfer.Engine) -> None:
    """None could begin any more, and the engine said that it had no work."""
    run = engine.run(LONG | {"seed": seed, "temperature": 1} for seed in range(300))
    next(run)
    engine.stop(0.0)
    with pytest.raises(StoppedError):
        list(run)
    ((choice,),) = answers(engine, LONG)
    assert choice["finish_reason"] is not None
    assert not engine.has_work


def test_added_requests_and_a_run_go_side_by_side(engine: fminfer.Engine) -> None:
    """A run leaves answers of others to those who step."""
    request = QUESTION | {"max_tokens": 4, "seed": 1}
    (expected,) = answers(engine, request)
    runner = engine.start_run()
    own = engine.add(request)
    runner.add(Line(0, 1, b'{"prompt": "north", "max_tokens": 2}'))
    runner.end_input()
    events: list[Event] = []
    num_records = 0
    while runner.has_work or engine.has_work:
        runner.hand_over()
        new = engine.step()
        events += new
        num_records += len(runner.take(new))
    assert answer_in(events, own) == expected and num_records == 1


def test_a_rank_that_dies_ends_every_step_with_an_error() -> None:
    """Who added another request waited for ever."""
    engine = fminfer.Engine(dtype="float32", world_size=2)
    try:
        for _ in range(5):
            engine.add(QUESTION | {"max_tokens": 400}, is_streamed=True)
        for _ in range(5):
            engine.step()
        os.kill(own_ranks()[0], signal.SIGKILL)

        def use() -> None:
            with pytest.raises(PipelineError, match="rank 1"):
                events_of(engine)
            assert not engine.has_work
            for _ in range(10):
                engine.add(QUESTION)
                with pytest.raises(PipelineError, match="rank 1"):
                    engine.step()
                assert not engine.has_work

        within(60, use)
    finally:
        within(60, engine.close)
    assert not own_ranks()
