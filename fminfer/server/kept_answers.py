"""A kept answer as the events of a request; for a stream, a delta of each choice comes first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fminfer.engine.events import Delta, Event, Finished


def events_of(answer: Finished, *, is_streamed: bool) -> list[Event]:
    """Return the events by which a request gets an answer that is there already."""
    return [*(_deltas(answer) if is_streamed else ()), answer]


def _deltas(answer: Finished) -> Iterator[Delta]:
    for choice in answer.choices:
        message: dict[str, Any] = choice.get("message", {})
        calls = message.get("tool_calls", [])
        yield Delta(
            answer.request_id,
            choice["index"],
            message["content"] or "" if message else choice["text"],
            choice.get("token_ids", []),
            choice.get("logprobs"),
            choice["finish_reason"],
            choice.get("stop_reason"),
            [{"index": place} | call for place, call in enumerate(calls)],
        )
