"""A tool call, and the JSON that says one."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class ToolCall:
    """A function's name, and its arguments as the text of a JSON object; or a part of these.

    A call without a name goes on with the arguments of the call before.
    """

    name: str
    arguments: str

    @property
    def goes_on(self) -> bool:
        return not self.name


def parse_call(text: str, name: str = "") -> ToolCall | None:
    """Read `{"name": …, "arguments": {…}}`, or with "parameters"; None is no valid call.

    Arguments that are a string with a JSON object in it stay as they are.

    Args:
        name: the text is the arguments of a function of that name.
    """
    try:
        call = parse_object(text)
        if name:
            call = {"name": name, "arguments": call}
        function = call["name"]
        arguments = call.get("arguments", call.get("parameters"))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        parse_object(arguments)
        if not isinstance(function, str) or not function:
            return None
        (function + arguments).encode()  # half of a surrogate pair fits no answer
    except (KeyError, ValueError, RecursionError):
        return None
    return ToolCall(function, arguments)


def parse_object(text: str) -> dict[str, object]:
    """Return the JSON object that a text is.

    Raises:
        ValueError: it is none, or has NaN or Infinity.
        RecursionError: it is nested too deep.
    """
    value = parse_json_value(text)
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value


def parse_json_value(text: str) -> object:
    """Return the JSON value that a text is; the errors are those of `parse_object`."""
    return json.loads(text, parse_constant=_reject_constant)


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
