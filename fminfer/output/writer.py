"""Puts an output's finished rows in input order under their final names.

It can be killed at any moment and repeated: the journal goes last. It knows nothing of what
records say.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import BinaryIO

from fminfer.output.disk import explain, sync_folder
from fminfer.output.journal import Journal, journal_path
from fminfer.output.names import beside

ORDERED = ".ordered"  # added to a final name while the file is being written


def errors_path(output: Path) -> Path:
    """Return where an output's errors go: `answers.errors.jsonl` for `answers.jsonl`."""
    return beside(output, ".errors.jsonl", without=".jsonl")


def traces(output: Path) -> list[Path]:
    """List every file that answering into `output` may write under a name of its own."""
    finals = [output, errors_path(output)]
    return [*finals, journal_path(output), *map(draft_path, [*finals, journal_path(output)])]


def put_in_order(journal: Journal) -> None:
    """Write all rows in the order of their lines, answers and errors apart.

    The journal may be removed once whoever asks for it has noted that the output is complete.

    The final names appear at once and whole, the answers' last: where they are, all is complete.

    Raises:
        OutputError: the disk is full or gone; the journal is left as it was.
    """
    journal.sync()
    answers, errors = journal.output, errors_path(journal.output)
    try:
        with contextlib.ExitStack() as open_files:
            files = [
                open_files.enter_context(draft_path(path).open("wb")) for path in (answers, errors)
            ]
            num_errors = _write_in_order(journal, *files)
            for file in files:
                file.flush()
                os.fsync(file.fileno())
        if num_errors:
            os.replace(draft_path(errors), errors)
        else:  # also what an earlier run may have left
            draft_path(errors).unlink()
            errors.unlink(missing_ok=True)
        os.replace(draft_path(answers), answers)
        sync_folder(answers.parent)
    except OSError as error:
        for path in (answers, errors):
            with contextlib.suppress(OSError):
                draft_path(path).unlink(missing_ok=True)
        raise explain(answers, error) from error


def _write_in_order(journal: Journal, answers: BinaryIO, errors: BinaryIO) -> int:
    """Return how many rows are errors."""
    num_errors = 0
    for row in journal.rows():
        (errors if row.is_error else answers).write(row.record + b"\n")
        num_errors += row.is_error
    return num_errors


def draft_path(path: Path) -> Path:
    """Return where a file is written before it gets its name."""
    return beside(path, ORDERED)
