"""The user's cache folder: of this user alone, whatever the umask and whoever makes it first."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from fminfer.cli.app import main
from fminfer.files.storage import RemoteFolders, default_work_dir
from fminfer.machine.user_cache import make_cache_folder

LINE = '{"prompt": "x", "max_tokens": 1, "temperature": 0}\n'


@pytest.fixture(autouse=True)
def open_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "cache"))
    before = os.umask(0o002)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_url_first_does_not_open_the_cache_folder(tmp_path: Path) -> None:
    """It was made with the umask's mode and then refused: kernels were built for each run."""
    source = tmp_path / "in" / "a.jsonl"
    source.parent.mkdir()
    source.write_text(LINE)
    (copy,) = RemoteFolders(default_work_dir(), is_quiet=True).fetch_inputs(
        f"file://{source}"
    )
    folder = make_cache_folder()
    assert folder is not None and folder == tmp_path / "home" / "cache" / "fminfer"
    assert [mode(path) for path in (folder, folder / "remote", copy.parent)] == [
        0o700
    ] * 3
    assert mode(copy) == 0o600, "prompts"
    source.write_text(LINE * 2)
    (copy,) = RemoteFolders(default_work_dir(), is_quiet=True).fetch_inputs(
        f"file://{source}"
    )
    assert copy.read_text() == LINE * 2 and mode(copy) == 0o600


def test_a_cache_folder_that_others_may_write_to_is_told(tmp_path: Path) -> None:
    """It was passed over in silence: runs took 25 s instead of 7, and nobody knew why."""
    folder = tmp_path / "home" / "cache" / "fminfer"
    folder.mkdir(parents=True)
    folder.chmod(0o775)
    assert make_cache_folder() is None
    source = tmp_path / "a.jsonl"
    source.write_text(LINE)
    found = CliRunner().invoke(main, ["run", str(source), "--kernels", "off"])
    assert found.exit_code == 0, found.output
    (told,) = [line for line in found.output.splitlines() if str(folder) in line]
    assert "other users may write to it" in told and f"chmod 700 {folder}" in told
