"""What a batch may be: the fields of `POST /v1/batches`, and the lines of its input."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from fminfer.contract.endpoints import EMBEDDINGS, URL_OF, URLS, remove_spare_slashes
from fminfer.contract.envelope import Envelope
from fminfer.contract.fields import (
    TEXT,
    Field,
    Kind,
    Schema,
    describe_value,
    is_integral,
    make_enum_kind,
    make_full_object_schema,
    make_integer_kind,
    make_type_kind,
    out_of_range_error,
)
from fminfer.core.errors import FminferError, RequestError

PURPOSE: Literal["batch"] = "batch"  # of files
MAX_INPUTS = 50_000  # of embeddings in a batch, as OpenAI has it
ENDPOINTS = (*URLS,)
EXAMPLE = {
    "input_file_id": "file-…",
    "endpoint": ENDPOINTS[0],
    "completion_window": "24h",
}
WINDOW_FORM = r"[1-9][0-9]{0,5}[smhd]"
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
MOST_WINDOW_S = 366 * 86400
ANCHOR = "created_at"
LEAST_LIFE_S = 3600
MOST_LIFE_S = 30 * 86400  # of files, as OpenAI's
MOST_PAIRS = 16
MOST_KEY_CHARS = 64
MOST_VALUE_CHARS = 512  # of metadata, as OpenAI's
METADATA: Schema = {
    "type": "object",
    "maxProperties": MOST_PAIRS,
    "propertyNames": {"maxLength": MOST_KEY_CHARS},
    "additionalProperties": {"type": "string", "maxLength": MOST_VALUE_CHARS},
}
ANCHORS: Schema = {"const": ANCHOR}
SECONDS = make_integer_kind(LEAST_LIFE_S, MOST_LIFE_S).make_schema(MOST_LIFE_S)
LIFE: Schema = make_full_object_schema(anchor=ANCHORS, seconds=SECONDS) | {
    "additionalProperties": False
}


class Window(NamedTuple):
    """A time for a batch, as its client wrote it and in seconds."""

    text: str
    seconds: int


@dataclass(slots=True, frozen=True)
class BatchRequest:
    """What a client asks for."""

    input_file_id: str
    endpoint: str
    completion_window: Window
    metadata: dict[str, str] | None = None
    output_expires_after: int | None = None  # seconds


def parse_life(name: str, value: Any, most: int = MOST_LIFE_S) -> int:
    """Return how long a file lives, in seconds."""
    if isinstance(value, dict) and value.keys() == {"anchor", "seconds"}:
        anchor = value["anchor"]
        seconds = value["seconds"]
        if (
            anchor == ANCHOR
            and is_integral(seconds)
            and LEAST_LIFE_S <= seconds <= most
        ):
            return int(seconds)
    raise out_of_range_error(
        name,
        value,
        f'an object with the anchor "{ANCHOR}" and the seconds from {LEAST_LIFE_S:,} to '
        f"{MOST_LIFE_S:,}, an hour to 30 days",
    )


def _parse_window(name: str, value: Any, most: int) -> Window:
    if isinstance(value, str) and re.fullmatch(WINDOW_FORM, value):
        seconds = int(value[:-1]) * UNITS_S[value[-1]]
        if seconds <= MOST_WINDOW_S:
            return Window(value, seconds)
    raise out_of_range_error(
        name, value, 'a whole duration up to 366 days, such as "24h", "90m" or "7d"'
    )


def _parse_metadata(name: str, value: Any, most: int) -> dict[str, str]:
    wrong_pairs = value
    if isinstance(value, dict) and len(value) <= MOST_PAIRS:
        wrong_pairs = {
            key: each
            for key, each in value.items()
            if len(key) > MOST_KEY_CHARS
            or not (isinstance(each, str) and len(each) <= MOST_VALUE_CHARS)
        }
        if not wrong_pairs:
            return value
    raise out_of_range_error(
        name,
        wrong_pairs,
        f"null or an object of up to {MOST_PAIRS} strings, of up to {MOST_VALUE_CHARS} "
        f"characters, under keys of up to {MOST_KEY_CHARS}",
    )


def _parse_endpoint(name: str, value: Any, most: int) -> Any:
    url = remove_spare_slashes(value) if isinstance(value, str) else value
    return _URL.parse(name, url, most)


_URL = make_enum_kind(*ENDPOINTS)
_ENDPOINT = Kind(_parse_endpoint, _URL.make_schema)
_ID = make_type_kind(str, f"a string, such as {EXAMPLE['input_file_id']}", TEXT)
_WINDOW = Kind(_parse_window, lambda most: TEXT | {"pattern": f"^{WINDOW_FORM}$"})
_TOO_LATE = (
    "24h, 90m, 7d, up to 366 days. A line that is not answered by then gets an error."
)
_LIFE_HELP = "How long output and error file live. Without it, they stay."
FIELDS = (
    Field("input_file_id", _ID, "A file with purpose batch.", is_required=True),
    Field("endpoint", _ENDPOINT, "The url of its lines.", is_required=True),
    Field("completion_window", _WINDOW, _TOO_LATE, is_required=True),
    Field(
        "metadata",
        Kind(_parse_metadata, lambda most: METADATA),
        "Pairs of strings, which come back.",
    ),
    Field("output_expires_after", Kind(parse_life, lambda most: LIFE), _LIFE_HELP),
)


def parse_batch(fields: Mapping[str, Any]) -> BatchRequest:
    """Parse the fields of a new batch."""
    table = {field.name: field for field in FIELDS}
    for name in sorted(fields.keys() - table.keys()):
        raise RequestError(
            "unsupported_parameter",
            f"{describe_value(name)} is no field of a batch here; there are {', '.join(table)}. "
            "Leave it out",
            name[:64],
        )
    values: dict[str, Any] = {}
    for name, field in table.items():
        value = fields.get(name)
        if value is not None:
            values[name] = field.kind.parse(name, value, MOST_LIFE_S)
        elif field.is_required:
            is_null = "null" if name in fields else "absent"
            raise RequestError(
                "invalid_type",
                f"{name} is {is_null}; it must be a string, such as {EXAMPLE[name]}",
                name,
            )
    return BatchRequest(**values)


def make_line_check(
    endpoint: str, check_model: Callable[[object], None]
) -> Callable[[Envelope], None]:
    """Return a check that raises a RequestError for a line that is not of a batch."""
    num_inputs = 0  # of embeddings, in the lines so far

    def check_line(envelope: Envelope) -> None:
        nonlocal num_inputs
        if envelope.shape != "batch":
            raise RequestError(
                "unsupported_parameter",
                'the line is no request of a batch; write {"custom_id": "…", "method": "POST", '
                f'"url": "{endpoint}", "body": {{…}}}}',
            )
        url = URL_OF[envelope.endpoint or "completions"]
        if url != endpoint:
            raise RequestError(
                "unsupported_parameter",
                f"url is {url}, and the batch is for {endpoint}; put the line into a batch for "
                f"{url}",
                "url",
            )
        inputs = envelope.fields.get("input")
        is_single = not isinstance(inputs, list) or all(map(is_integral, inputs))
        num_inputs += 1 if is_single or inputs is None else len(inputs)
        if num_inputs > MAX_INPUTS and endpoint == EMBEDDINGS:
            raise RequestError(
                "out_of_range",
                f"the batch has more than {MAX_INPUTS:,} inputs by this line; put this line and "
                "those after it into another batch",
                "input",
            )
        try:
            check_model(envelope.fields.get("model"))
        except FminferError as error:
            raise RequestError("unsupported_parameter", str(error), "model") from None

    return check_line
