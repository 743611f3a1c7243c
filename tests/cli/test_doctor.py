"""`fminfer doctor`: a page that may be pasted anywhere, on any machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fminfer.estimate import machine_report
from fminfer.estimate.machine_report import hide_names, make_machine_report

ROOT = Path(__file__).parents[2]
SECTIONS = ("processor", "memory", "GPU", "versions", "folders", "variables")


def call(**variables: str) -> str:
    command = [sys.executable, "-m", "fminfer", "doctor"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_page_has_no_key_and_no_home(tmp_path: Path) -> None:
    home = tmp_path / "paula"
    home.mkdir()
    keys = {name: "sesame123" for name in ("FMINFER_API_KEY", "HF_TOKEN")}
    page = call(HOME=str(home), XDG_CACHE_HOME=str(home / "c"), CXX="none", **keys)
    assert "sesame123" not in page and "paula" not in page
    assert re.search(r"FMINFER_API_KEY +is set", page.replace("_KEY is", "_KEY  is"))
    assert [line for line in page.splitlines() if line in SECTIONS] == [*SECTIONS]
    # a path is not broken
    assert max(len(line) for line in page.splitlines() if "/" not in line) <= 100
    assert "plain torch" in page and "install g++" in page
    assert re.search(r"serve +fastapi \d", page)


def test_a_folder_that_cannot_be_written_is_a_finding() -> None:
    page = call(HOME="/nonexistent", XDG_CACHE_HOME="/proc/none", CXX="none")
    assert "Nothing is kept from run to run" in page


def test_homes_and_users_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/data/anna")
    monkeypatch.setenv("LOGNAME", "fminfer")
    shown = hide_names("/data/anna/x:/home/bert/y /Users/carl and /data/annabel")
    assert shown == "~/x:~/y ~ and /data/annabel"
    shown = hide_names("came with fminfer, in /scratch/fminfer/x and /scratch/fminfer")
    assert shown == "came with fminfer, in /scratch/USER/x and /scratch/USER"


def test_a_section_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise OSError("no such number")

    monkeypatch.setattr(machine_report, "measure_free_host_bytes", fail)
    report = make_machine_report()
    assert ("not known", "OSError: no such number") in report.sections["memory"]
    assert report.sections["versions"]
