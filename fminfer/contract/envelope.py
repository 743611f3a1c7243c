"""From a line to the request in it, and what stands around the request (contract, section 1).

It knows the three shapes of input lines, and nothing of what a request's fields mean.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from fminfer.contract.endpoints import URLS, Endpoint, endpoint_of, find_asked
from fminfer.contract.fields import show, wrong_type
from fminfer.contract.json_object import dump, load_object
from fminfer.contract.json_spans import find_members, on_one_line
from fminfer.contract.line import Line
from fminfer.contract.read_fields import unknown_names
from fminfer.contract.row_warnings import MAX_NAMES, RowWarning, cut_name
from fminfer.core.errors import RequestError

Shape = Literal["bare", "wrapped", "batch"]
BATCH_KEYS = frozenset({"custom_id", "method", "url", "body"})
MAX_QUOTED_BYTES = 4096  # of a request that an error record holds verbatim
QUOTED_BYTES = 400  # that it holds of a longer one
_PLAIN_BATCH = re.compile(  # with its members in the usual order, and nothing escaped
    rb'\{ "custom_id" : (?P<custom_id>"[^"\\]*") , "method" : "[^"\\]*" , "url" : "[^"\\]*" , '
    rb'"body" : (?P<body>\{.*\}) \}'.replace(b" ", rb"[ \t]*")
)


@dataclass(slots=True, frozen=True)
class Envelope:
    """One line, opened: its request, and what its record needs beside the answer.

    `request`, `custom_id` and `others` are the line's own bytes, on one line.
    """

    shape: Shape
    request: bytes  # where the line is no JSON: its text as a JSON string
    fields: dict[str, Any] = field(default_factory=dict)  # the request's, by name
    custom_id: bytes = b"null"
    others: dict[str, bytes] = field(default_factory=dict)  # "name":value of a wrapped line's rest
    error: RequestError | None = None
    warnings: tuple[RowWarning, ...] = ()
    endpoint: Endpoint | None = None  # as a Batch line's url says; None: its fields tell

    @property
    def custom_id_text(self) -> str | None:
        """Return a Batch line's custom_id if it is a text; one text can be written in many ways."""
        if self.shape != "batch" or not self.custom_id.startswith(b'"'):
            return None
        text = self.custom_id[1:-1].decode()
        return str(json.loads(self.custom_id.decode())) if "\\" in text else text


def open_envelope(line: Line) -> Envelope:
    """Tell a line's shape and take its request out; what is wrong stands in `error`."""
    raw = line.raw.strip()
    try:
        if line.is_cut:
            raise RequestError("out_of_range", line.fault)
        if line.damage or line.fault:
            raise RequestError("invalid_json", line.damage or line.fault)
        fields = load_object(raw)
    except RequestError as error:
        is_json = error.code == "not_an_object"
        return Envelope("bare", on_one_line(raw) if is_json else as_text(raw), error=error)
    raw = on_one_line(raw)
    shape = tell_shape(fields)
    if shape is None:
        return Envelope("bare", raw, error=_two_requests())
    if shape == "wrapped":
        return _open_wrapped(raw, fields)
    return (
        _open_batch(raw, fields, line.number) if shape == "batch" else Envelope(shape, raw, fields)
    )


def find_custom_id(line: Line, envelope: Envelope) -> bytes:
    """Return a line's custom_id, whatever its shape; null if it has none, or is no object."""
    if envelope.shape != "batch":
        with contextlib.suppress(RequestError, RecursionError):  # of brackets in brackets
            return dump(load_object(line.raw.strip()).get("custom_id"))
    return envelope.custom_id


def tell_shape(fields: dict[str, Any]) -> Shape | None:
    """Return a line's shape; None: it holds two requests.

    An object in `request` or `body` is the request, whatever columns stand beside it. A null is
    absent: tables that are written as JSON lines have one in each column that a row lacks.
    """
    is_wrapped, is_batch = (isinstance(fields.get(name), dict) for name in ("request", "body"))
    if is_wrapped or is_batch:
        return None if is_wrapped and is_batch else "wrapped" if is_wrapped else "batch"
    if find_asked(fields) is not None:
        return "bare"
    if fields.get("request") is not None:
        return "wrapped"
    return "batch" if any(fields.get(name) is not None for name in BATCH_KEYS) else "bare"


def _two_requests() -> RequestError:
    return RequestError(
        "unsupported_parameter",
        "request and body are both objects, and a line has one request. Rename the one that is "
        "only a column",
        "body",
    )


def refuse_other_model(fields: dict[str, Any], names: Collection[str]) -> None:
    """Raise a RequestError if a request names another model than these."""
    for name in ("model", "engine"):
        asked = fields.get(name)
        if asked not in (None, "") and not (isinstance(asked, str) and asked in names):
            known = f"the model of this run is {' or '.join(sorted(names))}; give the line's own "
            remedy = "model by --model-name, or run without --check-model"
            if "demo" in names:
                known = "no --model-name is given, so that the demo model would answer. Give the "
                remedy = "line's model; or --model-name demo, if the demo model is to answer it"
            raise RequestError(
                "unsupported_parameter", f"{name} is {show(asked)}, and {known}{remedy}", name
            )


def as_text(raw: bytes) -> bytes:
    """Return bytes that are no JSON as a JSON string, to be shown; of many the first ones."""
    raw = raw.strip()
    if len(raw) > MAX_QUOTED_BYTES:
        return _beginning(raw)
    return dump(raw.decode("utf-8", errors="replace"))


def quote(value: bytes) -> bytes:
    """Return a JSON value as an error record shows it: verbatim, or the beginning of a long one.

    The beginning is a JSON string, which says how long the whole is.
    """
    return value if len(value) <= MAX_QUOTED_BYTES else _beginning(value)


def _beginning(raw: bytes) -> bytes:
    text = raw[:QUOTED_BYTES].decode("utf-8", errors="replace")
    return dump(f"{text}… ({len(raw):,} bytes in all)")


def _open_wrapped(raw: bytes, fields: dict[str, Any]) -> Envelope:
    members = find_members(raw)
    others = {
        name: member.key + b":" + member.value
        for name, member in members.items()
        if name not in ("request", "result")
    }
    error: RequestError | None = None
    warnings: tuple[RowWarning, ...] = ()
    if not isinstance(fields["request"], dict):
        error = wrong_type("request", fields["request"], "an object with the request's fields")
    if "result" in fields:
        warnings = (
            RowWarning("the line's own result is left out, and the new one stands in its place"),
        )
    return Envelope(
        "wrapped",
        members["request"].value,
        {} if error else fields["request"],
        others=others,
        error=error,
        warnings=warnings,
    )


def _find_batch_members(raw: bytes) -> tuple[bytes, bytes]:
    """Return `custom_id` and `body` of a Batch line, or null."""
    plain = _PLAIN_BATCH.fullmatch(raw)
    if plain is not None:
        with contextlib.suppress(ValueError):  # then other members stand behind the body
            orjson.loads(plain["body"])
            return plain["custom_id"], plain["body"]
    members = find_members(raw)
    values = (members[name].value if name in members else b"null" for name in ("custom_id", "body"))
    custom_id, body = values
    return custom_id, body


def _open_batch(raw: bytes, fields: dict[str, Any], number: int) -> Envelope:
    custom_id, body = _find_batch_members(raw)
    error = _what_is_wrong(fields, number)
    warnings: tuple[RowWarning, ...] = ()
    unknown = unknown_names(fields, BATCH_KEYS)
    if unknown:
        names = tuple(map(cut_name, unknown[: MAX_NAMES + 1]))
        warnings = (RowWarning("a Batch record has no place for other keys of a line", names),)
    return Envelope(
        "batch",
        body,
        {} if error else fields["body"],
        custom_id=custom_id,
        error=error,
        warnings=warnings,
        endpoint=endpoint_of(fields.get("url")) or "completions",
    )


def _what_is_wrong(fields: dict[str, Any], number: int) -> RequestError | None:
    """Check a Batch line's own fields, its body left out."""
    for name, allowed, is_right in (
        ("custom_id", "a string, by which the answer is found", str),
        ("body", "an object with the request's fields", dict),
    ):
        if not isinstance(fields.get(name), is_right):
            found = show(fields[name]) if name in fields else "absent"
            return RequestError(
                "invalid_type", f"{name} of line {number} is {found}; it must be {allowed}", name
            )
    has_url = endpoint_of(fields.get("url")) is not None
    for name, answered in (
        ("method", () if fields.get("method") == "POST" else ("POST",)),
        ("url", () if has_url else tuple(URLS)),
    ):
        if answered:
            found = show(fields[name]) if name in fields else "absent"
            allowed = " or ".join(f'"{value}"' for value in answered)
            return RequestError(
                "unsupported_parameter",
                f"{name} is {found}; it must be {allowed}. Write that, or take the line out",
                name,
            )
    return None
