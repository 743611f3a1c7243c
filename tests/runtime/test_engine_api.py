"""`add`, `cancel`, `wait` and `step`: of an engine with a real model, and of one that fails."""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

import fminfer
from fminfer.compute.attention.kv_cache import KvCache
from fminfer.compute.values.step import Step
from fminfer.contract.envelope import Line
from fminfer.core.errors import PipelineError, RequestError, StoppedError, UsageError
from fminfer.engine.engine_core import Event, Finished
from fminfer.runtime import engine_api
from fminfer.runtime.load.one_pipeline import OnePipeline
from tests.runtime.test_own_ranks import own_ranks
from tests.streams import answer_in, check_stream, events_of, within

QUESTION = {
    "prompt": "Question: How do you go",
    "return_token_ids": True,
    "logit_bias": {"0": -100},  # the end
}


LONG = {
    "prompt": [5] * 40,
    "max_tokens": 12,
    "temperature": 0,
    "return_token_ids": True,
}


@pytest.fixture(scope="module")
def engine() -> Iterator[fminfer.Engine]:
    engine = fminfer.Engine(dtype="float32", max_rows=2)
    yield engine
    engine.close()


def answers(
    engine: fminfer.Engine, *requests: dict[str, Any]
) -> list[list[dict[str, Any]]]:
    ids = [engine.add(request, is_streamed=True) for request in requests]
    events = events_of(engine)
    return [check_stream(events, request_id) for request_id in ids]


def test_a_higher_priority_enters_first_and_changes_no_answer(
    engine: fminfer.Engine,
) -> None:
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
    for fields in (
        {"n": 0},
        {"prompt": []},
        {"max_tokens": 10**6},
        {"n": 3},
        {"stream": True},
    ):
        with pytest.raises(RequestError):
            engine.add({"prompt": "x"} | fields)
    assert not engine.has_work


def test_a_stage_that_raises(
    engine: fminfer.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    with pytest.raises(UsageError, match="the engine is closed"):
        engine.add(QUESTION)
    assert not engine.has_work and not engine.wait(0.01)


def held_by(engine: fminfer.Engine) -> list[weakref.ref[Any]]:
    """Return references to what takes memory: the network and the KV cache of this process."""
    stage = engine.pipeline._stage
    assert stage is not None, "it is open"
    layers = stage._network.layers
    return [
        weakref.ref(each) for each in (stage, stage._network, layers[0], stage.cache)
    ][1:]


@pytest.mark.parametrize("options", [{}, {"world_size": 2}])
def test_a_closed_engine_holds_no_weights(options: dict[str, Any]) -> None:
    """They stayed as long as the variable did, so that a second model found no room."""
    engine = fminfer.Engine(dtype="float32", **options)
    held = held_by(engine)
    (record,) = engine.run([LONG])
    facts = engine.facts
    num_drawn = engine.stats.num_generated_tokens
    engine.close()
    assert [each() for each in held] == [None] * len(held)
    assert record.choices and engine.facts == facts
    assert engine.stats.num_generated_tokens == num_drawn and engine.memory
    engine.close()


def test_an_engine_that_failed_holds_no_weights_once_it_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The frames of an error that is kept held them, too."""
    engine = fminfer.Engine(dtype="float32")
    held = held_by(engine)

    def fail(self: Any, *_: Any) -> None:
        raise ValueError("no")

    monkeypatch.setattr(KvCache, "make_attention", fail)
    with pytest.raises(ValueError, match="no") as error:
        list(engine.run([LONG]))
    engine.close()
    assert [each() for each in held] == [None] * len(held) and error.value.__traceback__


def test_an_engine_that_cannot_be_made_holds_no_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its thread went on, with the weights, to the end of the process."""
    made: list[OnePipeline] = []

    def fail(*_: Any) -> None:
        raise UsageError("no")

    def compute(*arguments: Any) -> OnePipeline:
        made.append(OnePipeline(*arguments))
        return made[0]

    monkeypatch.setattr(engine_api, "make_intake", fail)
    with pytest.raises(UsageError, match="no"):
        fminfer.Engine(dtype="float32", compute=compute)
    assert made[0]._stage is None
    with pytest.raises(UsageError, match="closed"):
        made[0].stages.submit(Step(0))


def test_events_that_a_run_does_not_need_are_left_for_step(
    engine: fminfer.Engine,
) -> None:
    """They were lost, and nothing ever told of the request again."""
    request_id = engine.add(LONG, is_streamed=True)
    records = list(engine.run([LONG | {"max_tokens": 40, "ignore_eos": True}] * 3))
    assert [record.error for record in records] == [None] * 3
    assert engine.has_work and engine.wait(0)
    check_stream(events_of(engine), request_id)
    assert not engine.has_work


def test_requests_are_answered_after_a_run_that_was_stopped(
    engine: fminfer.Engine,
) -> None:
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
    runner = engine.runs.start()
    own = engine.add(request)
    runner.read_from(iter([Line(0, 1, b'{"prompt": "north", "max_tokens": 2}')]))
    events: list[Event] = []
    num_records = 0
    while runner.has_work or engine.has_work:
        num_records += len(runner.step())
        events += engine.step() if engine.runs.left else []
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


def test_a_run_that_may_read_nothing_is_refused(engine: fminfer.Engine) -> None:
    """It looped without end."""
    with pytest.raises(UsageError, match="read_ahead is 0"):
        list(engine.run([{"prompt": "x"}], read_ahead=0))


def test_events_have_names_of_the_package(engine: fminfer.Engine) -> None:
    engine.add(LONG, is_streamed=True)
    kinds = set(map(type, events_of(engine)))
    assert kinds == {fminfer.Delta, fminfer.Finished} and fminfer.Failed not in kinds
