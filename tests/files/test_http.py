"""Inputs of a web server: fetched again when they have changed, by what the server tells."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from click.testing import CliRunner

from fminfer.cli.app import main
from fminfer.core.errors import UsageError
from fminfer.files.storage import RemoteFolders

LINE = '{"prompt": "x", "max_tokens": 1, "temperature": 0}\n'


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder; without the headers in `hidden`, and with an ETag if there is one."""

    hidden: ClassVar[set[str]] = set()
    etag: ClassVar[str] = ""
    # paths with their queries, and credentials
    asked: ClassVar[set[tuple[str, str]]] = set()

    def do_GET(self) -> None:
        self.asked.add((self.path, self.headers.get("Authorization", "")))
        super().do_GET()

    def send_header(self, keyword: str, value: str) -> None:
        if keyword not in self.hidden:
            super().send_header(keyword, value)
        if keyword == "Content-Length" and self.etag:
            super().send_header("ETag", self.etag)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    Handler.hidden = set()
    Handler.etag = ""
    Handler.asked.clear()
    (tmp_path / "web").mkdir()
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Handler, directory=str(tmp_path / "web"))
    )
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}
    )
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/a.jsonl"
    server.shutdown()
    thread.join()
    server.server_close()


def fetch(tmp_path: Path, url: str) -> tuple[str, bool]:
    """Return what the copy holds, and whether it was fetched now."""
    folders = RemoteFolders(tmp_path / "work", is_quiet=True)
    local = folders.find_local_output(url)
    assert local is not None
    before = local.stat().st_mtime_ns if local.exists() else 0
    assert folders.fetch_inputs(url) == [local]
    return local.read_text(), local.stat().st_mtime_ns != before


def with_password(url: str) -> str:
    return url.replace("://", "://me:PASSWORD@")


def write(tmp_path: Path, text: str, changed_s: int) -> None:
    path = tmp_path / "web" / "a.jsonl"
    path.write_text(text)
    os.utime(path, (changed_s, changed_s))


def test_a_changed_file_of_a_web_server_is_fetched_again(
    tmp_path: Path, url: str
) -> None:
    """An old copy was answered for ever: fsspec's key of an http file is its URL alone."""
    write(tmp_path, "one\n", 1_000)
    assert fetch(tmp_path, url) == ("one\n", True)
    assert fetch(tmp_path, url) == ("one\n", False)
    write(tmp_path, "two\n", 2_000)  # Last-Modified
    assert fetch(tmp_path, url) == ("two\n", True)
    write(tmp_path, "three\n", 2_000)  # Content-Length
    assert fetch(tmp_path, url) == ("three\n", True)
    Handler.etag = '"a"'
    assert fetch(tmp_path, url) == ("three\n", True)
    assert fetch(tmp_path, url) == ("three\n", False)
    write(tmp_path, "seven\n", 2_000)
    Handler.etag = '"b"'
    assert fetch(tmp_path, url) == ("seven\n", True)


def test_where_the_server_tells_nothing_a_file_is_fetched_each_time(
    tmp_path: Path, url: str
) -> None:
    Handler.hidden = {"Last-Modified"}
    for text in ("one\n", "two\n", "two\n"):
        write(tmp_path, text, 1_000)
        assert fetch(tmp_path, url) == (text, True)


def test_a_signed_url_is_fetched_and_its_copy_has_the_name_of_its_path(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was refused for its ending. A later signature is of the same file."""
    write(tmp_path, "one\n", 1_000)
    shown = f"Fetching {url.replace('://', '://me:***@')}?X-Amz-Signature=*** …\n"
    for signature, is_fetched in (("SECRET/1", True), ("SECRET/2/", False)):
        folders = RemoteFolders(tmp_path / "work", is_quiet=False)
        (local,) = folders.fetch_inputs(
            f"{with_password(url)}?X-Amz-Signature={signature}"
        )
        assert local.name == "a.jsonl" and local.read_text() == "one\n"
        assert capsys.readouterr().err == shown * is_fetched
    ((asked, credentials),) = Handler.asked
    assert asked == "/a.jsonl?X-Amz-Signature=SECRET/1" and credentials.startswith(
        "Basic "
    )
    secrets = [b"PASSWORD", b"SECRET"]
    kept = [path for path in (tmp_path / "work").rglob("*") if path.is_file()]
    assert kept and not any(
        secret in p.read_bytes() for p in kept for secret in secrets
    )


def test_urls_that_differ_in_their_query_alone_are_not_mixed(
    tmp_path: Path, url: str
) -> None:
    write(tmp_path, "one\n", 1_000)
    folders = RemoteFolders(tmp_path / "work", is_quiet=True)
    folders.fetch_inputs(f"{url}?part=1")
    with pytest.raises(
        UsageError, match=r"a\.jsonl\?part=\*\*\* .*differ in their query alone"
    ):
        folders.fetch_inputs(f"{url}?part=2")


def test_what_is_wrong_with_a_url_is_told_without_its_secrets(
    tmp_path: Path, url: str
) -> None:
    """Passwords and signatures stood in errors, with --verbose also in those of libraries."""
    (tmp_path / "web" / "a.txt").write_text("")
    write(tmp_path, LINE, 1_000)
    signed = f"{with_password(url)}?X-Amz-Signature=SECRET"
    folder = signed.rpartition("/")[0]
    gone = f"http://me:PASSWORD@127.0.0.1:9/{signed.rpartition('/')[2]}"
    cases = {
        (signed.replace(".jsonl", ".txt"),): "none of the endings",
        (signed.replace("/a.", "/b."), "--verbose"): "does not exist",
        (gone, "--verbose"): "does not exist",
        (signed, "--output", folder, "--verbose"): "cannot be uploaded",
        (signed, "--output", signed): "--output http://me:***@127.0.0.1",
        (str(tmp_path), "--output", f"{folder}/b.jsonl", "--watch"): "--watch",
    }
    for arguments, hint in cases.items():
        found = CliRunner().invoke(
            main, ["run", "--work-dir", str(tmp_path / "work"), *arguments]
        )
        assert found.exit_code == 2 and hint in found.output, found.output
        assert "PASSWORD" not in found.output and "SECRET" not in found.output, (
            found.output
        )
