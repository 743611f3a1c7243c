"""Pieces of servers' answers become the answers that our own engine writes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from fminfer import Engine
from fminfer.client.answer_builder import AnswerBuilder
from fminfer.client.remote_options import DialectName
from fminfer.client.remote_request import RemoteRequest
from fminfer.client.server_trouble import ServerTroubleError
from fminfer.contract.endpoints import Endpoint
from fminfer.core.errors import RequestError
from fminfer.engine.engine_core import Failed, Finished
from tests.client.remote_requests import make_request

from .test_dialects import MESSAGES, TEXTS, TOOL, prepare

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def finish(request: RemoteRequest, *chunks: Any) -> Finished | Failed:
    builder = AnswerBuilder(request)
    for chunk in chunks:
        builder.add_chunk(chunk)
    return builder.finish(7, {"batch_time": 1.0})


def build(request: RemoteRequest, *chunks: Any) -> Finished:
    answer = finish(request, *chunks)
    assert isinstance(answer, Finished), answer
    assert answer.request_id == 7 and answer.kind == request.kind
    return answer


def find_error(request: RemoteRequest, *chunks: Any) -> RequestError:
    answer = finish(request, *chunks)
    assert isinstance(answer, Failed)
    return answer.error


def say(text: str | None, reason: str | None = None, index: int = 0) -> dict[str, Any]:
    return {"choices": [{"index": index, "text": text, "finish_reason": reason}]}


def say_in_chat(reason: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def test_texts_are_joined_and_choices_sorted() -> None:
    request = prepare("vllm", {"prompt": ["a", "b"], "n": 2})
    chunks = [say(None, index=index) for index in (3, 1, 0, 2)]
    chunks += [say(f"x{index}", index=index) for index in (1, 3, 2, 0)]
    chunks += [say("", "stop", index) for index in (2, 0, 3, 1)]
    answer = build(request, *chunks, {"choices": [], "usage": USAGE})
    assert answer.choices == [
        {"text": f"x{index}", "index": index, "logprobs": None, "finish_reason": "stop"}
        for index in range(4)
    ]
    assert answer.usage == USAGE | {"prompt_tokens_details": {"cached_tokens": 0}}


def test_lines_of_other_shapes_have_no_key_of_logprobs() -> None:
    request = prepare("vllm", {"prompt": "a"}, is_openai=False)
    (choice,) = build(request, say("b", "length")).choices
    assert choice == {"text": "b", "index": 0, "finish_reason": "length"}


def test_logprobs_of_completions() -> None:
    first = {
        "tokens": ["a", "b"],
        "token_logprobs": [None, -1.0],
        "top_logprobs": [None, {"b": -1.0}],
        "text_offset": [0, 1],
    }
    second = {
        "tokens": ["c"],
        "token_logprobs": [-2.0],
        "top_logprobs": [{"c": -2.0}],
        "text_offset": [2],
    }
    chunks = [say("ab"), say("c", "stop")]
    for chunk, logprobs in zip(chunks, (first, second), strict=True):
        chunk["choices"][0]["logprobs"] = logprobs
    line = {"prompt": "a", "echo": True}
    (choice,) = build(prepare("vllm", line | {"logprobs": 1}), *chunks).choices
    joined = {name: [*first[name], *second[name]] for name in first}  # type: ignore[misc]
    assert choice["logprobs"] == joined
    (choice,) = build(prepare("vllm", line | {"logprobs": 0}), *chunks).choices
    assert choice["logprobs"] == joined | {"top_logprobs": None}
    (choice,) = build(prepare("vllm", line), *chunks).choices
    assert choice["logprobs"] is None


def make_token(token: str, logprob: float, *tops: tuple[str, float]) -> dict[str, Any]:
    entry = {"id": 5, "token": token, "logprob": logprob, "bytes": [*token.encode()]}
    return entry | {"top_logprobs": [make_token(*top) for top in tops]}


def test_llama_servers_logprobs_of_completions() -> None:
    tokens = [
        make_token("ab", -1.0, ("ab", -1.0), ("c", -2.0), ("d", -3.0)),
        make_token("e", -9.0, ("f", -0.5), ("g", -0.75)),
    ]
    chunk = say("abe", "stop")
    chunk["choices"][0]["logprobs"] = {"content": tokens}
    request = prepare("llama-server", {"prompt": "a", "logprobs": 2})
    (choice,) = build(request, chunk).choices
    assert choice["logprobs"] == {
        "tokens": ["ab", "e"],
        "token_logprobs": [-1.0, -9.0],
        "top_logprobs": [{"ab": -1.0, "c": -2.0}, {"f": -0.5, "g": -0.75, "e": -9.0}],
        "text_offset": [0, 2],
    }
    tops = choice["logprobs"]["top_logprobs"]
    assert [[*each] for each in tops] == [["ab", "c"], ["f", "g", "e"]]


def test_a_chat() -> None:
    entry = make_token("Hi", -1.0, ("Hi", -1.0), ("Ho", -2.0))
    chunks = [
        say_in_chat(role="assistant", content=""),
        say_in_chat(reasoning_content="First "),
        say_in_chat(reasoning="this."),
        say_in_chat(content="Hi"),
        say_in_chat("stop"),
    ]
    chunks[3]["choices"][0]["logprobs"] = {"content": [entry]}
    chunks[4]["choices"][0]["stop_reason"] = "\n"
    line = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1}
    (choice,) = build(prepare("vllm", line), *chunks).choices
    top = {"token": "Hi", "logprob": -1.0, "bytes": [72, 105]}
    assert choice == {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": "Hi",
            "refusal": None,
            "reasoning_content": "First this.",
        },
        "logprobs": {"content": [top | {"top_logprobs": [top]}], "refusal": None},
        "finish_reason": "stop",
        "stop_reason": "\n",
    }


@pytest.mark.parametrize("repeats", [False, True])
def test_calls_come_in_pieces(repeats: bool) -> None:
    """Some servers repeat the name and the id in each piece."""
    named = {"name": "look"}
    pieces: list[dict[str, Any]] = [
        {"index": 1, "id": "b", "function": {"name": "find", "arguments": "{}"}},
        {"index": 0, "id": "a", "function": {"name": "look", "arguments": '{"x'}},
        {"index": 0, "function": {"arguments": '": 1}'} | (named if repeats else {})},
    ]
    chunks = [say_in_chat(tool_calls=[piece]) for piece in pieces]
    request = prepare("vllm", {"messages": MESSAGES, "tools": [TOOL]})
    (choice,) = build(request, *chunks, say_in_chat("tool_calls")).choices
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"] == [
        {
            "id": "a",
            "type": "function",
            "function": {"name": "look", "arguments": '{"x": 1}'},
        },
        {
            "id": "b",
            "type": "function",
            "function": {"name": "find", "arguments": "{}"},
        },
    ]


def test_a_whole_chat() -> None:
    function = {"name": "look", "arguments": "{}"}
    calls = [{"id": "a", "type": "function", "function": function}]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    request = prepare("vllm", {"messages": MESSAGES, "tools": [TOOL], "n": 2})
    body = {
        "choices": [
            {"index": index, "message": message, "finish_reason": "tool_calls"}
            for index in (1, 0)
        ],
        "usage": USAGE,
    }
    builder = AnswerBuilder(request)
    builder.add_whole(body)
    answer = builder.finish(1, {})
    assert isinstance(answer, Finished)
    assert [each["message"]["tool_calls"] for each in answer.choices] == [calls] * 2
    assert answer.usage["completion_tokens"] == 2  # of both together


def test_usage() -> None:
    request = prepare("vllm", {"prompt": "a"})
    usage = build(request, say("b", "stop")).usage
    assert usage == {
        "prompt_tokens": 0,
        "completion_tokens": 0,
        "total_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": 0},
        "is_missing": True,
    }
    details = {
        "prompt_tokens_details": {"cached_tokens": 2, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }
    usage = build(request, say("b", "stop"), {"usage": USAGE | details}).usage
    assert usage == USAGE | {
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }
    usage = build(request, say("b", "stop"), {"usage": {"prompt_tokens": None}}).usage
    assert usage["prompt_tokens"] == 0


def test_llama_server_counts_each_choice() -> None:
    request = prepare("llama-server", {"prompt": ["a", "b"], "n": 2})
    chunks = [say("b", "stop", index) | {"usage": USAGE} for index in range(4)]
    usage = build(request, *chunks).usage
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (6, 8)


def test_vectors_and_what_is_made_of_them() -> None:
    request = prepare("vllm", {"input": ["a", "b"]})
    entries = [{"index": index, "embedding": [float(index)]} for index in (1, 0)]
    usage = {"prompt_tokens": 3, "total_tokens": 3}
    answer = build(request, {"data": entries, "usage": usage})
    assert answer.choices == entries[::-1] and answer.part == "data"
    assert answer.usage == usage | {"prompt_tokens_details": {"cached_tokens": 0}}
    classes = [{"index": 0, "label": "x", "probs": [1.0], "num_classes": 1}]
    request = prepare("vllm", {"input": "a"}, "classify")
    assert build(request, {"data": classes}).choices == classes
    scores = [{"index": 0, "object": "score", "score": 0.5}]
    request = prepare("vllm", TEXTS["score"])
    assert build(request, {"data": scores}).choices == scores


def test_rankings_are_cut_and_have_their_documents() -> None:
    """llama-server returns no documents, and vLLM more of each."""
    line = {"query": "a", "documents": ["x", "y", "z"]}
    results = [
        {"index": index, "relevance_score": score, "document": {"text": "?", "more": 1}}
        for index, score in ((0, 0.25), (1, -1.0), (2, 0.5))
    ]
    answer = build(prepare("vllm", line | {"top_n": 2}), {"results": results})
    assert answer.choices == [
        {"index": 2, "document": {"text": "z"}, "relevance_score": 0.5},
        {"index": 0, "document": {"text": "x"}, "relevance_score": 0.25},
    ]
    assert answer.part == "results"
    request = prepare("llama-server", line | {"return_documents": False})
    answer = build(request, {"results": results})
    assert [[*each] for each in answer.choices] == [["index", "relevance_score"]] * 3


def test_answers_that_are_held_to_their_lines() -> None:
    request = prepare("vllm", {"prompt": "a", "guided_choice": ["den", "porch"]})
    assert build(request, say("den", "stop")).choices[0]["text"] == "den"
    error = find_error(request, say("hall", "stop"))
    assert error.code == "constraint_broken" and '"hall"' in error.message
    assert error.is_retryable
    assert build(request, say("ha", "length")).choices[0]["text"] == "ha"
    chat = {"messages": MESSAGES, "response_format": {"type": "json_object"}}
    request = prepare("openai", chat)
    pieces = [say_in_chat(reasoning_content="so"), say_in_chat(content='{"a":')]
    assert build(request, *pieces, say_in_chat("stop", content="1}")).choices
    assert find_error(request, *pieces, say_in_chat("stop")).code == "constraint_broken"


def test_a_call_that_is_asked_for_must_be_there() -> None:
    """llama-server answers by text where a model's template has no tools."""
    chat = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"}
    request = prepare("llama-server", chat)
    error = find_error(request, say_in_chat("stop", content="Hello!"))
    assert error.code == "constraint_broken" and "call" in error.message
    assert build(request, say_in_chat("length", content="Hello!"))


def test_refused_content_is_the_rows() -> None:
    request = prepare("openai", {"prompt": "a"})
    assert find_error(request, say("b", "content_filter")).code == "refused_by_server"
    message = {"role": "assistant", "content": None, "refusal": "I cannot."}
    chat = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    (choice,) = build(prepare("openai", {"messages": MESSAGES}), chat).choices
    assert choice["message"] == message


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [{"choices": []}],
        [say("a")],
        [say("a", "")],
        [say("a", "stop", 1)],
        [say("a", "stop"), say("a", "stop", 1)],
        [say("a", "abort")],
        [say("a", "error")],
        [{"error": {"message": "out of memory"}}],
        [{"error": "out of memory"}],
        [say("a"), {"object": "error", "error": {"code": 500}}],
    ],
)
def test_what_is_no_whole_answer_is_the_servers_trouble(chunks: list[Any]) -> None:
    with pytest.raises(ServerTroubleError):
        finish(prepare("vllm", {"prompt": "a"}), *chunks)


WRONG: list[Any] = [None, True, -1, 2.5, "x", [], [1], {}, {"a": 1}, [[]], [{}]]


def spoil(value: Any) -> Iterator[Any]:
    """Yield a value of JSON with each of its parts replaced by each wrong one."""
    yield from WRONG
    if isinstance(value, dict):
        for name in value:
            yield {key: each for key, each in value.items() if key != name}
            for wrong in spoil(value[name]):
                yield value | {name: wrong}
    if isinstance(value, list):
        for place, each in enumerate(value):
            for wrong in spoil(each):
                yield [*value[:place], wrong, *value[place + 1 :]]


def make_whole(endpoint: Endpoint) -> dict[str, Any]:
    usage = USAGE | {"prompt_tokens_details": {"cached_tokens": 1}}
    if endpoint == "completions":
        lists = {"tokens": ["a"], "token_logprobs": [-1], "top_logprobs": [{"a": -1}]}
        choice: dict[str, Any] = {"text": "a", "logprobs": lists | {"text_offset": [0]}}
    elif endpoint == "chat":
        entry = make_token("a", -1.0, ("a", -1.0))
        call = {"index": 0, "id": "a", "function": {"name": "a", "arguments": "{}"}}
        message = {"content": "a", "reasoning": "b", "tool_calls": [call]}
        choice = {"message": message, "logprobs": {"content": [entry]}}
    else:
        entry = {"index": 0, "embedding": [1.0], "score": 1.0, "relevance_score": 1.0}
        entries = [entry | {"probs": [1.0]}]
        return {"data": entries, "results": entries, "usage": usage}
    extras = {"stop_reason": "a", "token_ids": [1], "prompt_token_ids": [2]}
    choice |= {"index": 0, "finish_reason": "stop", **extras}
    return {"choices": [choice], "usage": usage}


@pytest.mark.parametrize("endpoint", TEXTS)
def test_hostile_json_is_an_answer_or_the_servers_trouble(endpoint: Endpoint) -> None:
    fields = TEXTS[endpoint]
    if endpoint in ("completions", "chat"):
        fields = fields | {"logprobs": True}
    if endpoint == "rerank":
        fields = {"query": "a", "documents": ["b"]}
    request = prepare("fminfer", fields, endpoint)
    whole = make_whole(endpoint)
    assert build(request, whole)
    num_answers = 0
    wrong_ones = [*spoil(whole)]
    for wrong in wrong_ones:
        try:
            answer = finish(request, wrong)
        except ServerTroubleError:
            continue
        num_answers += 1
        json.dumps(
            answer.choices if isinstance(answer, Finished) else "", allow_nan=False
        )
    assert 0 < num_answers < len(wrong_ones)


def test_long_answers_take_linear_time() -> None:
    request = prepare("vllm", {"prompt": "a", "logprobs": 1})
    chunk = say("abc")
    chunk["choices"][0]["logprobs"] = {"tokens": ["abc"], "token_logprobs": [-1.0]}

    def measure(num_chunks: int) -> float:
        start_s = time.process_time()
        build(request, *[chunk] * num_chunks, say("", "stop"))
        return time.process_time() - start_s

    measure(1000)
    assert measure(40_000) < 200 * max(measure(2000), 1e-3)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("demo", dtype="float32") as engine:
        yield engine


LINES: list[dict[str, Any]] = [
    {"prompt": "Question:", "max_tokens": 5, "temperature": 0},
    {"prompt": ["a", "b"], "max_tokens": 3, "n": 2, "seed": 3, "logprobs": 2},
    {"prompt": "Hi", "max_tokens": 0, "echo": True, "logprobs": 0},
    {"prompt": "Hi", "max_tokens": 4, "return_token_ids": True, "seed": 1, "stop": "e"},
    {"messages": MESSAGES, "max_tokens": 5, "temperature": 0},
    {"messages": MESSAGES, "temperature": 0, "logprobs": True, "top_logprobs": 2},
    {"prompt": "P", "structured_outputs": {"choice": ["a", "b"], "probabilities": 1}},
    {"prompt": "P", "guided_choice": ["a", "b"], "temperature": 0},
]


@pytest.mark.parametrize("line", LINES, ids=json.dumps)
def test_our_own_answers_come_back_as_they_were(
    line: dict[str, Any], engine: Engine
) -> None:
    """A choice is the same, its fields in the same order, whether whole or in pieces."""
    (record,) = engine.run([line])
    assert record.error is None and record.result is not None
    result: Any = record.result
    name: DialectName = "fminfer"
    request = prepare(name, line, is_openai=False)
    answer = build(request, {"choices": result["choices"], "usage": result["usage"]})
    assert json.dumps(answer.choices) == json.dumps(result["choices"])
    assert answer.usage == result["usage"]


def test_calls_of_one_index_with_other_ids_are_several() -> None:
    """Gemini's API, and older Ollamas, give each call the index 0."""
    request = make_request("a", "chat")
    builder = AnswerBuilder(request)
    for call_id, name in (("1", "f"), ("2", "g")):
        function = {"name": name, "arguments": "{}"}
        call = {"index": 0, "id": call_id, "function": function}
        piece = {"index": 0, "delta": {"tool_calls": [call]}}
        builder.add_chunk({"choices": [piece]})
    end = {"index": 0, "delta": {}, "finish_reason": "tool_calls"}
    builder.add_chunk({"choices": [end]})
    finished = builder.finish(0, {})
    assert isinstance(finished, Finished)
    calls = finished.choices[0]["message"]["tool_calls"]
    assert [each["function"]["name"] for each in calls] == ["f", "g"]
    assert [each["function"]["arguments"] for each in calls] == ["{}", "{}"]


@pytest.mark.parametrize("count", ["3", [1], -5, 1e300, True, None, 10**12])
def test_odd_counts_of_tokens_are_none(count: object) -> None:
    details = {"cached_tokens": count}
    for usage in ({"prompt_tokens": count}, {"prompt_tokens_details": count}):
        builder = AnswerBuilder(make_request("a"))
        choice = {"index": 0, "text": "b", "finish_reason": "stop"}
        usage = {"prompt_tokens_details": details} | usage
        builder.add_chunk({"choices": [choice], "usage": usage})
        finished = builder.finish(0, {})
        assert isinstance(finished, Finished)
        assert finished.usage["total_tokens"] == 0
        assert finished.usage["prompt_tokens_details"] == {"cached_tokens": 0}
