"""Requests that must have the same answer are computed once, and answered each for itself."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fminfer
from fminfer.contract.envelope import Line
from fminfer.forward.transformer import Head
from fminfer.runtime.lines import equal_requests
from fminfer.runtime.lines.line_intake import MAX_CHATS

GREEDY: dict[str, Any] = {
    "prompt": "Once upon a time",
    "max_tokens": 12,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def engine(llama_checkpoint: tuple[Path, Any]) -> Iterator[fminfer.Engine]:
    engine = fminfer.Engine(str(llama_checkpoint[0]), dtype="float32", kernels="off")
    yield engine
    engine.close()


def answers(
    engine: fminfer.Engine, requests: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    records = sorted(engine.run(requests), key=lambda record: record.line.number)
    return [record.to_dict() for record in records]


def choices(answer: dict[str, Any]) -> Any:
    return answer["result"]["choices"]


def test_equal_greedy_requests_are_computed_once(engine: fminfer.Engine) -> None:
    """Also if their keys stand in another order, and what is only recorded differs."""
    before = engine.stats.num_generated_tokens
    copied = engine.stats.num_copied_requests
    requests = [GREEDY | {"user": f"u{i}", "logprobs": 2} for i in range(9)]
    requests.append({"logprobs": 2.0, **GREEDY, "best_of": 1, "seed": 5})
    found = answers(engine, requests)
    assert engine.stats.num_generated_tokens - before == 12
    assert engine.stats.num_copied_requests - copied == 9
    assert all(choices(answer) == choices(found[0]) for answer in found)
    assert [answer["request"] for answer in found] == requests, (
        "each with its own request"
    )
    assert found[0]["result"]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    usage = found[9]["result"]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"]
    assert usage["completion_tokens"] == 12


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": "Once upon a tim"},
        {"max_tokens": 11},
        {"stop": ["a"]},
        {"logprobs": 1},
        {"echo": True},
        {"n": 2},
        {"logit_bias": {"7": 1}},
        {"allowed_token_ids": [7, 8]},
        {"bad_words": ["a"]},
        {"truncate_prompt_tokens": 3},
        {"prompt": [79, 110]},
        {"prompt": ["Once upon a time", "Once upon a time"]},
    ],
)
def test_what_changes_an_answer_makes_another_request(
    engine: fminfer.Engine, other: dict[str, Any]
) -> None:
    copied = engine.stats.num_copied_requests
    together = answers(engine, [GREEDY, GREEDY | other])
    assert engine.stats.num_copied_requests == copied
    alone = answers(engine, [GREEDY | other])[0]
    assert [c["text"] for c in choices(together[1])] == [
        c["text"] for c in choices(alone)
    ]


def test_draws_are_copied_only_with_a_seed_of_their_own(engine: fminfer.Engine) -> None:
    draw = GREEDY | {"temperature": 1.5}
    copied = engine.stats.num_copied_requests
    unseeded = answers(engine, [draw] * 4)
    assert engine.stats.num_copied_requests == copied
    assert len({choices(answer)[0]["text"] for answer in unseeded}) == 4
    seeded = answers(
        engine, [draw | {"seed": 3}] * 4 + [draw | {"seed": 3, "user": "me"}]
    )
    assert engine.stats.num_copied_requests == copied + 4, "the last says the same"
    assert len({choices(answer)[0]["text"] for answer in seeded[:4]}) == 1


def test_a_score_is_computed_once(engine: fminfer.Engine) -> None:
    score = {"prompt": "Once upon a time", "max_tokens": 0, "echo": True, "logprobs": 1}
    fed = engine.stats.num_prompt_tokens
    found = answers(engine, [score] * 50)
    assert engine.stats.num_prompt_tokens - fed < 2 * len("Once upon a time")
    assert all(choices(answer) == choices(found[0]) for answer in found)


def test_a_finished_answer_is_taken_later(engine: fminfer.Engine) -> None:
    """The equal request comes when its leader is long done."""
    others = [GREEDY | {"prompt": f"{i} more", "max_tokens": 40} for i in range(80)]
    generated = engine.stats.num_generated_tokens
    found = answers(engine, [GREEDY, *others, GREEDY])
    assert engine.stats.num_generated_tokens - generated == 12 + 80 * 40
    assert choices(found[0]) == choices(found[-1])


def test_what_is_kept_is_bounded(
    engine: fminfer.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(equal_requests, "MAX_KEPT_ENTRIES", 250)
    requests = [GREEDY | {"prompt": f"{i} more"} for i in range(200)]
    list(engine.run(requests))
    runner = engine.runs._runner
    assert runner is not None
    kept = runner._equal
    entries = kept._finished._answers
    assert 0 < entries.num_bytes <= 250 and len(entries._entries) < 10
    assert (
        not kept._followers and kept._num_followers.total() == kept._follower_bytes == 0
    )


def test_equal_lines_without_end_are_read_lazily(engine: fminfer.Engine) -> None:
    """Lines that wait for another's answer were read on and on, until memory ended."""
    num_read = itertools.count()

    def lines() -> Iterator[Line]:
        raw = json.dumps(GREEDY | {"max_tokens": 100}).encode()
        for number in range(1, 200_000):
            next(num_read)
            yield Line(0, number, raw)

    run = engine.run(lines())
    next(run)
    assert next(num_read) < 2 * equal_requests.MAX_FOLLOWERS
    run.close()
    assert len(list(engine.run([GREEDY]))) == 1, "the engine goes on"


def test_equal_lines_of_many_files_open_few_of_them(engine: fminfer.Engine) -> None:
    raw = json.dumps(GREEDY | {"max_tokens": 30, "prompt": "many files"}).encode()
    sources: list[int] = []

    def lines() -> Iterator[Line]:
        for source in range(500):
            sources.append(source)
            yield Line(source, 1, raw)

    run = engine.run(lines(), 1024)
    next(run)
    assert len(sources) <= equal_requests.MAX_FOLLOWERS_OF_FILES + MAX_CHATS
    assert len(list(run)) == 499


def test_an_error_is_each_lines_own(
    engine: fminfer.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A nan of the request that is computed is told to all that wait for it, and not kept."""
    multiply = Head.__call__
    with monkeypatch.context() as patch:
        patch.setattr(
            Head, "__call__", lambda head, x: multiply(head, x) * float("nan")
        )
        records = list(engine.run([GREEDY] * 3))
    assert [record.error and record.error.code for record in records] == [
        "nan_logits"
    ] * 3
    assert not any(record.error for record in engine.run([GREEDY] * 3))


def test_it_can_be_turned_off(llama_checkpoint: tuple[Path, Any]) -> None:
    engine = fminfer.Engine(
        str(llama_checkpoint[0]), dtype="float32", kernels="off", prefix_cache=False
    )
    found = answers(engine, [GREEDY] * 3)
    assert (
        engine.stats.num_generated_tokens == 36
        and engine.stats.num_copied_requests == 0
    )
    assert all(choices(answer) == choices(found[0]) for answer in found)
    engine.close()
