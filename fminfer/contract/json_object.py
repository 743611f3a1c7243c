"""JSON objects, such as a line of a file: read, written, and taken apart in their own bytes."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson

from fminfer.contract.fields import describe_json_type
from fminfer.core.errors import RequestError

LINE = "the line"  # what of a file is parsed
# Some readers of lines, such as str.splitlines and httpx, end a line here, too.
_LINE_ENDS = {
    char.encode(): f"\\u{ord(char):04x}".encode() for char in "\u2028\u2029\u0085"
}
_DECODER = json.JSONDecoder()
_GAP = re.compile(r"[ \t\r\n,:]*")  # between keys and values
_SCALAR = re.compile(r"[^,} \t\r\n]*")
_QUOTE_OR_BRACKET = re.compile(r'["\[\]{}]')
_LINE_BREAK = re.compile(rb"[\r\n][ \t\r\n]*")


def parse_object(raw: bytes, what: str = LINE) -> dict[str, Any]:
    """Return the object that a text of JSON holds; errors call the text `what`."""
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
        value = _parse_leniently(raw, error, what)
    if not isinstance(value, dict):
        raise RequestError(
            "not_an_object",
            f"{what} holds a JSON {describe_json_type(value)}; a request is a JSON object, "
            'such as {"prompt": "Hello", "max_tokens": 5}',
        )
    return value


def dump_json(value: object) -> bytes:
    """Return a value, with arrays of numpy, as JSON that every reader takes for one line.

    Half a surrogate pair, which a request may hold, stays what it is.
    """
    try:
        data = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError:
        return json.dumps(
            value, separators=(",", ":"), default=lambda a: a.tolist()
        ).encode()
    if 0xE2 in data or 0xC2 in data:  # the first bytes of these ends
        for char, escape in _LINE_ENDS.items():
            data = data.replace(char, escape)
    return data


def parse_json(data: bytes) -> Any:
    """Return a value of JSON as `dump_json` writes it: also one with half a surrogate pair.

    It raises a ValueError for all others, such as one that is nested too deep to be read.
    """
    with suppress(orjson.JSONDecodeError):
        return orjson.loads(data)
    with suppress(RecursionError):
        return json.loads(data)
    raise ValueError("the JSON is nested too deep")


def _parse_leniently(raw: bytes, error: orjson.JSONDecodeError, what: str) -> Any:
    """Accept what JSON allows and orjson refuses (lone surrogates); explain the rest."""

    def raise_constant_error(name: str) -> None:
        raise RequestError("invalid_json", f"{name} is not JSON; use a number or null")

    try:
        return json.loads(raw.decode(), parse_constant=raise_constant_error)
    except RecursionError:
        raise RequestError("invalid_json", "the JSON is nested too deep") from None
    except ValueError:
        raise RequestError(
            "invalid_json",
            f"{what} is not JSON: {error.msg} at character {error.pos + 1}. "
            f"{_describe_remedy(raw, what)}",
        ) from None


def _describe_remedy(raw: bytes, what: str) -> str:
    if not raw.strip():
        return "It is empty; send a JSON object"
    if raw[-1:] == b"}" and raw[:-1].rstrip()[-1:] == b",":
        return "There is a comma before the last brace; remove it"
    if what != LINE:
        return "Send one JSON object"
    if raw.startswith(b"\xef\xbb\xbf"):
        return (
            "A byte order mark stands before it; only a file's first line may have one"
        )
    if (raw[:1] == b"{" and raw[-1:] != b"}") or raw[:1] in (b'"', b"}", b"]"):
        return (
            "It looks like a piece of a request that is spread over several lines; "
            "write each request on one line (jq -c . does it)"
        )
    return "Write one JSON object on the line"


@dataclass(slots=True, frozen=True)
class JsonMember:
    """A key with its quotes, and its value, as they were written."""

    key: bytes
    value: bytes


def find_members(raw: bytes) -> dict[str, JsonMember]:
    """Return the members of an object that has passed as JSON, by name and in their own bytes.

    Of a name that comes twice the last value counts and the first place, as
    `json.loads` does it.
    """
    text = raw.decode()
    members = dict[str, JsonMember]()
    place = _skip_pattern(_GAP, text, text.index("{") + 1)
    while text[place] != "}":
        name, key_end = _DECODER.raw_decode(text, place)
        start = _skip_pattern(_GAP, text, key_end)
        end = _find_value_end(text, start)
        members[name] = JsonMember(
            text[place:key_end].encode(), text[start:end].encode()
        )
        place = _skip_pattern(_GAP, text, end)
    return members


def join_lines(raw: bytes) -> bytes:
    """Leave out line breaks and the white space after them.

    JSON has neither inside strings, so they stand between tokens, which need no space there.
    """
    return _LINE_BREAK.sub(b"", raw) if b"\n" in raw or b"\r" in raw else raw


def _skip_pattern(pattern: re.Pattern[str], text: str, place: int) -> int:
    match = pattern.match(text, place)
    return place if match is None else match.end()


def _find_value_end(text: str, place: int) -> int:
    """Return the place behind a value.

    It counts brackets, because a parser has a greatest depth.
    """
    if text[place] not in '"[{':
        return _skip_pattern(_SCALAR, text, place)
    depth = 0
    while True:
        if text[place] == '"':
            _, place = _DECODER.raw_decode(text, place)
        else:
            depth += 1 if text[place] in "[{" else -1
            place += 1
        if depth == 0:
            return place
        match = _QUOTE_OR_BRACKET.search(text, place)
        assert match is not None, "the object has no end"
        place = match.start()
