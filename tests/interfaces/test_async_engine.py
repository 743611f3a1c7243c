"""`AsyncEngine`: many tasks at once, cancelled ones, streams, failures."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from fminfer import AsyncEngine, Engine, FminferError, RequestError, UsageError

Result = TypeVar("Result")
QUESTION = "Question: How do you go from the porch to the den?\nAnswer:"
LIMIT_S = 240.0


def run(work: Coroutine[Any, Any, Result]) -> Result:
    async def limited() -> Result:
        return await asyncio.wait_for(work, LIMIT_S)

    return asyncio.run(limited())


def make_requests(number: int) -> list[dict[str, Any]]:
    """Greedy and seeded requests, long and short ones, that share prefixes."""
    return [
        {
            "prompt": QUESTION + " north" * (i % 5),
            "max_tokens": 1 + i % 40,
            "temperature": i % 2,
            "seed": i,
            "ignore_eos": i % 3 == 0,
            "logprobs": 1 if i % 4 == 0 else None,
        }
        for i in range(number)
    ]


def find_choices(record: Any) -> list[dict[str, Any]]:
    return [choice.fields for choice in record.choices]


def test_half_of_many_tasks_are_cancelled() -> None:
    """The books are clean then, and the others have the answers of `run`."""
    requests = make_requests(200)
    draws = random.Random(5)

    async def main() -> tuple[dict[int, Any], AsyncEngine]:
        engine = AsyncEngine(dtype="float32", max_rows=24)
        await engine.generate(QUESTION)
        tasks = [asyncio.create_task(engine.generate(each)) for each in requests]
        cancelled = draws.sample(range(200), 100)
        for place in cancelled:
            await asyncio.sleep(draws.choice([0, 0, 0, 0.002]))
            tasks[place].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        core: Any = (await engine._start())._core
        while core.has_work:
            await asyncio.sleep(0.01)
        assert not engine._events and not core._open
        core.check_books()
        await engine.close()
        return {
            place: find_choices(result)
            for place, result in enumerate(results)
            if not isinstance(result, BaseException)
        }, engine

    answers, _ = run(main())
    assert 100 <= len(answers) < 200, "some ended before they were cancelled"
    with Engine(dtype="float32") as engine:
        for record in engine.run(requests):
            place = record.line.number - 1
            if place in answers:
                choices = find_choices(record)
                assert [c["text"] for c in answers[place]] == [
                    c["text"] for c in choices
                ]


def test_a_stream_has_the_text_of_the_answer() -> None:
    async def main() -> None:
        async with AsyncEngine(dtype="float32") as engine:
            request = {"prompt": QUESTION, "max_tokens": 8, "temperature": 0}
            answer = await engine.generate(request)
            deltas = [delta async for delta in engine.stream(request)]
            assert "".join(delta.text for delta in deltas) == answer.text
            assert deltas[-1].finish_reason == answer.choices[0].fields["finish_reason"]
            assert len(deltas) > 1
            assert answer.to_dict()["request"] == request
            text = await engine.generate("How do you go from the porch to the den?")
            assert text.text

    run(main())


def test_leaving_a_stream_cancels_its_request() -> None:
    async def main() -> None:
        async with AsyncEngine(dtype="float32") as engine:
            request = {"prompt": QUESTION, "max_tokens": 900, "ignore_eos": True}
            stream = engine.stream(request)
            async for _ in stream:
                break
            await stream.aclose()
            core: Any = (await engine._start())._core
            while core.has_work:
                await asyncio.sleep(0.01)
            assert core.stats.num_generated_tokens < 900 and not engine._events

    run(main())


def test_a_wrong_request_raises_in_its_own_task() -> None:
    async def main() -> None:
        async with AsyncEngine(dtype="float32") as engine:
            right = asyncio.create_task(engine.generate(QUESTION))
            with pytest.raises(RequestError, match="temperature is 9"):
                await engine.generate({"prompt": "a", "temperature": 9})
            assert (await right).text

    run(main())


def test_a_dead_engine_raises_and_does_not_hang() -> None:
    async def main() -> None:
        engine = AsyncEngine(dtype="float32")
        await engine.generate(QUESTION)
        inner: Any = await engine._start()
        gate = threading.Event()

        def fail() -> None:
            gate.wait(LIMIT_S)
            raise ZeroDivisionError("a broken step")

        inner.step = fail
        waiting = [asyncio.create_task(engine.generate(QUESTION)) for _ in range(3)]
        while len(engine._events) < 3:
            await asyncio.sleep(0.01)
        gate.set()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all("a broken step" in str(result) for result in results), results
        with pytest.raises(FminferError, match="a broken step"):
            await engine.generate(QUESTION)
        await engine.close()

    run(main())


def test_a_closed_engine_and_one_of_another_loop_are_refused() -> None:
    engine = AsyncEngine(dtype="float32")

    async def close_while_it_answers() -> None:
        request = {"prompt": QUESTION, "max_tokens": 900, "ignore_eos": True}
        await engine.generate(QUESTION)
        open_task = asyncio.create_task(engine.generate(request))
        while not engine._events:
            await asyncio.sleep(0.01)
        await engine.close()
        with pytest.raises(UsageError, match="is closed"):
            await open_task
        with pytest.raises(UsageError, match="is closed"):
            await engine.generate(QUESTION)

    run(close_while_it_answers())
    other = AsyncEngine(dtype="float32")

    async def ask() -> None:
        await other.generate(QUESTION)

    run(ask())
    run(ask())  # the first loop is closed

    async def ask_in_another_loop() -> None:
        await other.generate(QUESTION)
        with pytest.raises(UsageError, match="of another event loop"):
            await asyncio.to_thread(asyncio.run, ask())
        await other.close()

    run(ask_in_another_loop())


def test_a_model_that_does_not_load_raises() -> None:
    async def main() -> None:
        engine = AsyncEngine("/no/such/model")
        with pytest.raises(FminferError):
            await engine.generate("a")
        await engine.close()

    run(main())


def test_an_engine_may_be_closed_twice() -> None:
    async def main() -> None:
        async with AsyncEngine(dtype="float32") as engine:
            await engine.close()

    run(main())
