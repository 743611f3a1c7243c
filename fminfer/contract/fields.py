"""Reads the fields of one JSON object by type and limits; null always means the default.

Every refusal names the field, what was found and what is allowed. It knows no parameter by name.
"""

from __future__ import annotations

import json
import math
from typing import Any

from fminfer.core.errors import RequestError

INT64 = 2**63


class FieldReader:
    """Reads one object's fields."""

    def __init__(self, obj: dict[str, Any]) -> None:
        self._obj = obj

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self._obj.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(name, value, "a number or null")
        if not (low <= value <= high) or math.isnan(value):
            raise out_of_range(name, value, f"from {low} to {high}")
        return float(value)

    def optional_integer(self, name: str, low: int, high: int) -> int | None:
        value = self._obj.get(name)
        if value is None:
            return None
        if not is_integral(value):
            raise wrong_type(name, value, "an integer or null")
        # The parser rounds integers beyond 64 bits: one just below -2^63 becomes the float -2^63.
        is_rounded = isinstance(value, float) and value == -INT64
        if is_rounded or not low <= value <= high:
            raise out_of_range(name, value, _broken_limit(value, low, high))
        return int(value)

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        value = self.optional_integer(name, low, high)
        return default if value is None else value

    def boolean(self, name: str, default: bool, *, also_0_1: bool = False) -> bool:
        value = self._obj.get(name)
        if value is None:
            return default
        if also_0_1 and value in (0, 1) and not isinstance(value, str):
            return bool(value)
        if not isinstance(value, bool):
            raise wrong_type(name, value, "true, false or null")
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        """Read a string or a list of strings, none of them empty; equal ones once.

        An empty string by itself means none, as null does.
        """
        value = self._obj.get(name)
        found = [] if value in (None, "", [""]) else [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not all(isinstance(s, str) for s in found):
            raise wrong_type(name, value, "a string, a list of strings or null")
        if "" in found:
            raise RequestError("out_of_range", f"{name} holds an empty string; remove it", name)
        return tuple(dict.fromkeys(found))

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Read a list of integers; which of them are tokens only the model knows."""
        value = self._obj.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(is_integral(item) for item in value):
            raise wrong_type(name, value, "a list of token ids or null")
        return tuple(dict.fromkeys(int(item) for item in value))

    def biases(self, name: str, limit: float) -> tuple[tuple[int, float], ...]:
        """Read an object of token id (written as a string) to number, within ±limit."""
        value = self._obj.get(name)
        if value is None:
            return ()
        allowed = (
            f'an object of token ids to numbers from {-limit} to {limit}, such as {{"50256": -100}}'
        )
        if not isinstance(value, dict):
            raise wrong_type(name, value, allowed)
        found: dict[int, float] = {}
        spellings: dict[int, str] = {}
        for key, bias in value.items():
            if not (key.isascii() and key.isdigit() and len(key) < 20):
                raise RequestError(
                    "invalid_type", f"{name} has the key {show(key)}; it must be {allowed}", name
                )
            if isinstance(bias, bool) or not isinstance(bias, int | float):
                raise wrong_type(f"{name}[{key}]", bias, f"a number from {-limit} to {limit}")
            if not -limit <= bias <= limit:
                raise out_of_range(f"{name}[{key}]", bias, f"from {-limit} to {limit}")
            token_id = int(key)
            if token_id in found:
                raise RequestError(
                    "out_of_range",
                    f'{name} names token {token_id} twice, as "{spellings[token_id]}" and as '
                    f'"{key}"; keep one of the two',
                    name,
                )
            found[token_id], spellings[token_id] = float(bias), key
        return tuple(found.items())


def _broken_limit(value: float, low: int, high: int) -> str:
    """Name both limits, or of a 64-bit range the one that a value breaks."""
    if high < INT64 - 1:
        return f"from {low} to {high}"
    return f"at least {low}" if value <= low else f"at most {high}"


def is_integral(value: object) -> bool:
    """Tell whether a JSON value is an integer; 2.0 is one, true is none."""
    if isinstance(value, float):
        return value.is_integer()
    return isinstance(value, int) and not isinstance(value, bool)


def wrong_type(name: str, value: object, allowed: str) -> RequestError:
    return RequestError(
        "invalid_type",
        f"{name} is {show(value)}, a {json_type(value)}; it must be {allowed}",
        name,
    )


def out_of_range(name: str, value: object, allowed: str) -> RequestError:
    return RequestError("out_of_range", f"{name} is {show(value)}; it must be {allowed}", name)


def json_type(value: object) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def show(value: object) -> str:
    try:
        text = json.dumps(value)
    except RecursionError:
        return f"a {json_type(value)} nested too deep to show"
    return text if len(text) <= 60 else text[:57] + "…"
