"""A response of `/v1/responses`, whole or as the events of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any

from fminfer.contract.json_object import dump_json
from fminfer.contract.response_items import (
    Item,
    make_call_item,
    make_message_item,
    make_thought_item,
)
from fminfer.contract.responses import make_response_head, make_result
from fminfer.engine.engine_core import Delta, Event, Finished
from fminfer.engine.sequence import PreparedRequest
from fminfer.server.http_errors import HttpError
from fminfer.server.replies import StreamShape

StreamEvent = dict[str, Any]
# By an item's type: how the events of its text are called, and what it is without a text.
_TEXT_EVENTS = {
    "reasoning": "reasoning_text",
    "message": "output_text",
    "function_call": "function_call_arguments",
}
_EMPTY: dict[str, Item] = {
    "reasoning": {"content": []},
    "message": {"content": []},
    "function_call": {"arguments": ""},
}
# What the event says that ends a text.
_DONE_FIELDS = ("text", "logprobs", "name", "arguments")


class ResponseShape(StreamShape):
    """One answer as a response, whole or in events, the last of which ends a stream."""

    end = b""

    def __init__(
        self, fields: Mapping[str, Any], prepared: PreparedRequest, model: str
    ) -> None:
        self._id = secrets.token_hex(16)
        now = int(time.time())
        self._head = make_response_head(fields, self._id, now, model, prepared.params)
        self._numbers = count()  # of events
        self._has_begun = False
        self._items: dict[str, Item] = {}  # by their ids, as they began or ended
        # Of the newest thought or call: it makes the item of a text, which comes in pieces.
        self._make_newest: Callable[[str], Item] | None = None
        self._pieces: list[str] = []
        self._logprobs: list[Item] = []  # of tokens before the next text

    def make_answer(self, finished: Finished) -> dict[str, Any]:
        """Return the whole response."""
        return self._head | make_result(finished.choices[0], finished.usage, self._id)

    def make_chunks(self, events: list[Event]) -> Iterator[StreamEvent]:
        """Make the events of a stream. Of no events it is a sign of life."""
        if not self._has_begun:
            yield self._make_event("created", response=self._head)
        if not (self._has_begun and events):
            yield self._make_event("in_progress", response=self._head)
        self._has_begun = True
        for event in events:
            if isinstance(event, Delta):
                yield from self._make_delta_events(event)
            elif isinstance(event, Finished):
                response = self.make_answer(event)
                for item in response["output"]:
                    yield from self._begin_item(item)  # if the answer is empty
                    yield from self._end_item(item)
                response["output"] = [*self._items.values()]
                yield self._make_event(response["status"], response=response)

    def make_error(self, error: HttpError) -> StreamEvent:
        """Make the event of an error in the middle of a stream."""
        fields = {"code": error.code, "message": str(error), "param": error.param}
        return self._make_event("error", **fields) | {"type": "error"}

    def format_chunk(self, chunk: StreamEvent) -> bytes:
        """Return an event as a server-sent one, which has its type as a name."""
        return b"event: %b\ndata: %b\n\n" % (chunk["type"].encode(), dump_json(chunk))

    def _make_event(self, name: str, /, **fields: Any) -> StreamEvent:
        return {
            "type": f"response.{name}",
            "sequence_number": next(self._numbers),
            **fields,
        }

    def _make_item_event(self, name: str, item: Item) -> StreamEvent:
        place = [*self._items].index(item["id"])
        return self._make_event(f"output_item.{name}", output_index=place, item=item)

    def _make_text_event(self, name: str, item: Item, /, **fields: Any) -> StreamEvent:
        place = {
            "item_id": item["id"],
            "output_index": [*self._items].index(item["id"]),
        }
        if "content" in item:
            place["content_index"] = 0
        return self._make_event(name, **place, **fields)

    def _make_delta_events(self, delta: Delta) -> Iterator[StreamEvent]:
        if delta.reasoning:
            make_thought = partial(make_thought_item, self._id)
            yield from self._add_text(make_thought, delta.reasoning)
        for call in delta.tool_calls:
            if "id" not in call and self._make_newest is not None:
                # of a call before this delta, and so before the text in it
                more = call["function"]["arguments"]
                yield from self._add_text(self._make_newest, more)
        self._logprobs += (delta.logprobs or {}).get("content", ())
        if delta.text:
            make_message = partial(make_message_item, self._id)
            yield from self._add_text(make_message, delta.text, logprobs=self._logprobs)
            self._logprobs = []
        for call in delta.tool_calls:
            if "id" in call:
                make_call = partial(make_call_item, call)
                yield from self._add_text(make_call, call["function"]["arguments"])

    def _add_text(
        self, make_item: Callable[[str], Item], text: str, /, **fields: Any
    ) -> Iterator[StreamEvent]:
        item = make_item("")
        yield from self._begin_item(item)
        if item["type"] != "message":
            self._make_newest = make_item
            self._pieces.append(text)
        if text:
            name = f"{_TEXT_EVENTS[item['type']]}.delta"
            yield self._make_text_event(name, item, delta=text, **fields)

    def _begin_item(self, item: Item) -> Iterator[StreamEvent]:
        """Begin an item that is new. It ends the thought or the call before it."""
        if item["id"] in self._items:
            return
        if self._make_newest is not None:
            yield from self._end_item(self._make_newest("".join(self._pieces)))
        self._pieces = []
        begun = item | {"status": "in_progress"} | _EMPTY[item["type"]]
        self._items[item["id"]] = begun
        yield self._make_item_event("added", begun)
        for part in item.get("content", ()):
            yield self._make_text_event("content_part.added", item, part=part)

    def _end_item(self, item: Item) -> Iterator[StreamEvent]:
        if self._items[item["id"]]["status"] != "in_progress":
            return
        self._items[item["id"]] = item
        (whole,) = item.get("content", [item])
        fields = {name: whole[name] for name in _DONE_FIELDS if name in whole}
        name = f"{_TEXT_EVENTS[item['type']]}.done"
        yield self._make_text_event(name, item, **fields)
        for part in item.get("content", ()):
            yield self._make_text_event("content_part.done", item, part=part)
        yield self._make_item_event("done", item)
