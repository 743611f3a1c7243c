"""Records: answered or refused lines, written and taken apart."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from typing import Any

import orjson

from fminfer.contract.envelope import (
    MAX_QUOTED_BYTES,
    Envelope,
    Line,
    find_custom_id,
    quote_json,
)
from fminfer.contract.json_object import dump_json, find_members, parse_json
from fminfer.contract.responses import convert_result
from fminfer.core.errors import RequestError
from fminfer.core.html_table import make_html_table

_START = b'{"request":'
_RESULT = b',"result":'
_BATCH_START = b'{"id":"batch_req_'
_RESPONSE = b',"response":'
_ANSWER = re.compile(
    rb',"response":\{"status_code":200,"request_id":"req_([0-9a-f]{32})[0-9a-f]{16}",'
    rb'"body":\{"id":"([a-z]+[-_])[0-9a-f]{32}"'
)
# of the prompt, those of it not computed again, and drawn ones
Tokens = tuple[int, int, int]


@dataclass(slots=True, frozen=True)
class Choice:
    """One of the answers to a request; `fields` is all of it, as the output has it."""

    fields: dict[str, Any]

    @property
    def text(self) -> str:
        return (
            self.fields.get("text")
            or self.fields.get("message", {}).get("content")
            or ""
        )


@dataclass(slots=True, frozen=True)
class Record:
    """The answer to one line: either `result` or `error` is set."""

    line: Line
    envelope: Envelope
    result: dict[str, Any] | None = None
    error: RequestError | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    repeat: int = 0  # equal requests before it, if chance has a part in it
    # of a server's batch, whose records all have OpenAI's form
    is_of_batch: bool = False
    vector: bytes = b""  # float32 numbers that go to a file of their own
    # Of a run whose answers have a type: the object, or why there is none.
    answer: Any = None
    answer_error: str = ""

    @property
    def choices(self) -> list[Choice]:
        """The answers, as many as the request has asked for.

        Raises:
            RequestError: the record holds this error and no answer.
        """
        if self.error is not None:
            # one that is kept would keep the frames that it passed
            raise copy(self.error)
        assert self.result is not None, "a record has a result or an error"
        result = convert_result(self.result)
        return [Choice(fields) for fields in result.get("choices", ())]

    @property
    def text(self) -> str:
        """The text of the first answer, none of vectors; it raises what `choices` raises."""
        return next((choice.text for choice in self.choices), "")

    def _repr_html_(self) -> str:
        """Return a table for a notebook."""
        rows: list[tuple[str, object]] = [
            ("line", self.line.number),
            ("request", self.envelope.request.decode(errors="replace")),
        ]
        if self.error is not None:
            rows.append(("error", self.error.message))
        elif self.result is not None and self.choices:
            rows += [(f"choice {n}", c.text) for n, c in enumerate(self.choices)]
        else:
            rows.append(("result", self.result))
        if self.answer is not None or self.answer_error:
            rows.append(("answer", self.answer_error or repr(self.answer)))
        tokens = f"{self.num_prompt_tokens} read, {self.num_completion_tokens} drawn"
        return make_html_table([*rows, ("tokens", tokens)])

    @property
    def key(self) -> bytes:
        """Return what records of one request, with the same draws, have in common."""
        return make_record_key(self.envelope, self.repeat)

    def to_json(self) -> bytes:
        """Return the output line in the shape of the input line, without a newline."""
        if self.envelope.shape == "batch" or self.is_of_batch:
            return self._to_batch_json()
        if self.error is not None:
            return self._to_error_json(self.error)
        members = [
            b'"request":' + self.envelope.request,
            b'"result":' + dump_json(self.result),
            *_list_further_keys(self.line, self.envelope),
        ]
        return b"{" + b",".join(members) + b"}"

    def _to_error_json(self, error: RequestError) -> bytes:
        members = {
            "line": b'"line":%d' % self.line.number,
            "custom_id": b'"custom_id":null',
            "error": b'"error":' + dump_json(_describe_error(error)),
            "retryable": b'"retryable":true'
            if error.is_retryable
            else b'"retryable":false',
            "request": b'"request":' + quote_json(self.envelope.request),
        }
        # A wrapped line's rest comes last. Of names that are in both the record's own
        # counts, but for custom_id, by which the line may be known.
        for name, member in self.envelope.others.items():
            if name not in members or name == "custom_id":
                is_long = len(member) > MAX_QUOTED_BYTES
                members[name] = (
                    json.dumps(name).encode() + b":" + quote_json(member)
                    if is_long
                    else member
                )
        return b"{" + b",".join(members.values()) + b"}"

    def _to_batch_json(self) -> bytes:
        """Write the line of an OpenAI Batch output file, or of its error file."""
        line_id = make_line_id(self.line, self.envelope)
        request_id = make_request_id(self.key, line_id)
        status = 200
        body = self.result
        custom_id = find_custom_id(self.line, self.envelope)
        if self.error is not None:
            status = 500 if self.error.is_retryable else 400
            description = _describe_error(self.error)
            if self.is_of_batch and custom_id == b"null":  # nothing else names the line
                description["message"] = (
                    f"line {self.line.number}: {self.error.message}"
                )
            body = {"error": description}
        response = {"status_code": status, "request_id": request_id, "body": body}
        members = [
            b'"id":"batch_req_' + line_id.encode() + b'"',
            b'"custom_id":' + custom_id,
            b'"response":' + dump_json(response),
            b'"error":null',
            *(
                [b'"line":%d' % self.line.number]
                if self.error and not self.is_of_batch
                else []
            ),
        ]
        return b"{" + b",".join(members) + b"}"

    def to_dict(self) -> dict[str, Any]:
        return parse_record(self.to_json())


def _list_further_keys(line: Line, envelope: Envelope) -> Iterable[bytes]:
    """Return what stands behind an answer: a wrapped line's rest, and the line's number.

    Of a name that is in both the number counts.
    """
    others = dict(envelope.others)
    if line.shows_number:
        others["line"] = b'"line":%d' % line.number
    return others.values()


def make_line_id(line: Line, envelope: Envelope) -> str:
    """Return 32 hex digits for a line, the same whenever it is answered."""
    parts = (b"%d" % line.number, envelope.custom_id, envelope.request)
    return hashlib.blake2b(b"\n".join(parts), digest_size=16).hexdigest()


def make_record_key(envelope: Envelope, repeat: int) -> bytes:
    """Return 16 bytes for a request, the form of its answer, and the draws that it takes.

    Lines of one key have one answer, whatever else stands in them. `repeat` counts
    equal requests before it in its file; it is 0 where chance has no part in it.
    """
    form = b"batch" if envelope.shape == "batch" else b"plain"
    if envelope.endpoint is not None:  # the url says it, and not the request
        form += b" " + envelope.endpoint.removesuffix("s").encode()
    head = b"%s %d\n" % (form, repeat)
    return hashlib.blake2b(head + envelope.request, digest_size=16).digest()


def make_request_id(key: bytes, line_id: str) -> str:
    """Return a Batch record's `request_id`. A later run finds the answer by the key in it."""
    return f"req_{key.hex()}{line_id[:16]}"


def _describe_error(error: RequestError) -> dict[str, str | None]:
    return {
        "message": error.message,
        "type": error.type,
        "param": error.param,
        "code": error.code,
    }


@dataclass(slots=True, frozen=True)
class AnsweredRecord:
    """A record without an error, in any of the shapes."""

    record: bytes
    fields: dict[str, Any]

    @property
    def tokens(self) -> Tokens:
        """Return the tokens that its usage counts, or raise a ValueError."""
        try:
            result = self.fields.get("result") or self.fields["response"]["body"]
            usage = convert_result(result)["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            return (
                int(usage["prompt_tokens"]),
                int(cached),
                int(usage.get("completion_tokens", 0)),
            )
        except (KeyError, TypeError) as error:
            raise ValueError("an answer has no usage") from error


def is_batch_record(record: bytes) -> bool:
    return record.startswith(_BATCH_START)


def find_record_key(record: bytes) -> bytes | None:
    """Return the key in an answered Batch record; None: an older version wrote it, or nobody."""
    match = _match_answer(record)
    return None if match is None else bytes.fromhex(match[1].decode())


def _match_answer(record: bytes) -> re.Match[bytes] | None:
    """Match what stands behind a Batch record's `custom_id`, which holds no bare quotes."""
    place = record.find(_RESPONSE)
    return (
        _ANSWER.match(record, place) if is_batch_record(record) and place > 0 else None
    )


def parse_record(record: bytes) -> dict[str, Any]:
    """Return a record as Python values; it raises a ValueError for what is no object of JSON."""
    fields = parse_json(record)
    if not isinstance(fields, dict):
        raise ValueError("a record is no object")
    return fields


def find_request_bytes(record: bytes) -> bytes:
    """Return the bytes of the request in a record that is none of a Batch line."""
    # a string has no bare quote
    if record.startswith(_START) and record.count(_RESULT) == 1:
        return record[len(_START) : record.index(_RESULT)]
    members = find_members(record)
    return members["request"].value if "request" in members else b""


def readdress_record(
    record: bytes, line: Line, envelope: Envelope, key: bytes
) -> AnsweredRecord:
    """Return the record that a line gets by the answer in another record of its key.

    Raises:
        ValueError: it is not a record of that key.
    """
    if envelope.shape == "batch":
        return _readdress_batch_record(record, line, envelope, key)
    start = _START + envelope.request + _RESULT
    others = _list_further_keys(line, envelope)
    end = b"".join(b"," + other for other in others) + b"}"
    if not record.startswith(start):
        raise ValueError("a record is of another request")
    result = record[len(start) : -len(end)] if record.endswith(end) else b""
    try:
        return AnsweredRecord(record, {"result": orjson.loads(result)})
    except (
        ValueError
    ):  # what stands around the request is not the same, or surrogates are in it
        result = find_members(record)["result"].value
        return AnsweredRecord(start + result + end, {"result": json.loads(result)})


def _readdress_batch_record(
    record: bytes, line: Line, envelope: Envelope, key: bytes
) -> AnsweredRecord:
    match = _match_answer(record)
    if match is None or match[1] != key.hex().encode():
        raise ValueError("a record is of another request")
    line_id = make_line_id(line, envelope)
    start = b'{"id":"batch_req_%s","custom_id":%s,"response":{"status_code":200,' % (
        line_id.encode(),
        envelope.custom_id,
    )
    request_id = make_request_id(key, line_id).encode()
    body = b'"request_id":"%s","body":{"id":"%s%s"' % (
        request_id,
        match[2],
        line_id.encode(),
    )
    moved = start + body + record[match.end() :]
    return AnsweredRecord(moved, parse_record(moved))
