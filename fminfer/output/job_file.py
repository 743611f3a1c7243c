"""One input of a run and where its answers go: what is done of it, and what is left.

It knows lines, records and the journal; who answers is not its business.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fminfer.errors import InUseError, OutputError, StoppedError, UsageError
from fminfer.input.lines import Line, count_rows, read_lines
from fminfer.input.streams import A_PIPE, Digest, changed_ns, digest_of
from fminfer.output.claims import Claim, Claims, look_at, remove_dead
from fminfer.output.disk import explain
from fminfer.output.journal import (
    Fingerprint,
    Journal,
    check_fingerprint,
    journal_path,
    peek,
)
from fminfer.output.records import Record
from fminfer.output.reopening import has_retryable, reopen
from fminfer.output.rows import Row
from fminfer.output.status import (
    Counts,
    StatusFile,
    has_ended_before,
    limit_of,
    read_status,
    seals_of,
)
from fminfer.output.stream import OrderedStream
from fminfer.output.writer import put_in_order

PassOver = Callable[[Line], None]  # told of each line that an earlier run answered


class StreamedInput:
    """An input whose answers go to stdout: in order, as soon as those before them are out."""

    def __init__(
        self, path: Path, source: int, stream: OrderedStream, limit: int | None = None
    ) -> None:
        self.path, self.source = path, source
        self._limit = limit
        self.num_left = count_rows(path, limit)  # lines to answer; None: not known before its end
        # It cannot go on where another ended.
        self.num_kept_rows = self.num_kept_errors = self.num_damaged_rows = self.num_tried_rows = 0
        self._num_read = self._num_done = 0
        self._is_read = False
        self._stream = stream

    @property
    def is_finished(self) -> bool:
        """It is never known of an earlier run."""
        return self._is_read and self._num_done == self._num_read

    def begin(self) -> None:
        """Nothing is there before the first record."""

    def lines(self, pass_over: PassOver) -> Iterator[Line]:
        """Read it."""
        for line in read_lines(self.path, self.source, limit=self._limit):
            self._stream.expect(self.source, line.number)
            self._num_read += 1
            yield line
        self._is_read = True

    def add(self, record: Record) -> bool:
        """Write a record when it is its turn."""
        is_error = record.error is not None
        self._stream.append(self.source, record.line.number, record.to_json(), is_error=is_error)
        self._num_done += 1
        return True

    @property
    def is_settled(self) -> bool:
        return self.is_finished

    @property
    def is_lost(self) -> bool:
        """No other run takes it."""
        return False

    def abandon(self, error: BaseException) -> None:
        """Stop without finishing."""


class JournaledInput:
    """An input whose answers go to a file, by way of its journal.

    Args:
        fingerprint: of the run, without the input's own.
        claims: from which the output's is taken when it is this input's turn.
        claim: of the output, if it is this run's already.
        restart: answer all lines again, whatever an earlier run has done.
        started_s: time.time() as this run began; it tries again what failed before, once.
        limit: answer only so many lines, the first ones.

    Raises:
        InUseError: another run is at work.
        UsageError: rows of another run are there.
    """

    def __init__(
        self,
        path: Path,
        source: int,
        output: Path,
        model: str,
        fingerprint: Fingerprint,
        *,
        claims: Claims,
        claim: Claim | None = None,
        restart: bool,
        started_s: float,
        limit: int | None = None,
    ) -> None:
        self._limit = limit
        self._before: dict[str, Any] = {}  # the status of the run that completed the output
        self.path, self.source, self.output = path, source, output
        self._started_s = started_s
        self._is_to_reopen = False  # it is complete, and has errors that may not come again
        self._claims, self._claim = claims, claim
        self.is_finished = False
        input_changed_ns = changed_ns(path)  # before the digest: a later change is noticed
        self._fingerprint = {"the input": digest_of(path)} | fingerprint
        self._restart = restart
        self._journal: Journal | None = None  # open while the input is being answered
        self._num_read = 0
        self._is_read = False
        self.is_lost = False  # to another run
        has_journal = peek(output, self._fingerprint, restart=restart)
        self.num_kept_rows = self.num_kept_errors = self.num_damaged_rows = self.num_tried_rows = 0
        self._counts = Counts()
        if not has_journal and not restart and output.exists():
            self._check_complete()
        self._num_rows = None if self.is_finished else count_rows(path, limit)
        self._counts.num_rows = self._counts.num_rows or self._num_rows or 0
        self._status = StatusFile(path, output, model, self._fingerprint, self._counts, limit)
        self._status.input_changed_ns = input_changed_ns

    @property
    def is_settled(self) -> bool:
        """Tell whether nothing of it is left for this run."""
        return self.is_finished or self.is_lost

    @property
    def num_done(self) -> int:
        """Lines that have their record, of this run and of those before it."""
        return self._counts.num_completed + self._counts.num_failed

    @property
    def num_left(self) -> int | None:
        """Lines to answer; None: not known before the input's end."""
        if self.is_finished:
            return 0
        return None if self._num_rows is None else self._num_rows - self.num_kept_rows

    @property
    def num_rows_at_start(self) -> int | None:
        """Lines that this run has to answer, or has answered; None: not known."""
        return None if self._num_rows is None else self._num_rows - self.num_kept_rows

    def begin(self) -> None:
        """Count what an earlier run has done; where it had answered every line, finish for it."""
        if self.is_finished:
            self._release()
            return
        if self._claim is None and any(not claim.is_dead for claim in look_at(self.output)):
            raise self._in_use()
        self._make_folder()
        if self._is_to_reopen:
            self._reopen()
        # There from the start, so that no run of another kind takes the output meanwhile.
        journal = self._journal = Journal(self.output, self._fingerprint, restart=self._restart)
        if self._claim is not None:  # whoever slept with the journal open still has its claim
            remove_dead(self.output)
        self._status.move("validating")
        self._keep(journal.kept.num_answers, journal.kept.num_errors, journal.kept.tokens)
        self.num_damaged_rows, self.num_tried_rows = journal.num_damaged, journal.num_tried
        if journal.num_rows == self._num_rows and journal.num_rows:
            self._num_read, self._is_read = journal.num_rows, True
            self._finish_if_complete()
        else:  # opened again when it is this input's turn: there may be thousands
            journal.close()
            self._journal = None

    def lines(self, pass_over: PassOver) -> Iterator[Line]:
        """Read the lines that are left.

        Raises:
            UsageError: a line is not the one that an earlier run answered.
            OutputError: the journal cannot be written.
        """
        if self.is_finished:
            return
        journal = self._take()
        if journal is None:
            return
        self._look_again(journal)
        self._status.move("in_progress")
        digest = Digest()
        for line in read_lines(self.path, self.source, digest, self._limit):
            self._num_read += 1
            self._counts.num_rows = max(self._num_rows or 0, self._num_read)
            if self.is_lost:
                return
            if line.number not in journal:
                yield line
                continue
            if not journal.is_of(line.number, zlib.crc32(line.raw)):
                raise UsageError(
                    f"line {line.number} of {self.path} is not the one that an earlier run has "
                    "answered; give --restart to answer all from the start, or another --output"
                )
            pass_over(line)
        found = str(digest) if self._limit is None else digest_of(self.path)
        if self._fingerprint["the input"] not in (found, A_PIPE):
            raise UsageError(
                f"{self.path} was changed while it was being answered. Its finished rows are kept "
                "until you give --restart to answer all from the start; or answer it into another "
                "--output"
            )
        self._counts.num_rows = self._num_read
        self._is_read = True
        self._finish_if_complete()  # its last record may have come before its end was seen

    def add(self, record: Record) -> bool:
        """Write a record at once; return False if another run has taken the output over."""
        if self._claim is not None and not self._claim.holds():
            self._lose()
        if self.is_lost:
            return False
        assert self._journal is not None, "a record of an input that is not being answered"
        is_error = record.error is not None
        tokens = record.num_prompt_tokens, record.num_cached_tokens, record.num_completion_tokens
        crc, number = zlib.crc32(record.line.raw), record.line.number
        is_ours = record.error is not None and record.error.is_ours
        self._journal.append(Row(number, is_error, tokens, crc, record.to_json(), is_ours))
        self._counts.add(is_error=is_error, tokens=tokens)
        self._status.update()
        self._finish_if_complete()
        return True

    def see_completed(self) -> None:
        """Take a lost output as finished if another run has completed it.

        Raises:
            UsageError: it was completed with another model, or with other settings.
        """
        num_done, num_failed = self.num_done - self.num_kept_rows, self._counts.num_failed
        num_failed -= self.num_kept_errors
        if self.output.exists() and not journal_path(self.output).exists():
            self._check_complete()
        if self.is_finished:  # what this run answered of it is counted as its own
            self.num_kept_rows = max(0, self.num_kept_rows - num_done)
            self.num_kept_errors = max(0, self.num_kept_errors - num_failed)

    def abandon(self, error: BaseException) -> None:
        """Stop without finishing; what was answered stays in the journal."""
        if self.is_finished or self.is_lost:
            return
        with contextlib.suppress(OutputError):  # there are other files, and a reason to be told
            if self._journal is not None:
                self._journal.close()
            if isinstance(error, StoppedError):
                self._status.move(error.status)
            elif isinstance(error, KeyboardInterrupt):
                self._status.move("cancelled")
            else:
                self._status.move("failed", f"{type(error).__name__}: {error}")
        self._release()

    def _reopen(self) -> None:
        claim = self._claim or self._claims.take(self.output)
        if claim is None:
            raise self._in_use()
        try:
            if not journal_path(self.output).exists():  # of a run that did so and died meanwhile
                seals, limit = seals_of(self._before), limit_of(self._before)
                reopen(self.path, self.output, self._fingerprint, seals, limit)
        finally:
            if claim is not self._claim:  # it is taken again when it is this input's turn
                claim.release()

    def _take(self) -> Journal | None:
        """Open the journal for good; None: another run has finished the output since the start."""
        try:
            self._claim = self._claim or self._claims.take(self.output)
            if self._claim is None:
                raise self._in_use()
            journal = Journal(self.output, self._fingerprint)
            remove_dead(self.output)
        except UsageError:
            self.is_lost = True
            self._release()
            raise
        has_rows = journal.num_rows or journal.num_tried
        if not (has_rows or self._restart) and self.output.exists():
            journal.remove()
            self.is_lost = True  # until it is known to be ours
            self._release()
            self._check_complete()
            return None
        self._journal = journal
        return journal

    def _look_again(self, journal: Journal) -> None:
        """Take an input as it is now: others may have been answered since the run began.

        Raises:
            UsageError: it was changed, and rows of an earlier run are kept.
        """
        now_ns = changed_ns(self.path)
        if now_ns == self._status.input_changed_ns:
            return
        self._status.input_changed_ns = now_ns
        digest = digest_of(self.path)
        if digest == self._fingerprint["the input"]:
            return
        if journal.num_rows or journal.num_tried:
            raise UsageError(
                f"{self.path} was changed since this run began, and rows of an earlier run are "
                "kept. Give --restart to answer all from the start, or another --output"
            )
        self._fingerprint["the input"] = digest
        journal.begin_anew(self._fingerprint)
        self._num_rows = count_rows(self.path, self._limit)
        self._counts.num_rows = self._num_rows or 0

    def _lose(self) -> None:
        """Write no more: this process slept, or did not reach the disk, for so long."""
        self.is_lost = True
        if self._journal is not None:
            with contextlib.suppress(OutputError):
                self._journal.close()
            self._journal = None
        self._release()

    def _release(self) -> None:
        if self._claim is not None:
            self._claim.release()
            self._claim = None

    def _in_use(self) -> InUseError:
        return InUseError(
            f"{self.output} is another run's to answer at the moment. Wait for it or end it; its "
            "finished rows are kept"
        )

    def _make_folder(self) -> None:
        try:
            self.output.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise explain(self.output.parent, error) from error

    def _keep(self, num_answers: int, num_errors: int, tokens: Sequence[int]) -> None:
        self.num_kept_rows = num_answers + num_errors
        self.num_kept_errors = num_errors
        self._counts.keep(num_answers, num_errors, tokens)
        self._counts.num_kept = self.num_kept_rows

    def _finish_if_complete(self) -> None:
        """Give the output its final name once every line of the input has its record."""
        journal = self._journal
        if journal is None or not self._is_read or journal.num_rows < self._num_read:
            return
        if journal.num_rows > self._num_read and self._limit is not None:
            raise UsageError(
                f"an earlier run has answered more than the first {self._limit} lines of "
                f"{self.path}; give a larger --limit or none to go on with them, or --restart"
            )
        if journal.num_rows > self._num_read:
            raise UsageError(
                f"an earlier run has answered {journal.num_rows} lines of {self.path}, and now it "
                f"has {self._num_read}; give --restart to answer all from the start"
            )
        self._status.move("finalizing")
        self._status.seals = put_in_order(journal)
        self._status.move("completed")
        self.is_finished = True
        self._journal = None
        journal.remove()  # last: until then the next run does all of this again
        self._release()

    def _check_complete(self) -> None:
        """See that an output that is there is this run's own.

        Raises:
            UsageError: it is not, or nobody knows.
        """
        status = read_status(self.output)
        if status is None or status.get("status") != "completed":
            raise UsageError(
                f"{self.output} exists, and nothing tells which run wrote it. Give --restart to "
                f"answer {self.path} again, or another --output"
            )
        if self._fingerprint["the input"] == A_PIPE:
            raise UsageError(
                f"{self.output} exists, and what {self.path} holds is not known before it is read. "
                "Give --restart to answer it, or another --output"
            )
        check_fingerprint(self.output, dict(status.get("metadata") or {}), self._fingerprint)
        self._before = status
        is_short = is_short_of(status, self._limit)
        if is_short or is_worth_another_try(self.output, status, self._started_s):
            self._is_to_reopen = True
            return
        counts = status["request_counts"]
        self._counts.num_rows = counts["total"]
        self._keep(counts["completed"], counts["failed"], (0, 0, 0))
        self.is_finished = True


def is_short_of(status: dict[str, Any], limit: int | None) -> bool:
    """Tell whether a complete output has fewer lines than a run with this limit is to answer."""
    before = limit_of(status)
    return before is not None and (limit is None or limit > before)


def is_worth_another_try(output: Path, status: dict[str, Any], started_s: float) -> bool:
    """Tell whether a run that began then is to answer failed rows of a complete output again.

    What has failed since it began was tried by a run beside it.
    """
    has_errors = status["request_counts"]["failed"] > 0
    if not has_errors or not has_ended_before(output, started_s):
        return False
    return has_retryable(output, seals_of(status))


JobFile = StreamedInput | JournaledInput
