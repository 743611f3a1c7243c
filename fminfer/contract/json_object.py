"""One JSON object of a request: a line of a file, or the body of an HTTP request."""

from __future__ import annotations

import json
from typing import Any

import orjson

from fminfer.contract.fields import json_type
from fminfer.core.errors import RequestError

LINE = "the line"  # what of a file is parsed
# Some readers of lines, such as str.splitlines and httpx, end a line here, too.
_LINE_ENDS = {char.encode(): f"\\u{ord(char):04x}".encode() for char in "\u2028\u2029\u0085"}


def load_object(raw: bytes, what: str = LINE) -> dict[str, Any]:
    """Return the object that a text of JSON holds.

    Args:
        what: the text is called in errors.

    Raises:
        RequestError: it holds none.
    """
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            "invalid_utf8",
            f"byte {error.start} of {what} is not UTF-8 ({raw[error.start]:#04x}); "
            + ("save the file as UTF-8" if what == LINE else "send UTF-8"),
        ) from None
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        value = _load_leniently(raw, error, what)
    if not isinstance(value, dict):
        raise RequestError(
            "not_an_object",
            f"{what} holds a JSON {json_type(value)}; a request is a JSON object, "
            'such as {"prompt": "Hello", "max_tokens": 5}',
        )
    return value


def dump(value: object) -> bytes:
    """Return a value, with arrays of numpy, as JSON that every reader takes for one line.

    Half a surrogate pair, which a request may hold, stays what it is.
    """
    try:
        data = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError:
        return json.dumps(value, separators=(",", ":"), default=lambda a: a.tolist()).encode()
    if 0xE2 in data or 0xC2 in data:  # the first bytes of these ends
        for char, escape in _LINE_ENDS.items():
            data = data.replace(char, escape)
    return data


def load(data: bytes) -> Any:
    """Return a value of JSON, such as `dump` writes: also one with half a surrogate pair.

    Raises:
        ValueError, RecursionError: it is none.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return json.loads(data)


def _load_leniently(raw: bytes, error: orjson.JSONDecodeError, what: str) -> Any:
    """Accept what JSON allows and orjson refuses (lone surrogates); explain the rest."""

    def refuse_constant(name: str) -> None:
        raise RequestError("invalid_json", f"{name} is not JSON; use a number or null")

    try:
        return json.loads(raw.decode(), parse_constant=refuse_constant)
    except RecursionError:
        raise RequestError("invalid_json", "the JSON is nested too deep") from None
    except ValueError:
        raise RequestError(
            "invalid_json",
            f"{what} is not JSON: {error.msg} at character {error.pos + 1}. {_remedy(raw, what)}",
        ) from None


def _remedy(raw: bytes, what: str) -> str:
    if not raw.strip():
        return "It is empty; send a JSON object"
    if raw[-1:] == b"}" and raw[:-1].rstrip()[-1:] == b",":
        return "There is a comma before the last brace; remove it"
    if what != LINE:
        return "Send one JSON object"
    if raw.startswith(b"\xef\xbb\xbf"):
        return "A byte order mark stands before it; only a file's first line may have one"
    if (raw[:1] == b"{" and raw[-1:] != b"}") or raw[:1] in (b'"', b"}", b"]"):
        return (
            "It looks like a piece of a request that is spread over several lines; "
            "write each request on one line (jq -c . does it)"
        )
    return "Write one JSON object on the line"
