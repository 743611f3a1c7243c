"""Answers one batch, in a thread of its own: from its input to its output, or to its early end."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from fminfer.answers.run_terms import RunTerms
from fminfer.contract.endpoints import EMBEDDINGS, URL_OF
from fminfer.contract.envelope import Envelope
from fminfer.contract.fields import is_integral
from fminfer.core.errors import FminferError, RequestError, StoppedError, UsageError, printable
from fminfer.core.quantities import counted
from fminfer.files.claims import drop_claims
from fminfer.files.completed import CompletedOutput, find_completed
from fminfer.files.journal import journal_path
from fminfer.files.ordered_output import errors_path
from fminfer.files.row_counts import Counts
from fminfer.job.journaled_input import JournaledInput
from fminfer.runtime.engine_api import Engine
from fminfer.runtime.lines.lanes import Lane
from fminfer.runtime.lines.line_intake import RecordForm
from fminfer.runtime.lines.runner import WINDOW
from fminfer.server.batches.early_end import count_kept, drop_journal, end_early
from fminfer.server.batches.stored_batches import (
    BatchStatus,
    BatchStore,
    Ending,
    Progress,
    StoredBatch,
    Trouble,
)
from fminfer.server.batches.stored_files import FileStore, ServerFile
from fminfer.server.batches.troubles import check_unchanged, trouble_of
from fminfer.server.http_errors import HttpError
from fminfer.server.server_log import ServerLog
from fminfer.server.service import ServedModel


def make_check(endpoint: str, model: ServedModel) -> Callable[[Envelope], None]:
    """Return what refuses a line that is not of a batch, by a RequestError."""

    num_inputs = 0  # of embeddings, in the lines so far

    def check(envelope: Envelope) -> None:
        nonlocal num_inputs
        if envelope.shape != "batch":
            raise RequestError(
                "unsupported_parameter",
                'the line is no request of a batch; write {"custom_id": "…", "method": "POST", '
                f'"url": "{endpoint}", "body": {{…}}}}',
            )
        url = URL_OF[envelope.endpoint or "completions"]
        if url != endpoint:
            raise RequestError(
                "unsupported_parameter",
                f"url is {url}, and the batch is for {endpoint}; put the line into a batch for "
                f"{url}",
                "url",
            )
        given = envelope.fields.get("input")
        is_one = not isinstance(given, list) or all(map(is_integral, given))
        num_inputs += 1 if is_one or given is None else len(given)
        if num_inputs > MAX_INPUTS and endpoint == EMBEDDINGS:
            raise RequestError(
                "out_of_range",
                f"the batch has more than {MAX_INPUTS:,} inputs by this line; put this line and "
                "those after it into another batch",
                "input",
            )
        try:
            model.check(envelope.fields.get("model"))
        except HttpError as error:
            raise RequestError("unsupported_parameter", str(error), "model") from None

    return check


MAX_INPUTS = 50_000  # of embeddings in a batch, as OpenAI has it
EMPTY = Trouble("empty_file", "the input file has no lines; upload one that has")
WAIT_S = 0.2  # between looks whether the batch is to end


@dataclass(slots=True)
class DoneRows:
    """Lines that batches have answered since the server began."""

    completed: int = 0
    failed: int = 0


@dataclass(slots=True, frozen=True)
class BatchShared:
    """What the runs of all batches share."""

    engine: Engine
    files: FileStore
    batches: BatchStore
    terms: RunTerms
    model: ServedModel
    done: DoneRows
    log: ServerLog


class BatchRun:
    """One batch that is being answered."""

    def __init__(self, batch: StoredBatch, shop: BatchShared) -> None:
        self.batch = batch
        self.trouble: Trouble | None = None  # for which it paused
        self._shop = shop
        self._output = shop.batches.output_of(batch)
        self._counts: Counts | None = None
        self._lane: Lane | None = None
        self._is_stopped = False

    @property
    def progress(self) -> Progress | None:
        """How far it is; None: as its batch says."""
        return None if self._counts is None else _progress(self._counts)

    def wake(self) -> None:
        """Have it look at its batch at once. Any thread may call it."""
        if (lane := self._lane) is not None:
            lane.wake()

    def stop(self) -> None:
        """Have it end; what is answered is kept. Any thread may call it."""
        self._is_stopped = True
        self.wake()

    def run(self) -> None:
        """Answer the batch, or bring it to its early end, or pause it."""
        try:
            self._bring_on()
        except StoppedError:
            pass  # the next server goes on
        except Exception as error:
            self._pause(error)

    def _bring_on(self) -> None:
        completed = None if journal_path(self._output).exists() else find_completed(self._output)
        if completed is not None and completed.find_edit() is None:
            self._complete(completed)  # the server ended before its batch said so
        elif (ending := self._find_ending()) is not None:
            self._end(ending)
        else:
            self._begin()  # it refuses an output that was edited

    def _begin(self) -> None:
        shop, batch = self._shop, self.batch
        check_unchanged(batch, self._output, shop.terms.fingerprint)
        # The folder is locked, so no claim holds, whatever it says. One may be this server's own,
        # left by trouble of the disk. A copied folder has those of another server.
        drop_claims(self._output)
        file = JournaledInput(self._find_input(), 0, self._output, shop.terms)
        try:
            file.begin()
            self._counts = file.counts
            if file.num_left == 0 and not file.counts.num_rows:
                self._fail(EMPTY)
                return
            self._move("in_progress", self._counts, only_from=("validating",))
            self._tell("goes on" if file.counts.done.num_rows else "begins", _progress(file.counts))
            ending = self._answer(file)
        except BaseException as error:
            file.abandon(error)
            raise
        if ending is not None:
            file.abandon(StoppedError(f"the batch is {ending}"))
            self._end(ending)
            return
        completed = find_completed(self._output)
        assert completed is not None, "every line has its record"
        self._complete(completed)

    def _answer(self, file: JournaledInput) -> Ending | None:
        """Answer the lines that are left; return why it stopped before all were."""
        batch = self.batch
        form = RecordForm(self._shop.model.names[0], batch.created_at)
        check = make_check(batch.endpoint, self._shop.model)
        runner, lane = self._shop.engine.runs.start_behind(
            form, check, WINDOW, lambda line: f"{batch.id}, line {line.number}"
        )
        self._lane = lane
        lines = file.lines(runner.pass_over)
        try:
            while runner.has_work:
                if (ending := self._find_ending()) is not None:
                    return ending
                runner.read_from(lines)
                records = runner.step()
                for record in records:
                    self._note_last(file)
                    if not file.add(replace(record, is_of_batch=True)):
                        raise FminferError("another process has taken the batch's output over")
                    self._shop.done.completed += record.error is None
                    self._shop.done.failed += record.error is not None
                if not records and not runner.wants_more:
                    lane.wait(WAIT_S, wants_room=runner.has_window)
        finally:
            runner.close()
            lane.close()
            self._lane = None
        return None

    def _find_input(self) -> Path:
        """Return where its input is.

        Raises:
            UsageError: it is gone, or others have edited it.
        """
        files, batch = self._shop.files, self.batch
        path = files.input_path(batch.input_file_id)
        stored = files.get_input(batch.input_file_id)
        size = path.stat().st_size if path.exists() else 0
        if stored is None or size != stored.bytes:
            was = "uploaded" if stored is None else f"uploaded with {stored.bytes:,}"
            raise UsageError(f"{path} has {size:,} bytes, and was {was}; put it back as it was")
        return path

    def _find_ending(self) -> Ending | None:
        """Return why the batch is to end before all is answered.

        Raises:
            StoppedError: the server ends.
        """
        if self._is_stopped:
            raise StoppedError("the server ends", "terminated")
        batch = self._shop.batches.now(self.batch)
        if batch.status == "cancelling":
            return "cancelled"
        return "expired" if time.time() >= batch.expires_at else None

    def _note_last(self, file: JournaledInput) -> None:
        """Enter the last status but one with the last record, which finishes the output."""
        counts = file.counts
        if file.num_left is not None and counts.done.num_rows + 1 == counts.num_rows:
            self._move("finalizing", counts, only_from=("in_progress",))

    def _move(
        self, status: BatchStatus, counts: Counts, *, only_from: tuple[BatchStatus, ...]
    ) -> None:
        """Enter a status, unless the batch is in another one by now; end a pause."""

        def change(batch: StoredBatch) -> StoredBatch:
            batch = replace(batch, progress=_progress(counts), troubles=())
            return batch.moved(status) if batch.status in only_from else batch

        self._shop.batches.change(self.batch, change)

    def _complete(self, completed: CompletedOutput) -> None:
        """Publish an output that is there."""
        if not completed.counts.num_rows:
            self._fail(EMPTY)
            return
        self._publish("completed", _progress_of(completed))

    def _end(self, ending: Ending) -> None:
        """Make an output of what is finished."""
        batch = self._shop.batches.now(self.batch)
        total = max(batch.progress.total, self._counts.num_rows if self._counts else 0)
        source = None
        if ending == "expired":
            source = self._find_input()
            self._shop.batches.change(batch, _finalizing)
        progress = end_early(self._output, source, total)
        self._publish(ending, progress)
        drop_journal(self._output)

    def _fail(self, trouble: Trouble) -> None:
        self._shop.batches.change(self.batch, lambda b: b.moved("failed", troubles=(trouble,)))
        self._shop.log.info(f"Batch {self.batch.id} failed: {trouble.message}.")
        drop_journal(self._output)

    def _publish(self, status: BatchStatus, progress: Progress) -> None:
        """Make files of what was written, and let the batch say so."""
        output_id = self._keep(self.batch.answers_id, is_errors=False)
        error_id = self._keep(self.batch.errors_id, is_errors=True)

        def change(batch: StoredBatch) -> StoredBatch:
            is_late = status == "completed" and batch.status == "cancelling"
            return batch.moved(
                "cancelled" if is_late else status,
                progress=progress,
                troubles=(),
                output_file_id=output_id,
                error_file_id=error_id,
            )

        self._tell(f"is {self._shop.batches.change(self.batch, change).status}", progress)

    def _tell(self, what: str, done: Progress) -> None:
        self._shop.log.info(
            f"Batch {self.batch.id} {what}: {counted(done.completed, 'answer')} and "
            f"{counted(done.failed, 'error')} of {counted(done.total, 'line')}."
        )

    def _keep(self, file_id: str, *, is_errors: bool) -> str | None:
        """Make a file of one of the two outputs; return its id; None: it has no line."""
        path = errors_path(self._output) if is_errors else self._output
        if not path.exists() or (size := path.stat().st_size) == 0:
            return None
        batch, now_ns, lives_s = self.batch, time.time_ns(), self.batch.output_expires_after_s
        kind = "errors" if is_errors else "output"
        self._shop.files.keep(
            ServerFile(
                *(file_id, batch.owner, size, now_ns, f"{batch.id}_{kind}.jsonl"),
                purpose="batch_output",
                batch_id=batch.id,
                is_errors=is_errors,
                expires_at=None if lives_s is None else now_ns // 10**9 + lives_s,
            )
        )
        return file_id

    def _pause(self, error: Exception) -> None:
        """Let the batch say why it does not go on."""
        self.trouble = trouble = trouble_of(error)
        text = str(error) if isinstance(error, FminferError) else trouble.message
        self._shop.log.error(f"Batch {self.batch.id} pauses: {text}")
        if trouble.code == "internal_error":
            self._shop.log.error(printable("".join(traceback.format_exception(error))))

        progress = self.progress
        if progress is None:  # its rows were not counted, as they cannot go on
            with suppress(FminferError, OSError):
                progress = count_kept(self._output, self.batch.progress.total)

        def change(batch: StoredBatch) -> StoredBatch:
            return replace(batch, progress=progress or batch.progress, troubles=(trouble,))

        try:
            self._shop.batches.change(self.batch, change)
        except FminferError:  # the same disk
            self._shop.batches.note(self.batch, change)


def _finalizing(batch: StoredBatch) -> StoredBatch:
    return batch if batch.status == "finalizing" else batch.moved("finalizing")


def _progress(counts: Counts) -> Progress:
    return Progress(counts.num_rows, counts.num_completed, counts.num_failed, *counts.tokens)


def _progress_of(completed: CompletedOutput) -> Progress:
    """Return what a complete output's status file says."""
    counts, usage = completed.counts, completed.status["usage"]
    return Progress(
        *(counts.num_rows, counts.num_completed, counts.num_failed),
        *(usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]),
        usage["output_tokens"],
    )
