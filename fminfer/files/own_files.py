"""Tells files that fminfer wrote, and may replace, from files of others, by their content."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fminfer.core.errors import UsageError
from fminfer.files.completed import find_completed
from fminfer.files.disk import raising_disk_errors, replacing_file
from fminfer.files.first_lines import holds_answers
from fminfer.files.journal import journal_path
from fminfer.files.ordered_output import Seals, errors_path
from fminfer.files.status_file import status_path
from fminfer.files.streams import is_stream
from fminfer.files.tables.table_writer import is_own_table

OLD_SEALS: Seals = {"output": {}, "errors": {}}  # of an older version's status file
START_BYTES = 4096  # by which a kind of file is recognized


@dataclass(slots=True, frozen=True)
class FileKind:
    """A kind of file that fminfer writes."""

    name: str  # for people
    matches: Callable[[Path], bool]


def _make_start_matcher(pattern: bytes) -> Callable[[Path], bool]:
    start = re.compile(pattern, re.IGNORECASE)

    def matches(path: Path) -> bool:
        with path.open("rb") as file:
            return start.match(file.read(START_BYTES)) is not None

    return matches


PAGE = FileKind("HTML page", _make_start_matcher(rb"<!doctype html"))
PICTURE = FileKind("SVG picture", _make_start_matcher(rb"<svg "))
SUMMARY = FileKind(
    "summary of a run",
    _make_start_matcher(rb'\{\s*"model": "(?:[^"\\]|\\.)*",\s*"dtype": '),
)
TIMELINE = FileKind(
    "timeline of a run",
    _make_start_matcher(rb'\[\s*(?:\{"name":"thread_name","ph":"M",|\{\}\])'),
)
STATUS = FileKind("status file of a run", _make_start_matcher(rb'\{\s*"id":\s*"batch_'))
TABLE = FileKind("table of a run's answers", is_own_table)
RECORDS = FileKind("file of a run's answers or errors", holds_answers)


def require_own_file(path: Path, kind: FileKind, label: str) -> None:
    """Raise a UsageError if a file is there that is not of this kind.

    A new name, a blank file and a folder pass: a folder is never replaced.
    """
    if path.is_dir() or not path.exists():
        return
    is_own = False  # a pipe, a device, or a file that cannot be read
    with suppress(OSError):
        is_own = path.is_file() and (kind.matches(path) or _is_blank(path))
    if not is_own:
        raise UsageError(
            f"{label} {path} exists and is no {kind.name}, and fminfer replaces nothing else; "
            "give another name, or move the file away"
        )


def _is_blank(path: Path) -> bool:
    """Tell whether a file is empty, or all zeros, as a power cut may leave it."""
    with path.open("rb") as file:
        return not any(
            piece.strip(b"\0") for piece in iter(partial(file.read, 1 << 20), b"")
        )


def is_device(path: Path) -> bool:
    """Tell whether a path is written into, not replaced: a pipe, a device, a descriptor."""
    return is_stream(path) or (path.exists() and not path.is_file())


def replace_own_file(path: Path, kind: FileKind, label: str, data: bytes) -> None:
    """Put a whole file in the place of an older one of its kind; write into a device."""
    with raising_disk_errors(path):
        if is_device(path):
            path.write_bytes(data)
            return
        require_own_file(path, kind, label)  # another file may have come meanwhile
        with replacing_file(path.resolve(), is_durable=False) as file:
            file.write(data)


def require_own_outputs(output: Path) -> None:
    """Raise a UsageError if an output, its errors or its status are files of no run.

    Answers would replace them. Files beside a journal, or sealed by a status file, are a run's.
    """
    if journal_path(output).exists():
        return
    completed = find_completed(output)
    seals: Seals = {} if completed is None else completed.seals or OLD_SEALS
    for name, path in {"output": output, "errors": errors_path(output)}.items():
        if seals.get(name) is None:
            require_own_file(path, RECORDS, f"the file of this run's {name},")
    require_own_file(status_path(output), STATUS, "the status file of this run,")
