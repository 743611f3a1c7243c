"""The three shapes of lines, what stands around a request, and the errors of each shape."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import openai.types
import pytest

from fminfer.contract.envelope import Line, make_line, parse_envelope
from fminfer.contract.record import Record
from fminfer.core.errors import ErrorCode, RequestError
from tests.engine.test_contract import Bench
from tests.line_bench import with_options

REQUEST = b'{ "prompt" :">","temperature":0.0,  "max_tokens":2.0,"user":null,"top_p":1}'
BATCH = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}


def run(*lines: bytes | dict[str, Any], bench: Bench | None = None) -> list[Record]:
    raws = [
        line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines
    ]
    records = (bench or Bench()).run_lines(
        [Line(0, number, raw) for number, raw in enumerate(raws, start=1)]
    )
    return sorted(records, key=lambda record: record.line.number)


def batch(**fields: Any) -> dict[str, Any]:
    return BATCH | {"body": {"prompt": ">", "max_tokens": 2, "temperature": 0}} | fields


def strict_bench(**limits: Any) -> Bench:
    bench = Bench()
    bench.intake.limits = with_options(bench.intake.limits, **limits)
    return bench


def test_a_wrapped_request_and_its_other_keys_are_verbatim() -> None:
    scenario = b'"scenario":{"name" : "x","a":[1.0,null,"\\u00e9"]}'
    line = (
        b"{"
        + scenario
        + b', "request" : '
        + REQUEST
        + b' ,"z": 0.0,"b\\u0061d":"\\/" }'
    )
    (record,) = run(line + b"\r\n")
    out = record.to_json()
    assert out.startswith(b'{"request":' + REQUEST + b',"result":{"choices":[')
    assert out.endswith(b"," + scenario + b',"z":0.0,"b\\u0061d":"\\/"}')
    assert list(record.to_dict()) == ["request", "result", "scenario", "z", "bad"]


@pytest.mark.parametrize(
    "url", ["/v1/completions/", "//v1/completions", "/v1//completions//"]
)
def test_a_batch_lines_url_may_have_slashes_to_spare(url: str) -> None:
    """HTTP passed them over, and the same url in a line was refused."""
    plain, slashed = run(batch(), batch() | {"custom_id": "b", "url": url})
    assert slashed.error is None and slashed.text == plain.text


def test_all_shapes_of_a_request_are_answered_alike() -> None:
    """The draws belong to the request's own bytes, not to what stands around them."""
    request = b'{"prompt":">","temperature":1,"max_tokens":9,"n":3}'
    for seedless in (
        request,
        b'{"request":' + request + b',"x":1}',
        b'{"body":' + request + b"," + json.dumps(BATCH).encode()[1:],
    ):
        (record,) = run(seedless)
        answer = record.to_dict()
        choices = (answer.get("result") or answer["response"]["body"])["choices"]
        texts = [choice["text"] for choice in choices]
        (bare,) = run(request)
        assert texts == [
            choice["text"] for choice in bare.to_dict()["result"]["choices"]
        ]


def test_a_key_that_comes_twice_counts_the_last_time() -> None:
    """As json.loads does it, so that a consumer who parses finds what was answered."""
    line = b'{"request":{"prompt":"no"},"x":1,"request":' + REQUEST + b',"x": 2.0}'
    (record,) = run(line)
    out = record.to_json()
    assert out.startswith(b'{"request":' + REQUEST + b',"result"') and out.endswith(
        b'},"x":2.0}'
    )
    twice = b'{"prompt":"a","prompt":">","max_tokens":1,"temperature":0}'
    (bare,) = run(twice)
    assert bare.to_json().startswith(b'{"request":' + twice)
    assert bare.to_dict()["result"]["usage"]["prompt_tokens"] == 1


def test_an_old_result_gives_way_to_the_new_one_with_a_warning() -> None:
    bench = Bench()
    (record,) = run(
        b'{"request":' + REQUEST + b',"result":{"old":1},"x":1}', bench=bench
    )
    answer = record.to_dict()
    assert list(answer) == ["request", "result", "x"] and "choices" in answer["result"]
    assert record.to_json().count(b'"result"') == 1
    assert [*bench.intake.warnings.to_dict()] == [
        "the line's own result is left out, and the new one stands in its place"
    ]


def test_columns_beside_a_request_do_not_take_its_place() -> None:
    """The text of a column `prompt` was answered with default parameters, with status 0."""
    request = {"prompt": ">", "max_tokens": 1, "temperature": 0}
    column = {"prompt": "a question", "messages": [], "body": "a mail"}
    (record,) = run({"request": request} | column)
    answer = record.to_dict()
    assert answer["request"] == request and answer["prompt"] == "a question"
    assert (answer["messages"], answer["body"]) == ([], "a mail")
    (record,) = run(batch(prompt="a question", request="a", messages=None))
    assert record.to_dict()["custom_id"] == "a" and record.error is None
    (record,) = run(request | {"custom_id": "a", "request": "a", "url": "/a"})
    assert record.to_dict()["request"]["custom_id"] == "a" and record.error is None


def test_a_line_with_two_requests_is_refused() -> None:
    (record,) = run({"request": {"prompt": "a"}, "body": {"prompt": "b"}})
    assert (
        record.error is not None
        and "request and body are both objects" in record.error.message
    )
    assert (record.error.code, record.error.param) == ("unsupported_parameter", "body")
    assert record.to_dict()["request"]["body"] == {"prompt": "b"}


@pytest.mark.parametrize("is_strict", [False, True])
def test_a_null_is_absent_whatever_its_name(is_strict: bool) -> None:
    """pandas' to_json(lines=True) writes a null for each column that a row lacks."""
    lines = [
        {"prompt": ">", "max_tokens": 1},
        {"request": {"prompt": ">"}},
        batch(),
        {"note": 1},
    ]
    names = sorted({name for line in lines for name in line})
    full = [{name: line.get(name) for name in names} for line in lines]
    bench = strict_bench(strict=is_strict)
    *records, empty = run(*full, bench=bench)
    assert [record.error for record in records] == [None] * 3
    assert empty.error is not None and not bench.intake.warnings.to_dict()
    first, second, third = (record.to_dict() for record in records)
    assert first["request"] == full[0] and second["request"] == {"prompt": ">"}
    assert third["custom_id"] == "a" and "prompt" in second


def test_a_request_that_is_no_object_is_named() -> None:
    (record,) = run({"request": "hello", "x": 1})
    answer = record.to_dict()
    assert (answer["error"]["code"], answer["error"]["param"]) == (
        "invalid_type",
        "request",
    )
    assert answer["request"] == "hello" and answer["x"] == 1


@pytest.mark.parametrize(
    ("request_", "fault"),
    [
        (5, "request 3 is a int"),
        (None, "is a NoneType"),
        ({"a": {1}}, "request 3 is no JSON"),
    ],
)
def test_what_a_program_gives_and_is_no_request_fails_alone(
    request_: Any, fault: str
) -> None:
    line = make_line(3, request_)
    assert (line.source, line.number, line.raw) == (0, 3, repr(request_).encode())
    assert fault in line.fault and not line.damage
    assert make_line(4, {"prompt": "é"}) == Line(0, 4, b'{"prompt": "\\u00e9"}')
    with pytest.raises(RequestError, match=fault):
        raise parse_envelope(line).error or AssertionError


def test_a_batch_line_gives_what_openai_gives() -> None:
    line = batch(
        custom_id="é/\u2028", body={"prompt": ">", "max_tokens": 2, "temperature": 0}
    )
    raw = json.dumps(line, ensure_ascii=False).encode()
    (record,) = run(raw)
    answer = record.to_dict()
    assert list(answer) == ["id", "custom_id", "response", "error"]
    assert answer["custom_id"] == line["custom_id"] and answer["error"] is None
    assert '"custom_id":"é/\u2028"' in record.to_json().decode(), "verbatim"
    assert list(answer["response"]) == ["status_code", "request_id", "body"]
    assert answer["response"]["status_code"] == 200
    body = answer["response"]["body"]
    assert list(body) == ["id", "object", "created", "model", "choices", "usage"]
    assert list(body["choices"][0]) == ["text", "index", "logprobs", "finish_reason"]
    assert body["choices"][0]["logprobs"] is None, "the schema requires the key"
    assert body["model"] == "scripted" and body["created"] > 1_700_000_000
    completion = openai.types.Completion.model_validate(body)
    assert completion.choices[0].text == "ab" and completion.usage is not None
    assert completion.usage.completion_tokens == 2


def test_logprobs_of_a_batch_line_are_what_openai_reads() -> None:
    (record,) = run(
        batch(body={"prompt": ">", "temperature": 0, "logprobs": 2, "model": "mine"})
    )
    body = record.to_dict()["response"]["body"]
    completion = openai.types.Completion.model_validate(body)
    assert completion.model == "mine" and completion.choices[0].logprobs is not None
    assert completion.choices[0].logprobs.tokens is not None
    assert "".join(completion.choices[0].logprobs.tokens) == completion.choices[0].text


def test_ids_are_the_same_in_every_run_and_differ_between_lines() -> None:
    lines = [batch(custom_id="a"), batch(custom_id="b"), batch(custom_id="c", body={})]
    runs = [[record.to_dict() for record in run(*lines)] for _ in range(2)]
    ids = [
        [(r["id"], r["response"]["request_id"]) for r in answers] for answers in runs
    ]
    assert ids[0] == ids[1] and len(set(ids[0])) == 3
    assert runs[0][0]["response"]["body"]["id"].startswith("cmpl-")
    assert runs[0][0]["response"]["body"]["id"] == runs[1][0]["response"]["body"]["id"]


@pytest.mark.parametrize(
    "changes, code, param, hint",
    [
        (
            {"custom_id": 5},
            "invalid_type",
            "custom_id",
            "line 1 is 5; it must be a string",
        ),
        ({"custom_id": None}, "invalid_type", "custom_id", "line 1 is null"),
        ({"custom_id": ...}, "invalid_type", "custom_id", "line 1 is absent"),
        (
            {"method": "GET"},
            "unsupported_parameter",
            "method",
            'method is "GET"; it must be "POST". Write that',
        ),
        ({"method": ...}, "unsupported_parameter", "method", "absent"),
        (
            {"url": "/v1/images"},
            "unsupported_parameter",
            "url",
            '"/v1/chat/completions"',
        ),
        ({"url": "/v1/chat/completions"}, "missing_prompt", "messages", "absent"),
        ({"url": ...}, "unsupported_parameter", "url", "absent"),
        ({"body": ...}, "invalid_type", "body", "absent; it must be an object"),
        ({"body": [1]}, "invalid_type", "body", "is [1]"),
        ({"body": {}}, "missing_prompt", "prompt", "absent"),
        ({"body": {"prompt": ">", "n": 0}}, "out_of_range", "n", "from 1 to 128"),
    ],
)
def test_rejected_batch_lines(
    changes: dict[str, Any], code: str, param: str, hint: str
) -> None:
    line = {
        key: value for key, value in (batch() | changes).items() if value is not ...
    }
    (record,) = run(line)
    answer = record.to_dict()
    assert list(answer) == ["id", "custom_id", "response", "error", "line"]
    assert answer["line"] == 1, "without it, one looked for the line by hand"
    of_server = replace(record, is_of_batch=True).to_dict()
    assert list(of_server) == ["id", "custom_id", "response", "error"], "as OpenAI's"
    if answer["custom_id"] is not None:
        assert of_server == {
            name: value for name, value in answer.items() if name != "line"
        }
    assert answer["custom_id"] == line.get("custom_id") and answer["error"] is None
    assert answer["response"]["status_code"] == 400
    error = answer["response"]["body"]["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert (error["code"], error["param"]) == (code, param) and hint in error["message"]
    assert error["type"] == "invalid_request_error"


def test_a_custom_id_may_come_once_in_a_file() -> None:
    bench = Bench()
    lines = [
        json.dumps(batch(custom_id=custom_id)).encode()
        for custom_id in ("é", "b", "é", "é ")
    ]
    lines.append(json.dumps(batch(custom_id="b"), ensure_ascii=False).encode())
    numbered = [Line(0, number, raw) for number, raw in enumerate(lines, start=1)]
    other_file = [Line(1, 1, lines[0])]
    for _ in range(2):  # a run forgets the one before it
        records = list(bench.run_lines(numbered + other_file))
        codes = {
            (record.line.source, record.line.number): record.error.code
            for record in records
            if record.error is not None
        }
        assert codes == {(0, 3): "duplicate_custom_id", (0, 5): "duplicate_custom_id"}


def test_one_custom_id_written_in_two_ways_is_the_same() -> None:
    plain = json.dumps(batch(custom_id="é"), ensure_ascii=False).encode()
    records = run(plain, json.dumps(batch(custom_id="é")).encode())
    assert [record.error and record.error.code for record in records] == [
        None,
        "duplicate_custom_id",
    ]


def test_our_own_faults_are_status_500() -> None:
    body = {"prompt": ">", "max_tokens": 4, "temperature": 0}
    (record,) = run(batch(body=body), bench=Bench(b"ab\xffd"))
    response = record.to_dict()["response"]
    assert response["status_code"] == 500
    assert response["body"]["error"]["code"] == "nan_logits"
    assert response["body"]["error"]["type"] == "server_error"


def test_errors_of_wrapped_lines_keep_what_they_are_joined_by() -> None:
    line = (
        b'{"id":{"x":1.0},"request": {"prompt": 5.0, '
        b'"n":1},"custom_id":"k","line":3,"error":1}'
    )
    (record,) = run(line)
    assert record.to_json().endswith(
        b'"retryable":false,"request":{"prompt": 5.0, "n":1},"id":{"x":1.0}}'
    )
    answer = record.to_dict()
    assert list(answer) == ["line", "custom_id", "error", "retryable", "request", "id"]
    assert answer["line"] == 1 and answer["custom_id"] == "k"
    assert answer["error"]["code"] == "invalid_type"


def test_no_line_break_comes_out_whatever_came_in() -> None:
    """A reader with universal newlines would take a bare \\r for the end of the line."""
    bare = (
        b'{"prompt":">",\r"max_tokens":1,"temperature":0,"user":"\xe2\x80\xa8\xc2\x85"}'
    )
    wrapped = b'{"request":\r{"prompt":">",\r\r"temperature":0},"x":[\r1,\r  2]}'
    array = b"[\r1,\r2]"
    broken = b'{"prompt":\r'
    outs = [record.to_json() for record in run(bare, wrapped, array, broken)]
    assert not [out for out in outs if b"\r" in out or b"\n" in out]
    assert outs[0].startswith(b'{"request":' + bare.replace(b"\r", b"") + b',"result"')
    assert outs[1].startswith(b'{"request":{"prompt":">","temperature":0},"result"')
    assert outs[1].endswith(b',"x":[1,2]}')
    assert b'"request":[1,2]}' in outs[2] and outs[3].endswith(
        b'"request":"{\\"prompt\\":"}'
    )


def test_half_a_surrogate_pair_costs_nothing_but_itself() -> None:
    """orjson cannot write one: a name or a model that held it ended the whole run."""
    bench = strict_bench(strict=True)
    records = run(
        b'{"prompt":">","\\ud800":1}',
        b'{"body":{"prompt":">","max_tokens":1,"model":"\\ud800"},'
        + json.dumps(BATCH).encode()[1:],
        b'{"prompt":"\\ud800","user":"\\udfff"}',
        bench=bench,
    )
    answers = [record.to_dict() for record in records]
    assert answers[0]["error"]["param"] == "\ud800"
    assert answers[1]["response"]["body"]["model"] == "\ud800"
    assert answers[2]["request"] == {"prompt": "\ud800", "user": "\udfff"}, (
        "JSON, and so shown"
    )


def test_strict_makes_warnings_errors() -> None:
    lines: list[dict[str, Any]] = [
        {"prompt": ">", "tempreature": 0.5},
        {"prompt": ">", "n": 4, "best_of": 1},
        {"request": {"prompt": ">"}, "result": {}},
        batch(metadata={}),
        {"prompt": ">", "user": "u", "model": "m", "best_of": None, "max_tokens": 1},
    ]
    errors = [record.error for record in run(*lines, bench=strict_bench(strict=True))]
    assert [error and (error.code, error.param) for error in errors] == [
        ("unsupported_parameter", "tempreature"),
        ("out_of_range", "best_of"),
        ("unsupported_parameter", None),
        ("unsupported_parameter", None),
        None,
    ]
    assert errors[0] is not None and "is 0.5" in errors[0].message
    assert errors[1] is not None and "at least n, which is 4" in errors[1].message
    assert all(error is None or "--strict" in error.message for error in errors)
    bench = Bench()
    assert not [record.error for record in run(*lines, bench=bench) if record.error]
    assert len(bench.intake.warnings.to_dict()) == 4


def test_request_args_replace_each_lines_own() -> None:
    """--overwrite-request-args: the line is echoed as it is, and answered as the run says."""
    args = {"max_tokens": 3, "temperature": 0, "n": 2}
    lines = [
        {"prompt": ">", "max_tokens": 9, "temperature": "hot"},
        batch(),
        {"prompt": ">"},
    ]
    for record in run(*lines, bench=strict_bench(request_args=args)):
        assert record.error is None and record.result is not None
        assert record.num_completion_tokens == 6 and len(record.result["choices"]) == 2
    (record,) = run(
        {"prompt": ">", "n": 1}, bench=strict_bench(request_args={"n": 500})
    )
    assert record.error is not None and record.error.param == "n"


def test_check_model_refuses_lines_for_another_model() -> None:
    names = frozenset({"/models/llama", "llama"})
    asked = [
        {"model": "llama"},
        {"model": "/models/llama", "engine": None},
        {"engine": "llama"},
        {},
        {"model": "opt"},
        {"model": "llama", "engine": "together/opt"},
        {"model": ["llama"]},
    ]
    lines = [{"prompt": ">", "max_tokens": 1} | fields for fields in asked]
    records = run(*lines, batch(body=lines[4]), bench=strict_bench(model_names=names))
    found = [
        record.error and (record.error.code, record.error.param) for record in records
    ]
    model = ("unsupported_parameter", "model")
    engine = ("unsupported_parameter", "engine")
    assert found == [None, None, None, None, model, engine, model, model]
    assert records[4].error is not None
    assert "/models/llama or llama" in records[4].error.message
    demo = strict_bench(model_names=frozenset({"demo"}))
    (record,) = run({"prompt": ">", "model": "opt"}, bench=demo)
    assert record.error is not None and record.error.param == "model"
    assert "no --model-name is given" in record.error.message
    assert "--model-name demo" in record.error.message


def fail_to_encode(bench: Bench) -> Bench:
    def fail(text: str, **options: Any) -> Any:
        raise ValueError("boom")

    bench.tokenizer.encode = fail  # type: ignore[method-assign]
    return bench


# What makes each error, and what its message must name: the value found, the limit, the remedy.
EVERY_ERROR: dict[str, tuple[bytes, list[str]]] = {
    "invalid_json": (
        b'{"prompt": "x",}',
        ["character 15", "comma before the last brace; remove"],
    ),
    "invalid_utf8": (
        b'{"prompt": "\xff"}',
        ["byte 12", "0xff", "not UTF-8", "save the file as"],
    ),
    "not_an_object": (b"[1]", ["list", "JSON object", 'such as {"prompt"']),
    "missing_prompt": (b'{"max_tokens": 1}', ["absent", "give a string", "list of"]),
    "invalid_type": (
        b'{"prompt": ">", "n": "5"}',
        ['"5"', "string", "an integer or null"],
    ),
    "out_of_range": (b'{"prompt": ">", "n": 129}', ["129", "from 1 to 128"]),
    "context_length_exceeded": (
        b'{"prompt": ">", "max_tokens": 50}',
        [
            "1 token and",
            "50",
            "51 in all",
            "maximum context length is 40 tokens",
            "Lower max_tokens, which leaves no place for a prompt",
        ],
    ),
    "token_out_of_range": (
        b'{"prompt": [1, 999]}',
        ["999", "index 1", "0 to 255", "another model"],
    ),
    "unsupported_parameter": (
        b'{"prompt": ">", "stream": true}',
        ["true", "remove", "or false"],
    ),
    "duplicate_custom_id": (
        json.dumps(batch(custom_id="k")).encode(),
        ['"k"', "line 2", "one of its own", "Change or remove"],
    ),
    "out_of_memory": (
        b'{"prompt": ">", "n": 9, "best_of": 9}',
        ["9 candidates", "allows 8", "Raise it, or lower n"],
    ),
    "nan_logits": (
        b'{"prompt": ">>", "temperature": 0}',
        ["nan", "generated token 1", "--dtype"],
    ),
    "internal_error": (
        b'{"prompt": "y"}',
        ["ValueError: boom", "this line", "please report"],
    ),
}


def test_every_error_code_has_a_message_to_check() -> None:
    of_servers = ["refused_by_server", "server_failed", "constraint_broken"]
    assert sorted([*EVERY_ERROR, *of_servers]) == sorted(get_args(ErrorCode))


@pytest.mark.parametrize("code", EVERY_ERROR)
def test_every_error_names_value_limit_and_remedy(code: str) -> None:
    raw, hints = EVERY_ERROR[code]
    bench = Bench(b"ab\xff" if code == "nan_logits" else b"abcdefgh")
    if code == "internal_error":
        bench = fail_to_encode(bench)
    record = run(raw, raw, bench=bench)[1]
    assert record.error is not None and record.error.code == code
    assert not [hint for hint in hints if hint not in record.error.message], (
        record.error.message
    )


def test_the_shape_is_told_line_by_line() -> None:
    raws = [
        REQUEST,
        b'{"request":' + REQUEST + b"}",
        json.dumps(batch()).encode(),
        b"[]",
        b"{}",
    ]
    shapes = [parse_envelope(Line(0, 1, raw)).shape for raw in raws]
    assert shapes == ["bare", "wrapped", "batch", "bare", "bare"]


def test_the_examples_are_of_all_shapes() -> None:
    folder = Path(__file__).parent.parent.parent / "examples" / "queries"
    for name, shape in [("plain", "bare"), ("wrapped", "wrapped"), ("batch", "batch")]:
        lines = (folder / f"{name}.jsonl").read_bytes().splitlines()
        assert {parse_envelope(Line(0, 1, line)).shape for line in lines} == {shape}


@pytest.mark.parametrize(
    ("line", "param", "told"),
    [
        (
            {"inputs": "x", "parameters": {"max_new_tokens": 2}},
            "prompt",
            "inputs is no field",
        ),
        (
            {"recordId": "a", "modelInput": {"prompt": "x"}},
            "prompt",
            "modelInput is no field",
        ),
        ({"key": "a", "request": {"contents": [{}]}}, "prompt", "contents is no field"),
        ({"custom_id": "a", "params": {"messages": []}}, "body", "params is no field"),
        ({"message": "x", "chat_history": []}, "prompt", "Cohere"),
    ],
)
def test_a_line_of_another_service_is_told_what_its_field_is_called(
    line: dict[str, Any], param: str, told: str
) -> None:
    """The message named the missing field alone."""
    (record,) = run(line)
    assert record.error is not None and record.error.param == param
    assert told in record.error.message


def test_parameters_beside_a_request_are_named() -> None:
    """They had no effect, and nothing said so."""
    kind = "parameters that stand beside request have no effect"
    request = {"prompt": ">", "max_tokens": 1, "temperature": 0}
    beside = {
        "temperature": 1,
        "max_tokens": 5,
        "response_format": {"type": "json_object"},
    }
    columns = {
        "prompt": "a question",
        "messages": [],
        "model": "m",
        "note": 1,
        "seed": None,
    }
    bench = Bench()
    (record,) = run({"request": request} | beside | columns, bench=bench)
    assert record.error is None and record.to_dict()["max_tokens"] == 5
    assert [*bench.intake.warnings.to_dict()] == [
        f"{kind}: max_tokens, response_format, temperature"
    ]
    bench = Bench()
    run({"request": request} | columns | {"temperature": 0}, bench=bench)
    assert not bench.intake.warnings.to_dict()
    chat = {"messages": [{"role": "user", "content": "x"}]}
    envelope = parse_envelope(
        Line(
            0,
            1,
            json.dumps({"request": chat, "top_logprobs": 3, "echo": True}).encode(),
        )
    )
    assert [warning.names for warning in envelope.warnings] == [("top_logprobs",)]
