"""Kept answers over HTTP: as if they had been computed, whole and streamed; and when
they are."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import fminfer
from fminfer.answers.answer_index import open_answer_index
from fminfer.answers.answer_store import FILE
from fminfer.answers.cache_place import CachePlace
from fminfer.models.checkpoint import open_model
from fminfer.plan.planning import plan_ahead
from tests.server.answers import join, join_chat
from tests.server.reciting import save_reciting
from tests.server.running import Answer, Running, running, until
from tests.server.server_needs import needs_server
from tests.server.test_tools_over_http import TEMPLATE, TEXTS, TOOLS

pytestmark = needs_server(engine={"max_rows": 2})

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
QUESTION = "Question: How do you go from the den to the porch?\nAnswer:"
GREEDY: dict[str, Any] = {"prompt": QUESTION, "max_tokens": 8, "temperature": 0}
DRAWN: dict[str, Any] = {"prompt": QUESTION, "max_tokens": 12, "temperature": 2}
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "How do you go?"}]}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, GREEDY),
    (COMPLETIONS, GREEDY | {"logprobs": 2, "n": 2}),
    (COMPLETIONS, GREEDY | {"logprobs": 1, "echo": True}),
    (COMPLETIONS, GREEDY | {"prompt": [[5, 6], [7]], "return_token_ids": True}),
    (COMPLETIONS, GREEDY | {"stop": ["o"]}),
    (COMPLETIONS, GREEDY | {"max_tokens": 0, "echo": True, "logprobs": 1}),
    (COMPLETIONS, DRAWN | {"seed": 5, "logprobs": 0, "best_of": 2}),
    (
        CHAT,
        TALK | {"max_tokens": 9, "temperature": 0, "logprobs": True, "top_logprobs": 2},
    ),
    (CHAT, TALK | {"max_tokens": 9, "seed": 5, "n": 2}),
]
CALLS: list[tuple[str, dict[str, Any]]] = [
    (
        CHAT,
        {
            "messages": [{"role": "user", "content": name}],
            "tools": TOOLS,
            "seed": 3,
            "n": n,
        },
    )
    for name, n in (("one", 1), ("two", 2))
]


@contextmanager
def serving(
    engine: fminfer.Engine,
    folder: Path | None = None,
    *,
    size: int = 0,
    list_size: int = 1,
    **settings: Any,
) -> Iterator[Running]:
    told: list[str] = []
    place = None if folder is None else CachePlace(folder, 2**24)
    fingerprint = plan_ahead(engine.config, open_model(engine.config)).fingerprint()
    cache = open_answer_index(
        fingerprint, place, told.append, size=size, list_size=list_size
    )
    assert cache is not None
    engine.runs.cache = cache
    try:
        with running(engine, **settings) as server:
            yield server
    finally:
        engine.runs.cache = None
        cache.close()


def counts(server: Running) -> tuple[int, int]:
    stats = server.get("/stats").json
    return stats["result_cache_queries"], stats["result_cache_hits"]


def whole(answer: Answer) -> tuple[Any, dict[str, Any]]:
    """Return choices and usage; the usage without what was cached."""
    assert answer.status == 200, answer.body
    usage = answer.json["usage"]
    del usage["prompt_tokens_details"]["cached_tokens"]
    return answer.json["choices"], usage


def streamed(answer: Answer, path: str) -> tuple[Any, dict[str, Any]]:
    """Return the same of a stream."""
    assert answer.status == 200, answer.body
    *chunks, last = answer.events
    assert last["choices"] == [] and all(chunk["usage"] is None for chunk in chunks)
    parts = [part for chunk in chunks for part in chunk["choices"]]
    del last["usage"]["prompt_tokens_details"]["cached_tokens"]
    return (join_chat(parts) if path == CHAT else join(parts)), last["usage"]


def ask_streamed(
    server: Running, path: str, fields: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    more = {"stream": True, "stream_options": {"include_usage": True}}
    return streamed(server.post(path, fields | more), path)


def check_all(
    engine: fminfer.Engine, folder: Path, requests: list[tuple[str, dict[str, Any]]]
) -> None:
    with serving(engine, folder) as server:
        computed = [whole(server.post(path, fields)) for path, fields in requests]
        assert counts(server) == (len(requests), 0)
    with running(engine) as server:  # without a cache
        assert [ask_streamed(server, *each) for each in requests] and counts(
            server
        ) == (0, 0)
        expected = [ask_streamed(server, *each) for each in requests]
    before = engine.stats.num_prompt_tokens, engine.stats.num_generated_tokens
    with serving(engine, folder) as server:
        assert [
            whole(server.post(path, fields)) for path, fields in requests
        ] == computed
        assert [ask_streamed(server, *each) for each in requests] == expected
        assert counts(server) == (2 * len(requests), 2 * len(requests))
        again = server.post(*requests[0]).json["usage"]
        assert again["prompt_tokens_details"]["cached_tokens"] == again["prompt_tokens"]
        metrics = server.get("/metrics").body.decode()
        assert (
            f'fminfer:result_cache_hits_total{{model_name="{engine.model_name}"}}'
            in metrics
        )
        assert server.is_idle()
    assert (engine.stats.num_prompt_tokens, engine.stats.num_generated_tokens) == before


def test_kept_answers_are_those_that_were_computed(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    """Whole and in a stream, with logprobs, echo, several choices, seeds and ids."""
    check_all(engine, tmp_path, REQUESTS)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, GREEDY),
        (COMPLETIONS, DRAWN | {"prompt": ["den", "porch"], "n": 2, "seed": 5}),
        (CHAT, TALK | {"max_tokens": 9, "seed": 5}),
    ],
)
def test_the_usage_so_far_of_a_kept_answer(
    engine: fminfer.Engine, path: str, fields: dict[str, Any]
) -> None:
    """It was 0 tokens beside the whole text: a kept answer has no ids to count."""
    wish = {"include_usage": True, "continuous_usage_stats": True}
    asked = fields | {"stream": True, "stream_options": wish}
    with serving(engine, size=8) as server:
        *_, computed = server.post(path, asked).events
        kept = [event["usage"] for event in server.post(path, asked).events]
        assert counts(server)[1] == 1
    for usage in kept:
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert usage[name] == computed["usage"][name], "all of it was drawn before"


def test_calls_of_tools_are_kept(tmp_path: Path) -> None:
    engine = fminfer.Engine(
        str(save_reciting(tmp_path / "m", TEXTS, TEMPLATE)), dtype="float32"
    )
    try:
        check_all(engine, tmp_path / "cache", CALLS)
    finally:
        engine.close()


def test_a_response_and_its_chat_share_their_answer(engine: fminfer.Engine) -> None:
    asked = {"input": "How do you go?", "max_output_tokens": 9, "seed": 5}
    with serving(engine, size=8) as server:
        computed = server.post("/v1/responses", asked).json
        body = server.post("/v1/responses", asked | {"stream": True}).body.decode()
        *_, last, _ = body.split("\n\n")
        kept = json.loads(last.partition("data: ")[2])["response"]
        chat = server.post(CHAT, TALK | {"max_tokens": 9, "seed": 5}).json
        assert counts(server) == (3, 2)
    content = computed["output"][0]["content"]
    assert kept["output"][0]["content"] == content
    assert content[0]["text"] == chat["choices"][0]["message"]["content"]
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        assert kept["usage"][name] == computed["usage"][name]


def test_a_streamed_answer_is_kept_for_one_that_is_not(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    with serving(engine, tmp_path) as server:
        ask_streamed(server, COMPLETIONS, GREEDY)
        server.post(COMPLETIONS, GREEDY | {"user": "another", "model": "any"})
        assert counts(server) == (2, 1)


def test_a_run_and_a_server_share_answers(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    with serving(engine, tmp_path) as server:
        server.post(CHAT, TALK | {"max_tokens": 9, "temperature": 0})
    with serving(engine, tmp_path):
        kept = engine.stats.num_kept_requests
        body = TALK | {"max_tokens": 9, "temperature": 0}
        batch = {"custom_id": "1", "method": "POST", "url": CHAT, "body": body}
        assert all(record.error is None for record in engine.run([batch, body]))
        assert engine.stats.num_kept_requests - kept >= 1


def test_cache_size_of_energonai(engine: fminfer.Engine) -> None:
    """Seed 003: `cache_size` queries are kept, and the one not used for longest leaves."""
    first, second, third = [GREEDY | {"prompt": f"{n} rooms"} for n in range(3)]
    with serving(engine, size=2) as server:
        for request in (first, second, first, third, first, second):
            assert server.post(COMPLETIONS, request).status == 200
        assert counts(server) == (6, 2), "first, twice"
        for _ in range(2):
            server.post(COMPLETIONS, DRAWN)
        assert counts(server) == (6, 2), "draws without a seed are not kept"


def test_cache_list_size_of_energonai(engine: fminfer.Engine) -> None:
    """Seed 003: so many answers of a query are kept, and a random one of them is returned."""
    with serving(engine, size=2, list_size=3) as server:
        drawn = [whole(server.post(COMPLETIONS, DRAWN))[0][0]["text"] for _ in range(3)]
        assert counts(server) == (3, 0)
        again = {
            whole(server.post(COMPLETIONS, DRAWN))[0][0]["text"] for _ in range(60)
        }
        assert counts(server) == (63, 60) and again == {*drawn}
        other = DRAWN | {"temperature": 1.9}
        server.post(COMPLETIONS, other)
        assert counts(server) == (64, 60), "another temperature is another query"
        assert ask_streamed(server, COMPLETIONS, DRAWN)[0][0]["text"] in again


def test_a_full_queue_still_gives_kept_answers(engine: fminfer.Engine) -> None:
    long = {"prompt": [5] * 20, "max_tokens": 900, "ignore_eos": True, "n": 2}
    with serving(engine, size=9, queue_size=1) as server:
        server.post(COMPLETIONS, GREEDY)
        connections = [server.start_post(COMPLETIONS, long)]
        until(lambda: engine.state.num_running == 2, "all rows are taken")
        connections.append(server.start_post(COMPLETIONS, long | {"seed": 1}))
        until(lambda: server.thread.service.dispatcher.num_waiting == 1, "one waits")
        assert server.post(COMPLETIONS, GREEDY).status == 200
        refused = server.post(COMPLETIONS, GREEDY | {"max_tokens": 7})
        assert refused.status == 429 and refused.error["code"] == "queue_full"
        assert "Retry-After" in refused.headers or "retry-after" in refused.headers
        for connection in connections:
            connection.close()
        until(server.is_idle, "all is free")


def test_a_slow_disk_holds_no_other_request_up(
    engine: fminfer.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read beside the event loop."""
    with serving(engine, tmp_path) as server:
        cache = engine.runs.cache
        assert cache is not None and cache._store is not None
        is_asked = threading.Event()
        goes_on = threading.Event()

        def find(key: bytes) -> None:
            is_asked.set()
            assert goes_on.wait(20)

        monkeypatch.setattr(cache._store, "find", find)
        connection = server.start_post(COMPLETIONS, GREEDY)
        assert is_asked.wait(20)
        assert server.get("/health").status == 200
        goes_on.set()
        assert connection.recv(12) == b"HTTP/1.1 200"
        connection.close()
        until(server.is_idle, "all is free")


def test_a_damaged_file_costs_no_request(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    with serving(engine, tmp_path) as server:
        expected = whole(server.post(COMPLETIONS, GREEDY))
        cache = engine.runs.cache
        assert cache is not None and cache._store is not None
        until(lambda: not cache._store._pending, "it is written")
        (tmp_path / FILE).write_bytes(b"garbage" * 5000)
        for _ in range(3):
            assert whole(server.post(COMPLETIONS, GREEDY)) == expected
            time.sleep(0.1)
    with serving(engine, tmp_path) as server:
        assert whole(server.post(COMPLETIONS, GREEDY)) == expected
        assert counts(server) == (1, 1)


def test_what_a_client_reads_is_no_other_clients(engine: fminfer.Engine) -> None:
    """Ids of answers differ, and each has the model's name as it was asked for."""
    with serving(engine, size=5) as server:
        found = [
            server.post(COMPLETIONS, GREEDY | {"model": name}).json for name in "ab"
        ]
    assert [answer["model"] for answer in found] == ["a", "b"]
    assert found[0]["id"] != found[1]["id"]
    assert json.dumps(found[0]["choices"]) == json.dumps(found[1]["choices"])
