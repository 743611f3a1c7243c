"""Records: one answered or refused line, and its bytes. It knows nothing of how it was answered."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import orjson

from fminfer.errors import RequestError
from fminfer.input.lines import Line


@dataclass(slots=True, frozen=True)
class Record:
    """The answer to one line: either `result` or `error` is set."""

    line: Line
    request: bytes  # the request's JSON, verbatim
    result: dict[str, Any] | None = None
    error: RequestError | None = None
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0

    def to_json(self) -> bytes:
        """Return the output line, without a newline.

        A `result` stands beside the request's own bytes. An error has the request as it was, or its
        raw text where it is no JSON.
        """
        if self.error is None:
            return b'{"request":' + self.request + b',"result":' + orjson.dumps(self.result) + b"}"
        head = {
            "line": self.line.number,
            "custom_id": None,
            "error": {
                "message": self.error.message,
                "type": self.error.type,
                "param": self.error.param,
                "code": self.error.code,
            },
            "retryable": False,
        }
        is_json = self.error.code not in ("invalid_json", "invalid_utf8")
        raw = self.line.raw.strip()
        request = raw if is_json else orjson.dumps(raw.decode("utf-8", errors="replace"))
        return orjson.dumps(head)[:-1] + b',"request":' + request + b"}"

    def to_dict(self) -> dict[str, Any]:
        """Return the output line as Python values."""
        value: dict[str, Any] = json.loads(self.to_json())  # which takes lone surrogates
        return value
