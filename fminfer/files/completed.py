"""A complete output: which run made it, whether it was edited, and what is left of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fminfer.contract.record import is_batch_record, parse_record
from fminfer.core.errors import RETRYABLE, UsageError
from fminfer.files.disk import raising_disk_errors
from fminfer.files.journal import journal_path
from fminfer.files.journal_rows import (
    CLOCK,
    INPUT,
    Counts,
    Fingerprint,
    check_fingerprint,
    check_settings,
    is_of_other_input,
    parse_fingerprint,
)
from fminfer.files.line_reader import identify_input
from fminfer.files.ordered_output import (
    Seal,
    Seals,
    errors_path,
    read_seal,
    vectors_path,
)
from fminfer.files.status_file import (
    fminfer_fields,
    limit_of,
    read_status,
    seals_of,
    status_path,
)
from fminfer.files.streams import A_PIPE, raising_read_errors, read_changed_ns
from fminfer.files.tables.table_writer import TableOutput, is_table_name


@dataclass(slots=True, frozen=True)
class Edit:
    """A file that is not as it was written."""

    path: Path
    what: str  # differs, for people


@dataclass(slots=True, frozen=True)
class CompletedOutput:
    """An output that is there, and whose status file says that it is complete."""

    output: Path
    status: dict[str, Any]

    @property
    def counts(self) -> Counts:
        """Its rows, without their tokens."""
        counts = self.status["request_counts"]
        return Counts(
            int(counts["total"]), int(counts["completed"]), int(counts["failed"])
        )

    @property
    def limit(self) -> int | None:
        """How many lines of its input it is of; None: all."""
        return limit_of(self.status)

    @property
    def seals(self) -> Seals | None:
        return seals_of(self.status)

    @property
    def fingerprint(self) -> Fingerprint:
        return dict(self.status.get("metadata") or {})

    def check_settings(self, fingerprint: Fingerprint) -> None:
        """Raise a UsageError if the output is another run's, whatever its input."""
        check_settings(self.output, self.fingerprint, fingerprint)

    def find_edit(self, *, is_read: bool = False) -> Edit | None:
        return find_edit(self.output, self.status, is_read=is_read)

    def check_unedited(self) -> None:
        """Raise a UsageError if a file of the output was edited since."""
        if (edit := self.find_edit()) is not None:
            raise edited_error(self.output, edit)

    def has_table(self, path: Path) -> bool:
        """Tell whether a table beside it is as a run of this output has written it."""
        seal = (self.seals or {}).get(path.name)
        with raising_read_errors(path):
            if seal is None or _looks_as_written(path, seal, self.output):
                return seal is not None
            return {**seal, **(read_seal(path) or {})} == seal

    def lacks_table(self, table: TableOutput | None) -> bool:
        """Tell whether a table is to be written beside it, with these columns."""
        if table is None:
            return False
        seal = (self.seals or {}).get(table.path.name) or {}
        return not table.path.exists() or seal.get("layout") != table.layout

    def list_table_seals(self) -> Seals:
        """Return the seals of its tables, without layouts: they are of older records then."""
        return {
            name: {**seal, "layout": ""}
            for name, seal in (self.seals or {}).items()
            if seal is not None and is_table_name(name)
        }

    def is_of_input_changed_at(self, changed_ns: int) -> bool:
        """Tell whether its input was last changed then, by `streams.read_changed_ns`."""
        return bool(fminfer_fields(self.status).get("input_changed_ns") == changed_ns)

    def ended_before(self, time_s: float) -> bool:
        """Tell whether it was complete before a time, in time.time(); to the second."""
        return int(self.status.get("completed_at") or 0) < int(time_s)

    def has_rows_left(self, limit: int | None, started_s: float) -> bool:
        """Tell whether a run with this limit, which began then, is to go on with it.

        It is short of the limit, or failed rows may be tried again, which no run beside it has.
        """
        if self.limit is not None and (limit is None or limit > self.limit):
            return True
        status = status_path(self.output)
        errors = errors_path(self.output)
        is_older = status.exists() and status.stat().st_mtime < started_s
        if self.counts.num_failed == 0 or not is_older:
            return False
        if not errors.exists():  # removed, to leave the output as it is
            return False
        written = (self.seals or {}).get("errors")
        is_edited = written is not None and errors.stat().st_size != written.get(
            "bytes"
        )
        # `reopen` tells of an edit
        return is_edited or any(map(is_retryable, read_records(errors)))


def find_edit(
    output: Path, status: dict[str, Any], *, is_read: bool = False
) -> Edit | None:
    """Return which file of a complete output was edited; None: none, or no seals are known.

    Args:
        is_read: compare the bytes of all files. Otherwise only the size of a file is
            compared if it is older than its status file, which a run writes last: there may
            be thousands of outputs. An errors file that is gone counts as unedited: a user
            removed it, to leave the output as it is.
    """
    seals = seals_of(status)
    if seals is None:
        return None
    paths = {"output": output, "errors": errors_path(output)}
    if "vectors" in seals:
        paths["vectors"] = vectors_path(output)
    for name, path in paths.items():
        then = seals.get(name)
        with raising_read_errors(path):
            if not is_read and _looks_as_written(path, then, output):
                continue
            now = read_seal(path)
        if now != then:
            return Edit(path, _describe_change(then, now))
    return None


def edited_error(output: Path, edit: Edit, *, can_stay: bool = False) -> UsageError:
    """Return the error about an edited file; it `can_stay` without the errors file."""
    errors = errors_path(output)
    moved = "it" if edit.path == output else output.name
    text = (
        f"{edit.path} is not as it was written ({edit.what}). Put the file back as it "
        f"was. Or move {moved} away, or give --restart, to answer all again"
    )
    if can_stay:
        text += (
            f". To leave the output as it is, remove {errors.name} and keep the --limit that it "
            "was made with"
        )
    return UsageError(text)


def _looks_as_written(path: Path, seal: Seal | None, output: Path) -> bool:
    """Tell whether a file has its size, and was written before the status file.

    A file that takes the place of another may have an old time of writing, but its entry is new.
    """
    if not path.exists():
        return path == errors_path(output)
    if seal is None:
        return False
    file = path.stat()
    status = status_path(output).stat()
    is_older = (
        file.st_mtime_ns < status.st_mtime_ns and file.st_ctime_ns <= status.st_ctime_ns
    )
    return is_older and file.st_size == seal.get("bytes")


def _describe_change(then: Seal | None, now: Seal | None) -> str:
    sizes = [
        f"{seal.get('bytes')} bytes" if seal else "no file" for seal in (then, now)
    ]
    if sizes[0] == sizes[1]:
        return f"it still has {sizes[0]}, but other ones"
    return f"it was {sizes[0]} then, and is {sizes[1]} now"


def is_retryable(record: bytes) -> bool:
    """Tell whether another run may answer the line of an error record."""
    try:
        fields = parse_record(record)
        error = (
            fields["response"]["body"]["error"]
            if is_batch_record(record)
            else fields["error"]
        )
        return error["code"] in RETRYABLE
    except (ValueError, KeyError, TypeError):
        return False


# Begins a Batch record; its digits are the line's, by `contract.record.make_line_id`.
BATCH_RECORD = re.compile(rb'\{"id":"batch_req_([0-9a-f]{32})"')


def read_records(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, without their newlines; none if it is not there."""
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                yield line.rstrip(b"\n")


def find_completed(output: Path) -> CompletedOutput | None:
    """Return what is known of an output that is there; None: not that it is complete."""
    status = read_status(output)
    if status is None or status.get("status") != "completed":
        return None
    return CompletedOutput(output, status)


def find_clock(output: Path) -> str | None:
    """Return the time that the templates of an output's rows read; None: nothing tells it."""
    path = journal_path(output)
    with (
        raising_disk_errors(path),
        suppress(FileNotFoundError),
        path.open("rb") as file,
    ):
        head = file.readline()
        return (
            parse_fingerprint(path, head).get(CLOCK) if head.endswith(b"\n") else None
        )
    return ((read_status(output) or {}).get("metadata") or {}).get(CLOCK)


def is_complete(output: Path, source: Path | None) -> bool:
    """Tell whether an output is complete, and its input, if it is known, as it was then."""
    if not output.exists() or journal_path(output).exists():
        return False
    if source is not None and has_input_changed(source, read_status(output) or {}):
        return False
    if (completed := find_completed(output)) is not None:
        completed.check_unedited()
    return True


def has_input_changed(source: Path, status: dict[str, Any]) -> bool:
    """Tell whether an input holds other bytes than when its status was written."""
    noted = str((status.get("metadata") or {}).get(INPUT) or A_PIPE)
    if noted == A_PIPE or not source.is_file():
        return False
    if fminfer_fields(status).get("input_changed_ns") == read_changed_ns(source):
        return False
    is_as_long = noted.startswith(f"{source.stat().st_size:,} bytes ")
    return not is_as_long or identify_input(source) != noted


def require_completed(
    output: Path, source: Path, fingerprint: Fingerprint, *, takes_over: bool = False
) -> CompletedOutput:
    """Return what is known of a complete output of this run.

    With `takes_over`, it may be an output to another form of the input.

    Raises:
        UsageError: it is another run's, or nobody knows whose.
    """
    completed = find_completed(output)
    if completed is None:
        raise UsageError(
            f"{output} exists, and nothing tells which run wrote it. Give --restart to answer "
            f"{source} again, or another --output"
        )
    if fingerprint[INPUT] == A_PIPE:
        raise UsageError(
            f"{output} exists, and what {source} holds is not known before it is read. Give "
            "--restart to answer it, or another --output"
        )
    if not (takes_over and is_of_other_input(completed.fingerprint, fingerprint)):
        check_fingerprint(output, completed.fingerprint, fingerprint)
    return completed
