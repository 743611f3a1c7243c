"""Streams of deltas, joined and compared with the answer that they belong to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from fminfer.engine.engine_core import Delta, Event, Failed, Finished


class Steps(Protocol):
    """What has requests to answer: a loop, an engine, a team."""

    @property
    def has_work(self) -> bool: ...

    def step(self) -> list[Event]: ...


def events_of(core: Steps) -> list[Event]:
    """Step until nothing is left to do."""
    events: list[Event] = []
    while core.has_work:
        events += core.step()
    return events


def of_request(events: Iterable[Event], request_id: int) -> list[Event]:
    return [event for event in events if event.request_id == request_id]


def answer_in(events: Iterable[Event], request_id: int) -> list[dict[str, Any]]:
    """Return the choices of a request that has one answer and no error."""
    ends = [
        each for each in of_request(events, request_id) if not isinstance(each, Delta)
    ]
    assert len(ends) == 1 and isinstance(ends[0], Finished), ends
    return ends[0].choices


def check_stream(
    events: Iterable[Event], request_id: int, *, is_exact: bool = True
) -> list[dict[str, Any]]:
    """See that the deltas of a request, joined, are its answer; return its choices.

    Args:
        request_id: of a request with `return_token_ids`.
        is_exact: to the last bit of the logprobs, which may differ between pipelines.
    """
    *deltas, last = of_request(events, request_id)
    assert isinstance(last, Finished), "nothing comes behind the answer"
    joined: dict[int, list[Delta]] = {}
    for delta in deltas:
        assert isinstance(delta, Delta)
        joined.setdefault(delta.index, []).append(delta)
    join: Callable[[list[Delta]], dict[str, Any]] = _join
    if last.choices and "message" in last.choices[0]:
        has_thought = "reasoning_content" in last.choices[0]["message"]
        join = partial(_join_message, has_thought=has_thought)
    choices = [join(joined[index]) for index in sorted(joined)]
    expected = [
        {name: value for name, value in choice.items() if name != "prompt_token_ids"}
        for choice in last.choices
    ]
    assert choices == expected if is_exact else rounded(choices) == rounded(expected)
    return last.choices


def _join(deltas: list[Delta]) -> dict[str, Any]:
    assert all(delta.finish_reason is None for delta in deltas[:-1]), (
        "its end is told once"
    )
    assert all(delta.stop_reason is None for delta in deltas[:-1])
    end = deltas[-1]
    choice: dict[str, Any] = {
        "text": "".join(delta.text for delta in deltas),
        "index": end.index,
        "logprobs": _join_logprobs([delta.logprobs for delta in deltas]),
        "finish_reason": end.finish_reason,
        "token_ids": [token_id for delta in deltas for token_id in delta.token_ids],
    }
    assert all(not delta.further_fields for delta in deltas[:-1])
    choice |= end.further_fields
    return choice | (
        {} if end.stop_reason is None else {"stop_reason": end.stop_reason}
    )


def join_calls(pieces: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the calls of such pieces; a piece without an id has more of the arguments."""
    calls = list[dict[str, Any]]()
    for piece in pieces:
        if "id" in piece:
            assert piece["index"] == len(calls)
            calls.append(piece | {"function": dict(piece["function"])})
        else:
            assert piece.keys() == {"index", "function"}
            assert piece["index"] == len(calls) - 1
            calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
    return calls


def _join_message(deltas: list[Delta], *, has_thought: bool = False) -> dict[str, Any]:
    """Return the choice of chat that deltas are of."""
    choice = _join(deltas)
    content = choice.pop("text")
    calls = join_calls([call for delta in deltas for call in delta.tool_calls])
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if not deltas[-1].has_content:
        assert content == "", "it ended in its thought"
        message["content"] = None
    if has_thought:
        message["reasoning_content"] = "".join(d.reasoning for d in deltas) or None
    if calls:
        plain = [
            {name: call[name] for name in call if name != "index"} for call in calls
        ]
        message |= {"content": content or None, "tool_calls": plain}
    return choice | {"message": message}


def _join_logprobs(parts: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    if None in parts:
        assert set(map(type, parts)) == {type(None)}, (
            "all of them have logprobs, or none"
        )
        return None
    if all(
        part is not None and tuple(part) == ("content", "refusal") for part in parts
    ):
        entries = [
            entry for part in parts if part is not None for entry in part["content"]
        ]
        return {"content": entries, "refusal": None}
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    assert all(part is not None and tuple(part) == names for part in parts)
    columns: dict[str, Any] = {}
    for name in names:
        values = [part[name] for part in parts if part is not None]
        columns[name] = (
            None if None in values else [each for value in values for each in value]
        )
    return columns


def rounded(value: Any) -> Any:
    """Return a value whose numbers have three digits behind the point."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(value, 3) if isinstance(value, float) else value


def failed(events: Iterable[Event]) -> list[Failed]:
    return [event for event in events if isinstance(event, Failed)]


def within(seconds: float, work: Callable[[], object]) -> None:
    """Have a thread do something that must not hang; raise what it raises."""
    caught: list[BaseException] = []

    def do() -> None:
        try:
            work()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"it has not ended within {seconds:g} s"
    if caught:
        raise caught[0]
