"""Puts an output's finished rows in input order under their final names.

It can be killed at any moment and repeated: the journal goes last. What was written is digested on
the way, so that a later run can tell whether the files were edited since.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import BinaryIO

from fminfer.files.disk import explain, sync_folder
from fminfer.files.file_names import beside
from fminfer.files.journal import Journal, journal_path

ORDERED = ".ordered"  # added to a final name while the file is being written
DIGEST_BYTES = 16
Seal = dict[str, int | str]  # a file's size and digest, as JSON has them
Seals = dict[str, Seal | None]  # of the "output" and its "errors"; None: there is no such file


def errors_path(output: Path) -> Path:
    """Return where an output's errors go: `answers.errors.jsonl` for `answers.jsonl`."""
    return beside(output, ".errors.jsonl", without=".jsonl")


def traces(output: Path) -> list[Path]:
    """List every file that answering into `output` may write under a name of its own."""
    finals = [output, errors_path(output)]
    return [*finals, journal_path(output), *map(draft_path, [*finals, journal_path(output)])]


def put_in_order(journal: Journal) -> Seals:
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
            seals = _write_in_order(journal, *files)
            for file in files:
                file.flush()
                os.fsync(file.fileno())
        if seals["errors"] is not None:
            os.replace(draft_path(errors), errors)
        else:  # also what an earlier run may have left
            draft_path(errors).unlink()
            errors.unlink(missing_ok=True)
        os.replace(draft_path(answers), answers)
        sync_folder(answers.parent)
        return seals
    except OSError as error:
        for path in (answers, errors):
            with contextlib.suppress(OSError):
                draft_path(path).unlink(missing_ok=True)
        raise explain(answers, error) from error


def _write_in_order(journal: Journal, *files: BinaryIO) -> Seals:
    """Write answers into the first file and errors into the second."""
    digests = [_new_digest() for _ in files]
    for row in journal.rows():
        line = row.record + b"\n"
        files[row.is_error].write(line)
        digests[row.is_error].update(line)
    answers, errors = (
        _seal(file, digest.hexdigest()) for file, digest in zip(files, digests, strict=True)
    )
    return {"output": answers, "errors": errors if errors["bytes"] else None}


def read_seal(path: Path) -> Seal | None:
    """Return a file's seal as it is now; None: there is no such file."""
    if not path.exists():
        return None
    digest = _new_digest()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
        return _seal(file, digest.hexdigest())


def _seal(file: BinaryIO, digest: str) -> Seal:
    return {"bytes": file.tell(), "blake2b": digest}


def _new_digest() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=DIGEST_BYTES)


def draft_path(path: Path) -> Path:
    """Return where a file is written before it gets its name."""
    return beside(path, ORDERED)
