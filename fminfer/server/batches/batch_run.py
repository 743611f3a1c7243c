"""Answers one batch, in a thread of its own, to its output or to its early end."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from fminfer.answers.carrying_over import RunTerms
from fminfer.contract.envelope import find_custom_id
from fminfer.contract.record import Record
from fminfer.core.errors import (
    FminferError,
    MachineError,
    RequestError,
    StoppedError,
    UsageError,
    make_printable,
)
from fminfer.core.quantities import with_noun
from fminfer.files.claims import remove_all_claims
from fminfer.files.completed import CompletedOutput, find_completed
from fminfer.files.journal import journal_path
from fminfer.files.journal_rows import Counts
from fminfer.files.line_reader import read_lines
from fminfer.files.ordered_output import errors_path
from fminfer.job.journaled_input import JournaledInput
from fminfer.runtime.engine_api import Engine
from fminfer.runtime.lines.lanes import Lane
from fminfer.runtime.lines.line_intake import RecordForm
from fminfer.runtime.lines.runner import WINDOW
from fminfer.server.batch_engine import BatchEngine
from fminfer.server.batches.batch_ends import (
    check_fingerprint,
    count_finished,
    drop_journal,
    find_trouble,
    publish_finished,
)
from fminfer.server.batches.batch_request import make_line_check
from fminfer.server.batches.stored_batches import (
    BatchStatus,
    Ending,
    Progress,
    ServerState,
    StoredBatch,
    Trouble,
)
from fminfer.server.batches.stored_files import ServerFile

EMPTY = Trouble("empty_file", "the input file has no lines; upload one that has")
# A packed file of a megabyte may hold a hundred million lines. They are counted as it is read.
TOO_LONG = Trouble(
    "file_too_large",
    "the file has more lines, unpacked, than the server allows (--max-batch-lines); cut it into "
    "several",
)
MOST_UNNAMED = 256  # errors of lines without a custom_id that have a record
WAIT_S = 0.2  # between looks whether the batch is to end
RowKind = Literal["answer", "error"]


@dataclass(slots=True, frozen=True)
class BatchContext:
    """What the runs of all batches share."""

    engine: Engine | BatchEngine
    state: ServerState
    terms: RunTerms
    model_name: str
    # raises a FminferError for a name that is not served
    check_model: Callable[[object], None]
    log: Callable[[Literal["info", "error"], str], None]  # the server's log
    max_lines: int  # of a file
    # lines, since the server began
    done: Counter[RowKind] = field(default_factory=Counter)


class _UnrecordedError(Record):
    """The error of a line that is only counted."""

    def to_json(self) -> bytes:
        """Return no bytes: the line has no record."""
        return b""


class BatchRun:
    """One batch that is being answered."""

    def __init__(self, batch: StoredBatch, context: BatchContext) -> None:
        self.batch = batch
        self.trouble: Trouble | None = None  # for which it paused
        self._context = context
        self._files = context.state.files
        self._batches = context.state.batches
        self._output = self._batches.output_path(batch)
        self._counts: Counts | None = None
        self._lane: Lane | None = None
        self._is_stopped = False
        self._num_unnamed = 0  # errors of lines without a custom_id

    @property
    def progress(self) -> Progress | None:
        """How far it is; None: as its batch says."""
        return None if self._counts is None else Progress.from_counts(self._counts)

    def wake(self) -> None:
        """Wake the run, so that it reads its batch's status. Any thread may call it."""
        if (lane := self._lane) is not None:
            lane.wake()

    def stop(self) -> None:
        """End the run; what is answered is kept. Any thread may call it."""
        self._is_stopped = True
        self.wake()

    def run(self) -> None:
        """Answer the batch, or end it early, or pause it."""
        try:
            self._continue_batch()
        except StoppedError:
            pass  # the next server goes on
        except Exception as error:
            self._pause_batch(error)

    def _continue_batch(self) -> None:
        completed = (
            None
            if journal_path(self._output).exists()
            else find_completed(self._output)
        )
        if completed is not None and completed.find_edit() is None:
            self._publish_completed(
                completed
            )  # the server ended before its batch said so
        elif (ending := self._find_ending()) is not None:
            self._end_early(ending)
        else:
            self._answer_input()  # it refuses an output that was edited

    def _answer_input(self) -> None:
        terms = self._context.terms
        check_fingerprint(self.batch, self._output, terms.fingerprint)
        # The folder is locked, so no claim holds, whatever it says. One may be this
        # server's own, left by trouble of the disk. A copied folder has those of another server.
        remove_all_claims(self._output)
        file = JournaledInput(self._require_input(), 0, self._output, terms)
        try:
            file.begin()
            self._counts = file.counts
            if file.num_left == 0 and not file.counts.num_rows:
                self._fail_batch(EMPTY)
                return
            done = self._enter_status("in_progress", file.counts, after="validating")
            self._log_progress(
                "goes on" if file.counts.done.num_rows else "begins", done
            )
            ending = self._answer_lines(file)
        except BaseException as error:
            file.abandon(error)
            raise
        if ending is not None:
            file.abandon(StoppedError(f"the batch is {ending}"))
            self._end_early(ending)
            return
        completed = find_completed(self._output)
        if completed is None:
            raise MachineError(
                f"the status of {self._output} was just written, and cannot be read. "
                "See that the disk of --state is there and sound"
            )
        self._publish_completed(completed)

    def _answer_lines(self, file: JournaledInput) -> Ending | Literal["failed"] | None:
        """Answer the lines that are left; return why it stopped before all were."""
        batch = self.batch
        context = self._context
        runner, lane = context.engine.runs.start_behind(
            RecordForm(context.model_name, batch.created_at),
            make_line_check(batch.endpoint, context.check_model),
            WINDOW,
            lambda line: f"{batch.id}, line {line.number}",
        )
        self._lane = lane
        lines = file.read_lines(runner.add_answered_line)
        try:
            while runner.has_work:
                if (ending := self._find_ending()) is not None:
                    return ending
                runner.read_from(lines)
                records = runner.step()
                for record in records:
                    if record.line.number > context.max_lines:
                        return "failed"
                    self._enter_finalizing(file)
                    if not file.add(
                        self._limit_unnamed_error(replace(record, is_of_batch=True))
                    ):
                        raise FminferError(
                            "another process has taken the batch's output over"
                        )
                    context.done["answer" if record.error is None else "error"] += 1
                if not records and not runner.wants_more:
                    lane.wait(WAIT_S, wants_room=runner.has_window)
        finally:
            runner.close()
            lane.close()
            self._lane = None
        return None

    def _limit_unnamed_error(self, record: Record) -> Record:
        """Return a record, or an empty one behind many wrong lines without a custom_id.

        A record has hundreds of bytes, and such a line may have two.
        """
        error = record.error
        if error is None or find_custom_id(record.line, record.envelope) != b"null":
            return record
        self._num_unnamed += 1
        if self._num_unnamed > MOST_UNNAMED:
            return _UnrecordedError(record.line, record.envelope, error=error)
        if self._num_unnamed == MOST_UNNAMED:
            text = f"{error.message}. Later lines without a custom_id are only counted"
            error = RequestError(error.code, text, error.param)
        return replace(record, error=error)

    def _require_input(self) -> Path:
        """Return where its input is."""
        path = self._files.input_path(self.batch.input_file_id)
        stored = self._files.find_input(self.batch.input_file_id)
        size = path.stat().st_size if path.exists() else 0
        if stored is None or size != stored.bytes:
            was = "uploaded" if stored is None else f"uploaded with {stored.bytes:,}"
            raise UsageError(
                f"{path} has {size:,} bytes, and was {was}; put it back as it was"
            )
        return path

    def _find_ending(self) -> Ending | None:
        """Return why the batch is to end before all is answered."""
        if self._is_stopped:
            raise StoppedError("the server ends", "terminated")
        batch = self._batches.find_newest(self.batch)
        if batch.status == "cancelling":
            return "cancelled"
        return "expired" if time.time() >= batch.expires_at else None

    def _enter_finalizing(self, file: JournaledInput) -> None:
        """Enter `finalizing` before the last record is added, which finishes the output."""
        counts = file.counts
        if file.num_left is not None and counts.done.num_rows + 1 == counts.num_rows:
            self._enter_status("finalizing", counts, after="in_progress")

    def _enter_status(
        self, status: BatchStatus, counts: Counts, *, after: BatchStatus
    ) -> Progress:
        """Enter a status, unless the batch is in another one by now; end a pause."""
        done = Progress.from_counts(counts)

        def change(batch: StoredBatch) -> StoredBatch:
            batch = replace(batch, progress=done, troubles=())
            return batch.with_status(status) if batch.status == after else batch

        self._batches.change(self.batch, change)
        return done

    def _publish_completed(self, completed: CompletedOutput) -> None:
        """Publish an output that is there."""
        if not completed.counts.num_rows:
            self._fail_batch(EMPTY)
            return
        self._publish_files("completed", _progress_of(completed))

    def _end_early(self, ending: Ending | Literal["failed"]) -> None:
        """Make an output of the finished lines."""
        batch = self._batches.find_newest(self.batch)
        total = max(batch.progress.total, self._counts.num_rows if self._counts else 0)
        source = self._require_input() if ending == "expired" else None
        if ending == "failed" or any(
            line.number > self._context.max_lines
            for line in (read_lines(source, 0) if source is not None else ())
        ):
            self._fail_batch(TOO_LONG)
            return
        if source is not None:
            self._batches.change(batch, _to_finalizing)
        self._publish_files(ending, publish_finished(self._output, source, total))
        drop_journal(self._output)

    def _fail_batch(self, trouble: Trouble) -> None:
        self._batches.change(
            self.batch, lambda b: b.with_status("failed", troubles=(trouble,))
        )
        self._context.log("info", f"Batch {self.batch.id} failed: {trouble.message}.")
        drop_journal(self._output)

    def _publish_files(self, status: BatchStatus, progress: Progress) -> None:
        """Add the written outputs to the files, and change the batch."""
        output_id = self._add_output_file(self.batch.answers_id, is_errors=False)
        error_id = self._add_output_file(self.batch.errors_id, is_errors=True)

        def change(batch: StoredBatch) -> StoredBatch:
            is_late = status == "completed" and batch.status == "cancelling"
            return batch.with_status(
                "cancelled" if is_late else status,
                progress=progress,
                troubles=(),
                output_file_id=output_id,
                error_file_id=error_id,
            )

        self._log_progress(
            f"is {self._batches.change(self.batch, change).status}", progress
        )

    def _log_progress(self, event: str, done: Progress) -> None:
        self._context.log(
            "info",
            f"Batch {self.batch.id} {event}: {with_noun(done.completed, 'answer')} and "
            f"{with_noun(done.failed, 'error')} of {with_noun(done.total, 'line')}.",
        )

    def _add_output_file(self, file_id: str, *, is_errors: bool) -> str | None:
        """Make a file of one of the two outputs; return its id; None: it has no line."""
        path = errors_path(self._output) if is_errors else self._output
        if not path.exists() or (size := path.stat().st_size) == 0:
            return None
        batch = self.batch
        kind = "errors" if is_errors else "output"
        self._files.add(
            ServerFile.make(
                file_id,
                batch.owner,
                size,
                f"{batch.id}_{kind}.jsonl",
                batch.output_expires_after_s,
                purpose="batch_output",
                batch_id=batch.id,
                is_errors=is_errors,
            )
        )
        return file_id

    def _pause_batch(self, error: Exception) -> None:
        """Pause the batch, and enter the reason."""
        self.trouble = trouble = find_trouble(error)
        text = str(error) if isinstance(error, FminferError) else trouble.message
        self._context.log("error", f"Batch {self.batch.id} pauses: {text}")
        if trouble.code == "internal_error":
            self._context.log(
                "error", make_printable("".join(traceback.format_exception(error)))
            )

        progress = self.progress
        if progress is None:  # its rows were not counted, as they cannot go on
            with suppress(FminferError, OSError):
                progress = count_finished(self._output, self.batch.progress.total)

        def change(batch: StoredBatch) -> StoredBatch:
            return replace(
                batch, progress=progress or batch.progress, troubles=(trouble,)
            )

        try:
            self._batches.change(self.batch, change)
        except FminferError:  # the same disk
            self._batches.change_in_memory(self.batch, change)


def _to_finalizing(batch: StoredBatch) -> StoredBatch:
    return batch if batch.status == "finalizing" else batch.with_status("finalizing")


def _progress_of(completed: CompletedOutput) -> Progress:
    """Return what a complete output's status file says."""
    usage = completed.status["usage"]
    return replace(
        Progress.from_counts(completed.counts),
        input_tokens=usage["input_tokens"],
        cached_tokens=usage["input_tokens_details"]["cached_tokens"],
        output_tokens=usage["output_tokens"],
    )
