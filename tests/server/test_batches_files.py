"""How long files live: pages behind deleted ones, and files that expire."""

from __future__ import annotations

import errno
import json
import time
from pathlib import Path
from typing import Any

import pytest

import fminfer
from fminfer.server.batches import stored_files
from tests.server.batch_calls import (
    BOUNDARY,
    Clock,
    batch_line,
    content,
    create,
    get,
    long_lines,
    upload,
    wait_for_end,
    wait_until,
)
from tests.server.running import Answer, Running, running, until
from tests.server.server_needs import needs_server

pytestmark = needs_server(engine={"max_rows": 4})

A = {"Authorization": "Bearer a"}
B = {"Authorization": "Bearer b"}
HOUR = 3600


def page(
    server: Running, query: str = "", headers: dict[str, str] | None = None
) -> list[str]:
    answer = server.get(f"/v1/files?{query}", headers)
    assert answer.status == 200, answer.body
    return [each["id"] for each in answer.json["data"]]


def delete(
    server: Running, file_id: str, headers: dict[str, str] | None = None
) -> None:
    assert server.call("DELETE", f"/v1/files/{file_id}", None, headers).status == 200


def test_a_page_goes_on_behind_deleted_files(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    """Who deleted the files of each page got 400 for the next one: its cursor was gone."""
    with running(engine, state=tmp_path) as server:
        ids = [upload(server, [batch_line(str(n))]) for n in range(6)][::-1]
        for file_id in (first := page(server, "limit=2")):
            delete(server, file_id)
        after = f"limit=2&after={first[-1]}"
        assert page(server, after) == ids[2:4]
        assert page(server, f"{after}&purpose=batch") == ids[2:4]
        assert page(server, f"order=asc&after={ids[1]}") == []
        delete(server, ids[3])
        assert page(server, f"order=asc&after={ids[3]}") == [ids[2]]
        never = server.get(f"/v1/files?after=file-{'0' * 32}")
        assert (never.status, never.error["param"]) == (400, "after")
    with running(engine, state=tmp_path) as server:
        assert page(server, after) == [ids[2], ids[4]], (
            "the next server knows the place"
        )
        assert page(server, f"after={ids[3]}") == ids[4:]


def test_another_keys_deleted_files_stay_unknown(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    with running(engine, state=tmp_path, api_keys=["a", "b"]) as server:
        file_id = upload(server, [batch_line("a")], A)
        delete(server, file_id, A)
        assert page(server, f"after={file_id}", A) == []
        theirs = server.get(f"/v1/files?after={file_id}", B)
        never = server.get(f"/v1/files?after=file-{'0' * 32}", B)
        assert (theirs.status, theirs.body) == (400, never.body)


def test_a_full_disk_keeps_nobody_from_deleting(
    engine: fminfer.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place of a deleted file needs a few bytes, and there may be none until it is
    deleted."""
    with running(engine, state=tmp_path) as server:
        ids = [upload(server, [batch_line("a")]) for _ in range(3)]
    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, "No space left on device")
        patch.setattr(
            stored_files, "write_durably", lambda *_: (_ for _ in ()).throw(full)
        )
        with running(engine, state=tmp_path) as server:
            (tmp_path / "deleted").unlink()
            (tmp_path / "deleted").mkdir()  # which cannot be written, either
            delete(server, ids[1])
            assert page(server, f"after={ids[1]}") == ids[:1]
        (tmp_path / "deleted").rmdir()


def test_places_of_deleted_files_are_bounded(
    engine: fminfer.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_files, "MOST_GONE", 3)
    with running(engine, state=tmp_path) as server:
        ids = [upload(server, [batch_line("a")]) for _ in range(11)]
        for file_id in ids[:10]:
            delete(server, file_id)
        assert server.get(f"/v1/files?after={ids[0]}").status == 400
        assert page(server, f"order=asc&after={ids[9]}") == ids[10:]
        assert len((tmp_path / "deleted").read_bytes().splitlines()) <= 6
    with (tmp_path / "deleted").open("ab") as file:
        file.write(b'["file-')  # of a server that died
    with running(engine, state=tmp_path) as server:
        delete(server, ids[10])
    with running(engine, state=tmp_path) as server:
        for file_id in ids[8:]:
            assert page(server, f"order=asc&after={file_id}") == []


def send(server: Running, *, lines: list[bytes] | None = None, **form: str) -> Answer:
    """Upload lines with further fields of the form."""
    data = b"\n".join(lines or [batch_line("a")])
    form = {"purpose": "batch"} | form
    parts = [
        f'Content-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in form.items()
    ]
    parts.append(
        b'Content-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
        + data
        + b"\r\n"
    )
    mark = f"--{BOUNDARY}\r\n".encode()
    body = b"".join(mark + each for each in parts) + f"--{BOUNDARY}--\r\n".encode()
    headers = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    return server.call("POST", "/v1/files", body, headers)


def send_for(server: Running, seconds: object, **more: Any) -> Answer:
    form = {
        "expires_after[anchor]": "created_at",
        "expires_after[seconds]": str(seconds),
    }
    return send(server, **form | more)


def test_a_file_expires(engine: fminfer.Engine, tmp_path: Path, clock: Clock) -> None:
    """`expires_after` was refused, and files stayed until a client deleted them."""
    with running(engine, state=tmp_path) as server:
        stays = upload(server, [batch_line("a")])
        sent = send_for(server, HOUR).json
        assert sent["expires_at"] == sent["created_at"] + HOUR
        path = f"/v1/files/{sent['id']}"
        assert server.get(path).json["expires_at"] == sent["expires_at"]
        assert server.get(f"/v1/files/{stays}").json["expires_at"] is None
        clock.ahead_s = HOUR + 1
        assert server.get(path).status == server.get(f"{path}/content").status == 404
        assert server.call("DELETE", path).status == 404
        wish = {"endpoint": "/v1/completions", "completion_window": "24h"}
        assert (
            server.post("/v1/batches", wish | {"input_file_id": sent["id"]}).status
            == 404
        )
        assert page(server) == [stays]
        until(
            lambda: not [*tmp_path.glob(f"files/{sent['id']}*")],
            "it is removed from the disk",
        )
        assert page(server, f"after={sent['id']}") == [stays], "its place is known"


def test_a_file_expires_while_the_server_is_down(
    engine: fminfer.Engine, tmp_path: Path, clock: Clock
) -> None:
    with running(engine, state=tmp_path) as server:
        file_id = send_for(server, HOUR).json["id"]
    clock.ahead_s = HOUR - 60
    with running(engine, state=tmp_path) as server:
        assert page(server) == [file_id]
    clock.ahead_s = HOUR
    with running(engine, state=tmp_path) as server:
        assert page(server) == []
        until(
            lambda: not [*tmp_path.glob(f"files/{file_id}*")],
            "it is removed from the disk",
        )


def test_what_a_batch_reads_is_kept_until_it_ends(
    engine: fminfer.Engine, tmp_path: Path, clock: Clock
) -> None:
    wish = {"endpoint": "/v1/completions", "completion_window": "24h"}
    with running(engine, state=tmp_path) as server:
        file_id = send_for(server, HOUR, lines=long_lines(40)).json["id"]
        wish["input_file_id"] = file_id
        batch = server.post("/v1/batches", wish).json
        wait_until(
            server, batch, lambda found: found["request_counts"]["completed"] > 0
        )
        clock.ahead_s = HOUR + 1
        assert server.get(f"/v1/files/{file_id}").status == 404, (
            "it is over for its client"
        )
    with running(engine, state=tmp_path) as server:
        until(
            lambda: (
                server.batches.work.progress_of(server.batches.batches.open_batches[0])
                is not None
            ),
            "",
        )
        assert get(server, batch)["status"] == "in_progress"
        batch = wait_for_end(server, batch)
        assert (batch["status"], batch["request_counts"]["completed"]) == (
            "completed",
            40,
        )
        until(
            lambda: not [*tmp_path.glob(f"files/{file_id}*")],
            "it is removed from the disk",
        )
        assert len(content(server, batch["output_file_id"])) == 40


def test_a_file_that_its_owner_deletes_as_it_expires(
    engine: fminfer.Engine, tmp_path: Path, clock: Clock
) -> None:
    """The thread that begins batches died of it, so that no batch began any more."""
    with running(engine, state=tmp_path) as server:
        file_id = send_for(server, HOUR).json["id"]
        with server.batches.files.lock:  # as a DELETE that waits for the disk
            clock.ahead_s = HOUR + 1
            until(lambda: server.batches.files.expired_files != [], "it is over")
            time.sleep(0.2)  # it was seen by now
            server.batches.files.remove(server.batches.files.expired_files[0])
        batch = wait_for_end(server, create(server, [batch_line("a")]))
        assert batch["status"] == "completed" and file_id not in page(server)


def test_a_disk_that_cannot_delete_is_not_filled(
    engine: fminfer.Engine,
    tmp_path: Path,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The place of an expired file was written again with each try to remove it."""
    broken = OSError(errno.EIO, "Input/output error")
    with running(engine, state=tmp_path) as server:
        file_id = send_for(server, HOUR).json["id"]
        with monkeypatch.context() as patch:
            patch.setattr(
                stored_files, "sync_folder", lambda _: (_ for _ in ()).throw(broken)
            )
            clock.ahead_s = HOUR + 1
            time.sleep(0.5)
            assert len((tmp_path / "deleted").read_bytes().splitlines()) == 1
        until(
            lambda: not [*tmp_path.glob(f"files/{file_id}*")],
            "it is removed from the disk",
        )


def test_outputs_expire(engine: fminfer.Engine, tmp_path: Path, clock: Clock) -> None:
    """`output_expires_after` was refused. It counts from when the file was made."""
    wish: dict[str, Any] = {"endpoint": "/v1/completions", "completion_window": "24h"}
    wish["output_expires_after"] = {"anchor": "created_at", "seconds": HOUR}
    with running(engine, state=tmp_path) as server:
        wish["input_file_id"] = upload(server, [batch_line("a"), b"{}"])
        batch = wait_for_end(server, server.post("/v1/batches", wish).json)
        for name in ("output_file_id", "error_file_id"):
            found = server.get(f"/v1/files/{batch[name]}").json
            assert found["expires_at"] == found["created_at"] + HOUR
        clock.ahead_s = HOUR + 1
        assert page(server) == [wish["input_file_id"]]
        until(
            lambda: not [*tmp_path.glob("batches/*/output*.jsonl")], "they are removed"
        )
        assert get(server, batch)["output_file_id"] == batch["output_file_id"]


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ({"anchor": "created_at", "seconds": 3599}, "from 3,600 to 2,592,000"),
        ({"anchor": "created_at", "seconds": 2592001}, "from 3,600 to 2,592,000"),
        ({"anchor": "created_at", "seconds": True}, "from 3,600 to 2,592,000"),
        ({"anchor": "created_at", "seconds": "soon"}, "from 3,600 to 2,592,000"),
        ({"anchor": "last_used_at", "seconds": 3600}, '"created_at"'),
        ({"anchor": "created_at"}, "seconds"),
        ({"seconds": 3600}, "anchor"),
        ({"anchor": "created_at", "seconds": 3600, "days": 1}, "days"),
        ("1h", "an object"),
        ([], "an object"),
    ],
)
def test_wrong_times(
    engine: fminfer.Engine, tmp_path: Path, value: Any, hint: str
) -> None:
    with running(engine, state=tmp_path) as server:
        if isinstance(value, dict) and "days" not in value:
            form = {f"expires_after[{name}]": str(each) for name, each in value.items()}
            refused = send(server, **form)
            assert refused.status == 400 and "expires_after" in refused.error["param"]
            assert hint in refused.error["message"]
            assert not [*tmp_path.glob("*/*")], "nothing of it stays"
        wish = {"endpoint": "/v1/completions", "completion_window": "24h"}
        wish["input_file_id"] = upload(server, [batch_line("a")])
        refused = server.post("/v1/batches", wish | {"output_expires_after": value})
        assert (
            refused.status == 400 and refused.error["param"] == "output_expires_after"
        )
        assert hint in refused.error["message"]
        for seconds in (3600, 3600.0, 2592000):
            after = {"anchor": "created_at", "seconds": seconds}
            assert (
                server.post(
                    "/v1/batches", wish | {"output_expires_after": after}
                ).status
                == 200
            )
        assert (
            server.post("/v1/batches", wish | {"output_expires_after": None}).status
            == 200
        )


def test_records_of_an_older_version(engine: fminfer.Engine, tmp_path: Path) -> None:
    """They lack the fields of times, and their files stay."""
    with running(engine, state=tmp_path) as server:
        file_id = upload(server, [batch_line("a")])
        wish = {
            "endpoint": "/v1/completions",
            "completion_window": "24h",
            "input_file_id": file_id,
        }
        batch = wait_for_end(server, server.post("/v1/batches", wish).json)
    for path in (
        *tmp_path.glob("files/*.json"),
        *tmp_path.glob("batches/*/batch.json"),
    ):
        fields = json.loads(path.read_bytes())
        assert {"expires_at", "output_expires_after_s"} & fields.keys()
        if "filename" in fields:
            del fields["expires_at"]
        fields.pop("output_expires_after_s", None)
        path.write_text(json.dumps(fields))
    with running(engine, state=tmp_path) as server:
        assert page(server) == [batch["output_file_id"], file_id]
        assert get(server, batch)["status"] == "completed"
