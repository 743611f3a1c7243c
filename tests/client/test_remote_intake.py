"""Lines for servers: checked by the contract, before anything is sent."""

from __future__ import annotations

import time
from array import array
from typing import Any

import orjson
import pytest

from fminfer.answers.answer_index import make_answer_key
from fminfer.client.dialects import DIALECTS
from fminfer.client.remote_intake import RemoteIntake
from fminfer.client.remote_request import RemoteRequest
from fminfer.contract.endpoints import Endpoint
from fminfer.contract.envelope import make_line
from fminfer.contract.record import Record
from fminfer.core.config import EngineConfig
from fminfer.core.errors import RequestError
from fminfer.engine.engine_core import Finished
from fminfer.engine.intake import IncomingRequest
from fminfer.runtime.lines.line_intake import LineIntake, LineRequest, RecordForm

from .test_dialects import MESSAGES, TEXTS, TOOL, prepare, send


def make_intake(**options: Any) -> RemoteIntake:
    return RemoteIntake(EngineConfig(**options), DIALECTS["vllm"])


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"prompt": "a", "temperature": 3}, "out_of_range"),
        ({"prompt": 5}, "invalid_type"),
        ({"prompt": "a", "n": "two"}, "invalid_type"),
        ({"prompt": "\ud800"}, "invalid_utf8"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "invalid_utf8"),
        ({"messages": []}, "out_of_range"),
        ({"messages": [{"role": "user"}]}, "invalid_type"),
        ({"input": []}, "out_of_range"),
        ({"prompt": "a", "suffix": "b"}, "unsupported_parameter"),
        ({"prompt": "a", "guided_json": "no JSON"}, "out_of_range"),
        ({}, "missing_prompt"),
    ],
)
def test_wrong_lines_have_the_codes_of_the_contract(
    fields: dict[str, Any], code: str
) -> None:
    intake = make_intake()
    with pytest.raises(RequestError) as error:
        request = intake.parse(fields)
        (prepared,) = intake.prepare_all([IncomingRequest(request, 0, True)])
        assert isinstance(prepared, Exception)
        raise prepared
    assert error.value.code == code


def test_a_wrong_line_fails_alone() -> None:
    intake = make_intake()
    lines = ({"prompt": "a"}, {"prompt": "a", "best_of": 2}, {"prompt": "b"})
    incoming = [IncomingRequest(intake.parse(line), 0, True) for line in lines]
    first, second, third = intake.prepare_all(incoming)
    assert isinstance(first, RemoteRequest) and isinstance(third, RemoteRequest)
    assert isinstance(second, RequestError) and second.param == "best_of"


def test_what_a_request_is() -> None:
    line = {"prompt": ["Hällo", "b"], "temperature": 0, "guided_regex": "a"}
    request = prepare("vllm", line)
    texts = [prompt.text for prompt in request.prompts]
    assert texts == [request.body.decode(), ""]
    assert array("I", request.prompts[0].ids).tobytes() == "Hällo".encode() + b"\0\0"
    assert prepare("vllm", {"prompt": [5, 6]}).prompts[0].ids == [5, 6]
    assert request.params.constraint is None and request.params.is_greedy
    assert request.constraint is not None and request.constraint.text == "a"
    assert (request.kind, request.endpoint) == ("openai", "completions")
    assert prepare("vllm", line, is_openai=False).kind == "plain"
    kinds = {endpoint: prepare("fminfer", TEXTS[endpoint]).kind for endpoint in TEXTS}
    assert kinds == {each: each for each in TEXTS} | {
        "completions": "openai",
        "classify": "embeddings",  # unless a url says otherwise
    }
    assert prepare("vllm", TEXTS["classify"], "classify").kind == "classify"
    scored = prepare("vllm", TEXTS["score"])
    assert scored.vectors is not None and scored.vectors.seconds == ("two",)


def test_equal_requests_have_one_key_and_others_another() -> None:
    line = {"prompt": "a", "temperature": 0}
    key = make_answer_key(prepare("vllm", line))
    assert key == make_answer_key(prepare("vllm", line | {"user": "x", "top_k": -1}))
    for other in ({"max_tokens": 3}, {"prompt": "b"}, {"guided_regex": "a"}):
        assert key != make_answer_key(prepare("vllm", line | other))
    chat = {"messages": MESSAGES, "temperature": 0}
    key = make_answer_key(prepare("vllm", chat))
    for further in ({"chat_template_kwargs": {"a": 1}}, {"tools": [TOOL]}):
        assert key != make_answer_key(prepare("vllm", {**chat, **further}))


def test_requests_by_chance_are_counted() -> None:
    intake = make_intake()
    request = intake.parse({"prompt": "a"})
    (prepared,) = intake.prepare_all([IncomingRequest(request, 2, True)])
    assert isinstance(prepared, RemoteRequest)
    assert prepared.repeat == 2 and prepared.meaning
    greedy = intake.parse({"prompt": "a", "temperature": 0})
    (prepared,) = intake.prepare_all([IncomingRequest(greedy, 2, True)])
    assert isinstance(prepared, RemoteRequest)
    assert prepared.repeat == 0 and not prepared.meaning


def test_fields_of_the_run_are_laid_over() -> None:
    config = EngineConfig(
        request_args={"max_tokens": 3, "logprobs": 2, "dimensions": 8}
    )
    sent = orjson.loads(prepare("vllm", {"input": "a"}, config=config).body)
    assert sent == {"input": "a", "dimensions": 8}
    config = EngineConfig(request_args={"max_tokens": 3, "logprobs": 2})
    line = {"prompt": "a", "max_tokens": 9}
    sent = orjson.loads(prepare("vllm", line, config=config).body)
    assert sent["max_tokens"] == 3 and sent["logprobs"] == 2
    chat = {"messages": MESSAGES, "max_completion_tokens": 9}
    sent = orjson.loads(prepare("vllm", chat, config=config).body)
    assert sent["max_tokens"] == 3 and sent["top_logprobs"] == 2
    assert "max_completion_tokens" not in sent


def test_responses_are_asked_as_chats() -> None:
    line = {"input": "Hello", "max_output_tokens": 5, "instructions": "Be brief."}
    request = prepare("vllm", line, "responses")
    assert (request.kind, request.endpoint) == ("chat", "chat")
    sent = orjson.loads(request.body)
    assert sent["max_tokens"] == 5
    assert [each["role"] for each in sent["messages"]] == ["system", "user"]
    with pytest.raises(RequestError, match="n is 2"):
        send("vllm", line | {"n": 2}, "responses")
    with pytest.raises(RequestError, match=r"reasoning\.effort is"):
        send("llama-server", line | {"reasoning": {"effort": "low"}}, "responses")


def make_record(line: dict[str, Any], choice: dict[str, Any], kind: str) -> Any:
    intake = LineIntake(make_intake())
    opened = intake.open(make_line(1, line))
    assert isinstance(opened, LineRequest), opened
    usage = {
        "prompt_tokens": 1,
        "completion_tokens": 1,
        "total_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    times = {"batch_time": 0.0, "batch_size": 1, "queue_time": 0.0}
    answer = Finished(1, [choice], usage, times, kind)  # type: ignore[arg-type]
    record = RecordForm("model", 1).build(opened, answer)
    assert isinstance(record, Record)
    return record.result


def test_records_of_responses_and_of_bare_inputs() -> None:
    """A bare `input` asks for a vector here, and its record is none of a response."""
    entry = {"object": "embedding", "index": 0, "embedding": [1.0]}
    result = make_record({"input": "Hello"}, entry, "embeddings")
    assert result["data"] == [entry]
    message = {"role": "assistant", "content": "Hi", "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/responses",
        "body": {"input": "Hello"},
    }
    result = make_record(line, choice, "chat")
    assert result["object"] == "response" and result["status"] == "completed"


def test_unknown_fields_warn_and_are_not_sent() -> None:
    intake = make_intake()
    request = intake.parse({"prompt": "a", "temprature": 1})
    assert any("temprature" in str(warning) for warning in request.warnings)
    assert "temprature" not in send("vllm", {"prompt": "a", "temprature": 1})
    with pytest.raises(RequestError, match="temprature"):
        make_intake(strict=True).parse({"prompt": "a", "temprature": 1})


def test_rows_of_tables_are_opened_without_a_tokenizer() -> None:
    from fminfer.contract.envelope import make_row_line

    cells = b'{"text":"<s> Hello"}'
    line = make_row_line(0, 1, cells, b'{"prompt":"<s> Hello"}')
    assert isinstance(LineIntake(make_intake()).open(line), LineRequest)


def test_where_a_text_by_itself_stands() -> None:
    intake = make_intake()
    assert intake.choose_text_field({}, is_raw=False) == "messages"
    assert intake.choose_text_field({}, is_raw=True) == "prompt"
    assert intake.choose_text_field({"echo": True}, is_raw=False) == "prompt"


def test_a_short_line_takes_little_time() -> None:
    """It takes 15 µs beside its parsing; ten times as long is allowed, and more."""
    intake = make_intake()
    line = {"prompt": "Question: how? " * 8, "temperature": 0, "stop": "\n"}
    request = intake.parse(line)
    start_s = time.process_time()
    for _ in range(1000):
        intake.prepare_all([IncomingRequest(request, 0, True)])
    assert (time.process_time() - start_s) / 1000 < 600e-6


@pytest.mark.parametrize("endpoint", ["chat", "responses", "completions"])
def test_a_clock_and_compiling_mean_nothing_here(endpoint: Endpoint) -> None:
    text = TEXTS.get(endpoint, {"input": "Hello"})
    request = make_intake().parse(text, endpoint=endpoint, clock="2026", compiles=False)
    assert request.endpoint == endpoint
