"""Lines of an input, in three shapes (contract, section 1).

A line holds a request, and what stands around it.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

import orjson

from fminfer.contract.endpoints import URLS, Endpoint, find_endpoint, find_url_endpoint
from fminfer.contract.fields import describe_value, wrong_type_error
from fminfer.contract.json_object import (
    JsonMember,
    dump_json,
    find_members,
    join_lines,
    parse_object,
)
from fminfer.contract.prompts import describe_foreign_field
from fminfer.contract.read_fields import find_params_beside, find_unknown_names
from fminfer.contract.row_warnings import MAX_NAMES, RowWarning, cut_name
from fminfer.core.errors import ErrorCode, RequestError

Shape = Literal["bare", "wrapped", "batch"]
BATCH_KEYS = frozenset({"custom_id", "method", "url", "body"})
MAX_QUOTED_BYTES = 4096  # of a request that an error record holds verbatim
QUOTED_BYTES = 400  # that it holds of a longer one
_PLAIN_BATCH = re.compile(  # with its members in the usual order, and nothing escaped
    rb'\{ "custom_id" : (?P<custom_id>"[^"\\]*") , "method" : "[^"\\]*" , "url" : "[^"\\]*" , '
    rb'"body" : (?P<body>\{.*\}) \}'.replace(b" ", rb"[ \t]*")
)


@dataclass(slots=True, frozen=True)
class Line:
    """One line that is not blank; `source` counts the files of a run, `number` starts at 1.

    In a `.json` file `number` counts the values, which may spread over many lines.
    """

    source: int
    number: int
    raw: bytes  # of a line that is cut: the beginning
    damage: str = ""  # why this line and the rest of its file cannot be read
    # equal ones before it that count, where that is known already
    num_equal: int | None = None
    is_alone: bool = False  # lines before it in its file are not seen
    fault: str = ""  # why this line, and only it, cannot be answered
    is_cut: bool = False  # it is too long to be held
    # The time that a chat template reads, in ISO format, for all lines of an output; "": now.
    clock: str = ""
    fault_code: ErrorCode = "invalid_json"
    cells: bytes = b""  # of a table's row, of which a template made the request
    shows_number: bool = False  # its record names it, where its shape has a place


def read_clock() -> str:
    """Return the time as `Line.clock` has it, to the second."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def make_line(number: int, request: object) -> Line:
    """Return a request as an input line. A wrong one fails alone."""
    if not isinstance(request, Mapping):
        fault = f"request {number} is a {type(request).__name__}; give a dict or a text"
        return Line(0, number, repr(request).encode(), fault=fault)
    try:
        # nan stays nan, and is refused by name
        raw = json.dumps(dict(request)).encode()
    except (TypeError, ValueError, RecursionError) as error:
        fault = f"request {number} is no JSON: {error}"
        return Line(0, number, repr(request).encode(), fault=fault)
    return Line(0, number, raw)


def make_row_line(
    source: int,
    number: int,
    cells: bytes,
    request: bytes = b"null",
    fault: str = "",
    fault_code: ErrorCode = "invalid_json",
    damage: str = "",
) -> Line:
    """Return the line of a table's row, of which a template made a request, or a fault.

    Args:
        cells: the row in JSON.
    """
    raw = b'{"request":%b,"row":%b}' % (request, cells)
    return Line(
        source,
        number,
        raw,
        damage,
        fault=fault,
        fault_code=fault_code,
        cells=cells,
    )


@dataclass(slots=True, frozen=True)
class Envelope:
    """One line, opened: its request, and what its record needs beside the answer.

    Bytes are the line's own, on one line.
    """

    shape: Shape
    request: bytes  # where the line is no JSON: its text as a JSON string
    fields: dict[str, Any] = field(default_factory=dict)  # the request's, by name
    custom_id: bytes = b"null"
    # "name":value of a wrapped line's rest
    others: dict[str, bytes] = field(default_factory=dict)
    error: RequestError | None = None
    warnings: tuple[RowWarning, ...] = ()
    # as a Batch line's url says; None: its fields tell
    endpoint: Endpoint | None = None

    @property
    def is_response(self) -> bool:
        """Whether `/v1/responses` is asked, unless the model gives vectors."""
        return (self.endpoint or find_endpoint(self.fields)) == "responses"

    @property
    def custom_id_text(self) -> str | None:
        """Return a Batch line's custom_id if it is a text.

        One text can be written in many ways.
        """
        if self.shape != "batch" or not self.custom_id.startswith(b'"'):
            return None
        text = self.custom_id[1:-1].decode()
        return str(json.loads(self.custom_id.decode())) if "\\" in text else text


def parse_envelope(line: Line) -> Envelope:
    """Parse a line into its shape and its request; what is wrong stands in `error`."""
    raw = line.raw.strip()
    try:
        if line.is_cut:
            raise RequestError("out_of_range", line.fault)
        if line.damage or line.fault:
            raise RequestError(line.fault_code, line.damage or line.fault)
        if line.cells:
            request = raw[len(b'{"request":') : -len(line.cells) - len(b',"row":}')]
            return _make_row_envelope(line, request, parse_object(request))
        fields = parse_object(raw)
    except RequestError as error:
        if line.cells:
            return _make_row_envelope(line, b"null", {}, error)
        is_json = error.code == "not_an_object"
        return Envelope(
            "bare", join_lines(raw) if is_json else quote_text(raw), error=error
        )
    raw = join_lines(raw)
    shape = find_shape(fields)
    if shape == "wrapped":
        return _parse_wrapped_line(raw, fields)
    if shape == "batch":
        return _parse_batch_line(raw, fields, line.number)
    if shape == "bare":
        return Envelope("bare", raw, fields)
    text = (
        "request and body are both objects, and a line has one request. Rename the one "
        "that is "
    )
    two = RequestError("unsupported_parameter", f"{text}only a column", "body")
    return Envelope("bare", raw, error=two)


def find_custom_id(line: Line, envelope: Envelope) -> bytes:
    """Return a line's custom_id, whatever its shape; null if it has none, or is no object."""
    if envelope.shape != "batch":
        # of brackets in brackets
        with contextlib.suppress(RequestError, RecursionError):
            return dump_json(parse_object(line.raw.strip()).get("custom_id"))
    return envelope.custom_id


def find_shape(fields: dict[str, Any]) -> Shape | None:
    """Return a line's shape; None: it holds two requests.

    An object in `request` or `body` is the request, whatever columns stand beside it. A null is
    absent: tables that are written as JSON lines have one in each column that a row lacks.
    """
    is_wrapped, is_batch = (
        isinstance(fields.get(name), dict) for name in ("request", "body")
    )
    if is_wrapped or is_batch:
        return None if is_wrapped and is_batch else "wrapped" if is_wrapped else "batch"
    if find_endpoint(fields) is not None:
        return "bare"
    if fields.get("request") is not None:
        return "wrapped"
    return (
        "batch" if any(fields.get(name) is not None for name in BATCH_KEYS) else "bare"
    )


def check_model_name(fields: dict[str, Any], names: Collection[str]) -> None:
    for name in ("model", "engine"):
        model = fields.get(name)
        if model not in (None, "") and not (isinstance(model, str) and model in names):
            known = (
                f"the model of this run is {' or '.join(sorted(names))}; give the "
                "line's own "
            )
            remedy = (
                "model by --model-name. If this one is to answer the line, name it there, "
                "and leave --check-model out"
            )
            if "demo" in names:
                known = (
                    "no --model-name is given, so that the demo model would answer. "
                    "Give the "
                )
                remedy = "line's model; or --model-name demo, if the demo model is to answer it"
            raise RequestError(
                "unsupported_parameter",
                f"{name} is {describe_value(model)}, and {known}{remedy}",
                name,
            )


def quote_text(raw: bytes) -> bytes:
    """Return bytes that are no JSON as a JSON string, to be shown; of many the first ones."""
    raw = raw.strip()
    if len(raw) > MAX_QUOTED_BYTES:
        return _quote_beginning(raw)
    return dump_json(raw.decode("utf-8", errors="replace"))


def quote_json(value: bytes) -> bytes:
    """Return a JSON value as an error record shows it.

    A long one becomes a string of its beginning.
    """
    return value if len(value) <= MAX_QUOTED_BYTES else _quote_beginning(value)


def _quote_beginning(raw: bytes) -> bytes:
    text = raw[:QUOTED_BYTES].decode("utf-8", errors="replace")
    return dump_json(f"{text}… ({len(raw):,} bytes in all)")


def _make_row_envelope(
    line: Line,
    request: bytes,
    fields: dict[str, Any],
    error: RequestError | None = None,
) -> Envelope:
    others = {"row": b'"row":' + line.cells}
    return Envelope("wrapped", request, fields, others=others, error=error)


def _parse_wrapped_line(raw: bytes, fields: dict[str, Any]) -> Envelope:
    members = find_members(raw)
    others = {
        name: member.key + b":" + member.value
        for name, member in members.items()
        if name not in ("request", "result")
    }
    request = fields["request"]
    error = None
    if not isinstance(request, dict):
        error = wrong_type_error(
            "request", request, "an object with the request's fields"
        )
        request = {}
    kind = "the line's own result is left out, and the new one stands in its place"
    warnings = [RowWarning(kind)] if "result" in fields else []
    if beside := find_params_beside(fields, request):
        warnings.append(
            RowWarning(
                "parameters that stand beside request have no effect", tuple(beside)
            )
        )
    body = members["request"].value
    return Envelope(
        "wrapped",
        body,
        request,
        others=others,
        error=error,
        warnings=tuple(warnings),
    )


def _find_batch_members(raw: bytes) -> tuple[bytes, bytes]:
    plain = _PLAIN_BATCH.fullmatch(raw)
    if plain is not None:
        # then other members stand behind the body
        with contextlib.suppress(ValueError):
            orjson.loads(plain["body"])
            return plain["custom_id"], plain["body"]
    members = find_members(raw)
    absent = JsonMember(b"", b"null")
    return members.get("custom_id", absent).value, members.get("body", absent).value


def _parse_batch_line(raw: bytes, fields: dict[str, Any], number: int) -> Envelope:
    custom_id, body = _find_batch_members(raw)
    error = _batch_line_error(fields, number)
    warnings: tuple[RowWarning, ...] = ()
    unknown = find_unknown_names(fields, BATCH_KEYS)
    if unknown:
        names = tuple(map(cut_name, unknown[: MAX_NAMES + 1]))
        warnings = (
            RowWarning("a Batch record has no place for other keys of a line", names),
        )
    return Envelope(
        "batch",
        body,
        {} if error else fields["body"],
        custom_id=custom_id,
        error=error,
        warnings=warnings,
        endpoint=find_url_endpoint(fields.get("url")) or "completions",
    )


def _batch_line_error(fields: dict[str, Any], number: int) -> RequestError | None:
    """Check a Batch line's own fields, its body left out."""
    for name, allowed, kind in (
        ("custom_id", "a string, by which the answer is found", str),
        ("body", "an object with the request's fields", dict),
    ):
        if not isinstance(fields.get(name), kind):
            shown_value = describe_value(fields[name]) if name in fields else "absent"
            text = f"{name} of line {number} is {shown_value}; it must be {allowed}"
            return RequestError(
                "invalid_type", text + describe_foreign_field(fields), name
            )
    has_url = find_url_endpoint(fields.get("url")) is not None
    for name, values, is_right in (
        ("method", ("POST",), fields.get("method") == "POST"),
        ("url", tuple(URLS), has_url),
    ):
        if not is_right:
            shown_value = describe_value(fields[name]) if name in fields else "absent"
            allowed = " or ".join(map(describe_value, values))
            text = f"{name} is {shown_value}; it must be {allowed}"
            remedy = "Write that, or take the line out"
            return RequestError("unsupported_parameter", f"{text}. {remedy}", name)
    return None
