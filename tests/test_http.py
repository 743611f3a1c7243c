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

from fminfer.storage import RemoteFolders


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder; without the headers in `hidden`, and with an ETag if there is one."""

    hidden: ClassVar[set[str]] = set()
    etag: ClassVar[str] = ""

    def send_header(self, keyword: str, value: str) -> None:
        if keyword not in self.hidden:
            super().send_header(keyword, value)
        if keyword == "Content-Length" and self.etag:
            super().send_header("ETag", self.etag)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    Handler.hidden, Handler.etag = set(), ""
    (tmp_path / "web").mkdir()
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Handler, directory=str(tmp_path / "web"))
    )
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/a.jsonl"
    server.shutdown()
    thread.join()
    server.server_close()


def fetch(tmp_path: Path, url: str) -> tuple[str, bool]:
    """Return what the copy holds, and whether it was fetched now."""
    folders = RemoteFolders(tmp_path / "work", is_quiet=True)
    local = folders.place(url)
    assert local is not None
    before = local.stat().st_mtime_ns if local.exists() else 0
    assert folders.fetch(url) == [local]
    return local.read_text(), local.stat().st_mtime_ns != before


def write(tmp_path: Path, text: str, changed_s: int) -> None:
    path = tmp_path / "web" / "a.jsonl"
    path.write_text(text)
    os.utime(path, (changed_s, changed_s))


def test_a_changed_file_of_a_web_server_is_fetched_again(tmp_path: Path, url: str) -> None:
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
