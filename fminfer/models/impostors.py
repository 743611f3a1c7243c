"""Tells files that are not what their names say: web pages, and pointers of git-LFS."""

from __future__ import annotations

from pathlib import Path

from fminfer.errors import CheckpointError

_POINTER = b"version https://git-lfs"


def refuse_impostor(path: Path) -> None:
    """Refuse a file that a download put in the place of a model's file.

    Raises:
        CheckpointError: it says what to fetch instead.
    """
    try:
        with path.open("rb") as file:
            start = file.read(64).lstrip()
    except OSError:
        return  # whoever reads it says what is wrong
    if start.startswith(b"<"):
        raise CheckpointError(
            f"{path} is a web page. An address with /blob/ shows a page about a file; download the "
            "file itself from the same address with /resolve/"
        )
    if start.startswith(_POINTER):
        raise CheckpointError(
            f"{path} is a pointer of git-LFS, not the file that it stands for; fetch that with "
            "'git lfs pull' in its repository"
        )
