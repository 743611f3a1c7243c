"""Makes a journal of a complete output again, so that a run can answer its failed rows once more.

It is the reverse of `files.ordered_output`. The output and its errors file stay until they
are replaced.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from fminfer.contract.envelope import Envelope, Line, open_envelope
from fminfer.contract.record import Answered, Tokens, load_record, make_id, make_key
from fminfer.core.errors import RETRYABLE, UsageError, row_error
from fminfer.files.disk import replacing, told
from fminfer.files.edits import find_edit
from fminfer.files.journal import journal_path
from fminfer.files.journal_rows import Fingerprint, Row, head_line
from fminfer.files.line_reader import read_lines
from fminfer.files.ordered_output import Seals, draft_path, errors_path
from fminfer.files.run_terms import LineCounter
from fminfer.files.vector_file import VectorReader

_LINE = re.compile(rb'\{"line":(\d{1,18}),')
_BATCH = re.compile(rb'\{"id":"batch_req_([0-9a-f]{32})"')


def has_retryable(output: Path, seals: Seals | None) -> bool:
    """Tell whether a complete output has errors that another run may not meet.

    Also if its errors file, which may have had some, has another size by now: `reopen` says so.

    Args:
        seals: with which it was written; None: they are not known.
    """
    path = errors_path(output)
    if not path.exists():  # removed, to leave the output as it is
        return False
    written = (seals or {}).get("errors")
    is_edited = written is not None and path.stat().st_size != written.get("bytes")
    return is_edited or any(map(is_retryable, records_of(path)))


def is_retryable(record: bytes) -> bool:
    """Tell whether an error record says that its line was right, and another run may answer it."""
    try:
        fields = load_record(record)
        if _BATCH.match(record):
            return bool(fields["response"]["body"]["error"]["code"] in RETRYABLE)
        return bool(fields["error"]["code"] in RETRYABLE)
    except (ValueError, KeyError, TypeError):
        return False


def reopen(
    source: Path,
    output: Path,
    fingerprint: Fingerprint,
    seals: Seals | None = None,
    limit: int | None = None,
    counter: LineCounter | None = None,
) -> None:
    """Write the journal from which `files.ordered_output` would make the output and its errors.

    It appears at once and whole. The caller has claimed the output.

    Args:
        seals: with which the output was written; None: they are not known.
        limit: the output is of so many lines, the first ones.
        counter: begins with the first line. Without it the rows have no keys.

    Raises:
        UsageError: the output is not what a run has written for the lines of `source`.
        OutputError: the disk is full or gone.
    """
    with told(output):
        check_unchanged(output, seals)
        vectors = VectorReader(output) if "vectors" in (seals or {}) else None
        put_journal(output, fingerprint, _read_rows(source, output, vectors, limit, counter))


def put_journal(output: Path, fingerprint: Fingerprint, rows: Iterable[Row]) -> None:
    """Write an output's journal beside the one that may be there, and put it in its place.

    Raises:
        OutputError: the disk is full or gone; the one that was there stays.
    """
    path = journal_path(output)
    with told(path), replacing(path, draft_path(path)) as file:
        file.write(head_line(fingerprint))
        for row in rows:
            file.write(row.to_line())


def check_unchanged(output: Path, seals: Seals | None, *, has_changed_input: bool = False) -> None:
    """Refuse files that were edited since they were written."""
    if (edit := find_edit(output, seals, is_read=True)) is not None:
        can_stay = edit.path != output and not has_changed_input
        raise _changed(output, edit.path, edit.what, can_stay=can_stay)


def _read_rows(
    source: Path,
    output: Path,
    vectors: VectorReader | None,
    limit: int | None,
    counter: LineCounter | None,
) -> Iterator[Row]:
    answers, errors = records_of(output), records_of(errors_path(output))
    answer, error = next(answers, None), next(errors, None)
    for line in read_lines(source, 0, limit=limit):
        envelope, crc = open_envelope(line), zlib.crc32(line.raw)
        repeat = None if counter is None else _count(line, envelope, counter)
        if error is not None and _is_error_of(error, line, envelope):
            yield Row(line.number, True, (0, 0, 0), crc, error, is_retryable(error))
            error = next(errors, None)
        elif answer is not None and _is_answer_to(answer, line, envelope):
            key = b"" if counter is None else make_key(envelope, repeat or 0)
            vector = b"" if vectors is None else vectors.of(line.number)
            tokens = _tokens(output, answer)
            yield Row(line.number, False, tokens, crc, answer, key=key, vector=vector)
            answer = next(answers, None)
        else:
            raise _changed(output, output, f"line {line.number} of {source} has no record")
    if answer is not None or error is not None:
        raise _changed(output, output, f"it has more records than {source} has lines")


def _count(line: Line, envelope: Envelope, counter: LineCounter) -> int | None:
    try:
        return counter.count(line, envelope)
    except Exception as error:  # a refused line
        row_error(error, f"line {line.number}")
        return None


def records_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, without their newlines; none if it is not there."""
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                yield line.rstrip(b"\n")


def _is_error_of(record: bytes, line: Line, envelope: Envelope) -> bool:
    match = _LINE.match(record)
    return int(match[1]) == line.number if match else _has_id_of(record, line, envelope)


def _is_answer_to(record: bytes, line: Line, envelope: Envelope) -> bool:
    if envelope.shape == "batch":
        return _has_id_of(record, line, envelope)
    return record.startswith(b'{"request":' + envelope.request + b",")


def _has_id_of(record: bytes, line: Line, envelope: Envelope) -> bool:
    match = _BATCH.match(record)
    return match is not None and match[1] == make_id(line, envelope).encode()


def _tokens(output: Path, answer: bytes) -> Tokens:
    """Return an answer's tokens, as a row of a journal has them."""
    try:
        return Answered(answer, load_record(answer)).tokens
    except ValueError as error:
        raise _changed(output, output, "an answer has no usage") from error


def _changed(output: Path, path: Path, what: str, *, can_stay: bool = True) -> UsageError:
    """Return the refusal of a file.

    Args:
        can_stay: without its errors file the output would count as complete.
    """
    moved = "it" if path == output else output.name
    text = (
        f"{path} is not as it was written ({what}), and lines of {output} are left to answer. Put "
        f"the file back as it was. Or move {moved} away, or give --restart, to answer all again"
    )
    if can_stay:
        text += f". To leave the output as it is, remove {errors_path(output).name} and keep the "
        text += "--limit that it was made with"
    return UsageError(text)
