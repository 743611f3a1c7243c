"""Parts of batches by themselves: fields of a new one, lines, files' times, and why one
pauses."""

from __future__ import annotations

import errno
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fminfer.contract.endpoints import EMBEDDINGS
from fminfer.contract.envelope import Line, parse_envelope
from fminfer.core.errors import FminferError, RequestError, UsageError
from fminfer.server.batches import batch_ends, batch_request, stored_files
from fminfer.server.batches.batch_ends import ChangedError, find_trouble
from fminfer.server.batches.batch_request import FIELDS, make_line_check, parse_batch
from fminfer.server.batches.stored_files import ServerFile

ASKED = {
    "input_file_id": "file-1",
    "endpoint": "/v1/completions",
    "completion_window": "24h",
}


@pytest.mark.parametrize(
    ("window", "seconds"),
    [("24h", 86_400), ("90m", 5400), ("7d", 604_800), ("366d", 31_622_400)],
)
def test_a_window_is_a_duration(window: str, seconds: int) -> None:
    found = parse_batch(
        ASKED | {"completion_window": window, "endpoint": "//v1//completions"}
    )
    assert found.completion_window.seconds == seconds
    assert (found.endpoint, found.input_file_id) == ("/v1/completions", "file-1")


@pytest.mark.parametrize(
    ("fields", "code", "param", "said"),
    [
        (
            {"input_file_id": None},
            "invalid_type",
            "input_file_id",
            "is null; it must be a string",
        ),
        (
            {"completion_window": "367d"},
            "out_of_range",
            "completion_window",
            'such as "24h", "90m"',
        ),
        (
            {"completion_window": "24 h"},
            "out_of_range",
            "completion_window",
            "up to 366 days",
        ),
        ({"endpoint": 7}, None, "endpoint", "/v1/completions"),
        ({"endpoint": "/v1/other"}, None, "endpoint", "/v1/completions"),
        (
            {"metadata": {"a": 1}},
            "out_of_range",
            "metadata",
            "an object of up to 16 strings",
        ),
        (
            {"more": 1},
            "unsupported_parameter",
            "more",
            "there are input_file_id, endpoint",
        ),
        (
            {"output_expires_after": {"seconds": 9}},
            "out_of_range",
            "output_expires_after",
            "anchor",
        ),
    ],
)
def test_what_a_batch_cannot_be(
    fields: Any, code: str | None, param: str, said: str
) -> None:
    with pytest.raises(RequestError) as refused:
        parse_batch(ASKED | fields)
    assert refused.value.param == param and said in str(refused.value)
    assert code in (None, refused.value.code)


def test_what_a_batch_needs() -> None:
    needed = {each.name for each in FIELDS if each.is_required}
    assert needed == {*ASKED} and all(each.help for each in FIELDS)
    for name in ASKED:
        with pytest.raises(
            RequestError, match=f"{name} is absent; it must be"
        ) as refused:
            parse_batch({key: value for key, value in ASKED.items() if key != name})
        assert (refused.value.code, refused.value.param) == ("invalid_type", name)


def envelope_of(url: str, body: Any) -> Any:
    fields = {"custom_id": "a", "method": "POST", "url": url, "body": body}
    return parse_envelope(Line(0, 1, json.dumps(fields).encode()))


def test_inputs_of_embeddings_are_bounded_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A text, a list of ids and no input count as one; lists of them by their size."""
    monkeypatch.setattr(batch_request, "MAX_INPUTS", 8)
    check = make_line_check(EMBEDDINGS, lambda model: None)
    for given in ("a", [1, 2, 3, 4, 5], ["a", "b"], [[1, 2, 3], [4]], None, "b"):
        check(envelope_of(EMBEDDINGS, {"input": given}))
    with pytest.raises(
        RequestError, match="more than 8 inputs by this line"
    ) as refused:
        check(envelope_of(EMBEDDINGS, {"input": "c"}))
    assert (refused.value.code, refused.value.param) == ("out_of_range", "input")


def test_lines_of_another_kind_are_refused() -> None:
    def check_model(model: object) -> None:
        if model != "m":
            raise UsageError(f"no model {model}")

    check = make_line_check("/v1/completions", check_model)
    check(envelope_of("/v1/completions", {"model": "m"}))
    bare = parse_envelope(Line(0, 1, b'{"prompt": "a"}'))
    for envelope, param, said in (
        (bare, None, "no request of a batch"),
        (
            envelope_of(EMBEDDINGS, {"model": "m"}),
            "url",
            "the batch is for /v1/completions",
        ),
        (envelope_of("/v1/completions", {"model": "o"}), "model", "no model o"),
    ):
        with pytest.raises(RequestError, match=said) as refused:
            check(envelope)
        assert (refused.value.code, refused.value.param) == (
            "unsupported_parameter",
            param,
        )


def test_a_file_expires_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1_700_000_000.5
    monkeypatch.setattr(stored_files.time, "time_ns", lambda: int(now_s * 1e9))
    kept = ServerFile.make("file-1", "me", 7, "a.jsonl", None, purpose="batch")
    short = ServerFile.make("file-2", "me", 7, "a.jsonl", 3600, purpose="batch")
    assert (kept.expires_at, short.expires_at) == (None, 1_700_003_600)
    assert short.to_openai_object()["created_at"] == 1_700_000_000
    for later_s, is_over in ((0, False), (3599, False), (3600, True), (9999, True)):
        monkeypatch.setattr(
            stored_files.time, "time", lambda later_s=later_s: now_s + later_s
        )
        assert (kept.is_over, short.is_over) == (False, is_over)


def test_a_record_of_another_file_is_told(tmp_path: Path) -> None:
    stored = ServerFile.make(
        "file-" + "a" * 32, "me", 7, "a.jsonl", None, purpose="batch"
    )
    path = tmp_path / "other.json"
    path.write_text(json.dumps(asdict(stored)))
    with pytest.raises(
        UsageError, match=f"other.json is of another file, {stored.id}; move it away"
    ):
        stored_files._read_record(path)
    path.write_text("{}")
    with pytest.raises(UsageError, match=r"other.json is damaged .*put it back"):
        stored_files._read_record(path)


def test_why_a_batch_pauses_is_told_with_what_helps() -> None:
    """Without paths of the server; an error of ours says what it is, others their name alone."""
    found = {
        "changed": find_trouble(ChangedError("it was sent to another server")),
        "disk": find_trouble(OSError(errno.ENOSPC, "no space", "/secret")),
        "ours": find_trouble(FminferError("it failed")),
        "other": find_trouble(ZeroDivisionError("/secret")),
    }
    assert found["changed"].code == batch_ends.MODEL_CHANGED
    assert found["changed"].message == "it was sent to another server"
    assert (
        found["ours"].code == "server_failed"
        and found["other"].code == "internal_error"
    )
    assert "ZeroDivisionError" in found["other"].message
    for name, trouble in found.items():
        later = "Finished lines are kept, and the server tries again by itself"
        assert (later in trouble.message) == (
            name != "changed"
        ) and "secret" not in trouble.message
