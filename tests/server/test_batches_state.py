"""A state folder that was damaged, copied or restored in part: nothing is removed, all
is told."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

import fminfer
from fminfer.core.errors import InUseError, UsageError
from fminfer.files import disk
from fminfer.files.claims import Claims
from fminfer.server.batches import batch_work
from fminfer.server.batches.state_folder import StateFolder
from fminfer.server.batches.stored_batches import ServerState
from tests.server.batch_calls import (
    Clock,
    batch_line,
    create,
    get,
    has_trouble,
    long_lines,
    texts_of,
    upload,
    wait_for_end,
    wait_until,
)
from tests.server.running import running, until
from tests.server.server_needs import needs_server

pytestmark = needs_server(engine={"max_rows": 4})


def some_done(found: dict[str, object]) -> bool:
    counts = found["request_counts"]
    return isinstance(counts, dict) and counts["completed"] > 2


@pytest.mark.parametrize("name", ["salt", "files", "batches"])
def test_damage_is_told_by_name(
    engine: fminfer.Engine, tmp_path: Path, name: str
) -> None:
    state = tmp_path / "state"
    with running(engine, state=state) as server:
        create(server, [batch_line("a")])
    damaged = {
        "salt": state / "salt",
        "files": next(state.glob("files/*.json")),
        "batches": next(state.glob("batches/*/batch.json")),
    }[name]
    damaged.write_bytes(b"{}")
    with pytest.raises(UsageError, match=damaged.name), running(engine, state=state):
        pass


def test_answers_whose_batch_has_no_record_stay(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    """The next start took them for a creation that was broken off, and removed them."""
    with running(engine, state=tmp_path) as server:
        batch = create(server, [batch_line("a")])
        until(lambda: get(server, batch)["status"] == "completed", "it is over")
    (record,) = tmp_path.glob("batches/*/batch.json")
    kept = record.read_bytes()
    record.unlink()
    with pytest.raises(UsageError, match=r"output\.jsonl.*but no batch\.json"):
        ServerState(tmp_path, {})
    assert record.with_name("output.jsonl").exists()
    record.write_bytes(kept)
    # of a creation that was broken off
    record.rename(record.with_name("batch.json.new"))
    for path in record.parent.glob("output*"):
        path.unlink()
    ServerState(tmp_path, {}).close()
    assert not record.parent.exists()


def test_a_start_whose_locks_fail_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafts of the salt that it left were no folder of a server's for the next start."""
    with monkeypatch.context() as patch:
        patch.setattr(disk, "_lock_draft", lambda *_: False)
        with pytest.raises(InUseError, match=r"salt\.new is being written by other"):
            ServerState(tmp_path, {})
    ServerState(tmp_path, {}).close()
    with monkeypatch.context() as patch:
        patch.setattr(disk, "_lock_draft", lambda *_: False)
        ServerState(tmp_path, {}).close()
    assert not [*tmp_path.glob("salt.new*")]


def test_bytes_without_a_record_stay(engine: fminfer.Engine, tmp_path: Path) -> None:
    """A restore that had not come to the records yet lost all uploads at the next start."""
    with running(engine, state=tmp_path) as server:
        file_id = upload(server, [batch_line("a")])
    record = tmp_path / "files" / f"{file_id}.json"
    kept = record.read_bytes()
    record.unlink()
    note = tmp_path / "files" / "notes.jsonl"
    note.write_text("mine")
    with pytest.raises(UsageError, match=rf"{file_id}\.jsonl has no {file_id}\.json"):
        ServerState(tmp_path, {})
    record.write_bytes(kept)
    with running(engine, state=tmp_path) as server:
        assert server.get(f"/v1/files/{file_id}/content").body.startswith(
            b'{"custom_id": "a"'
        )
    assert note.read_text() == "mine"


def test_uploads_that_a_kill_broke_off(engine: fminfer.Engine, tmp_path: Path) -> None:
    """One whose record is there is finished; others, of which nobody heard, are removed."""
    with running(engine, state=tmp_path) as server:
        file_id = upload(server, [batch_line("a")])
    path = tmp_path / "files" / f"{file_id}.jsonl"
    uploads = tmp_path / "uploads"
    os.replace(path, uploads / path.name)
    (uploads / secrets.token_hex(16)).write_bytes(b"half")
    (uploads / "notes.txt").write_text("mine")
    (tmp_path / "files" / f"{file_id}.json.new").write_text("{")
    with running(engine, state=tmp_path) as server:
        assert server.get(f"/v1/files/{file_id}/content").status == 200
    assert [path.name for path in uploads.iterdir()] == ["notes.txt"]
    assert len([*(tmp_path / "files").iterdir()]) == 2


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    """The server ended with a traceback of Python."""
    StateFolder(tmp_path).close()
    (tmp_path / "files" / f"file-{32 * '0'}.json").mkdir()
    with pytest.raises(UsageError, match="cannot be read or written: Is a directory"):
        ServerState(tmp_path, {})


def test_a_claim_that_this_server_or_a_copied_one_has_left(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    """After a trouble of the disk was mended, a batch waited for its own server without end."""
    with running(engine, state=tmp_path) as server:
        batch = create(server, long_lines(60, 100))
        wait_until(server, batch, some_done)
    output = tmp_path / "batches" / batch["id"] / "output.jsonl"
    assert not output.exists(), "the batch is not over"
    claim = Claims().acquire(output)
    assert claim is not None and claim.path.exists(), "one of a living process"
    with running(engine, state=tmp_path) as server:
        batch = wait_for_end(server, batch)
        assert batch["status"] == "completed" and len(texts_of(server, batch)) == 60


def test_another_model_does_not_begin_a_batch(
    engine: fminfer.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answered what waited, under the first model's name."""
    with monkeypatch.context() as patch:
        patch.setattr(batch_work, "MOST_AT_ONCE", 0)
        with running(engine, state=tmp_path, fingerprint={"the model": "a"}) as server:
            batch = create(server, [batch_line("a")])
    with running(engine, state=tmp_path, fingerprint={"the model": "b"}) as server:
        paused = wait_until(server, batch, has_trouble)
        assert paused["status"] == "validating"
        assert paused["errors"]["data"][0]["code"] == "model_changed"
    with running(engine, state=tmp_path, fingerprint={"the model": "a"}) as server:
        assert wait_for_end(server, batch)["status"] == "completed"


@pytest.mark.parametrize("change", [None, b""])
def test_an_input_that_is_not_as_it_was(
    engine: fminfer.Engine, tmp_path: Path, clock: Clock, change: bytes | None
) -> None:
    """Lines of an emptied input were named nowhere once its batch expired."""
    with running(engine, state=tmp_path) as server:
        batch = create(server, long_lines(60, 100), window="1h")
        wait_until(server, batch, some_done)
    source = tmp_path / "files" / f"{batch['input_file_id']}.jsonl"
    kept = source.read_bytes()
    source.unlink() if change is None else source.write_bytes(change)
    with running(engine, state=tmp_path) as server:
        paused = wait_until(server, batch, has_trouble)
        assert paused["errors"]["data"][0]["code"] == "input_changed"
        assert some_done(paused) and paused["request_counts"]["total"] == 60
    source.write_bytes(kept)
    clock.ahead_s = 3600
    with running(engine, state=tmp_path) as server:
        batch = wait_for_end(server, batch)
        counts = batch["request_counts"]
        assert (
            batch["status"] == "expired"
            and counts["completed"] + counts["failed"] == 60
        )
