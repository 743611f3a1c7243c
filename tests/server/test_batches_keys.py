"""With keys, each client sees its own files and batches alone; and nobody else on the
machine."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

import fminfer
from fminfer.core.errors import UsageError
from fminfer.server.batches.state_folder import ID, StateFolder, make_random_id
from tests.server.batch_calls import batch_line, create, get, long_lines, upload
from tests.server.running import Running, running, until
from tests.server.server_needs import needs_server

KEYS = ("key-of-a", "key-of-b")
pytestmark = needs_server(
    engine={"max_rows": 4}, has_state=True, is_fresh=True, api_keys=KEYS
)
A, B = ({"Authorization": f"Bearer {key}"} for key in KEYS)


def test_each_key_has_its_own(server: Running, tmp_path: Path) -> None:
    batch = create(server, [batch_line("a")], A)
    until(lambda: get(server, batch, A)["status"] == "completed", "it is over")
    output = get(server, batch, A)["output_file_id"]
    for method, path in (
        ("GET", f"/v1/batches/{batch['id']}"),
        ("POST", f"/v1/batches/{batch['id']}/cancel"),
        ("GET", f"/v1/files/{batch['input_file_id']}"),
        ("GET", f"/v1/files/{output}/content"),
        ("DELETE", f"/v1/files/{output}"),
    ):
        assert server.call(method, path).status == 401
        assert server.call(method, path, headers=B).status == 404, path
    for path in ("/v1/files", "/v1/batches"):
        assert server.get(path, B).json["data"] == []
        assert len(server.get(path, A).json["data"]) == (
            2 if path == "/v1/files" else 1
        )
    wish = {"endpoint": "/v1/completions", "completion_window": "1h"}
    wish["input_file_id"] = batch["input_file_id"]
    assert server.post("/v1/batches", wish, B).status == 404
    after = server.get(f"/v1/batches?after={batch['id']}", B)
    assert after.status == 400, "an id of another's list"
    assert server.get(f"/v1/files/{output}/content", A).status == 200
    for path in (tmp_path / "state").rglob("*"):
        if path.is_file():
            assert not any(key.encode() in path.read_bytes() for key in KEYS), path


def test_what_belongs_to_a_key_is_hidden_without_one(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    with running(engine, state=tmp_path / "state", api_keys=KEYS) as server:
        file_id = upload(server, [batch_line("a")], A)
    with running(engine, state=tmp_path / "state") as server:
        assert server.get(f"/v1/files/{file_id}").status == 404
        assert server.get(f"/v1/files/{file_id}", A).status == 404
    with running(engine, state=tmp_path / "state", api_keys=KEYS[:1]) as server:
        assert server.get(f"/v1/files/{file_id}", A).status == 200


def test_ids_cannot_be_guessed() -> None:
    ids = {make_random_id("file-") for _ in range(1000)}
    assert len(ids) == 1000 and all(ID.fullmatch(each) for each in ids)


def test_a_folder_is_for_its_owner_alone(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "new" / "state")
    paths = [folder.path, *folder.path.rglob("*")]
    assert len(paths) == 6
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    folder.close()
    folder.path.chmod(0o755)
    again = StateFolder(folder.path)
    assert again.was_narrowed and stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    again.close()


def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner could go on reading it."""
    folder = tmp_path / "state"
    folder.mkdir()
    monkeypatch.setattr("os.geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(UsageError, match="the folder of user"):
        StateFolder(folder)
    assert [*folder.iterdir()] == []


def test_one_server_a_folder(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    with pytest.raises(UsageError, match="by another server"):
        StateFolder(tmp_path)
    folder.close()
    StateFolder(tmp_path).close()


def test_a_folder_that_only_has_names_of_ours_is_left_alone(tmp_path: Path) -> None:
    upload = tmp_path / "uploads" / "picture"
    upload.parent.mkdir()
    upload.write_bytes(b"mine")
    (tmp_path / "lock").touch()
    with pytest.raises(UsageError, match="other things, such as uploads"):
        StateFolder(tmp_path)
    assert upload.read_bytes() == b"mine"


def test_other_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    tmp_path.chmod(0o755)
    with pytest.raises(UsageError, match=r"letter\.txt"):
        StateFolder(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755, "it is as it was"
    file = tmp_path / "letter.txt"
    with pytest.raises(UsageError, match="cannot be used"):
        StateFolder(file)


def test_one_key_cannot_take_all_places(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches were begun by age alone."""
    monkeypatch.setattr("fminfer.server.batches.batch_work.MOST_AT_ONCE", 2)
    many = [create(server, long_lines(40, 40), A) for _ in range(6)]
    one = create(server, [batch_line("a")], B)
    until(lambda: get(server, one, B)["status"] == "completed", "it is over")
    begun = [batch for batch in many if get(server, batch, A)["status"] != "validating"]
    assert len(begun) < 6, "it waited for one place, not for the last"
