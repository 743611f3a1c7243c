"""A batch that does not go on: why it pauses, and what is finished of one that ends early."""

from __future__ import annotations

import zlib
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from fminfer.contract.envelope import Line, find_custom_id, parse_envelope
from fminfer.contract.json_object import dump_json
from fminfer.contract.record import make_line_id
from fminfer.core.errors import FminferError, InUseError, MachineError, UsageError
from fminfer.files.disk import NEW, DiskFault, find_disk_fault, path_beside
from fminfer.files.journal import Journal, find_fingerprint, journal_path
from fminfer.files.journal_rows import INPUT, Fingerprint, Row, describe_changes
from fminfer.files.line_reader import read_lines
from fminfer.files.ordered_output import write_ordered_output
from fminfer.files.status_file import status_path
from fminfer.server.batches.stored_batches import Progress, StoredBatch, Trouble

EXPIRED = {
    "code": "batch_expired",
    "message": "This line was not answered before the batch's completion window was "
    "over. Send it "
    "again, with a longer completion_window",
}
NOBODY: Fingerprint = {"the run": "ended before its first row"}
LATER = "Finished lines are kept, and the server tries again by itself"
MODEL_CHANGED = "model_changed"
DISK_FAULTS: dict[DiskFault, str] = {
    "disk_full": "the server's disk is full; make room there",
    "state_not_writable": "the server may not write its state folder; mend the folder's rights",
    "disk_failed": "the server's disk failed; check it",
}
# For errors that are not the disk's. The first class that an error is of counts.
ERROR_TROUBLES = {
    InUseError: Trouble("in_use", f"another process still writes its output. {LATER}"),
    MachineError: Trouble("machine_failed", f"the server's machine failed. {LATER}"),
    UsageError: Trouble(
        "input_changed",
        "its input or output in the server's state folder was edited; the server's log says "
        "what. Cancel the batch, or have the edit undone",
    ),
}


def publish_finished(output: Path, source: Path | None, total: int) -> Progress:
    """Write a batch's finished lines under their final names; its journal stays. Repeatable.

    Args:
        source: the input, of which every line without a record gets an error; None: none does.
        total: lines of it, as far as they are known.
    """
    with closing(_open_journal(output)) as journal:
        if source is not None:
            total = _append_expired_errors(journal, source)
        write_ordered_output(journal)
        return _progress_of(journal, total)


def count_finished(output: Path, total: int) -> Progress | None:
    """Count a batch's finished lines, whatever model they are of; None: it has none."""
    if not journal_path(output).exists():
        return None
    with closing(_open_journal(output)) as journal:
        return _progress_of(journal, total)


def drop_journal(output: Path) -> None:
    """Remove the journal of a batch whose end is on the disk, and what a kill has left."""
    journal_path(output).unlink(missing_ok=True)
    path_beside(status_path(output), NEW).unlink(missing_ok=True)


def _open_journal(output: Path) -> Journal:
    """Open a journal whatever model its rows are of: no others come."""
    return Journal(output, find_fingerprint(output) or NOBODY)


def _progress_of(journal: Journal, total: int) -> Progress:
    return Progress.from_counts(
        replace(journal.kept, num_rows=max(total, journal.num_rows))
    )


def _append_expired_errors(journal: Journal, source: Path) -> int:
    """Append an error for every line without a record; return the number of lines."""
    num_lines = 0
    for line in read_lines(source, 0):
        num_lines += 1
        if line.number not in journal:
            row = Row(
                line.number,
                True,
                (0, 0, 0),
                zlib.crc32(line.raw),
                _make_expired_record(line),
            )
            journal.append(row)
            journal.kept.add(is_error=True, tokens=row.tokens)
    return num_lines


def _make_expired_record(line: Line) -> bytes:
    """Return the error of a line that was not executed, as OpenAI's error files have it.

    A line without a custom_id has none (b""): it would name nothing, and be far longer.
    """
    envelope = parse_envelope(line)
    custom_id = find_custom_id(line, envelope)
    if custom_id == b"null":
        return b""
    return b'{"id":"batch_req_%s","custom_id":%s,"response":null,"error":%s}' % (
        make_line_id(line, envelope).encode(),
        custom_id,
        dump_json(EXPIRED),
    )


class ChangedError(UsageError):
    """The rows of a batch are of another model, or of other settings."""


def check_fingerprint(
    batch: StoredBatch, output: Path, fingerprint: Fingerprint
) -> None:
    """Raise if a batch or its rows are of another model or of other settings."""
    any_input = {INPUT: ""}
    for old in (batch.made_for, find_fingerprint(output, needs_row=True)):
        if old and (
            changes := describe_changes(old | any_input, fingerprint | any_input)
        ):
            raise ChangedError(
                f"it was sent to another server: {changes}. Start the server as "
                "before, and the batch goes on. Or cancel the batch, which keeps its "
                "finished lines, and send the others in a new one"
            )


def find_trouble(error: Exception) -> Trouble:
    """Return why a batch pauses, without paths of the server."""
    cause = error if isinstance(error, OSError) else error.__cause__
    if isinstance(error, ChangedError):
        return Trouble(MODEL_CHANGED, str(error))
    if isinstance(cause, OSError):
        fault = find_disk_fault(cause)
        return Trouble(fault, f"{DISK_FAULTS[fault]}. {LATER}")
    for kind, trouble in ERROR_TROUBLES.items():
        if isinstance(error, kind):
            return trouble
    if isinstance(error, FminferError):
        return Trouble("server_failed", f"{error}. {LATER}")
    name = type(error).__name__
    return Trouble(
        "internal_error", f"fminfer failed ({name}); please report it. {LATER}"
    )
