"""Puts an output's finished rows in input order under their final names.

It can be killed at any moment and repeated: the journal goes last. What was written is digested on
the way, so that a later run can tell whether the files were edited since.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from fminfer.files.disk import beside, sync_folder, told
from fminfer.files.journal import Journal, journal_path
from fminfer.files.vector_file import VectorWriter, vectors_path

ORDERED = ".ordered"  # added to a final name while the file is being written
DIGEST_BYTES = 16
Seal = dict[str, int | str]  # a file's size and digest, as JSON has them
# Of the "output", its "errors" and "vectors"; None: there is no such file.
Seals = dict[str, Seal | None]


def errors_path(output: Path) -> Path:
    """Return where an output's errors go: `answers.errors.jsonl` for `answers.jsonl`."""
    return beside(output, ".errors.jsonl", without=".jsonl")


def traces(output: Path) -> list[Path]:
    """List every file that answering into `output` may write under a name of its own."""
    finals = [output, errors_path(output), vectors_path(output)]
    return [*finals, journal_path(output), *map(draft_path, [*finals, journal_path(output)])]


def put_in_order(journal: Journal, *, has_older_vectors: bool = False) -> Seals:
    """Write all rows in the order of their lines; answers, errors and vectors apart.

    The journal may be removed once whoever asks for it has noted that the output is complete.

    The final names appear at once and whole, the answers' last: where they are, all is complete.

    Args:
        has_older_vectors: the file of vectors that is there, if any, is of an earlier run.

    Raises:
        OutputError: the disk is full or gone; the journal is left as it was.
    """
    journal.sync()
    answers = journal.output
    paths = [answers, errors_path(answers)]
    if journal.vector_bytes or has_older_vectors:
        paths.append(vectors_path(answers))
    with told(answers), written_together(*paths) as files:
        return _write_in_order(journal, files)


@contextlib.contextmanager
def written_together(output: Path, *others: Path) -> Iterator[Sequence[BinaryIO]]:
    """Write an output and what stands beside it under other names, and give them theirs at the end.

    The output gets its name last: where it is, all is complete. Others to which nothing was written
    are left out; so are those that an earlier run may have left.
    """
    paths = [output, *others]
    try:
        with contextlib.ExitStack() as open_files:
            files = [open_files.enter_context(draft_path(path).open("wb")) for path in paths]
            yield files
            for file in files:
                file.flush()
                os.fsync(file.fileno())
        for path in reversed(paths):
            if path == output or draft_path(path).stat().st_size:
                os.replace(draft_path(path), path)
            else:
                draft_path(path).unlink()
                path.unlink(missing_ok=True)
        sync_folder(output.parent)
    except BaseException:
        for path in paths:
            with contextlib.suppress(OSError):
                draft_path(path).unlink(missing_ok=True)
        raise


def _write_in_order(journal: Journal, files: Sequence[BinaryIO]) -> Seals:
    """Write answers into the first file, errors into the second, and vectors into the third."""
    digests = [_new_digest() for _ in files]
    writer = None
    if journal.vector_bytes:
        shape = journal.last_number, journal.vector_bytes // 4
        writer = VectorWriter(files[2], *shape, digests[2])
    for row in journal.rows():
        line = row.record + b"\n"
        files[row.is_error].write(line)
        digests[row.is_error].update(line)
        if writer is not None and not row.is_error:
            writer.add(row.number, row.vector)
    if writer is not None:
        writer.finish()
    names = ["output", "errors", *["vectors"] * (writer is not None)]
    seals = [_seal(file, digest.hexdigest()) for file, digest in zip(files, digests, strict=True)]
    found: Seals = dict(zip(names, seals, strict=False))
    return found if seals[1]["bytes"] else found | {"errors": None}


def read_seal(path: Path) -> Seal | None:
    """Return a file's seal as it is now; None: there is no such file."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        return _seal(file, hashlib.file_digest(file, _new_digest).hexdigest())


def _seal(file: BinaryIO, digest: str) -> Seal:
    return {"bytes": file.tell(), "blake2b": digest}


def _new_digest() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=DIGEST_BYTES)


def draft_path(path: Path) -> Path:
    """Return where a file is written before it gets its name."""
    return beside(path, ORDERED)
