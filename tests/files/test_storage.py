"""Inputs and outputs behind URLs: fetched, answered here, uploaded when complete."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from click.testing import CliRunner, Result
from fsspec.implementations.memory import MemoryFileSystem

from fminfer.cli.app import main
from fminfer.core.errors import OutputError, UsageError
from fminfer.files.disk import path_beside
from fminfer.files.remote_files import PART
from fminfer.files.status_file import status_path
from fminfer.files.storage import SYNCED, RemoteFolders

LINES = [
    '{"prompt": "A", "max_tokens": 2, "temperature": 0}',
    '{"prompt": "B", "max_tokens": 2, "temperature": 0}',
]
TEXT = "".join(line + "\n" for line in LINES)
BAD = '{"prompt": 7}\n'


class Weak(MemoryFileSystem):
    """A file system whose uploads can be made to fail; it has a store of its own."""

    protocol = "weak"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    names_refused: ClassVar[set[str]] = set()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("weak://", "memory://"))

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        if any(name in rpath for name in self.names_refused):
            raise ConnectionError("the network is gone")
        super().put_file(lpath, rpath, **options)


class Closed(Weak):
    """One that nobody may write to."""

    protocol = "closed"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("closed://", "memory://"))

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        raise PermissionError("AccessDenied")


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    fsspec.register_implementation("weak", Weak, clobber=True)
    fsspec.register_implementation("closed", Closed, clobber=True)
    for kind in (MemoryFileSystem, Weak):
        kind.store.clear()
        kind.pseudo_dirs[:] = [""]
    Weak.names_refused.clear()
    yield


def write(url: str, text: str | bytes) -> None:
    with fsspec.open(url, "wb") as file:
        file.write(text.encode() if isinstance(text, str) else text)


def read(url: str) -> str:
    with fsspec.open(url, "rb") as file:
        return bytes(file.read()).decode()


def names(url: str) -> list[str]:
    file_system, path = fsspec.url_to_fs(url)
    return sorted(
        name.rpartition("/")[2] for name in file_system.ls(path, detail=False)
    )


def run(work: Path, *arguments: str) -> Result:
    options = ["run", "--work-dir", str(work), "--kernels", "off", *arguments]
    return CliRunner().invoke(main, options)


@pytest.fixture
def folders(tmp_path: Path) -> RemoteFolders:
    return RemoteFolders(tmp_path / "work", is_quiet=True)


def complete(output: Path, text: str = "answers\n", **fields: Any) -> None:
    """Put an output here as a run leaves it when it is complete."""
    ids = {"input_file_id": None, "output_file_id": str(output), "error_file_id": None}
    status_path(output).write_text(json.dumps(ids | {"status": "completed"} | fields))
    output.write_text(text)


def test_a_run_from_url_to_url(tmp_path: Path) -> None:
    """The same rows as from a local file, under the final names only, and once."""
    write("memory://in/a.jsonl", TEXT + BAD)
    command = ["memory://in/a.jsonl", "--output", "memory://out/a.jsonl"]
    found = run(tmp_path / "work", *command)
    assert found.exit_code == 3, found.output
    assert names("memory://out") == ["a.errors.jsonl", "a.jsonl", "a.status.json"]
    records = [json.loads(line) for line in read("memory://out/a.jsonl").splitlines()]
    assert [record["request"] for record in records] == [
        json.loads(line) for line in LINES
    ]
    status = json.loads(read("memory://out/a.status.json"))
    assert status["status"] == "completed"
    assert status["input_file_id"] == "memory://in/a.jsonl"
    assert status["output_file_id"] == "memory://out/a.jsonl"
    assert status["error_file_id"] == "memory://out/a.errors.jsonl"

    before = read("memory://out/a.jsonl")
    again = run(tmp_path / "work", *command)
    assert again.exit_code == 3 and "Uploading" not in again.output, again.output
    elsewhere = run(tmp_path / "elsewhere", *command)
    assert elsewhere.exit_code == 3 and "Uploading" not in elsewhere.output, (
        elsewhere.output
    )
    assert read("memory://out/a.jsonl") == before, "it was complete: nothing was done"
    other = run(tmp_path / "elsewhere", *command, "--seed", "5")
    assert other.exit_code == 2 and "seed" in other.output, (
        "another run's output is kept"
    )
    assert read("memory://out/a.jsonl") == before


def test_an_upload_that_fails_loses_nothing(tmp_path: Path) -> None:
    write("weak://in/a.jsonl", TEXT)
    for refused in ("a.status.json", "output_a.jsonl"):
        Weak.names_refused.add(refused)
        found = run(tmp_path / "work", "weak://in/a.jsonl")
        assert found.exit_code == 1, found.output
        assert (
            "the network is gone" in found.output
            and "All rows are kept" in found.output
        )
        assert "output_a.jsonl" not in names("weak://in")
        Weak.names_refused.clear()
    found = run(tmp_path / "work", "weak://in/a.jsonl")
    assert found.exit_code == 0 and "2 kept" in found.output, found.output
    assert names("weak://in") == ["a.jsonl", "output_a.jsonl", "output_a.status.json"]
    assert read("weak://in/output_a.jsonl").count("\n") == 2


def test_folders_are_read_as_local_ones_are(folders: RemoteFolders) -> None:
    for name in (
        "b.jsonl",
        "a.jsonl.gz",
        "output_b.jsonl",
        "b.errors.jsonl",
        "b.txt",
        "d/c.jsonl",
    ):
        write(
            f"memory://in/{name}",
            gzip.compress(TEXT.encode()) if "gz" in name else TEXT,
        )
    found = folders.fetch_inputs("memory://in/")
    assert [path.name for path in found] == ["a.jsonl.gz", "b.jsonl"]
    assert gzip.decompress(found[0].read_bytes()).decode() == TEXT
    assert [path.name for path in folders.fetch_inputs("memory://in/b*")] == ["b.jsonl"]
    output = folders.find_local_output("memory://in")
    assert output is not None and output == found[0].parent
    with pytest.raises(UsageError, match="holds no file"):
        folders.fetch_inputs("memory://in/c*.jsonl")


def test_files_and_outputs_of_the_local_file_system(
    folders: RemoteFolders, tmp_path: Path
) -> None:
    """file:// is another file system in all but name."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text(TEXT)
    (local,) = folders.fetch_inputs(f"file://{tmp_path}/in/a.jsonl")
    assert local.read_text() == TEXT and local.parent != tmp_path / "in"
    output = local.with_name("output_a.jsonl")
    folders.prepare_outputs([output], restart=False)
    complete(output)
    folders.upload_outputs([output])
    assert sorted(path.name for path in (tmp_path / "in").iterdir()) == [
        "a.jsonl",
        "output_a.jsonl",
        "output_a.status.json",
    ]


def test_an_input_is_fetched_again_only_if_it_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = RemoteFolders(tmp_path, is_quiet=False)
    told = ""
    for text, num_fetched in ((TEXT, 1), (None, 1), (TEXT + TEXT, 2)):
        if text is not None:
            write("memory://in/a.jsonl", text)
        (local,) = folders.fetch_inputs("memory://in/a.jsonl")
        told += capsys.readouterr().err
        assert told.count("Fetching memory://in/a.jsonl") == num_fetched
    assert local.read_text() == TEXT + TEXT


def test_what_is_fetched_is_private_and_whole(folders: RemoteFolders) -> None:
    write("memory://in/a.jsonl", TEXT)
    (local,) = folders.fetch_inputs("memory://in/a.jsonl")
    assert local.stat().st_mode & 0o777 == 0o600 and local.read_text() == TEXT
    assert [path.name for path in local.parent.iterdir() if "part" in path.name] == []
    left = path_beside(local, PART)
    left.write_text("of an earlier run")
    left.chmod(0o400)
    write("memory://in/a.jsonl", TEXT + TEXT)
    (local,) = folders.fetch_inputs("memory://in/a.jsonl")
    assert local.stat().st_mode & 0o777 == 0o600 and local.read_text() == TEXT + TEXT
    assert not left.exists()


def test_what_is_there_is_not_uploaded_again(
    folders: RemoteFolders, tmp_path: Path
) -> None:
    """Also where the disk's clock is coarse, so that both files have one time."""
    output = folders.find_local_output("memory://out/a.jsonl")
    assert output is not None
    complete(output)
    folders.upload_outputs([output])
    assert names("memory://out") == ["a.jsonl", "a.status.json"]
    fsspec.filesystem("memory").rm("/out/a.jsonl")
    synced = path_beside(output, SYNCED)
    os.utime(synced, ns=(output.stat().st_mtime_ns,) * 2)
    folders.upload_outputs([output])
    assert names("memory://out") == ["a.status.json"]
    os.utime(synced, ns=(1, 1))
    folders.upload_outputs([output])
    assert names("memory://out") == ["a.jsonl", "a.status.json"]


def test_local_paths_pass_unchanged(folders: RemoteFolders, tmp_path: Path) -> None:
    for path in (Path("-"), Path("a.jsonl"), tmp_path):
        assert (
            folders.fetch_inputs(path) == [path]
            and folders.find_local_output(path) == path
        )
    assert folders.find_local_output(None) is None
    folders.prepare_outputs([Path("-"), tmp_path / "output_a.jsonl"], restart=True)
    folders.upload_outputs([Path("-"), tmp_path / "output_a.jsonl"])
    assert not list(tmp_path.iterdir()), "nothing is made for them"


def test_what_others_completed_is_brought_here(tmp_path: Path) -> None:
    """And what is complete here, and not there, is uploaded; a journal is left to go on."""
    one, two = (
        RemoteFolders(tmp_path / name, is_quiet=True) for name in ("one", "two")
    )
    first, second = (
        each.find_local_output("memory://out/a.jsonl") for each in (one, two)
    )
    assert first is not None and second is not None
    one.prepare_outputs([first], restart=False)
    complete(first, "first\n")
    one.upload_outputs([first])
    two.prepare_outputs([second], restart=False)
    assert second.read_text() == "first\n" and status_path(second).exists()
    two.prepare_outputs([second], restart=True)
    complete(second, "second\n")
    two.prepare_outputs([second], restart=False)
    assert second.read_text() == "second\n", "it is yet to be uploaded"
    two.upload_outputs([second])
    one.prepare_outputs([first], restart=False)
    assert first.read_text() == "second\n" == read("memory://out/a.jsonl")

    fsspec.filesystem("memory").rm("/out/a.jsonl")
    first.with_name("a.jsonl.journal").touch()
    one.prepare_outputs([first], restart=False)
    one.upload_outputs([first])
    assert "a.jsonl" not in names("memory://out"), "a run is at work here"
    first.with_name("a.jsonl.journal").unlink()
    one.upload_outputs([first])
    assert read("memory://out/a.jsonl") == "second\n"


def test_errors_of_an_earlier_run_go(folders: RemoteFolders) -> None:
    output = folders.find_local_output("memory://out/a.jsonl")
    assert output is not None
    write("memory://out/a.errors.jsonl", "old")
    folders.prepare_outputs([output], restart=True)
    complete(output)
    folders.upload_outputs([output])
    assert names("memory://out") == ["a.jsonl", "a.status.json"]
    local = sorted(path.name for path in output.parent.iterdir())
    assert local == ["a.jsonl", "a.jsonl.synced", "a.status.json"]


def test_what_cannot_be_is_told_before_the_run(
    folders: RemoteFolders, tmp_path: Path
) -> None:
    write("memory://in/a.jsonl", TEXT)
    write("memory://in/a.txt", TEXT)
    cases = {
        "memory://in/b.jsonl": "does not exist",
        "memory://in/a.txt": "endings",
        "nowhere://in/a.jsonl": "nowhere",
    }
    for url, hint in cases.items():
        with pytest.raises(UsageError, match=hint):
            folders.fetch_inputs(url)
    for url, hint in (
        ("closed://out/a.jsonl", "AccessDenied"),
        ("nowhere://o/a.jsonl", "nowhere"),
    ):
        output = folders.find_local_output(url)
        assert output is not None
        with pytest.raises(UsageError, match=hint):
            folders.prepare_outputs([output], restart=True)
    (tmp_path / "work2").write_text("")
    with pytest.raises(UsageError, match="--work-dir"):
        RemoteFolders(tmp_path / "work2", is_quiet=True).find_local_output(
            "memory://out"
        )
    found = run(tmp_path, "memory://in/a.jsonl", "--output", "closed://out/")
    assert found.exit_code == 2 and "credentials" in found.output
    assert "credentials" not in run(tmp_path, "nowhere://in/a.jsonl").output
    (tmp_path / "a.jsonl").write_text(TEXT)
    found = run(tmp_path, str(tmp_path), "--watch", "--output", "memory://out/")
    assert found.exit_code == 2 and "--watch works with local files" in found.output


def test_what_is_to_be_installed_is_said(
    folders: RemoteFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It named an extra of fminfer, which no index has; what stands there must run as it is."""

    def refuse(url: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "url_to_fs", refuse)
    with pytest.raises(UsageError) as found:
        folders.fetch_inputs("s3://bucket/a.jsonl")
    said = str(found.value)
    assert re.search(
        r"Install s3fs to access S3\. For s3://: .*pip install s3fs;", said
    )


def test_an_upload_error_says_where_the_rows_are(folders: RemoteFolders) -> None:
    output = folders.find_local_output("weak://out/a.jsonl")
    assert output is not None
    complete(output)
    Weak.names_refused.add("a.jsonl")
    with pytest.raises(OutputError, match=str(output)):
        folders.upload_outputs([output])
    assert output.exists()


def test_a_status_file_and_errors_name_urls_without_passwords(
    folders: RemoteFolders,
) -> None:
    output = folders.find_local_output("weak://me:PASSWORD@out/a.jsonl")
    assert output is not None
    complete(output)
    Weak.names_refused.add("a.jsonl")
    with pytest.raises(
        OutputError, match=r"weak://me:\*\*\*@out/a\.jsonl cannot be uploaded"
    ) as found:
        folders.upload_outputs([output])
    assert "PASSWORD" not in str(found.value)
    Weak.names_refused.clear()
    folders.upload_outputs([output])
    status = json.loads(read("weak://me:PASSWORD@out/a.status.json"))
    assert status["output_file_id"] == "weak://me:***@out/a.jsonl"
