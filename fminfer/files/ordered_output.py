"""Writes an output's finished rows in input order, and vectors beside them.

It can be killed at any moment and repeated: the journal goes last. What is written is
digested on the way, so that a later run can tell whether the files were edited since.
"""

from __future__ import annotations

import contextlib
import filecmp
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from fminfer.core.errors import UsageError
from fminfer.files.disk import (
    opening_draft,
    path_beside,
    raising_disk_errors,
    sync_and_close,
    sync_folder,
)
from fminfer.files.journal import Journal, journal_path
from fminfer.files.tables.table_writer import TableTask, TableWriter, writing_table

ORDERED = ".ordered"  # added to a final name while the file is being written
DIGEST_BYTES = 16
MOST_GAP = 1 << 20  # bytes of absent rows of vectors that are written at once
Seal = dict[str, int | str]  # a file's size and digest, as JSON has them
# Of the "output", its "errors" and "vectors", and of tables by their names; None: there is no
# such file.
Seals = dict[str, Seal | None]


def errors_path(output: Path) -> Path:
    """Return where an output's errors go: `answers.errors.jsonl` for `answers.jsonl`."""
    return path_beside(output, ".errors.jsonl", without=".jsonl")


def vectors_path(output: Path) -> Path:
    """Return where an output's vectors go: `answers.npy` for `answers.jsonl`."""
    return path_beside(output, ".npy", without=".jsonl")


def draft_path(path: Path) -> Path:
    """Return where a file is written before it gets its name."""
    return path_beside(path, ORDERED)


def list_written_files(output: Path) -> list[Path]:
    """List every file that answering into `output` may write under a name of its own."""
    finals = [output, errors_path(output), vectors_path(output)]
    return [
        *finals,
        journal_path(output),
        *map(draft_path, [*finals, journal_path(output)]),
    ]


def write_ordered_output(
    journal: Journal,
    *,
    has_older_vectors: bool = False,
    table: TableTask | None = None,
) -> Seals:
    """Write all rows in the order of their lines; answers, errors, vectors and table apart.

    The journal stays until the caller has noted that. With `has_older_vectors`, an earlier run's
    are replaced.
    """
    journal.sync()
    answers = journal.output
    paths = [answers, errors_path(answers)]
    if journal.vector_bytes or has_older_vectors:
        paths.append(vectors_path(answers))
    if table is not None:
        paths.append(table.output.path)
    with raising_disk_errors(answers), writing_together(*paths) as files:
        sealed = [_SealedFile(file) for file in files]
        opened = nullcontext() if table is None else writing_table(sealed[-1], table)
        with opened as writer:
            return _write_rows(journal, sealed, writer)


@contextlib.contextmanager
def writing_together(
    output: Path, *others: Path, is_new: bool = False
) -> Iterator[Sequence[BinaryIO]]:
    """Write an output and the files beside it under other names; rename them at the end.

    The output gets its name last: where it is, all is complete. Others to which nothing
    was written are left out; so are those that an earlier run may have left.

    Args:
        is_new: raise a UsageError where a file would be replaced that is not equal.
    """
    with contextlib.ExitStack() as stack:
        drafts = [
            (path, *stack.enter_context(opening_draft(draft_path(path))))
            for path in (output, *others)
        ]
        yield [file for *_, file in drafts]
        for *_, file in drafts:
            sync_and_close(file)
        for path, name, _ in drafts if is_new else ():
            if path.exists() and not filecmp.cmp(path, name, shallow=False):
                raise UsageError(
                    f"{path} exists; move it away, or give another --output"
                )
        for path, name, _ in reversed(drafts):
            if path == output or name.stat().st_size:
                os.replace(name, path)
            else:
                path.unlink(missing_ok=True)
        sync_folder(output.parent)


class _SealedFile:
    """A file that digests what is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = _make_digest()

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)

    def make_seal(self) -> Seal:
        return _make_seal(self._file, self._digest.hexdigest())


def _write_rows(
    journal: Journal, files: Sequence[_SealedFile], table: TableWriter | None
) -> Seals:
    """Write answers, errors, and vectors into the first three files; `table` is the last."""
    vectors = (
        _VectorWriter(files[2], journal.last_number, journal.vector_bytes // 4)
        if journal.vector_bytes
        else None
    )
    for row in journal.read_rows():
        if row.record:  # an error without a record is only counted
            files[row.is_error].write(row.record + b"\n")
        if vectors is not None and not row.is_error:
            vectors.add(row.number, row.vector)
        if table is not None:
            table.add(row)
    errors = files[1].make_seal()
    seals: Seals = {
        "output": files[0].make_seal(),
        "errors": errors if errors["bytes"] else None,
    }
    if vectors is not None:
        vectors.fill_gap(journal.last_number)
        seals["vectors"] = files[2].make_seal()
    if table is not None:
        table.close()
        seal = {**files[-1].make_seal(), "layout": table.output.layout}
        seals[table.output.path.name] = seal
    return seals


def read_seal(path: Path) -> Seal | None:
    """Return a file's seal as it is now; None: there is no such file."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        return _make_seal(file, hashlib.file_digest(file, _make_digest).hexdigest())


def _make_seal(file: BinaryIO, digest: str) -> Seal:
    return {"bytes": file.tell(), "blake2b": digest}


def _make_digest() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=DIGEST_BYTES)


class _VectorWriter:
    """Writes vectors of one size as .npy: a row for each line, of nan if it has no vector."""

    def __init__(self, file: _SealedFile, num_rows: int, size: int) -> None:
        import numpy as np  # only here: `fminfer --help` needs none

        self._file = file
        self._num_written = 0
        self._absent = np.full(size, np.nan, "<f4").tobytes()
        header = {"descr": "<f4", "fortran_order": False, "shape": (num_rows, size)}
        start = BytesIO()
        np.lib.format.write_array_header_1_0(start, header)
        file.write(start.getvalue())

    def add(self, number: int, vector: bytes) -> None:
        """Write the vector of a line, whose number is larger than those before."""
        assert len(vector) == len(self._absent), "a run's vectors have one size"
        self.fill_gap(number - 1)
        self._file.write(vector)
        self._num_written += 1

    def fill_gap(self, until: int) -> None:
        """Write rows of nan for the next lines, which have no vectors, up to a line's number."""
        most = max(1, MOST_GAP // len(self._absent))
        while (left := until - self._num_written) > 0:
            self._file.write(self._absent * min(left, most))
            self._num_written += min(left, most)


class VectorReader:
    """The vectors of a complete output, from the file that was written with it."""

    def __init__(self, output: Path) -> None:
        import numpy as np

        self._rows = np.load(vectors_path(output), mmap_mode="r")

    def read(self, number: int) -> bytes:
        """Return the vector of a line that was answered."""
        return bytes(self._rows[number - 1].tobytes())
