"""One input whose answers go to a file; resumed runs, and runs that share it, go on with it.

It puts four parts together: `InputFile` has the lines, `Hold` says whether this run may write,
`Journal` has what is done, and `StatusFile` tells it to others.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

from fminfer.answers.carrying_over import (
    CarriedOver,
    RunTerms,
    carry_answers_over,
    rebuild_journal,
    remove_answerless_output,
)
from fminfer.contract.envelope import Line, read_clock
from fminfer.contract.record import Record
from fminfer.core.errors import OutputError, UsageError
from fminfer.files.claims import Claim, Hold
from fminfer.files.completed import find_clock, find_completed, require_completed
from fminfer.files.disk import raising_disk_errors
from fminfer.files.journal import Journal, inspect_journal, journal_path
from fminfer.files.journal_rows import CLOCK, INPUT, Counts, Row, RowCounts
from fminfer.files.line_reader import InputFile
from fminfer.files.ordered_output import Seals, errors_path, write_ordered_output
from fminfer.files.own_files import (
    RECORDS,
    TABLE,
    require_own_file,
    require_own_outputs,
)
from fminfer.files.run_facts import RunHistory, parse_runs
from fminfer.files.status_file import StatusFile, check_vectors_owned, read_status
from fminfer.files.tables.table_writer import TableTask, changed_error

MANY_ROWS = 100_000  # of a journal that is not read again if it has just been made
# What is to be done with an input before its lines are answered. "reopen" makes the
# journal of its complete output again, "write table" too, and no line is left then.
# "carry over" takes answers to an earlier form of the input. "finished": all lines have
# their record.
State = Literal["reopen", "write table", "carry over", "answer", "finished"]


class JournaledInput:
    """An input whose answers go to its journal, and then to a file.

    Args:
        source: its number in the run.
        claim: of the output, if it is this run's already.
    """

    def __init__(
        self,
        path: Path,
        source: int,
        output: Path,
        terms: RunTerms,
        claim: Claim | None = None,
    ) -> None:
        require_own_outputs(output)
        _require_own_table(output, terms)
        # As they are now. Beside a journal, they may have come since a run was killed.
        self._files_at_start = {
            path
            for path in (output, errors_path(output))
            if path.exists() and not journal_path(output).exists()
        }
        self.path = path
        self.source = source
        self.output = output
        self.num_damaged_rows = self.num_tried_rows = 0
        self.hold = Hold(output, terms.claims, claim)
        self.journal: Journal | None = None  # open while the input is being answered
        self._terms = terms
        self._input = InputFile(path, source, terms.limit, terms.row_template)
        self._fingerprint = {
            INPUT: self._input.digest,
            CLOCK: read_clock(),
        } | terms.fingerprint
        self.counts = Counts()  # rows and tokens so far
        self._state: State = "answer"
        self.carried = CarriedOver()  # from answers to an earlier form of the input
        # seals of tables that earlier runs wrote from the same records
        self._older_tables: Seals = {}
        takes_over = terms.count_lines is not None
        journal = inspect_journal(
            output, self._fingerprint, restart=terms.restart, takes_over=takes_over
        )
        if journal == "other input":
            self._state = "carry over"
        if not terms.restart and (clock := find_clock(output)) is not None:
            self._fingerprint[CLOCK] = clock
        if journal is None and not terms.restart and output.exists():
            self._adopt_output()
        if self._state in ("reopen", "answer"):
            self._input.count_rows()
            self.counts.num_rows = self._input.num_rows or 0
        is_kept = not terms.restart and (journal is not None or output.exists())
        earlier = parse_runs(read_status(output)) if is_kept else []
        self._history = RunHistory(terms.current_run, earlier)
        self.status = StatusFile(
            source=path,
            output=output,
            model=terms.model,
            fingerprint=self._fingerprint,
            counts=self.counts,
            limit=terms.limit,
            input_changed_ns=self._input.changed_ns,
            list_runs=self._history.to_list,
        )

    @property
    def is_finished(self) -> bool:
        return self._state == "finished"

    @property
    def is_lost(self) -> bool:
        return self.hold.is_lost

    @property
    def is_settled(self) -> bool:
        """Return whether nothing of it is left for this run."""
        return self.is_finished or self.is_lost

    @property
    def num_left(self) -> int | None:
        """Lines that this run has to answer, or has answered; None: not known before the end."""
        if self.is_lost:
            return self.counts.by_this_run.num_rows
        num_rows = self.counts.num_rows if self.is_finished else self._input.num_rows
        return None if num_rows is None else num_rows - self.kept.num_rows

    @property
    def kept(self) -> RowCounts:
        """Rows of other runs."""
        return self.counts.kept

    @property
    def num_saved_rows(self) -> int:
        """Lines that have their record, of this run and of others."""
        return self.counts.done.num_rows

    def begin(self) -> None:
        """Count the rows of earlier runs; if they answered every line, finish for them."""
        if self.is_finished:
            return
        self.hold.check_free()
        with raising_disk_errors(self.output.parent):
            self.output.parent.mkdir(parents=True, exist_ok=True)
        has_all_rows = self._state == "write table"
        if self._state == "reopen" or has_all_rows:
            self._rebuild_journal()
        elif self._state == "carry over":
            self._carry_answers_over()
        self._state = "answer"
        # There from the start, so that no run of another kind takes the output meanwhile.
        journal = Journal(self.output, self._fingerprint, restart=self._terms.restart)
        self.journal = journal
        self.hold.remove_dead_claims()
        if not (journal.num_rows or journal.num_tried):
            remove_answerless_output(self.output, self._fingerprint, self._terms)
        self.status.set_status("validating")
        self._count_kept(journal)
        try:
            self._input.check_limit(journal.last_number)
        except UsageError:
            journal.close()
            self.journal = None
            raise
        is_known = journal.num_rows or has_all_rows
        if journal.num_rows == self._input.num_rows and is_known:
            self._input.mark_read(journal.num_rows)
            self._finish_if_complete()
        elif not (journal.has_locks and self.carried.num_answered >= MANY_ROWS):
            # opened again when it is this input's turn: there may be thousands
            journal.close()
            self.journal = None

    def read_lines(self, pass_over: Callable[[Line], None]) -> Iterator[Line]:
        """Read the lines that are left; call `pass_over` for each that was answered earlier."""
        if self.is_finished:
            return
        journal = self._open_journal()
        if journal is None:
            return
        self._check_input_again(journal)
        repeats = self.carried.find_repeats(journal)
        self.status.set_status("in_progress")
        for read in self._input.read_lines():
            shows_number = self._terms.has_line_numbers
            line = replace(read, clock=journal.clock, shows_number=shows_number)
            self.counts.num_rows = max(self._input.num_rows or 0, self._input.num_read)
            if self.is_lost:
                return
            if line.number not in journal:
                if repeats is not None:
                    line = replace(line, num_equal=repeats[line.number], is_alone=True)
                yield line
                continue
            if not journal.has_input_crc(line.number, zlib.crc32(line.raw)):
                raise UsageError(
                    f"line {line.number} of {self.path} is not the one that an earlier run has "
                    "answered; give --restart to answer all from the start, or another --output"
                )
            if repeats is None:
                pass_over(line)
        self.counts.num_rows = self._input.num_read
        # its last record may have come before its end was seen
        self._finish_if_complete()

    def add(self, record: Record) -> bool:
        """Write a record at once; return False if another run has taken the output over."""
        if not self.hold.is_held():
            self._stop_writing()
        if self.is_lost:
            return False
        assert self.journal is not None, (
            "a record of an input that is not being answered"
        )
        row = _make_row(record)
        self.journal.append(row)
        self.counts.add(is_error=row.is_error, tokens=row.tokens)
        self.status.journal_bytes = self.journal.num_bytes
        self.status.update()
        self._finish_if_complete()
        return True

    def adopt_completed(self) -> None:
        """Count a lost output as finished if another run of its settings completed it."""
        if self.output.exists() and not journal_path(self.output).exists():
            self._adopt_output()

    def abandon(self, error: BaseException) -> None:
        """Stop without finishing; records that still come are not written."""
        if self.is_settled:
            return
        # there are other files, and a reason to be told
        with contextlib.suppress(OutputError):
            if self.journal is not None:
                self.journal.close()
            self.status.end_with_error(error)
        self.hold.mark_lost()

    def _rebuild_journal(self) -> None:
        """Make the journal of a complete output again."""
        with self.hold.acquired():
            # of a run that did so and died meanwhile
            if not journal_path(self.output).exists():
                completed = require_completed(self.output, self.path, self._fingerprint)
                rebuild_journal(self.path, completed, self._fingerprint, self._terms)

    def _carry_answers_over(self) -> None:
        """Make the journal from the answers to an earlier form of the input."""
        with self.hold.acquired():
            carried = carry_answers_over(
                self.path, self.output, self._fingerprint, self._terms
            )
        if carried is None:  # another run has done so meanwhile
            self._input.count_rows()
        else:
            self.carried = carried
            self._input.set_count(carried.num_rows, carried.last_number)
        self.counts.num_rows = self._input.num_rows or 0

    def _open_journal(self) -> Journal | None:
        """Open the journal for writing; None: another run has finished the output meanwhile."""
        try:
            self.hold.acquire()
            journal = self.journal or Journal(self.output, self._fingerprint)
            self.hold.remove_dead_claims()
        except UsageError:
            self._stop_writing()
            raise
        has_rows = journal.num_rows or journal.num_tried
        if not (has_rows or self._terms.restart) and self.output.exists():
            journal.remove()
            self.hold.mark_lost()
            self._adopt_output()
            return None
        self.journal = journal
        self._fingerprint[CLOCK] = journal.clock  # another run may have begun it since
        self._count_kept(journal)
        return journal

    def _check_input_again(self, journal: Journal) -> None:
        """Check whether the input has changed while the run answered others."""
        has_changed = self._input.update_digest()
        self.status.input_changed_ns = self._input.changed_ns
        if not has_changed:
            return
        if journal.num_rows or journal.num_tried:
            raise UsageError(
                f"{self.path} was changed since this run began, and rows of an earlier run are "
                "kept. Run the same command again: it keeps the answers to lines that are still "
                "there (--restart answers all anew)"
            )
        self._fingerprint[INPUT] = self._input.digest  # the status file's as well
        journal.restart(self._fingerprint)
        self._history.drop_earlier_runs()
        self._input.count_rows()
        self.counts.num_rows = self._input.num_rows or 0

    def _count_kept(self, journal: Journal) -> None:
        self.counts.start_from(journal.kept)
        self.status.journal_bytes = journal.num_bytes
        self.num_damaged_rows = journal.num_damaged
        self.num_tried_rows = journal.num_tried

    def _finish_if_complete(self) -> None:
        """Write the output under its final name once every line has its record."""
        journal = self.journal
        if journal is None or not self._input.has_all_answers(
            journal.num_rows, journal.last_number
        ):
            return
        status = self.status
        if journal.vector_bytes:
            check_vectors_owned(self.output)  # it may have come while the run answered
            status.has_vectors = True
        table = self._make_table_task()
        for path in {self.output, errors_path(self.output)} - self._files_at_start:
            # it may have come meanwhile
            require_own_file(path, RECORDS, "a file of this run,")
        status.set_status("finalizing")
        seals = write_ordered_output(
            journal, has_older_vectors=status.has_vectors, table=table
        )
        status.seals = {**self._older_tables, **seals}
        status.has_vectors = "vectors" in status.seals
        self.status.set_status("completed")
        self._state = "finished"
        self.journal = None
        journal.remove()  # last: until then the next run does all of this again
        self.hold.remove_leftovers()

    def _make_table_task(self) -> TableTask | None:
        """Return the table to write, once it is sure that its input is as it was answered."""
        table = self._terms.table
        if table is None:
            return None
        self._input.update_digest()
        if self._input.digest != self._fingerprint[INPUT]:
            raise changed_error(self.path)
        require_own_file(table.path, TABLE, "the table of this run,")
        return TableTask(
            table,
            source=self.path,
            changed_ns=self._input.changed_ns,
            is_cut=self._terms.limit is not None,
        )

    def _adopt_output(self) -> None:
        """Count the output that is there as finished, or note what is to be done with it."""
        terms = self._terms
        completed = require_completed(
            self.output,
            self.path,
            self._fingerprint,
            takes_over=terms.count_lines is not None,
        )
        self._older_tables = completed.list_table_seals()
        if terms.can_carry_over(completed.fingerprint, self._fingerprint):
            self._state = "carry over"
        elif completed.has_rows_left(terms.limit, terms.started_s):
            self._state = "reopen"
        elif completed.lacks_table(terms.table):
            self._state = "write table"
            self.counts.num_rows = completed.counts.num_rows
            self._input.set_count(self.counts.num_rows, self.counts.num_rows)
        else:
            completed.check_unedited()
            self.counts.adopt_completed(completed.counts)
            self._state = "finished"
            self.hold.remove_leftovers()

    def _stop_writing(self) -> None:
        """Stop writing: this process slept, or could not reach the disk, for too long."""
        if self.journal is not None:
            with contextlib.suppress(OutputError):
                self.journal.close()
            self.journal = None
        self.hold.mark_lost()


def _require_own_table(output: Path, terms: RunTerms) -> None:
    """Raise a UsageError if the table of a run is there, and is not of this output."""
    table = terms.table
    if table is None:
        return
    require_own_file(table.path, TABLE, "the table of this run,")
    completed = find_completed(output)
    is_known = terms.restart or journal_path(output).exists() or not table.path.exists()
    if not is_known and (completed is None or not completed.has_table(table.path)):
        raise UsageError(
            f"{table.path} was not written by this run, or was edited since. Move it away: "
            f"the same command then writes it again from {output}, without answering anew. "
            "Or give another --output"
        )


def _make_row(record: Record) -> Row:
    """Return a record as its journal's row."""
    return Row(
        number=record.line.number,
        is_error=record.error is not None,
        tokens=(
            record.num_prompt_tokens,
            record.num_cached_tokens,
            record.num_completion_tokens,
        ),
        input_crc=zlib.crc32(record.line.raw),
        record=record.to_json(),
        is_ours=record.error is not None and record.error.is_retryable,
        key=record.key,
        vector=record.vector,
    )
