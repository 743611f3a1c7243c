"""The files of another commit, and how commands run with the code of one or the other."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

CHECKOUT = Path(__file__).parents[2]


@contextmanager
def open_commit(commit: str) -> Iterator[Path]:
    """Make a worktree of a commit, and remove it at the end."""
    with tempfile.TemporaryDirectory(prefix="fminfer-base-") as folder:
        tree = Path(folder) / "tree"
        _git("worktree", "add", "--quiet", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def name_commit(commit: str) -> str:
    """Return the short name and the subject of a commit."""
    return _git("log", "-1", "--format=%h %s", commit)


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=CHECKOUT, capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


def environment_of(tree: Path) -> dict[str, str]:
    """Return the environment in which Python imports a tree's code, and no flag is set."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("FMINFER_")
    }
    kept.setdefault("OMP_NUM_THREADS", "1")
    kept["PYTHONPATH"] = str(tree)
    kept["HF_HUB_OFFLINE"] = "1"
    return kept


def require_code_of(tree: Path, folder: Path) -> None:
    """Check that commands in a folder import a tree's code, and not that of the .venv."""
    command = [sys.executable, "-c", "import fminfer; print(fminfer.__file__)"]
    done = subprocess.run(
        command, cwd=folder, env=environment_of(tree), capture_output=True, text=True
    )
    if not Path(done.stdout.strip()).is_relative_to(tree):
        raise click.ClickException(
            f"commands in {folder} import {done.stdout.strip()} and not {tree}: {done.stderr}"
        )
