"""Records taken apart: an answer moves to another line of its request, and to no other."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fminfer.contract.envelope import (
    Envelope,
    Line,
    find_custom_id,
    parse_envelope,
    quote_text,
)
from fminfer.contract.record import (
    Choice,
    Record,
    find_record_key,
    find_request_bytes,
    is_batch_record,
    make_record_key,
    readdress_record,
)
from fminfer.core.errors import RequestError

USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 2},
}
BODY = b'{"prompt":"a \\"result\\": \\\\", "x":{"y":1,"result":{"z":2}}}'
HEAD = {
    "id": "cmpl-" + "0" * 32,
    "object": "text_completion",
    "created": 1,
    "model": "m",
}


def line_of(number: int, raw: bytes) -> Line:
    return Line(0, number, raw)


def batch(custom_id: str, body: bytes = BODY) -> bytes:
    head = b'{"custom_id": %s, "method":"POST","url":"/v1/completions", "body": '
    return head % json.dumps(custom_id).encode() + body + b"}"


def record_of(line: Line, repeat: int = 0, text: str = "t") -> bytes:
    envelope = parse_envelope(line)
    result: dict[str, Any] = {"choices": [{"text": text}], "usage": USAGE}
    result = HEAD | result if envelope.shape == "batch" else result
    return Record(line, envelope, result, repeat=repeat).to_json()


LINES = {
    "bare": (BODY, BODY),
    "other keys": (
        b'{"request":%s, "a":[1,{"result":2}]}' % BODY,
        b'{"a":7,"request":%s}' % BODY,
    ),
    "no keys": (b'{"request":%s,"a":1}' % BODY, b'{"request":%s}' % BODY),
    "bare to wrapped": (BODY, b'{"request":%s,"a":",\\"result\\":"}' % BODY),
    "batch": (batch('a","response":{"\\'), batch("\ud800 b")),
}


@pytest.mark.parametrize("text", ["t", '","usage":{"}', "half \ud800"])
@pytest.mark.parametrize("kind", LINES)
def test_an_answer_moves_to_another_line(kind: str, text: str) -> None:
    """The record is the one that the other line would have got with this answer."""
    old, new = (
        line_of(number, raw) for number, raw in zip((3, 8), LINES[kind], strict=True)
    )
    record = record_of(old, 2, text)
    envelope = parse_envelope(new)
    key = make_record_key(envelope, 2)
    assert key == make_record_key(parse_envelope(old), 2)
    if is_batch_record(record):
        assert find_record_key(record) == key
    else:
        assert find_request_bytes(record) == BODY
    moved = readdress_record(record, new, envelope, key)
    assert moved.tokens == (5, 2, 3)
    expected = json.loads(record_of(new, 2, text))
    if kind == "batch":
        line_id = expected["id"].removeprefix("batch_req_")
        expected["response"]["body"]["id"] = f"cmpl-{line_id}"
    assert json.loads(moved.record) == expected
    again = readdress_record(moved.record, new, envelope, key)
    assert again.record == moved.record


@pytest.mark.parametrize("kind", ["bare", "batch"])
def test_an_answer_to_another_request_is_refused(kind: str) -> None:
    old = BODY
    other = BODY.replace(b"a ", b"b ")
    if kind == "batch":
        old = batch("c", old)
        other = batch("c", other)
    line = line_of(1, other)
    envelope = parse_envelope(line)
    assert make_record_key(envelope, 0) != make_record_key(
        parse_envelope(line_of(1, old)), 0
    )
    with pytest.raises(ValueError, match="another request"):
        readdress_record(
            record_of(line_of(1, old)), line, envelope, make_record_key(envelope, 0)
        )


def test_keys_tell_forms_draws_and_endpoints_apart() -> None:
    chat = batch("c").replace(b"/v1/completions", b"/v1/chat/completions")
    keys = {
        make_record_key(parse_envelope(line_of(1, raw)), repeat)
        for raw in (BODY, batch("c"), chat)
        for repeat in (0, 1)
    }
    assert len(keys) == 6
    assert make_record_key(parse_envelope(line_of(9, batch("d"))), 0) in keys, (
        "whatever its custom_id"
    )


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        (BODY, "a32b2eed82fcf7fa3b9adbb908d0ab65"),
        (batch("c"), "f027447683ee692f9438a01785674255"),
        (
            batch("c").replace(b"/v1/completions", b"/v1/chat/completions"),
            "8c1d19a4236124bfc4d5eff16c544905",
        ),
    ],
)
def test_keys_stay_those_of_earlier_versions(raw: bytes, key: str) -> None:
    """Journals and kept answers hold them."""
    assert make_record_key(parse_envelope(line_of(1, raw)), 1).hex() == key


@pytest.mark.parametrize(
    ("raw", "custom_id"),
    [
        (batch("é"), '"é"'.encode()),
        (b'{"prompt":"x","custom_id":"a"}', b'"a"'),
        (b'{"prompt":"x"}', b"null"),
        (b"[1]", b"null"),
        (b'{"a":' * 2000, b"null"),
    ],
)
def test_a_custom_id_is_found_in_any_shape(raw: bytes, custom_id: bytes) -> None:
    line = line_of(1, raw)
    found = find_custom_id(line, parse_envelope(line))
    assert json.loads(found) == json.loads(custom_id)


def test_a_record_without_a_request_has_none() -> None:
    assert find_request_bytes(b'{"result":{}}') == b""
    assert (
        find_request_bytes(b'{"a":1,"request":{"prompt":"x"},"result":{}}')
        == b'{"prompt":"x"}'
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"text": "a"}, "a"),
        ({"message": {"content": "b"}}, "b"),
        ({"message": {"content": None}}, ""),
        ({"text": ""}, ""),
    ],
)
def test_the_text_of_a_choice(fields: dict[str, Any], text: str) -> None:
    assert Choice(fields).text == text


def test_a_record_of_an_older_version_has_no_key() -> None:
    record = record_of(line_of(1, batch("c")))
    found = json.loads(record)
    found["response"]["request_id"] = found["response"]["request_id"][:36]
    assert find_record_key(json.dumps(found, separators=(",", ":")).encode()) is None


ENDS = "a\u2028b\u2029c\x85d\x0b\x0c\x1c\x1d\x1e’\u00c5"


@pytest.mark.parametrize("raw", [BODY, batch("c"), b'{"request":%s,"a":1}' % BODY])
def test_a_record_is_one_line_for_every_reader(raw: bytes) -> None:
    """U+2028, U+2029 and U+0085 stood raw in answers, where `str.splitlines` and httpx cut."""
    record = record_of(line_of(1, raw), text=ENDS).decode()
    assert record.splitlines() == [record]
    found = json.loads(record)
    result = found.get("result") or found["response"]["body"]
    assert result["choices"][0]["text"] == ENDS
    line = line_of(1, f"no JSON {ENDS}".encode())
    error = RequestError("invalid_json", f"it was {ENDS}")
    refused = Record(line, Envelope("bare", quote_text(line.raw)), error=error)
    shown = refused.to_json().decode()
    assert shown.splitlines() == [shown]
    assert json.loads(shown)["request"] == f"no JSON {ENDS}"
    assert json.loads(shown)["error"]["message"] == f"it was {ENDS}"
