"""Takes records apart, and gives the answer in one to another line of the same request."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import orjson

from fminfer.contract.envelope import Envelope
from fminfer.contract.json_object import load
from fminfer.contract.json_spans import find_members
from fminfer.contract.line import Line
from fminfer.contract.record import make_id, make_request_id

_START, _RESULT = b'{"request":', b',"result":'
_BATCH_START, _RESPONSE = b'{"id":"batch_req_', b',"response":'
_ANSWER = re.compile(
    rb',"response":\{"status_code":200,"request_id":"req_([0-9a-f]{32})[0-9a-f]{16}",'
    rb'"body":\{"id":"([a-z]+)-[0-9a-f]{32}"'
)
Tokens = tuple[int, int, int]  # of the prompt, those of it not computed again, and drawn ones


@dataclass(slots=True, frozen=True)
class Answered:
    """A record without an error, in any of the shapes."""

    record: bytes
    fields: dict[str, Any]

    @property
    def tokens(self) -> Tokens:
        """Return the tokens that its usage counts.

        Raises:
            ValueError: it has none.
        """
        try:
            result = self.fields.get("result") or self.fields["response"]["body"]
            usage = result["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            return int(usage["prompt_tokens"]), int(cached), int(usage.get("completion_tokens", 0))
        except (KeyError, TypeError) as error:
            raise ValueError("an answer has no usage") from error


def is_batch(record: bytes) -> bool:
    """Tell whether a record has the shape of a Batch line."""
    return record.startswith(_BATCH_START)


def read_key(record: bytes) -> bytes | None:
    """Return the key in an answered Batch record; None: an older version wrote it, or nobody."""
    match = _match_answer(record)
    return None if match is None else bytes.fromhex(match[1].decode())


def _match_answer(record: bytes) -> re.Match[bytes] | None:
    """Match what stands behind a Batch record's `custom_id`, which holds no bare quotes."""
    place = record.find(_RESPONSE)
    return _ANSWER.match(record, place) if is_batch(record) and place > 0 else None


def load_record(record: bytes) -> dict[str, Any]:
    """Return a record as Python values.

    Raises:
        ValueError: it is no object of JSON.
    """
    fields = load(record)
    if not isinstance(fields, dict):
        raise ValueError("a record is no object")
    return fields


def read_request(record: bytes) -> bytes:
    """Return the bytes of the request in a record that is none of a Batch line."""
    if record.startswith(_START) and record.count(_RESULT) == 1:  # a string has no bare quote
        return record[len(_START) : record.index(_RESULT)]
    members = find_members(record)
    return members["request"].value if "request" in members else b""


def readdress(record: bytes, line: Line, envelope: Envelope, key: bytes) -> Answered:
    """Return the record that a line gets by the answer in another record of its key.

    Raises:
        ValueError: it is not a record of that key.
    """
    if envelope.shape == "batch":
        return _readdress_batch(record, line, envelope, key)
    start = _START + envelope.request + _RESULT
    end = b"".join(b"," + other for other in envelope.others.values()) + b"}"
    if not record.startswith(start):
        raise ValueError("a record is of another request")
    result = record[len(start) : -len(end)] if record.endswith(end) else b""
    try:
        return Answered(record, {"result": orjson.loads(result)})
    except ValueError:  # what stands around the request is not the same, or surrogates are in it
        result = find_members(record)["result"].value
        return Answered(start + result + end, {"result": json.loads(result)})


def _readdress_batch(record: bytes, line: Line, envelope: Envelope, key: bytes) -> Answered:
    match = _match_answer(record)
    if match is None or match[1] != key.hex().encode():
        raise ValueError("a record is of another request")
    line_id = make_id(line, envelope)
    start = b'{"id":"batch_req_%s","custom_id":%s,"response":{"status_code":200,' % (
        line_id.encode(),
        envelope.custom_id,
    )
    request_id = make_request_id(key, line_id).encode()
    body = b'"request_id":"%s","body":{"id":"%s-%s"' % (request_id, match[2], line_id.encode())
    moved = start + body + record[match.end() :]
    return Answered(moved, load_record(moved))
