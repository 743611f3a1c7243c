"""Batches that end early: cancelled ones keep what is finished, expired ones tell the rest."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest

import fminfer
from fminfer.files.ordered_output import errors_path
from fminfer.server.batches import batch_work
from fminfer.server.batches.batch_ends import publish_finished
from tests.server.batch_calls import (
    Clock,
    batch_line,
    content,
    create,
    get,
    long_lines,
    texts_of,
    wait_for_end,
    wait_until,
)
from tests.server.running import Running, running
from tests.server.server_needs import needs_server

pytestmark = needs_server(engine={"max_rows": 4}, has_state=True, is_fresh=True)

NUM_LINES = 40


def has_some(batch: dict[str, object]) -> bool:
    counts = batch["request_counts"]
    assert isinstance(counts, dict)
    return counts["completed"] >= 5


def test_a_cancelled_batch_keeps_what_is_finished(server: Running) -> None:
    batch = create(server, [b"bad", *long_lines(NUM_LINES, 100)])
    wait_until(server, batch, has_some)
    assert (
        server.post(f"/v1/batches/{batch['id']}/cancel", b"").json["status"]
        == "cancelling"
    )
    batch = wait_for_end(server, batch)
    assert batch["status"] == "cancelled"
    counts = batch["request_counts"]
    texts = texts_of(server, batch)
    assert 5 <= len(texts) == counts["completed"] < NUM_LINES
    assert counts["total"] == NUM_LINES + 1 and counts["failed"] == 1
    assert len(content(server, batch["error_file_id"])) == 1
    order = [int(custom_id[1:]) for custom_id in texts]
    assert order == sorted(order), "in the order of the input"
    assert batch["usage"]["output_tokens"] == 100 * len(texts)
    assert not [*server.batches.uploads.parent.glob("batches/*/*.journal")]
    assert server.is_idle(), "rows that ran are dropped"
    again = server.post(f"/v1/batches/{batch['id']}/cancel", b"")
    assert again.status == 200 and again.json == batch


@pytest.mark.parametrize("end", ["cancelled", "expired"])
def test_a_batch_ends_while_others_go_first(
    server: Running, monkeypatch: pytest.MonkeyPatch, clock: Clock, end: str
) -> None:
    monkeypatch.setattr(batch_work, "MOST_AT_ONCE", 1)
    first = create(server, long_lines(NUM_LINES, 100))
    wait_until(server, first, has_some)
    second = create(server, [batch_line("a")], window="1h")
    assert second["status"] == "validating"
    clock.ahead_s = 3600.0 * (end == "expired")
    if end == "cancelled":
        server.post(f"/v1/batches/{second['id']}/cancel", b"")
    assert wait_for_end(server, second)["status"] == end
    assert get(server, first)["status"] == "in_progress"
    server.post(f"/v1/batches/{first['id']}/cancel", b"")
    wait_for_end(server, first)


def test_a_packed_file_that_is_too_long_makes_no_expired_lines(
    engine: fminfer.Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
) -> None:
    """Each of a hundred million lines had a row in the journal once the window was over."""
    monkeypatch.setattr(batch_work, "MOST_AT_ONCE", 1)
    with running(engine, state=tmp_path / "state", max_batch_lines=50) as server:
        first = create(server, long_lines(NUM_LINES, 100), window="48h")
        wait_until(server, first, has_some)
        second = create(server, [gzip.compress(b"1\n" * 3000)], window="1h")
        assert second["status"] == "validating"
        clock.ahead_s = 3600
        second = wait_for_end(server, second)
        assert second["status"] == "failed"
        assert [each["code"] for each in second["errors"]["data"]] == ["file_too_large"]
        server.post(f"/v1/batches/{first['id']}/cancel", b"")
        wait_for_end(server, first)


def test_a_batch_that_is_over_is_not_cancelled(server: Running) -> None:
    batch = wait_for_end(server, create(server, [batch_line("a")]))
    answer = server.post(f"/v1/batches/{batch['id']}/cancel", b"")
    assert answer.status == 409 and "completed" in answer.error["message"]
    assert get(server, batch) == batch


def test_an_expired_batch_tells_which_lines_were_not_answered(
    server: Running, clock: Clock
) -> None:
    lines = [b"bad", *long_lines(NUM_LINES, 100)]
    batch = create(server, lines, window="1h")
    wait_until(server, batch, has_some)
    clock.ahead_s = 3600
    batch = wait_for_end(server, batch)
    assert batch["status"] == "expired" and batch["expired_at"] >= batch["expires_at"]
    texts = texts_of(server, batch)
    errors = content(server, batch["error_file_id"])
    assert 0 < len(texts) < NUM_LINES
    assert len(texts) + len(errors) == len(lines) == batch["request_counts"]["total"]
    assert batch["request_counts"]["failed"] == len(errors)
    assert errors[0]["response"]["body"]["error"]["code"] == "invalid_json"
    for record in errors[1:]:
        assert record["error"]["code"] == "batch_expired" and record["response"] is None
    ids = [json.loads(line)["custom_id"] for line in lines[1:]]
    assert sorted([*texts, *(record["custom_id"] for record in errors[1:])]) == sorted(
        ids
    )


def test_a_window_is_over_while_the_server_is_down(
    engine: fminfer.Engine, tmp_path: Path, clock: Clock
) -> None:
    state = tmp_path / "state"
    with running(engine, state=state) as server:
        batch = create(server, long_lines(NUM_LINES, 100), window="1h")
        wait_until(server, batch, has_some)
    clock.ahead_s = 3600
    with running(engine, state=state) as server:
        batch = wait_for_end(server, batch)
        assert batch["status"] == "expired"
        texts = texts_of(server, batch)
        errors = content(server, batch["error_file_id"])
        assert len(texts) >= 5 and len(texts) + len(errors) == NUM_LINES
        assert {record["error"]["code"] for record in errors} == {"batch_expired"}


def test_what_is_finished_when_the_window_ends_is_completed(
    engine: fminfer.Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
) -> None:
    """A server that died between the output and the batch's own word left a complete output."""
    from fminfer.server.batches.batch_run import BatchRun

    state = tmp_path / "state"
    with monkeypatch.context() as patch:
        patch.setattr(BatchRun, "_publish_completed", lambda self, completed: None)
        with running(engine, state=state) as server:
            batch = create(server, [batch_line("a"), b"bad"], window="1h")
            output = server.batches.batches.output_path(
                server.batches.require_batch(batch["id"], "")
            )
            while not output.exists():
                time.sleep(0.01)
    clock.ahead_s = 3600
    with running(engine, state=state) as server:
        batch = wait_for_end(server, batch)
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
        assert batch["usage"]["output_tokens"] > 0
        assert [*texts_of(server, batch)] == ["a"]


def test_lines_without_an_id_are_only_counted_when_they_expire(tmp_path: Path) -> None:
    """Each made a record of hundreds of bytes that named nothing, of two bytes that
    were sent."""
    source = tmp_path / "in.jsonl"
    output = tmp_path / "out.jsonl"
    source.write_bytes(b"\n".join([b"1", batch_line("a"), b"{}", b"[]"]))
    progress = publish_finished(output, source, 0)
    assert (progress.total, progress.completed, progress.failed) == (4, 0, 4)
    (record,) = errors_path(output).read_bytes().splitlines()
    assert json.loads(record)["custom_id"] == json.loads(batch_line("a"))["custom_id"]
