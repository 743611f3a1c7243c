"""Trouble of the machine pauses a batch: it says why, fails no row, and goes on by itself."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

import fminfer
from fminfer.core.errors import PipelineError, StoppedError
from fminfer.files import disk, journal
from fminfer.server import request_bodies
from fminfer.server.batches import batch_run, batch_work, state_folder
from tests.server.batch_calls import (
    batch_line,
    create,
    get,
    has_trouble,
    long_lines,
    texts_of,
    try_upload,
    wait_for_end,
    wait_until,
)
from tests.server.running import Running, running, until
from tests.server.server_needs import needs_server

pytestmark = needs_server(engine={"max_rows": 4}, has_state=True, is_fresh=True)
QUICK = pytest.mark.usefixtures("quick_looks")


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server looks soon again, for work and after trouble."""
    monkeypatch.setattr(batch_work, "RETRY_S", 0.2)
    monkeypatch.setattr(batch_work, "LOOK_S", 0.1)


class FullDisk:
    """A disk that takes a number of writes, and then none until it is told to."""

    def __init__(self, write: Any, num_good: int, number: int = errno.ENOSPC) -> None:
        self._write = write
        self._num_good = num_good
        self._number = number
        self.is_full = True

    def __call__(self, *arguments: Any) -> Any:
        self._num_good -= 1
        if self.is_full and self._num_good < 0:
            raise OSError(self._number, os.strerror(self._number))
        return self._write(*arguments)


@QUICK
@pytest.mark.parametrize(
    ("number", "code", "told"),
    [
        (errno.ENOSPC, "disk_full", "make room"),
        (errno.EROFS, "state_not_writable", "mend the folder's"),
        (errno.EIO, "disk_failed", "check it"),
    ],
)
def test_a_disk_that_fails_pauses_a_batch(
    server: Running, monkeypatch: pytest.MonkeyPatch, number: int, code: str, told: str
) -> None:
    disk = FullDisk(journal.write_all, 12, number)
    monkeypatch.setattr(journal, "write_all", disk)
    batch = create(server, long_lines(30, 20))
    paused = wait_until(server, batch, has_trouble)
    assert paused["status"] == "in_progress"
    (error,) = paused["errors"]["data"]
    assert error["code"] == code and told in error["message"]
    assert str(server.batches.uploads.parent) not in error["message"], (
        "paths are the server's own"
    )
    assert (
        paused["request_counts"]["failed"] == 0
        and paused["request_counts"]["completed"] > 5
    )
    live = server.post("/v1/completions", {"prompt": [5], "max_tokens": 2})
    assert live.status == 200, "the server goes on"
    disk.is_full = False
    batch = wait_for_end(server, batch)
    assert batch["status"] == "completed" and batch["errors"] is None
    assert batch["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
    assert len(texts_of(server, batch)) == 30


@QUICK
def test_a_disk_that_is_full_when_the_output_is_written(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And when the batch says that it is complete."""
    written: list[str] = []
    write = state_folder.write_durably

    def fail_once(path: Path, data: bytes) -> None:
        if b'"status": "completed"' in data and len(written) < 2:
            written.append(path.name)
            raise OSError(errno.ENOSPC, "full")
        write(path, data)

    monkeypatch.setattr(
        "fminfer.server.batches.stored_batches.write_durably", fail_once
    )
    batch = wait_for_end(server, create(server, [batch_line("a")]))
    assert batch["status"] == "completed" and batch["errors"] is None
    assert len(written) == 2 and [*texts_of(server, batch)] == ["a"]


@QUICK
def test_a_batch_whose_end_cannot_be_written_can_be_cancelled(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the output that it is about to have is not deleted before."""
    write = state_folder.write_durably

    def fail(path: Path, data: bytes) -> None:
        if b'"status": "completed"' in data:
            raise OSError(errno.ENOSPC, "full")
        write(path, data)

    monkeypatch.setattr("fminfer.server.batches.stored_batches.write_durably", fail)
    batch = create(server, [batch_line("a")])
    assert wait_until(server, batch, has_trouble)["status"] == "finalizing"
    (output,) = server.get("/v1/files?purpose=batch_output").json["data"]
    answer = server.call("DELETE", f"/v1/files/{output['id']}")
    assert answer.status == 409 and answer.error["code"] == "file_in_use"
    assert server.post(f"/v1/batches/{batch['id']}/cancel", b"").status == 200
    batch = wait_for_end(server, batch)
    assert batch["status"] == "cancelled" and batch["output_file_id"] == output["id"]
    assert [*texts_of(server, batch)] == ["a"]
    assert server.call("DELETE", f"/v1/files/{output['id']}").status == 200


@QUICK
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_batch_that_cannot_tell_its_trouble_goes_on_later(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Exception] = []

    def fail(run: batch_run.BatchRun, error: Exception) -> None:
        told.append(error)
        raise BrokenPipeError("nobody reads the log")

    with monkeypatch.context() as patch:
        patch.setattr(batch_run.BatchRun, "_pause_batch", fail)
        patch.setattr(batch_run, "make_line_check", lambda *arguments: 1 / 0)
        batch = create(server, [batch_line("a")])
        while not told:
            get(server, batch)
    assert wait_for_end(server, batch)["status"] == "completed"


def test_the_log_level_holds_for_batches(
    engine: fminfer.Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(batch_run, "make_line_check", lambda *arguments: 1 / 0)
    with running(engine, state=tmp_path / "state", log_level="critical") as server:
        wait_until(server, create(server, [batch_line("a")]), has_trouble)
    assert capfd.readouterr().err == ""
    monkeypatch.undo()
    with running(engine, state=tmp_path / "other", is_quiet=False) as server:
        batch = wait_for_end(server, create(server, [batch_line("a"), b"{}"]))
    told = capfd.readouterr().err
    assert f"Batch {batch['id']} begins: 0 answers and 0 errors of 2 lines.\n" in told
    assert (
        f"Batch {batch['id']} is completed: 1 answer and 1 error of 2 lines.\n" in told
    )


@QUICK
def test_a_full_disk_at_an_upload(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            request_bodies, "write_all", FullDisk(request_bodies.write_all, 0)
        )
        answer = try_upload(server, batch_line("a"))
        assert answer.status == 507 and "Delete files" in answer.error["message"]
    with monkeypatch.context() as patch:
        full = FullDisk(None, 0)
        patch.setattr("fminfer.server.batches.stored_files.write_durably", full)
        assert try_upload(server, batch_line("a")).status == 507
    folder = server.batches.uploads.parent
    assert not [*folder.glob("uploads/*"), *folder.glob("files/*")]
    assert server.get("/v1/files").json["data"] == []
    assert try_upload(server, batch_line("a")).status == 200
    monkeypatch.setattr(disk, "_lock_draft", lambda *_: False)
    assert try_upload(server, batch_line("a")).status == 507, (
        "it was a fault of fminfer"
    )


@QUICK
def test_a_status_that_cannot_be_read_back_pauses_a_batch(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log told of a fault of fminfer, with a traceback."""
    with monkeypatch.context() as patch:
        patch.setattr(batch_run, "find_completed", lambda output: None)
        batch = create(server, [batch_line("a")])
        (error,) = wait_until(server, batch, has_trouble)["errors"]["data"]
    assert error["code"] == "machine_failed" and "/" not in error["message"]
    assert wait_for_end(server, batch)["status"] == "completed"


@QUICK
def test_a_full_disk_at_creation(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_id = try_upload(server, batch_line("a")).json["id"]
    wish = {
        "input_file_id": file_id,
        "endpoint": "/v1/completions",
        "completion_window": "1h",
    }
    with monkeypatch.context() as patch:
        patch.setattr(
            "fminfer.server.batches.stored_batches.write_durably", FullDisk(None, 0)
        )
        assert server.post("/v1/batches", wish).status == 507
    with monkeypatch.context() as patch:  # a disk whose locks fail
        patch.setattr(disk, "_lock_draft", lambda *_: False)
        assert server.post("/v1/batches", wish).status == 507
    assert server.get("/v1/batches").json["data"] == []
    assert not [*server.batches.uploads.parent.glob("batches/*")]


def test_another_model_pauses_a_batch_until_the_old_one_is_back(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    """Rows of two models are never mixed, and a cancelled batch has those of the first."""
    state = tmp_path / "state"
    with running(engine, state=state, fingerprint={"the model": "a"}) as server:
        lanes = server.engine.runs.lanes
        lanes.is_closed = True  # so that they begin together
        first, second = (create(server, long_lines(60, 50)) for _ in range(2))
        until(
            lambda: [lane.num_waiting >= 20 for lane in lanes.all] == [True] * 2,
            "all wait",
        )
        lanes.is_closed = False
        for batch in (first, second):
            wait_until(
                server, batch, lambda found: found["request_counts"]["completed"] > 2
            )
    with running(engine, state=state, fingerprint={"the model": "b"}) as server:
        for batch in (first, second):
            paused = wait_until(server, batch, has_trouble)
            assert paused["status"] == "in_progress"
            (error,) = paused["errors"]["data"]
            assert error["code"] == "model_changed"
            assert (
                "the model was a, is b" in error["message"]
                and "cancel" in error["message"]
            )
            counts = paused["request_counts"]
            assert counts["total"] == 60 and counts["completed"] > 2, (
                "the finished lines"
            )
        server.post(f"/v1/batches/{second['id']}/cancel", b"")
        second = wait_for_end(server, second)
        assert second["status"] == "cancelled" and len(texts_of(server, second)) > 2
        third = wait_for_end(server, create(server, [batch_line("a")]))
        assert third["status"] == "completed", "others go on"
    with running(engine, state=state, fingerprint={"the model": "a"}) as server:
        first = wait_for_end(server, first)
        assert first["status"] == "completed" and first["errors"] is None
        assert len(texts_of(server, first)) == 60


@QUICK
def test_a_fault_of_ours_pauses_one_batch(
    server: Running, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(batch_run, "make_line_check", lambda *arguments: 1 / 0)
        batch = create(server, [batch_line("a")])
        (error,) = wait_until(server, batch, has_trouble)["errors"]["data"]
        assert (
            error["code"] == "internal_error"
            and "ZeroDivisionError" in error["message"]
        )
    assert wait_for_end(server, batch)["status"] == "completed"
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_a_file_that_cannot_be_removed_at_the_start_keeps_no_batch_waiting(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    with running(engine, state=tmp_path) as server:
        batch = wait_for_end(server, create(server, [batch_line("a")]))
    (output,) = tmp_path.glob("batches/*/output.jsonl")
    journal.journal_path(output).mkdir()
    with running(engine, state=tmp_path) as server:
        assert (
            wait_for_end(server, create(server, [batch_line("b")]))["status"]
            == "completed"
        )
        assert [*texts_of(server, batch)] == ["a"]


def test_an_input_that_is_gone_pauses_its_batch(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    with running(engine, state=state) as server:
        batch = create(server, long_lines(60, 100))
        wait_until(
            server, batch, lambda found: found["request_counts"]["completed"] > 2
        )
    (source,) = state.glob("files/*.jsonl")
    kept = source.read_bytes()
    source.write_bytes(kept[: len(kept) // 2])
    with running(engine, state=state) as server:
        paused = wait_until(server, batch, has_trouble)
        assert paused["errors"]["data"][0]["code"] == "input_changed"
        assert get(server, batch)["status"] == "in_progress"


def test_an_engine_that_fails_keeps_the_batch(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    broken = fminfer.Engine(dtype="float32", max_rows=4)
    is_broken = threading.Event()
    step = broken._core.step

    def fail() -> Any:
        if is_broken.is_set():
            raise PipelineError("rank 1 is gone")
        return step()

    broken._core.step = fail  # type: ignore[method-assign]
    with running(broken, state=state) as server:
        batch = create(server, long_lines(60, 100))
        wait_until(
            server, batch, lambda found: found["request_counts"]["completed"] > 2
        )
        is_broken.set()
        server.thread.join(20)
    broken.close()
    assert isinstance(server.fault, PipelineError)
    with running(engine, state=state) as server:
        batch = wait_for_end(server, batch)
        assert batch["status"] == "completed" and batch["errors"] is None
        assert len(texts_of(server, batch)) == 60


@QUICK
def test_an_output_that_was_changed_is_not_sent(
    server: Running, tmp_path: Path
) -> None:
    """A file that somebody had cut short was sent as if it were whole."""
    batch = wait_for_end(server, create(server, [batch_line("a"), batch_line("b")]))
    (path,) = server.batches.uploads.parent.glob("batches/*/output.jsonl")
    whole = path.read_bytes()
    route = f"/v1/files/{batch['output_file_id']}/content"
    path.write_bytes(whole[:300])
    changed = server.get(route)
    assert changed.status == 410 and "300 bytes" in changed.error["message"]
    path.write_bytes(whole)
    assert server.get(route).body == whole
    path.unlink()
    assert server.get(route).error["code"] == "file_removed"
    # it goes between the look and the opening
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.batches, "require_bytes", lambda file_id, owner: path)
        answer = server.get(route)
    assert (answer.status, answer.error["code"]) == (410, "file_removed")


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_an_output_that_was_changed_before_its_batch_ended_is_not_published(
    engine: fminfer.Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_cancelled: bool,
) -> None:
    """The server ended between the output's last byte and the batch's last status."""

    def stop(run: object, completed: object) -> None:
        raise StoppedError("the server ends")

    state = tmp_path / "state"
    monkeypatch.setattr(batch_work, "RETRY_S", 0.2)
    monkeypatch.setattr(batch_work, "LOOK_S", 0.1)
    with monkeypatch.context() as patch, running(engine, state=state) as server:
        patch.setattr(batch_run.BatchRun, "_publish_completed", stop)
        batch = create(server, [batch_line("a"), batch_line("b")])
        for name, is_there in (
            ("output.status.json", True),
            ("output.jsonl.journal", False),
        ):
            path = f"batches/*/{name}"
            wait_until(
                server, batch, lambda _, p=path, i=is_there: any(state.glob(p)) == i
            )
    (output,) = state.glob("batches/*/output.jsonl")
    whole = output.read_bytes()
    output.write_bytes(whole[:300])
    with running(engine, state=state) as server:
        paused = wait_until(server, batch, has_trouble)
        assert paused["errors"]["data"][0]["code"] == "input_changed"
        if is_cancelled:
            assert server.post(f"/v1/batches/{batch['id']}/cancel", {}).status == 200
            assert wait_for_end(server, batch)["output_file_id"] is None
        else:
            output.write_bytes(whole)
            batch = wait_for_end(server, batch)
            assert batch["status"] == "completed" and len(texts_of(server, batch)) == 2
