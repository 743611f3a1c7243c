"""`add`, `cancel`, `wait` and `step` of several pipelines: as of one, also when some die."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

import fminfer
from fminfer.contract.envelope import Line
from fminfer.core.errors import PipelineError, StoppedError, UsageError
from fminfer.engine.engine_core import Delta, Event, Finished
from tests.runtime.test_own_ranks import own_ranks
from tests.streams import answer_in, check_stream, events_of, failed, rounded, within

MAX_ROWS = 4
QUESTION = {
    "prompt": "Question: How do you go",
    "return_token_ids": True,
    "logit_bias": {"0": -100},  # the end
}
WAYS = {
    "type": "array",
    "items": {"enum": ["north", "east"]},
    "minItems": 2,
    "maxItems": 4,
}
REQUESTS: list[dict[str, Any]] = [
    QUESTION | fields
    for number in range(6)
    for fields in (
        {"max_tokens": 20 + number, "seed": number, "logprobs": 2},
        {"max_tokens": 12, "seed": number, "n": 2, "echo": True, "logprobs": 0},
        {"max_tokens": 8, "seed": number, "n": 2, "best_of": 3},
        {"max_tokens": 30, "temperature": 0, "n": 2, "stop": ["the room", "garden"]},
        {"max_tokens": 0, "echo": True, "logprobs": 1},
        {"max_tokens": 40, "seed": number, "n": 2, "logprobs": 1, "guided_json": WAYS},
    )
]
LONG = QUESTION | {"max_tokens": 400}


def start_team() -> fminfer.Engine:
    """Start an engine of two pipelines, in processes of their own."""
    return fminfer.Engine(dtype="float32", data_group_size=2, max_rows=MAX_ROWS)


@pytest.fixture(scope="module")
def team() -> Iterator[fminfer.Engine]:
    engine = start_team()
    yield engine
    within(30, engine.close)


Brief = tuple[fminfer.Engine, list[int]]


@pytest.fixture
def brief_team() -> Iterator[Brief]:
    """Give a team that a test may break, and its processes."""
    before = own_ranks()
    engine = start_team()
    yield engine, [pid for pid in own_ranks() if pid not in before]
    within(30, engine.close)
    assert own_ranks() == before


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    engine = fminfer.Engine(dtype="float32", max_rows=MAX_ROWS)
    ids = [engine.add(request) for request in REQUESTS]
    events = events_of(engine)
    engine.close()
    return [rounded(answer_in(events, request_id)) for request_id in ids]


def test_streams_of_several_pipelines(
    team: fminfer.Engine, expected: list[Any]
) -> None:
    def use() -> None:
        before = team.stats
        ids = [team.add(request, is_streamed=True) for request in REQUESTS]
        events = events_of(team)
        assert [rounded(check_stream(events, each)) for each in ids] == expected
        assert not team.has_work and not team.wait(0.01)
        stats = team.stats
        drawn = stats.num_generated_tokens - before.num_generated_tokens
        greedy = [request for request in REQUESTS if request.get("temperature") == 0]
        answers = [each for each in events if isinstance(each, Finished)]
        told = sum(each.usage["completion_tokens"] for each in answers)
        of_greedy = [a for a in answers if REQUESTS[ids.index(a.request_id)] in greedy]
        copies = sum(answer.usage["completion_tokens"] // 2 for answer in of_greedy)
        assert drawn == told - copies
        assert stats.num_ended == stats.read.num_sequences
        assert stats.num_generated_tokens + stats.num_undrawn == stats.read.max_draws
        assert len(stats.stages) == 2 and all(
            stage.busy_s > 0 for stage in stats.stages
        )

    within(60, use)


def test_a_cancelled_request_is_told_no_more(team: fminfer.Engine) -> None:
    def use() -> None:
        ids = [team.add(LONG, is_streamed=True) for _ in range(12)]
        last = team.add(QUESTION | {"max_tokens": 3, "seed": 1}, is_streamed=True)
        events: list[Event] = []
        while not any(isinstance(event, Delta) for event in events):
            events += team.step()
        for request_id in ids:
            team.cancel(request_id)
            team.cancel(request_id)
        team.step()
        later = events_of(team)
        check_stream(later, last)
        assert {event.request_id for event in later} == {last}
        assert team.state.longest_row < 400 and not team.has_work

    within(60, use)


def test_a_cancel_of_what_is_finished_or_unknown(team: fminfer.Engine) -> None:
    """A step that had nothing to do but that waited for a word of the pipelines, for ever."""

    def use() -> None:
        done = team.add(QUESTION | {"max_tokens": 1})
        answer_in(events_of(team), done)
        core: Any = team._core
        for request_id in (done, 10**6):
            # as if the byte that wakes was read before
            core._cancelled.append(request_id)
            assert team.has_work and team.step() == [] and not team.has_work
            team.cancel(request_id)
            assert events_of(team) == []
        waiting = team.add(LONG)
        team.cancel(waiting)
        assert events_of(team) == []

    within(30, use)


def test_many_that_can_never_run_hold_nobody_up(team: fminfer.Engine) -> None:
    """A pipeline thought to have 80 waiting got no more, and these had been refused."""

    def use() -> None:
        wrong = [team.add(LONG | {"n": MAX_ROWS + 1}) for _ in range(250)]
        good = team.add(QUESTION | {"max_tokens": 3})
        events = events_of(team)
        assert {each.request_id for each in failed(events)} == set(wrong)
        assert {each.error.code for each in failed(events)} == {"out_of_memory"}
        assert answer_in(events, good)

    within(60, use)


def test_how_busy_all_pipelines_are(team: fminfer.Engine) -> None:
    def use() -> None:
        for _ in range(20):
            team.add(LONG | {"max_tokens": 60}, is_streamed=True)
        assert team.num_waiting == 20
        while team.state.num_running < 2 * MAX_ROWS:
            assert team.has_work, (
                "both pipelines run all their rows at once, at some moment"
            )
            team.step()
        assert 0 < team.state.kv_usage < 1 and 0 < team.num_waiting <= 12
        events_of(team)
        assert (team.num_waiting, team.state.num_running, team.state.kv_usage) == (
            0,
            0,
            0,
        )

    within(60, use)


def test_a_higher_priority_enters_first(team: fminfer.Engine) -> None:
    def use() -> None:
        low = [team.add(LONG | {"max_tokens": 60}) for _ in range(40)]
        while not team.state.longest_row:
            team.step()
        high = team.add(QUESTION | {"max_tokens": 3}, priority=1, is_streamed=True)
        events = events_of(team)
        check_stream(events, high)
        order = [event.request_id for event in events if isinstance(event, Finished)]
        assert order.index(high) < 2 * MAX_ROWS and sorted(order) == [*low, high]

    within(60, use)


def test_a_run_is_stopped_and_the_engine_goes_on(team: fminfer.Engine) -> None:
    def use() -> None:
        runner = team.runs.start()
        row = b'{"prompt": "north", "max_tokens": 400, "ignore_eos": true, "seed": %d}'
        runner.read_from(Line(0, number, row % number) for number in range(1, 41))
        while not team.state.longest_row:
            runner.step()
        team.stop(0.0)
        with pytest.raises(StoppedError):
            while True:
                runner.step()
        runner.close()
        records = list(team.run([QUESTION | {"max_tokens": 2}] * 5))
        assert [record.error for record in records] == [None] * 5
        assert not team.has_work

    within(60, use)


def test_streams_go_on_when_a_pipeline_is_killed(
    brief_team: Brief, expected: list[Any]
) -> None:
    """Nothing is told twice and nothing is lost, whatever of each choice was told before."""
    engine, pids = brief_team

    def use() -> None:
        ids = [engine.add(request, is_streamed=True) for request in REQUESTS]
        events: list[Event] = []
        while sum(isinstance(event, Delta) for event in events) < 30:
            events += engine.step()
        os.kill(pids[1], signal.SIGKILL)
        events += events_of(engine)
        assert [
            rounded(check_stream(events, each, is_exact=False)) for each in ids
        ] == expected
        again = engine.add(REQUESTS[0], is_streamed=True)
        assert rounded(check_stream(events_of(engine), again)) == expected[0]

    within(60, use)


def test_when_all_pipelines_are_gone_every_step_says_so(
    brief_team: Brief, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the last one it was said that the others go on."""
    engine, pids = brief_team

    def use() -> None:
        for _ in range(20):
            engine.add(LONG, is_streamed=True)
        engine.step()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(PipelineError, match="every pipeline has ended"):
                events_of(engine)
            assert not engine.has_work, "all requests are dropped"
            engine.add(LONG)
        first, last = (record.getMessage() for record in caplog.records)
        assert (
            "the others go on, and answer its " in first and "no other is left" in last
        )

    within(60, use)


def test_a_closed_team_says_so(brief_team: Brief) -> None:
    """It wrote into whatever file had its pipe's number afterwards."""
    engine, _ = brief_team
    request_id = engine.add(LONG)
    engine.step()
    within(30, engine.close)
    ends = [os.pipe() for _ in range(20)]
    for out, _ in ends:
        os.set_blocking(out, False)
    engine.cancel(request_id)
    with pytest.raises(UsageError, match="the engine is closed"):
        engine.add(LONG)
    time.sleep(0.05)
    for out, end in ends:
        with pytest.raises(BlockingIOError):
            os.read(out, 1)
        os.close(out)
        os.close(end)
    with pytest.raises(UsageError, match="the engine is closed"):
        engine.step()
    assert not engine.has_work
