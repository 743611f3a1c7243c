"""Whose trouble a response is."""

from __future__ import annotations

import time
from email.utils import formatdate

import pytest

from fminfer.client.server_trouble import ServerTroubleError
from fminfer.client.verdicts import (
    RefusalError,
    hide_key,
    make_verdict,
    parse_retry_after,
    quote,
)
from fminfer.core.errors import FminferError, RequestError, ServerError


@pytest.mark.parametrize(
    "status, body, kind",
    [
        (400, b'{"error": {"message": "too long"}}', RefusalError),
        (418, b"", RefusalError),
        (422, b'{"detail": [{"loc": ["body"]}]}', RefusalError),
        (400, b'{"error": {"code": "model_not_found"}}', ServerError),
        (429, b'{"error": {"code": "insufficient_quota"}}', ServerError),
        (429, b"[]", ServerTroubleError),
        (204, b"", ServerTroubleError),
        (599, b"\xff", ServerTroubleError),
        (302, b"", ServerError),
    ],
)
def test_a_status_and_a_code_make_a_verdict(
    status: int, body: bytes, kind: type[FminferError]
) -> None:
    assert type(make_verdict("http://h/v1", status, {}, body, "")) is kind


@pytest.mark.parametrize(
    "body, message",
    [
        (b'{"error": {"message": "why"}}', "why"),
        (b'{"message": "why"}', "why"),
        (b'{"detail": "why"}', "why"),
        (b'{"error": "why"}', "why"),
        (b"why", "why"),
        (b"\x1b[1m why\n key", "\\x1b[1m why [key]"),
        (b"a" * 1000, "a" * 300 + "…"),
        (b"a" * 298 + b"key", "a" * 298 + "[k…"),
    ],
)
def test_a_server_is_quoted(body: bytes, message: str) -> None:
    error = make_verdict("http://h/v1", 400, {}, body, "key")
    assert str(error) == f"http://h/v1 answered 400: {message}"


def test_refusals_are_alike_by_status_and_code() -> None:
    error = make_verdict("u", 400, {}, b'{"error": {"code": "c", "message": "m"}}', "")
    assert isinstance(error, RefusalError) and error.likeness == (400, "c m")


def test_retry_after_is_seconds_or_a_date() -> None:
    assert parse_retry_after("7") == 7.0
    assert parse_retry_after("soon") == parse_retry_after("") == 0.0
    assert 50 < parse_retry_after(formatdate(time.time() + 60, usegmt=True)) <= 60
    assert parse_retry_after(formatdate(0, usegmt=True)) == 0.0
    error = make_verdict("u", 503, {"retry-after": "3"}, b"", "")
    assert isinstance(error, ServerTroubleError)
    assert error.retry_after_s == 3.0 and error.is_overload


def test_the_key_is_hidden_in_errors() -> None:
    error = RequestError("constraint_broken", "it says s3cret")
    hide_key(error, "s3cret")
    assert str(error) == error.message == "it says [key]"
    hide_key(error, "")
    assert quote("a s3cret", "s3cret") == "a [key]"
