"""Records: one answered or refused line, and its bytes. It knows nothing of how it was answered."""

from __future__ import annotations

import hashlib
import json
from copy import copy
from dataclasses import dataclass
from typing import Any

from fminfer.contract.envelope import MAX_QUOTED_BYTES, Envelope, find_custom_id, quote
from fminfer.contract.json_object import dump
from fminfer.contract.line import Line
from fminfer.core.errors import RequestError


@dataclass(slots=True, frozen=True)
class Choice:
    """One of the answers to a request; `fields` is all of it, as the output has it."""

    fields: dict[str, Any]

    @property
    def text(self) -> str:
        """Its text; in chat, the content of its message."""
        return self.fields.get("text") or self.fields.get("message", {}).get("content") or ""


@dataclass(slots=True, frozen=True)
class Record:
    """The answer to one line: either `result` or `error` is set.

    `result` is the object that stands under `result`, or in a Batch line the response's `body`.
    """

    line: Line
    envelope: Envelope
    result: dict[str, Any] | None = None
    error: RequestError | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    repeat: int = 0  # equal requests before it, if chance has a part in it
    is_of_batch: bool = False  # of a server's batch, whose records all have OpenAI's form
    vector: bytes = b""  # float32 numbers that go to a file of their own

    @property
    def choices(self) -> list[Choice]:
        """The answers, as many as the request has asked for.

        Raises:
            RequestError: there are none; it is `error`.
        """
        if self.error is not None:
            raise copy(self.error)  # one that is kept would keep the frames that it passed
        assert self.result is not None, "a record has a result or an error"
        return [Choice(fields) for fields in self.result.get("choices", ())]

    @property
    def text(self) -> str:
        """The text of the first answer, none of vectors; it raises what `choices` raises."""
        return next((choice.text for choice in self.choices), "")

    @property
    def key(self) -> bytes:
        """Return what records of one request, with the same draws, have in common."""
        return make_key(self.envelope, self.repeat)

    def to_json(self) -> bytes:
        """Return the output line in the shape of the input line, without a newline.

        What comes from the input line stands there in its own bytes.
        """
        if self.envelope.shape == "batch" or self.is_of_batch:
            return self._to_batch_json()
        if self.error is not None:
            return self._to_error_json(self.error)
        members = [
            b'"request":' + self.envelope.request,
            b'"result":' + dump(self.result),
            *self.envelope.others.values(),
        ]
        return b"{" + b",".join(members) + b"}"

    def _to_error_json(self, error: RequestError) -> bytes:
        own = {
            "line": b'"line":%d' % self.line.number,
            "custom_id": b'"custom_id":null',
            "error": b'"error":' + dump(_describe(error)),
            "retryable": b'"retryable":true' if error.is_ours else b'"retryable":false',
            "request": b'"request":' + quote(self.envelope.request),
        }
        # A wrapped line's rest comes last. Of names that are in both the record's own counts, but
        # for custom_id, by which the line may be known.
        others = {
            name: member if len(member) <= MAX_QUOTED_BYTES else _cut_member(name, member)
            for name, member in self.envelope.others.items()
            if name not in own or name == "custom_id"
        }
        return b"{" + b",".join((own | others).values()) + b"}"

    def _to_batch_json(self) -> bytes:
        """Write the line of an OpenAI Batch output file, or of its error file."""
        line_id = make_id(self.line, self.envelope)
        request_id = make_request_id(self.key, line_id)
        status, body, number = 200, self.result, self.line.number
        custom_id = find_custom_id(self.line, self.envelope)
        if self.error is not None:
            status = 500 if self.error.is_ours else 400
            told = _describe(self.error)
            if self.is_of_batch and custom_id == b"null":  # nothing else names the line
                told["message"] = f"line {number}: {self.error.message}"
            body = {"error": told}
        response = {"status_code": status, "request_id": request_id, "body": body}
        members = [
            b'"id":"batch_req_' + line_id.encode() + b'"',
            b'"custom_id":' + custom_id,
            b'"response":' + dump(response),
            b'"error":null',
            *([b'"line":%d' % number] if self.error and not self.is_of_batch else []),
        ]
        return b"{" + b",".join(members) + b"}"

    def to_dict(self) -> dict[str, Any]:
        """Return the output line as Python values."""
        value: dict[str, Any] = json.loads(self.to_json())  # which takes lone surrogates
        return value


def _cut_member(name: str, member: bytes) -> bytes:
    key = json.dumps(name).encode()
    return key + b":" + quote(member)


def make_id(line: Line, envelope: Envelope) -> str:
    """Return 32 hex digits for a line, the same whenever it is answered."""
    parts = (b"%d" % line.number, envelope.custom_id, envelope.request)
    return hashlib.blake2b(b"\n".join(parts), digest_size=16).hexdigest()


def make_key(envelope: Envelope, repeat: int) -> bytes:
    """Return 16 bytes for a request, the form of its answer, and the draws that it takes.

    Lines of one key have one answer, whatever else stands in them.

    Args:
        repeat: equal requests before it in its file; 0 where chance has no part in it.
    """
    form = b"batch" if envelope.shape == "batch" else b"plain"
    if envelope.endpoint is not None:  # the url says it, and not the request
        form += b" " + envelope.endpoint.removesuffix("s").encode()
    head = b"%s %d\n" % (form, repeat)
    return hashlib.blake2b(head + envelope.request, digest_size=16).digest()


def make_request_id(key: bytes, line_id: str) -> str:
    """Return a Batch record's `request_id`. A later run finds the answer by the key in it."""
    return f"req_{key.hex()}{line_id[:16]}"


def _describe(error: RequestError) -> dict[str, str | None]:
    """Return the OpenAI error object."""
    return {
        "message": error.message,
        "type": error.type,
        "param": error.param,
        "code": error.code,
    }
