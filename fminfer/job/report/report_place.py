"""Where a report may be written: under a free name, or in the place of another HTML page."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from fminfer.core.errors import UsageError

START = b"<!doctype html"


def check_place(path: Path, flag: str = "The report") -> None:
    """See that a report takes the place of nothing but an HTML page or an empty file.

    Args:
        flag: by which the place was named, for people.

    Raises:
        UsageError: another file is there.
    """
    if path.is_dir() or not path.exists():  # a folder is never replaced
        return
    start = b"?"  # of a pipe, a device, or a file that cannot be read
    with suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                start = file.read(len(START))
    if start and start.lower() != START:
        raise UsageError(
            f"{flag} {path} exists and is no HTML page, and a report replaces nothing else; give "
            "another name"
        )
