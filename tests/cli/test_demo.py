"""`scripts/demo`, in a copy of the clone whose .venv is made already."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUM = "cat setup.cfg pyproject.toml constraints.txt | cksum | cut -d' ' -f1"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    clone = tmp_path / "clone"
    (clone / ".venv" / "bin").mkdir(parents=True)
    for name in ("scripts", "examples", "setup.cfg", "pyproject.toml", "constraints.txt"):
        (clone / name).symlink_to(ROOT / name)
    for name, start in (("fminfer", f"{sys.executable} -m fminfer"), ("python", sys.executable)):
        path = clone / ".venv" / "bin" / name
        path.write_text(f'#!/bin/sh\nexec {start} "$@"\n')
        path.chmod(0o755)
    for extra in ("core", "serve"):
        subprocess.run(f"touch .venv/.fminfer-{extra}-$({SUM})", shell=True, cwd=clone, check=True)
    (tmp_path / "temporary").mkdir()
    return clone


@contextmanager
def demo_of(clone: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    demo = subprocess.Popen(
        ["bash", "-c", f"cd {clone} && exec bash scripts/demo {' '.join(words)}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"TMPDIR": str(clone.parent / "temporary"), "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    try:
        yield demo
    finally:
        with suppress(ProcessLookupError):
            os.killpg(demo.pid, signal.SIGKILL)  # what it left


def test_it_shows_answers_of_every_kind(clone: Path) -> None:
    """It ended at the first chat, and left its outputs in the folder for temporary files."""
    with demo_of(clone) as demo:
        told, _ = demo.communicate(timeout=300)
    assert demo.returncode == 0, told
    for path in (ROOT / "examples" / "queries").glob("*.jsonl"):
        assert f"── output_{path.name}" in told
    assert "How do you go from the den to the porch?\n   → ' south'  (stop)" in told
    assert not [*(clone.parent / "temporary").glob("tmp.*")]


def test_whoever_ends_it_ends_the_server(clone: Path) -> None:
    """The server went on, and kept its port."""
    with demo_of(clone, "serve", "--port", "0") as demo:
        assert demo.stdout is not None
        lines = iter(demo.stdout.readline, "")
        url = next(line for line in lines if " at http" in line).split(" at ")[1].strip()
        assert urllib.request.urlopen(f"{url}/health", timeout=30).status == 200
        assert any(line == "Try:\n" for line in lines)
        demo.send_signal(signal.SIGTERM)
        demo.communicate(timeout=60)
        assert demo.returncode == 0, "the server's own status"
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(f"{url}/health", timeout=30)
