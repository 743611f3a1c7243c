"""The answers to one part of a split: whether they are all there, and whose each is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fminfer.contract.envelope import open_envelope
from fminfer.contract.record import make_id
from fminfer.core.errors import FminferError
from fminfer.core.quantities import counted
from fminfer.files.journal import journal_path
from fminfer.files.line_reader import read_lines
from fminfer.files.ordered_output import errors_path
from fminfer.files.output_paths import answers_path
from fminfer.files.status_file import read_status, status_path
from fminfer.files.streams import digest_of
from fminfer.split.manifest import Part

_LINE = re.compile(rb'(\A\{\s*"line"\s*:\s*|"error":null,"line":)(\d{1,18})(?=\s*[,}])')
_BATCH = re.compile(rb'\{"id":"batch_req_([0-9a-f]{32})"')


@dataclass(slots=True, frozen=True)
class AnsweredRow:
    """One record, as it will stand in the merged file."""

    row: int  # of the part, from 0
    record: bytes  # with its newline
    is_error: bool


def find_gap(folder: Path, part: Part) -> str:
    """Say why a part has no answers yet; an empty text if it has."""
    answers = answers_path(folder / part.path)
    status, has_journal = read_status(answers), journal_path(answers).exists()
    if not answers.is_file():
        return "not finished" if has_journal else "not answered"
    if status is None:
        return "not finished" if has_journal else ""
    return "" if status.get("status") == "completed" else "not finished"


def read_answers(folder: Path, part: Part) -> Iterator[AnsweredRow]:
    """Yield all records of a part that was answered, its errors first.

    Errors get the numbers that their lines have in the source.

    Raises:
        FminferError: they are not, or not all, of this part.
    """
    path = folder / part.path
    answers = answers_path(path)
    _check_digest(answers, part)
    is_taken = bytearray(len(part.lines))
    for row, record in _read_errors(path, part):
        is_taken[row] = 1
        yield AnsweredRow(row, record, True)
    row = num_answers = 0
    for record in _records(answers):
        row = is_taken.find(0, row)
        num_answers += 1
        if row < 0:
            break
        yield AnsweredRow(row, record, False)
        row += 1
    num_errors = is_taken.count(1)
    if num_answers + num_errors != len(part.lines):
        count = "more than" if row < 0 else f"{num_answers + num_errors} of"
        raise FminferError(
            f"{answers} has answers to {count} the {counted(len(part.lines), 'line')} of {path}, "
            f"its errors ({num_errors}) counted; answer that part again"
        )


def _check_digest(answers: Path, part: Part) -> None:
    metadata = (read_status(answers) or {}).get("metadata")
    found = metadata.get("the input") if isinstance(metadata, dict) else None
    if found is not None and found != part.digest:
        raise FminferError(
            f"{answers} holds answers to another file than {part.path} of this split: "
            f"{status_path(answers).name} says {found}, the manifest {part.digest}. Answer that "
            "part again"
        )


def _read_errors(path: Path, part: Part) -> Iterator[tuple[int, bytes]]:
    """Yield each error's row and its record; they stand in the order of the rows."""
    errors = errors_path(answers_path(path))
    if not errors.exists():
        return
    before = -1
    ids: Iterator[tuple[int, bytes]] | None = None  # of Batch errors that say no line: old ones
    for record in _records(errors):
        if match := _LINE.search(record):
            row = int(match[2]) - 1
        elif match := _BATCH.match(record):
            ids = ids or _read_ids(path, part)
            row = next((row for row, found in ids if found == match[1]), -1)
        else:
            row = -1
        if not before < row < len(part.lines):
            raise FminferError(
                f"{errors} holds an error that is of no line of {path}: {_show(record)}. Answer "
                "that part again"
            )
        before = row
        yield row, _LINE.sub(rb"\g<1>%d" % part.lines[row], record, count=1)


def _read_ids(path: Path, part: Part) -> Iterator[tuple[int, bytes]]:
    """Yield each row of a part with the id that its record has in an OpenAI Batch file."""
    if digest_of(path) != part.digest:
        raise FminferError(
            f"{path} is not as it was split, and its errors cannot be told apart without it; split "
            "the file again"
        )
    for row, line in enumerate(read_lines(path, 0)):
        yield row, make_id(line, open_envelope(line)).encode()


def _records(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file that are not blank, each with its newline."""
    with path.open("rb") as file:
        for record in file:
            if record.strip():
                yield record if record.endswith(b"\n") else record + b"\n"


def _show(record: bytes) -> str:
    text = record.decode("utf-8", "replace").strip()
    return text if len(text) <= 60 else text[:57] + "…"
