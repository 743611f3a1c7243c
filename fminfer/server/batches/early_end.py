"""Ends a batch before all of its lines are answered: what is finished becomes its output."""

from __future__ import annotations

import zlib
from pathlib import Path

from fminfer.contract.envelope import Line, find_custom_id, open_envelope
from fminfer.contract.json_object import dump
from fminfer.contract.record import make_id
from fminfer.files.disk import NEW, beside
from fminfer.files.journal import Journal, journal_path
from fminfer.files.journal_rows import Fingerprint, Row, read_fingerprint
from fminfer.files.line_reader import read_lines
from fminfer.files.ordered_output import put_in_order
from fminfer.files.status_file import status_path
from fminfer.server.batches.stored_batches import Progress

EXPIRED = {
    "code": "batch_expired",
    "message": "This line was not answered before the batch's completion window was over. Send it "
    "again, with a longer completion_window",
}
NOBODY: Fingerprint = {"the run": "ended before its first row"}


def end_early(output: Path, source: Path | None, total: int) -> Progress:
    """Write what is finished of a batch under its final names. It can be repeated.

    Its journal stays, until `drop_journal`.

    Args:
        source: the input, of which every line without a record gets an error; None: none does.
        total: lines of it, as far as they are known.

    Raises:
        UsageError: the input cannot be read.
        OutputError: the disk is full or gone.
    """
    journal = _open(output)
    try:
        if source is not None:
            total = _add_expired(journal, source)
        put_in_order(journal)
        return progress_of(journal, total)
    finally:
        journal.close()


def progress_of(journal: Journal, total: int) -> Progress:
    """Count the rows of a journal."""
    kept = journal.kept
    return Progress(max(total, journal.num_rows), kept.num_completed, kept.num_failed, *kept.tokens)


def count_kept(output: Path, total: int) -> Progress | None:
    """Count what is finished of a batch, whatever model its rows are of; None: there is nothing.

    Args:
        total: lines of its input, as far as they are known.

    Raises:
        UsageError: another process writes the rows, or they are damaged.
    """
    if not journal_path(output).exists():
        return None
    journal = _open(output)
    try:
        return progress_of(journal, total)
    finally:
        journal.close()


def drop_journal(output: Path) -> None:
    """Remove the journal of a batch whose end is on the disk, and what a kill has left."""
    journal_path(output).unlink(missing_ok=True)
    beside(status_path(output), NEW).unlink(missing_ok=True)


def _open(output: Path) -> Journal:
    """Open a journal whatever model its rows are of: no others come."""
    path = journal_path(output)
    fingerprint = NOBODY
    if path.exists():
        with path.open("rb") as file:
            head = file.readline()
        if head.endswith(b"\n"):
            fingerprint = read_fingerprint(path, head)
    return Journal(output, fingerprint)


def _add_expired(journal: Journal, source: Path) -> int:
    """Give every line without a record its error; return how many lines there are."""
    num_lines = 0
    for line in read_lines(source, 0):
        num_lines += 1
        if line.number not in journal:
            row = Row(line.number, True, (0, 0, 0), zlib.crc32(line.raw), _expired_record(line))
            journal.append(row)
            journal.kept.add(is_error=True, tokens=row.tokens)
    return num_lines


def _expired_record(line: Line) -> bytes:
    """Return the error of a line that was not executed, as OpenAI's error files have it."""
    envelope = open_envelope(line)
    request_id = make_id(line, envelope)
    return b'{"id":"batch_req_%s","custom_id":%s,"response":null,"error":%s}' % (
        request_id.encode(),
        find_custom_id(line, envelope),
        dump(EXPIRED),
    )
