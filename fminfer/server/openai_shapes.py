"""The JSON of the OpenAI API around what an engine returns: answers, and chunks of streams."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fminfer.contract.fields import wrong_type
from fminfer.engine.events import Delta, Event, Finished
from fminfer.server.http_errors import as_http


@dataclass(slots=True, frozen=True)
class StreamWish:
    """Whether an answer is to come in parts, and whether its usage comes last."""

    is_streamed: bool = False
    has_usage: bool = False

    @classmethod
    def take(cls, fields: dict[str, Any]) -> StreamWish:
        """Take a request's `stream` and `stream_options` out of its fields.

        Raises:
            HttpError: they are wrong.
        """
        stream, options = fields.pop("stream", None), fields.pop("stream_options", None)
        if not isinstance(stream, bool | None):
            raise as_http(wrong_type("stream", stream, "true, false or null"))
        if not isinstance(options, dict | None):
            raise as_http(wrong_type("stream_options", options, "an object or null"))
        usage = (options or {}).get("include_usage")
        if not isinstance(usage, bool | None):
            name = "stream_options.include_usage"
            raise as_http(wrong_type(name, usage, "true, false or null"))
        return cls(bool(stream), bool(stream and usage))


@dataclass(slots=True)
class AnswerShape:
    """One answer as an object of the API, whole or in chunks.

    Args:
        model: its name in the answer.
        has_usage: the last chunk tells the usage.
        prompt_ids: of each prompt, if chunks tell token ids.
        n: choices of each prompt.
    """

    is_chat: bool
    model: str
    has_usage: bool = False
    prompt_ids: list[list[int]] | None = None
    n: int = 1
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    created: int = field(default_factory=lambda: int(time.time()))
    _begun: set[int] = field(default_factory=set)  # choices that have had a chunk

    def whole(self, finished: Finished) -> dict[str, Any]:
        """Return the object of a whole answer."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        return self._head(kind) | {"choices": finished.choices, "usage": finished.usage}

    def chunks(self, events: list[Event]) -> Iterator[dict[str, Any]]:
        """Turn events of a streamed request into chunks."""
        head = self._head("chat.completion.chunk" if self.is_chat else "text_completion")
        if self.has_usage:
            head["usage"] = None
        for event in events:
            if isinstance(event, Delta):
                is_first = event.index not in self._begun
                self._begun.add(event.index)
                if self.is_chat and is_first:
                    yield head | {"choices": [_role(event.index)]}
                choice = _chat_delta(event) if self.is_chat else _text_delta(event)
                yield head | {"choices": [choice | self._token_ids(event, is_first=is_first)]}
            elif isinstance(event, Finished) and self.has_usage:
                yield head | {"choices": [], "usage": event.usage}

    def _token_ids(self, delta: Delta, *, is_first: bool) -> dict[str, Any]:
        """Return the new ids of a choice, and before the first ones its prompt's, if asked for."""
        if self.prompt_ids is None:
            return {}
        told = {"prompt_token_ids": self.prompt_ids[delta.index // self.n]} if is_first else {}
        return told | {"token_ids": delta.token_ids}

    def _head(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        return {
            "id": f"{prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }


def _role(index: int) -> dict[str, Any]:
    delta = {"role": "assistant", "content": ""}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _text_delta(delta: Delta) -> dict[str, Any]:
    return {
        "index": delta.index,
        "text": delta.text,
        "logprobs": delta.logprobs,
        "finish_reason": delta.finish_reason,
    } | _stop_reason(delta)


def _chat_delta(delta: Delta) -> dict[str, Any]:
    message: dict[str, Any] = {"content": delta.text} if delta.text else {}
    if delta.tool_calls:
        message["tool_calls"] = delta.tool_calls
    return {
        "index": delta.index,
        "delta": message,
        "logprobs": delta.logprobs,
        "finish_reason": delta.finish_reason,
    } | _stop_reason(delta)


def _stop_reason(delta: Delta) -> dict[str, Any]:
    return {} if delta.stop_reason is None else {"stop_reason": delta.stop_reason}
