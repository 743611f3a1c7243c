"""Whose trouble a response is that is no answer: the row's, the machine's or the run's."""

from __future__ import annotations

from email.utils import parsedate_to_datetime
from time import time
from typing import Any, Literal

import orjson

from fminfer.client.server_trouble import ServerTroubleError
from fminfer.core.errors import FminferError, RequestError, ServerError, make_printable

Whose = Literal["row", "machine", "run"]
MOST_QUOTED = 300  # characters of a server's own words
KEY_REMEDY = "Set FMINFER_ENGINE_KEY, or --engine-key-file, to a key that it accepts"

# By the code that the server names; before the status.
BY_CODE: dict[str, Whose] = {
    "insufficient_quota": "run",
    "invalid_api_key": "run",
    "model_not_found": "run",
    "content_filter": "row",
    "content_policy_violation": "row",
}
# By the status; a status of 500 or more is the machine's.
BY_STATUS: dict[int, Whose] = {
    400: "row",
    401: "run",
    402: "run",
    403: "run",
    404: "run",
    405: "run",
    407: "run",
    408: "machine",
    409: "machine",
    410: "run",
    413: "row",
    422: "row",
    425: "machine",
    429: "machine",
    501: "row",
}
REMEDIES = {
    401: KEY_REMEDY,
    402: "Add credit to the account",
    403: KEY_REMEDY,
}
OVERLOADS = (429, 503, 529)


class RefusalError(RequestError):
    """A row that its server refuses."""

    def __init__(self, message: str, likeness: tuple[int, str]) -> None:
        super().__init__("refused_by_server", message)
        self.likeness = likeness  # the status and the server's code


class MissingError(ServerError):
    """A server has no such model, or no such endpoint: what it lists tells which."""


def make_verdict(
    url: str, status: int, headers: dict[str, str], body: bytes, key: str
) -> FminferError:
    """Return the error of a response with a status other than 200.

    Args:
        headers: by their names in lower case.
        body: as far as it was read.
        key: is not quoted, if the body has it.
    """
    code, message = _parse_error(body)
    text = f"{url} answered {status}"
    if message := quote(message, key):
        text += f": {message}"
    default: Whose = "machine" if status >= 500 or status < 300 else "row"
    whose = BY_CODE.get(code) or BY_STATUS.get(status, default)
    if 300 <= status < 400:
        target = quote(headers.get("location", "nowhere"), key)
        return ServerError(
            f"{text}, a redirect to {target}. Requests and the key go nowhere else "
            "than --engine says; correct it"
        )
    if status == 404 and whose == "run":
        return MissingError(text)
    if whose == "run":
        remedy = REMEDIES.get(status, "See what the server needs")
        return ServerError(f"{text}. {remedy}, and run the same command again")
    if whose == "row":
        return RefusalError(text, (status, f"{code} {message}"))
    return ServerTroubleError(
        text,
        is_overload=status in OVERLOADS,
        retry_after_s=parse_retry_after(headers.get("retry-after", "")),
    )


def quote(text: str, key: str) -> str:
    """Return a server's words for a message: short, printable and without the key."""
    if key:
        text = text.replace(key, "[key]")
    words = make_printable(" ".join(text.split()))
    return words if len(words) <= MOST_QUOTED else f"{words[:MOST_QUOTED]}…"


def hide_key(error: FminferError, key: str) -> None:
    """Remove the key from an error's text."""
    text = str(error)
    if key and key in text:
        error.args = (text.replace(key, "[key]"),)
        if isinstance(error, RequestError):
            error.message = error.args[0]


def parse_retry_after(text: str) -> float:
    """Return the seconds that a `Retry-After` names, or has until its date; else 0."""
    try:
        if text.strip().isdecimal():
            return float(text)
        return max(0.0, parsedate_to_datetime(text).timestamp() - time())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _parse_error(body: bytes) -> tuple[str, str]:
    """Return the code and the message of an error's body, of any server."""
    try:
        fields: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return "", body.decode(errors="replace")
    error = fields.get("error", fields) if isinstance(fields, dict) else fields
    if not isinstance(error, dict):
        return "", str(error)
    code = error.get("code") or error.get("type") or ""
    return str(code), str(error.get("message") or error.get("detail") or error)
