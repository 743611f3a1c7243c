"""The body of `POST /v1/batches`: its fields, and what is wrong with them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fminfer.contract.envelope import CHAT, COMPLETIONS
from fminfer.contract.fields import show
from fminfer.server.http_errors import HttpError

ENDPOINTS = (COMPLETIONS, CHAT)
FIELDS = ("input_file_id", "endpoint", "completion_window", "metadata")
EXAMPLE = {"input_file_id": "file-…", "endpoint": ENDPOINTS[0], "completion_window": "24h"}
WINDOW_FORM = r"[1-9][0-9]{0,5}[smhd]"
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
MOST_WINDOW_S = 366 * 86400
MOST_PAIRS, MOST_KEY_CHARS, MOST_VALUE_CHARS = 16, 64, 512  # of metadata, as OpenAI's


@dataclass(slots=True, frozen=True)
class BatchRequest:
    """What a client asks for."""

    input_file_id: str
    endpoint: str
    completion_window: str
    window_s: int
    metadata: dict[str, str] | None


def parse_batch(fields: Mapping[str, Any]) -> BatchRequest:
    """Check the fields of a new batch.

    Raises:
        HttpError: what is wrong.
    """
    for name in fields:
        if name not in FIELDS:
            raise _refuse(
                f"{show(name)} is no field of a batch here; there are {', '.join(FIELDS)}. Leave "
                "it out",
                name[:64],
                "unsupported_parameter",
            )
    for name in FIELDS[:3]:
        if not isinstance(fields.get(name), str):
            found = show(fields[name]) if name in fields else "absent"
            raise _refuse(
                f"{name} is {found}; it must be a string, such as {EXAMPLE[name]}",
                name,
                "invalid_type",
            )
    endpoint, window = fields["endpoint"], fields["completion_window"]
    if endpoint not in ENDPOINTS:
        allowed = " or ".join(ENDPOINTS)
        raise _refuse(
            f"endpoint is {show(endpoint)}; it must be {allowed}",
            "endpoint",
            "unsupported_parameter",
        )
    window_s = _seconds_of(window)
    metadata = _check_metadata(fields.get("metadata"))
    return BatchRequest(fields["input_file_id"], endpoint, window, window_s, metadata)


def _seconds_of(window: str) -> int:
    if re.fullmatch(WINDOW_FORM, window) and len(window) <= 7:
        seconds = int(window[:-1]) * UNITS_S[window[-1]]
        if seconds <= MOST_WINDOW_S:
            return seconds
    raise _refuse(
        f"completion_window is {show(window)}; give a whole duration up to 366 days, such as "
        '"24h", "90m" or "7d"',
        "completion_window",
        "out_of_range",
    )


def _check_metadata(metadata: object) -> dict[str, str] | None:
    if metadata is None:
        return None
    if not isinstance(metadata, dict):
        raise _refuse(
            f"metadata is {show(metadata)}; it must be an object of strings, or null",
            "metadata",
            "invalid_type",
        )
    if len(metadata) > MOST_PAIRS:
        raise _refuse(
            f"metadata has {len(metadata)} pairs; at most {MOST_PAIRS} are allowed",
            "metadata",
            "out_of_range",
        )
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise _refuse(
                f"metadata holds {show(value)} under {show(key)}; values are strings",
                "metadata",
                "invalid_type",
            )
        if len(key) > MOST_KEY_CHARS or len(value) > MOST_VALUE_CHARS:
            raise _refuse(
                f"metadata: {show(key)} or its value is too long; keys have up to "
                f"{MOST_KEY_CHARS} characters, values up to {MOST_VALUE_CHARS}",
                "metadata",
                "out_of_range",
            )
    return metadata


def _refuse(message: str, param: str, code: str) -> HttpError:
    return HttpError(400, message, code=code, param=param)
