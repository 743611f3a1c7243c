"""`/v1/completions`: the answers of a file run, whole and in parts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import fminfer
from fminfer.models.known_sizes import DEMO_MODEL
from tests.server.answers import answer_file, assert_equal, join
from tests.server.running import Running, running, until
from tests.server.server_needs import needs_server

pytestmark = needs_server(engine={"max_rows": 64})

QUESTION = "Question: How do you go from the porch to the den?\nAnswer:"
REQUESTS: list[dict[str, Any]] = [
    {"prompt": QUESTION, "max_tokens": 8, "temperature": 0},
    {
        "prompt": QUESTION,
        "max_tokens": 12,
        "seed": 7,
        "logprobs": 3,
        "ignore_eos": True,
    },
    {"prompt": QUESTION, "max_tokens": 9, "seed": 7, "n": 3, "logit_bias": {"0": -100}},
    {"prompt": [QUESTION, "den"], "max_tokens": 5, "seed": 1, "n": 2, "logprobs": 0},
    {
        "prompt": [5, 6, 7],
        "max_tokens": 4,
        "temperature": 0,
        "echo": True,
        "logprobs": 2,
    },
    {"prompt": [[5, 6], [7]], "max_tokens": 3, "seed": 3, "echo": 1, "stop": ["e"]},
    {"prompt": QUESTION, "max_tokens": 0, "echo": True, "logprobs": 1},
    {
        "prompt": QUESTION,
        "max_tokens": 6,
        "seed": 5,
        "n": 2,
        "best_of": 4,
        "logprobs": 1,
    },
    {
        "prompt": "äöü 🙂",
        "max_tokens": 8,
        "seed": 2,
        "echo": True,
        "logprobs": 1,
        "top_k": 40,
    },
    {
        "prompt": QUESTION,
        "max_tokens": 5,
        "seed": 2,
        "return_token_ids": True,
        "min_tokens": 3,
    },
    {
        "prompt": QUESTION,
        "max_tokens": 5,
        "seed": 2,
        "allowed_token_ids": [299, 272, 199, 0],
    },
    {
        "prompt": QUESTION,
        "max_tokens": 9,
        "seed": 2,
        "bad_words": ["south", "east", "\n"],
    },
    {
        "prompt": QUESTION,
        "max_tokens": 5,
        "seed": 2,
        "truncate_prompt_tokens": 4,
        "echo": True,
    },
]


@pytest.fixture(scope="module")
def file_answers() -> list[dict[str, Any]]:
    """What the same requests have as answers in a Batch file."""
    return answer_file(
        [("/v1/completions", body) for body in REQUESTS], dtype="float32"
    )


@pytest.mark.parametrize("place", range(len(REQUESTS)))
def test_answers_are_those_of_a_file(
    server: Running, file_answers: list[dict[str, Any]], place: int
) -> None:
    answer = server.post("/v1/completions", REQUESTS[place])
    assert answer.status == 200
    assert_equal(answer.json, file_answers[place])


@pytest.mark.parametrize("place", range(len(REQUESTS)))
def test_a_streams_parts_are_the_answer(
    server: Running, file_answers: list[dict[str, Any]], place: int
) -> None:
    usage = {"stream_options": {"include_usage": True}}
    answer = server.post("/v1/completions", REQUESTS[place] | {"stream": True} | usage)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-accel-buffering"] == "no"
    *chunks, last = answer.events
    assert last["choices"] == [] and all(chunk["usage"] is None for chunk in chunks)
    joined = join([choice for chunk in chunks for choice in chunk["choices"]])
    assert_equal({"choices": joined, "usage": last["usage"]}, file_answers[place])


def test_each_chunk_tells_the_usage_if_asked(server: Running) -> None:
    """guidellm asks for it, and got the usage at the end alone."""
    wish = {"stream": True, "stream_options": {"include_usage": True}}
    wish["stream_options"] |= {
        "continuous_usage_stats": True,
        "include_obfuscation": False,
    }
    sent = {
        "prompt": [QUESTION, "den"],
        "max_tokens": 5,
        "temperature": 0,
        "n": 2,
    } | wish
    *chunks, last = [
        event["usage"] for event in server.post("/v1/completions", sent).events
    ]
    drawn = [usage["completion_tokens"] for usage in chunks]
    assert drawn == sorted(drawn) and drawn[0] < drawn[-1] == last["completion_tokens"]
    for usage in chunks:
        assert usage["prompt_tokens"] == last["prompt_tokens"]
        assert (
            usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        )
    odd = server.post("/v1/completions", sent | {"stream_options": {"nonsense": 1}})
    assert odd.status == 400 and "nonsense" in odd.error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_events_are_whole_for_readers_of_text_lines(server: Running, path: str) -> None:
    """U+2028, U+2029 and U+0085 stood raw in events, where httpx and `str.splitlines` cut."""
    text = "one\u2028two\u2029three\x85four"
    asked = {
        "prompt": "a",
        "messages": [{"role": "user", "content": "a"}],
        "model": text,
    }
    del asked["prompt" if "chat" in path else "messages"]
    for stream in (False, True):
        answer = server.post(path, asked | {"max_tokens": 1, "stream": stream})
        lines = [
            line.removeprefix("data: ")
            for line in answer.body.decode().splitlines()
            if line
        ]
        assert lines.pop() == "[DONE]" if stream else len(lines) == 1
        assert {json.loads(line)["model"] for line in lines} == {text}


def test_unseeded_requests_differ_and_a_seed_repeats(server: Running) -> None:
    def text(**fields: Any) -> str:
        request = {"prompt": "a", "max_tokens": 12, "ignore_eos": True} | fields
        found: str = server.post("/v1/completions", request).json["choices"][0]["text"]
        return found

    assert len({text() for _ in range(5)}) == 5
    assert len({text(seed=4) for _ in range(3)}) == 1


def test_an_answer_has_its_own_id_time_and_the_asked_models_name(
    server: Running,
) -> None:
    found = [
        server.post("/v1/completions", {"prompt": "a", "model": m}).json
        for m in ("x", "y")
    ]
    assert [each["model"] for each in found] == ["x", "y"]
    assert found[0]["id"] != found[1]["id"] and found[0]["id"].startswith("cmpl-")
    assert (
        found[0]["object"] == "text_completion" and found[0]["created"] > 1_700_000_000
    )


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"prompt": "a", "n": 0}, "n", "from 1 to 128"),
        ({}, "prompt", "prompt is absent"),
        ({"prompt": "a", "stream": 1}, "stream", "true, false or null"),
        (
            {"prompt": "a", "stream": True, "stream_options": 3},
            "stream_options",
            "an object",
        ),
        (
            {"prompt": "a", "max_tokens": 5000},
            "max_tokens",
            "maximum context length is 1024 ",
        ),
        ({"prompt": "a " * 3000}, "prompt", "maximum context length is 1024 tokens"),
        ({"prompt": [9999]}, "prompt", "token id 9999"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages", "prompt"),
        ({"prompt": "a", "n": 128, "best_of": 128}, "n", "--max-rows allows 64"),
    ],
)
def test_wrong_requests_are_told_what_is_wrong(
    server: Running, fields: dict[str, Any], param: str, told: str
) -> None:
    for stream in ({}, {"stream": True}):
        answer = server.post("/v1/completions", stream | fields)
        assert answer.status == 400
        assert answer.error["param"] == param and told in answer.error["message"]
        assert answer.error["type"] == "invalid_request_error"


def test_half_a_surrogate_pair_in_a_name_comes_back(server: Running) -> None:
    """orjson refuses to write what it is no text."""
    body = b'{"prompt": "a", "model": "\\ud800", "max_tokens": 1%s}'
    assert server.post("/v1/completions", body % b"").json["model"] == "\ud800"
    assert (
        server.post("/v1/completions", body % b', "stream": true').events[0]["model"]
        == "\ud800"
    )
    assert (
        server.post("/v1/completions", b'{"prompt": "a", "n": "\\ud800"}').status == 400
    )


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'{"prompt": NaN}', b"\xff", b"[" * 100_000]
)
def test_a_body_that_is_no_object(server: Running, body: bytes) -> None:
    answer = server.post("/v1/completions", body)
    assert answer.status == 400 and answer.error["code"] in (
        "invalid_json",
        "invalid_utf8",
        "not_an_object",
    )


def test_clients_that_leave_free_their_rows(server: Running) -> None:
    long = {"prompt": QUESTION, "max_tokens": 900, "ignore_eos": True}
    for fields in (long, long | {"stream": True}, long | {"n": 8}):
        connections = [server.start_post("/v1/completions", fields) for _ in range(3)]
        until(lambda: server.engine.state.num_running > 0, "they run")
        for connection in connections:
            connection.close()
        until(server.is_idle, "all is free")


def test_a_stream_that_nobody_reads_holds_no_other(server: Running) -> None:
    fields = {
        "prompt": QUESTION,
        "max_tokens": 900,
        "ignore_eos": True,
        "n": 8,
        "logprobs": 20,
    }
    connection = server.start_post("/v1/completions", fields | {"stream": True})
    until(lambda: server.engine.state.num_running > 0, "it runs")
    assert server.post("/v1/completions", REQUESTS[0]).status == 200
    connection.close()
    until(server.is_idle, "all is free")


def test_the_error_in_the_middle_of_a_stream(server: Running) -> None:
    """What a stream has had stays, and an event says what is wrong."""
    from fminfer.server.http_errors import HttpError

    fields = {"prompt": QUESTION, "max_tokens": 900, "ignore_eos": True, "stream": True}
    connection = server.start_post("/v1/completions", fields)
    received = b""
    while b"data: " not in received:
        received += connection.recv(1000)
    dispatcher = server.thread.service.dispatcher
    error = HttpError(500, "broken", code="internal_error")
    loop = server.thread.loop
    loop.call_soon_threadsafe(
        lambda: [reply.push(error) for reply in dispatcher.replies.values()]
    )
    while b"[DONE]" not in received:
        received += connection.recv(10_000)
    last = received.split(b"data: ")[-2]
    assert json.loads(last.split(b"\r\n")[0])["error"]["message"] == "broken"
    connection.close()
    until(server.is_idle, "all is free")


def test_a_model_may_be_asked_for_by_its_name_or_its_path(tmp_path: Path) -> None:
    """/v1/models had the path, which told clients of the server's disk."""
    folder = shutil.copytree(DEMO_MODEL, tmp_path / "my-model")
    engine = fminfer.Engine(f"{folder}/", dtype="float32", check_model=True)
    with running(engine) as server:
        (listed,) = server.get("/v1/models").json["data"]
        assert (listed["id"], listed["root"]) == ("my-model", "my-model")
        assert str(tmp_path) not in server.get("/v1/models").body.decode()
        for name in ("my-model", str(folder), f"{folder}/"):
            answer = server.post(
                "/v1/completions", {"model": name, "prompt": "a", "max_tokens": 1}
            )
            assert answer.status == 200, answer.body
            assert server.get(f"/v1/models/{name}").status == 200
        refused = server.post(
            "/v1/completions", {"model": str(tmp_path), "prompt": "a"}
        )
        assert (
            refused.status == 404
            and "this server has my-model;" in refused.error["message"]
        )
    lines = [
        {"prompt": "a", "max_tokens": 1, "model": name}
        for name in ("my-model", str(folder))
    ]
    assert [record.error for record in engine.run(lines)] == [None, None]
    engine.close()


def test_the_usage_so_far_counts_what_an_encoder_reads(tmp_path: Path) -> None:
    """Its chunks counted the decoder's own start, and not the prompt."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    config = {
        "model_type": "t5",
        "vocab_size": 300,
        "decoder_start_token_id": 0,
    } | sizes
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = fminfer.Engine(random_init=str(tmp_path / "config.json"), dtype="float32")
    wish = {"stream": True, "stream_options": {"include_usage": True}}
    wish["stream_options"] |= {"continuous_usage_stats": True}
    sent = {"prompt": ["a prompt", "another"], "max_tokens": 3, "temperature": 0} | wish
    with running(engine) as server:
        *chunks, last = [
            event["usage"] for event in server.post("/v1/completions", sent).events
        ]
    engine.close()
    assert chunks and {usage["prompt_tokens"] for usage in chunks} == {
        last["prompt_tokens"]
    }
