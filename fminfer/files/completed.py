"""An output that is complete: which run made it, and whether a later one is to go on with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fminfer.contract.record import is_batch, load_record
from fminfer.core.errors import RETRYABLE, UsageError
from fminfer.files.disk import told
from fminfer.files.edits import Edit, edited, find_edit
from fminfer.files.journal import journal_path
from fminfer.files.journal_rows import (
    CLOCK,
    INPUT,
    Fingerprint,
    check_fingerprint,
    is_of_other_input,
    read_fingerprint,
)
from fminfer.files.ordered_output import Seals, errors_path
from fminfer.files.row_counts import Counts
from fminfer.files.status_file import has_ended_before, limit_of, read_status, seals_of
from fminfer.files.streams import A_PIPE, changed_ns, digest_of


@dataclass(slots=True, frozen=True)
class CompletedOutput:
    """An output that is there, and whose status file says that it is complete."""

    output: Path
    status: dict[str, Any]

    @property
    def counts(self) -> Counts:
        """Its rows, without their tokens."""
        counts = self.status["request_counts"]
        return Counts(int(counts["total"]), int(counts["completed"]), int(counts["failed"]))

    @property
    def limit(self) -> int | None:
        """Return how many lines of its input it is of; None: all."""
        return limit_of(self.status)

    @property
    def seals(self) -> Seals | None:
        return seals_of(self.status)

    def check_fingerprint(self, fingerprint: Fingerprint) -> None:
        """See that it is of a run like this, and of the same input.

        Raises:
            UsageError: what differs.
        """
        check_fingerprint(self.output, self.fingerprint, fingerprint)

    def check_settings(self, fingerprint: Fingerprint) -> None:
        """See that it is of a run like this, whatever its input.

        Raises:
            UsageError: what differs.
        """
        any_input = {INPUT: ""}
        check_fingerprint(self.output, self.fingerprint | any_input, fingerprint | any_input)

    def find_edit(self, *, is_read: bool = False) -> Edit | None:
        """Return which of its files is not as it was written; None: none; see `edits.find_edit`."""
        return find_edit(self.output, self.seals, is_read=is_read)

    def check_unedited(self) -> None:
        """See that it is as it was written.

        Raises:
            UsageError: a file was edited since.
        """
        if (edit := self.find_edit()) is not None:
            raise edited(self.output, edit)

    def is_of_input_changed_at(self, changed_ns: int) -> bool:
        """Tell whether its input was last changed then, by `input.streams.changed_ns`."""
        return bool((self.status.get("fminfer") or {}).get("input_changed_ns") == changed_ns)

    def ended_before(self, time_s: float) -> bool:
        """Tell whether it was complete before a time, in time.time(); to the second."""
        return int(self.status.get("completed_at") or 0) < int(time_s)

    def leaves_rows(self, limit: int | None, started_s: float) -> bool:
        """Tell whether a run with this limit, which began then, is to go on with it.

        It is short of the limit, or has failed rows that another run may answer. What has failed
        since that run began was tried by one beside it.
        """
        if self.limit is not None and (limit is None or limit > self.limit):
            return True
        if self.counts.num_failed == 0 or not has_ended_before(self.output, started_s):
            return False
        return self._has_retryable()

    def _has_retryable(self) -> bool:
        """Tell whether it has errors that another run may not meet.

        Also if its errors file, which may have had some, has another size by now: `reopen` says so.
        """
        path = errors_path(self.output)
        if not path.exists():  # removed, to leave the output as it is
            return False
        written = (self.seals or {}).get("errors")
        is_edited = written is not None and path.stat().st_size != written.get("bytes")
        return is_edited or any(map(is_retryable, records_of(path)))

    @property
    def fingerprint(self) -> Fingerprint:
        return dict(self.status.get("metadata") or {})


def is_retryable(record: bytes) -> bool:
    """Tell whether an error record says that its line was right, and another run may answer it."""
    try:
        fields = load_record(record)
        error = fields["response"]["body"]["error"] if is_batch(record) else fields["error"]
        return error["code"] in RETRYABLE
    except (ValueError, KeyError, TypeError):
        return False


def records_of(path: Path) -> Iterator[bytes]:
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


def kept_clock(output: Path) -> str | None:
    """Return the time that the templates of an output's rows read; None: nothing tells it."""
    path = journal_path(output)
    with told(path), suppress(FileNotFoundError), path.open("rb") as file:
        head = file.readline()
        return read_fingerprint(path, head).get(CLOCK) if head.endswith(b"\n") else None
    metadata = (read_status(output) or {}).get("metadata") or {}
    return metadata.get(CLOCK)


def is_complete(output: Path, source: Path | None) -> bool:
    """Tell whether an output is complete, and its input as it was then.

    Args:
        source: the input; None: it is not known.

    Raises:
        UsageError: the output was edited since.
    """
    if not output.exists() or journal_path(output).exists():
        return False
    if source is not None and has_changed(source, read_status(output) or {}):
        return False
    if (completed := find_completed(output)) is not None:
        completed.check_unedited()
    return True


def has_changed(source: Path, status: dict[str, Any]) -> bool:
    """Tell whether an input holds other bytes than those that a status is of."""
    noted = str((status.get("metadata") or {}).get(INPUT) or A_PIPE)
    if noted == A_PIPE or not source.is_file():
        return False
    if (status.get("fminfer") or {}).get("input_changed_ns") == changed_ns(source):
        return False
    is_as_long = noted.startswith(f"{source.stat().st_size:,} bytes ")
    return not is_as_long or digest_of(source) != noted


def require_completed(
    output: Path, source: Path, fingerprint: Fingerprint, *, takes_over: bool = False
) -> CompletedOutput:
    """Return what is known of an output that is there, once it is sure that it is this run's.

    Args:
        fingerprint: of the run, with that of its input.
        takes_over: it may be of another input.

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
        completed.check_fingerprint(fingerprint)
    return completed
