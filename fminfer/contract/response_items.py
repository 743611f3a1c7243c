"""Items of `/v1/responses`: those of an input as a chat's messages, a choice as output items."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

from fminfer.contract.fields import check_type, describe_value
from fminfer.contract.json_object import parse_json
from fminfer.core.errors import RequestError

Item = dict[str, Any]
_TEXT_PARTS = ("input_text", "output_text")  # chat calls both text
_ITEM_KEYS = ("type", "id", "status", "phase")  # of a message, which are not its own
_EXAMPLE = 'an object, such as {"role": "user", "content": "Hello"}'
# By a key that several items of one message may have: how their values are joined.
_JOINS: dict[str, Callable[[list[Any]], Any]] = {
    "role": itemgetter(0),
    "reasoning_content": "".join,
    "tool_calls": lambda lists: [*chain.from_iterable(lists)],
}
# What a choice may have beside its message, and a response beside its output.
EXTRAS = (
    "stop_reason",
    "label_probabilities",
    "label_mass",
    "reasoning_truncated",
    "prompt_token_ids",
    "token_ids",
)


def parse_input(
    value: object, instructions: str | None
) -> tuple[list[Item], dict[str, str]]:
    """Return the messages of an input, and what their fields are called in the request.

    Reasoning, a message and calls that follow each other are one message of the assistant.
    """
    items = _list_items(value)
    if instructions is not None:
        system = {"role": "system", "content": instructions}
        items.insert(0, ("instructions", system))
    groups: list[dict[str, list[Any]]] = []  # of each message, values by key
    names: dict[str, str] = {}
    for name, item in items:
        message = _make_message(item, name)
        is_new = not (groups and _goes_on(groups[-1], message))
        if is_new:
            groups.append({})
        place = f"messages[{len(groups) - 1}]"
        names.setdefault(place, name)
        if message.get("role") == "tool":
            names[f"{place}.content"] = f"{name}.output"
        elif "content" in message and not is_new:
            names[f"{place}.content"] = f"{name}.content"
        for key, each in message.items():
            groups[-1].setdefault(key, []).append(each)
    return [*map(_join_values, groups)], names


def _join_values(group: dict[str, list[Any]]) -> Item:
    """Return one message of thoughts, a message and calls."""
    return {
        key: values[0] if len(values) == 1 else _JOINS[key](values)
        for key, values in group.items()
    }


def _list_items(value: object) -> list[tuple[str, object]]:
    """Return the items of an input with their names; a text is a message."""
    if isinstance(value, str):
        return [("input", {"role": "user", "content": value})]
    items = check_type("input", value, list, "a string or a list of items")
    if not items:
        raise RequestError(
            "out_of_range", "input is an empty list; give a message", "input"
        )
    return [(f"input[{place}]", item) for place, item in enumerate(items)]


def _goes_on(group: dict[str, list[Any]], message: Item) -> bool:
    """Return whether an item belongs to the assistant's message of the items before it.

    The text around calls comes behind them if they came first.
    """
    if not group.get("role", [""])[0] == message.get("role") == "assistant":
        return False
    is_call = message.keys() == {"role", "tool_calls"}
    is_behind_thought = group.keys() == {"role", "reasoning_content"}
    is_text = "content" in message and "content" not in group
    # A message may have any value under these names, which chat refuses.
    fits = all(
        isinstance(group[key][0], type(message[key])) for key in group.keys() & message
    )
    return fits and (is_call or is_behind_thought or is_text)


def _make_message(value: object, name: str) -> Item:
    item = check_type(name, value, dict, _EXAMPLE)
    kind = "message" if item.get("type") is None else item["type"]
    if kind not in (*_MESSAGES,):
        kinds = ", ".join(_MESSAGES)
        raise RequestError(
            "unsupported_parameter",
            f"{name}.type is {describe_value(kind)}; it must be one of {kinds}. No item is "
            "kept here: write each out, and leave out those of other services",
            f"{name}.type",
        )
    return _MESSAGES[kind](item, name)


def _make_plain_message(item: Item, name: str) -> Item:
    message = {key: each for key, each in item.items() if key not in _ITEM_KEYS}
    return message | {"content": _convert_parts(item.get("content"))}


def _convert_parts(content: object) -> object:
    """Return content with its text parts as chat has them; chat checks them all."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": part.get("text")}
        if isinstance(part, dict) and part.get("type") in _TEXT_PARTS
        else part
        for part in content
    ]


def _make_call(item: Item, name: str) -> Item:
    function = {key: _read_text(item, name, key) for key in ("name", "arguments")}
    call = {"id": _read_text(item, name, "call_id"), "type": "function"}
    return {"role": "assistant", "tool_calls": [call | {"function": function}]}


def _make_call_output(item: Item, name: str) -> Item:
    message = {"role": "tool", "tool_call_id": _read_text(item, name, "call_id")}
    output = item.get("output")
    is_list = isinstance(output, list)
    text = output if is_list else _read_text(item, name, "output")
    return message | {"content": _convert_parts(text)}


def _make_thought(item: Item, name: str) -> Item:
    key = "content" if item.get("content") else "summary"
    parts = check_type(f"{name}.{key}", item.get(key) or [], list, "a list of parts")
    if not parts and item.get("encrypted_content"):
        raise RequestError(
            "unsupported_parameter",
            f"{name} has encrypted_content alone, which only its service can read. Give the "
            "text as content, or leave the item out",
            f"{name}.encrypted_content",
        )
    texts = [
        _read_text(check_type(part_name, part, dict, "an object"), part_name, "text")
        for place, part in enumerate(parts)
        for part_name in [f"{name}.{key}[{place}]"]
    ]
    return {"role": "assistant", "reasoning_content": "".join(texts)}


def _read_text(item: Mapping[str, Any], name: str, key: str) -> str:
    return check_type(f"{name}.{key}", item.get(key), str, "a string")


_MESSAGES: dict[str, Callable[[Item, str], Item]] = {
    "message": _make_plain_message,
    "function_call": _make_call,
    "function_call_output": _make_call_output,
    "reasoning": _make_thought,
}


def make_thought_item(item_id: str, text: str) -> Item:
    return {
        "id": f"rs_{item_id}",
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
    }


def make_message_item(item_id: str, text: str, logprobs: Sequence[Item] = ()) -> Item:
    """Return a message, with the logprobs of a chat's choice."""
    part = {"type": "output_text", "text": text, "annotations": []}
    return {
        "id": f"msg_{item_id}",
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [part | {"logprobs": [*logprobs]}],
    }


def make_call_item(call: Item, arguments: str) -> Item:
    """Return a call of a chat's message, with as much of its arguments."""
    call_id: str = call["id"]
    return {
        "id": f"fc_{call_id.removeprefix('call_')}",
        "type": "function_call",
        "status": "completed",
        "call_id": call_id,
        "name": call["function"]["name"],
        "arguments": arguments,
    }


def make_output(choice: Mapping[str, Any], item_id: str) -> list[Item]:
    """Return the items of a chat's choice: its thought, its message, its calls.

    Where the tokens ended, one is incomplete. Without any text it is an empty message.
    """
    message = choice["message"]
    calls = message.get("tool_calls") or []
    items: list[Item] = []
    if thought := message.get("reasoning_content"):
        items.append(make_thought_item(item_id, thought))
    text = message["content"]
    if text or not (calls or items):
        logprobs = choice.get("logprobs") or {"content": []}
        items.append(make_message_item(item_id, text or "", logprobs["content"]))
    items += [make_call_item(call, call["function"]["arguments"]) for call in calls]
    if choice["finish_reason"] == "length":
        _find_cut_item(items)["status"] = "incomplete"
    return items


def _find_cut_item(items: list[Item]) -> Item:
    """Return the item at whose end tokens ran out: a message has the text behind calls, too."""
    messages = [item for item in items if item["type"] == "message"]
    try:
        parse_json(items[-1].get("arguments", ""))
    except ValueError:
        return items[-1]
    return (messages or items)[-1]


def make_choice(response: Mapping[str, Any]) -> Item:
    """Return a response's output as the choice that chat would have, with the same message."""
    parts = {
        item["type"]: item["content"][0]
        for item in response["output"]
        if item["type"] != "function_call"
    }
    calls = [
        {
            "id": item["call_id"],
            "type": "function",
            "function": {"name": item["name"], "arguments": item["arguments"]},
        }
        for item in response["output"]
        if item["type"] == "function_call"
    ]
    said = parts.get("message", {"text": None, "logprobs": []})
    message = {
        "role": "assistant",
        "content": said["text"],
        "reasoning_content": parts.get("reasoning", {"text": None})["text"],
        "tool_calls": calls,
    }
    is_cut = response["status"] == "incomplete"
    entries = said["logprobs"]
    choice = {
        "index": 0,
        "message": message,
        "logprobs": {"content": entries, "refusal": None} if entries else None,
        "finish_reason": "length" if is_cut else "tool_calls" if calls else "stop",
    }
    return choice | {name: response[name] for name in EXTRAS if name in response}
