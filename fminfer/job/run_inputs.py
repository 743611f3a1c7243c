"""The interface of a run's inputs: named files, a shared folder, stdin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from fminfer.answers.carrying_over import CarriedOver
from fminfer.contract.envelope import Line
from fminfer.contract.record import Record
from fminfer.core.errors import UsageError
from fminfer.files.row_counts import RowCounts
from fminfer.job.run_summary import JobSummary


class RunInput(Protocol):
    """One input and where its answers go."""

    @property
    def path(self) -> Path: ...

    @property
    def output(self) -> Path: ...

    @property
    def num_left(self) -> int | None:
        """Lines that this run has to answer, or has answered; None: not known before the end."""

    @property
    def kept(self) -> RowCounts:
        """Rows of other runs that stand in the output."""

    @property
    def num_damaged_rows(self) -> int:
        """Rows of earlier runs that the disk did not keep whole."""

    @property
    def num_tried_rows(self) -> int:
        """Rows that failed in earlier runs, and are tried again."""

    @property
    def carried(self) -> CarriedOver:
        """What became of answers to an earlier form of the input."""

    @property
    def num_saved_rows(self) -> int | None:
        """Lines whose record the next run keeps; None: it keeps none."""

    @property
    def is_finished(self) -> bool:
        """Return whether every line has its record, by this run or another."""

    @property
    def is_lost(self) -> bool:
        """Return whether it was given up, or another run has taken it over."""

    @property
    def is_settled(self) -> bool:
        """Return whether nothing of it is left for this run."""

    def lines(self, pass_over: Callable[[Line], None]) -> Iterator[Line]:
        """Read the lines to answer; `pass_over` is told of those that were answered before."""

    def add(self, record: Record) -> bool:
        """Write a record; return False if the input is lost, and it was not written."""

    def see_completed(self) -> None:
        """Count a lost input as finished if another run has completed it."""

    def abandon(self, error: BaseException) -> None:
        """Stop without finishing; the status file says why. Records that still come are lost."""


class RunInputs(Protocol):
    """The inputs of a run. `files` grows where they are found one by one."""

    @property
    def files(self) -> Sequence[RunInput]:
        """Return the inputs so far; a line's `source` is the place of its own."""

    @property
    def num_rows(self) -> int | None:
        """Lines that this run has to answer, as far as it can be known; None: it cannot."""

    @property
    def is_finished(self) -> bool:
        """Return whether nothing is left for this run."""

    @property
    def num_saved_rows(self) -> int | None:
        """Rows that the next run keeps; None: it keeps none."""

    def turns(self) -> Iterator[RunInput | None]:
        """Yield each input when it is its turn; None where none is free at the moment."""

    def give_up(self, file: RunInput, error: UsageError) -> None:
        """Leave an input that cannot be answered.

        Raises:
            UsageError: the same, where the run cannot go on without it.
        """

    def check_kept(self) -> None:
        """Check that no other run answers an input of this run.

        Raises:
            InUseError: one is.
        """

    def abandon(self, error: BaseException) -> None:
        """Stop without finishing; each status file says why."""

    def add_to(self, summary: JobSummary) -> None:
        """Add what became of the inputs to a run's summary."""


def sum_saved(files: Sequence[RunInput]) -> int | None:
    """Sum the rows that the next run keeps; None: it keeps none."""
    saved = [file.num_saved_rows for file in files if file.num_saved_rows is not None]
    return sum(saved) if saved else None


def add_files(files: Sequence[RunInput], kept: RowCounts, summary: JobSummary) -> None:
    """Add to a summary what it counts file by file, and the rows of other runs.

    What a run finds in a file counts once, also if it lost that file and took it again.
    """
    summary.num_kept_rows, summary.num_kept_errors = kept.num_rows, kept.num_errors
    damaged: dict[Path, int] = {}
    tried: dict[Path, int] = {}
    carried: dict[Path, CarriedOver] = {}
    for file in files:
        if file.is_lost and file.is_finished:
            summary.completed_elsewhere.append(str(file.output))
        damaged[file.path] = max(damaged.get(file.path, 0), file.num_damaged_rows)
        tried[file.path] = max(tried.get(file.path, 0), file.num_tried_rows)
        if file.carried.has_answers:
            carried[file.path] = file.carried
    summary.num_damaged_rows, summary.num_tried_rows = sum(damaged.values()), sum(tried.values())
    summary.num_changed_inputs = len(carried)
    summary.num_taken_rows = sum(each.num_taken for each in carried.values())
    summary.num_left_out_rows = sum(each.num_left_out for each in carried.values())
