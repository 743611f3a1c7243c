"""Files that several runs answer together: whoever is ready claims the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fminfer.answers.carrying_over import RunTerms
from fminfer.core.errors import InUseError, UsageError
from fminfer.files.claims import Hold, find_claimed, read_claims, read_disk_clock
from fminfer.files.completed import CompletedOutput, find_completed
from fminfer.files.disk import raising_disk_errors
from fminfer.files.journal import check_journal_settings, journal_path
from fminfer.files.journal_rows import RowCounts
from fminfer.files.line_reader import count_lines, sum_counts
from fminfer.files.output_paths import OutputPaths
from fminfer.files.streams import read_changed_ns
from fminfer.job.journaled_input import JournaledInput
from fminfer.job.run_inputs import RunInput, RunInputs
from fminfer.job.run_summary import JobSummary

SCAN_EVERY_S = 2.0  # while no file is free
YOUNG_S = 5.0  # a file that was written so lately may not be whole
# size of the files whose rows are counted before the first answer
MOST_COUNTED_BYTES = 4 << 30
WATCHED = "what came while watching"  # in place of a path, when a whole look fails


class SharedFiles(RunInputs):
    """The inputs of a run that shares them with others. It opens one after another.

    Args:
        find: lists the inputs and the output of each, as they are now.
        is_watching: wait for more files when all are answered; some may be only half there.
    """

    def __init__(
        self,
        find_paths: Callable[[], OutputPaths],
        terms: RunTerms,
        *,
        is_watching: bool,
    ) -> None:
        self.files: list[JournaledInput] = []  # claimed by this run, by their number
        # if no other run takes a file; None: not known
        self.num_rows: int | None = None
        self.num_elsewhere = 0  # files that other runs were answering at the last look
        self._find_paths = find_paths
        self._terms = terms
        self._is_watching = is_watching
        self._paths = OutputPaths([], [])
        # rows of files that other runs have completed
        self._complete: dict[Path, RowCounts] = {}
        self._free_rows: dict[Path, int | None] = {}  # of each file that is free
        self._refused: dict[Path | str, str] = {}  # since they were looked at
        self._settled: set[Path] = set()  # answered, refused, or this run's own
        # numbers of `files` that were lost, and may come free
        self._given_back: set[int] = set()
        # at the last look, a claim had no owner yet, or came and went
        self._must_look_again = False
        self._next_scan_s = 0.0
        self._was_idle = False  # at the last look: nothing was left of this run's own
        self._has_ended = False

    @property
    def refused(self) -> dict[str, str]:
        """Inputs that cannot be answered, and why; as the folder is now."""
        both = (*self._paths.refused.items(), *self._refused.items())
        return {str(path): reason for path, reason in both}

    @property
    def kept(self) -> RowCounts:
        """Rows of other runs: each once, also of a file that changed hands."""
        kept = dict(self._complete)
        by_this_run = dict.fromkeys(self._complete, RowCounts())
        for file in self.files:
            before = by_this_run.get(file.path, RowCounts())
            by_this_run[file.path] = before + file.counts.by_this_run
            if file.path not in self._complete:
                kept[file.path] = file.kept.minus(before)
        for path in self._complete:
            kept[path] = kept[path].minus(by_this_run[path])
        return sum(kept.values(), RowCounts())

    @property
    def is_finished(self) -> bool:
        """Return whether nothing is left that this run could answer, now or later."""
        return self._has_ended and all(file.is_settled for file in self.files)

    def scan(self) -> bool:
        """Find the free files; tell whether there is anything to load a model for."""
        self._paths = self._find_paths()
        free = []
        for path, output in self._find_free_files():
            free.append(path)
            if journal_path(output).exists() and not self._terms.restart:
                check_journal_settings(output, self._terms.fingerprint)
        for reason in self._refused.values():
            raise UsageError(reason)
        self._free_rows = dict.fromkeys(free)
        if (
            not self._is_watching
            and sum(path.stat().st_size for path in free) < MOST_COUNTED_BYTES
        ):
            for path in free:
                self._count_free_rows(path)
        self._count_rows()
        is_left = any(path not in self._settled for path in free)
        may_go_on = is_left or self._is_watching or self._must_look_again
        self._has_ended = not may_go_on
        return not self._has_ended

    def iterate_files(self) -> Iterator[JournaledInput | None]:
        """Yield each file as it is claimed; None where none is free at the moment."""
        while not self._has_ended:
            is_idle = all(file.is_settled for file in self.files)
            # Once its own work is done, a run looks at once whether it is over.
            if time.monotonic() < self._next_scan_s and is_idle == self._was_idle:
                yield None
                continue
            self._was_idle = is_idle
            opened = len(self.files)
            began_s = time.monotonic()
            self._list_files_again()
            for path, output in self._find_free_files():
                file = self._claim_file(path, output)
                if file is not None:
                    yield file
            if len(self.files) == opened:
                # What others answer may become free as long as this run has work of its own.
                may_go_on = self._is_watching or self._must_look_again
                self._has_ended = is_idle and not may_go_on
                # thousands of names take their time
                took_s = time.monotonic() - began_s
                self._next_scan_s = time.monotonic() + max(SCAN_EVERY_S, 20 * took_s)

    def abandon_file(self, file: RunInput, error: UsageError) -> None:
        """Leave a file that has changed since it was opened."""
        if not isinstance(error, InUseError):  # otherwise it may come free
            self._note_refused(file.path, error)
        file.abandon(error)

    def check_none_lost(self) -> None:
        """Do nothing: other runs finish what they took over, and `num_elsewhere` counts it."""

    def add_to_summary(self, summary: JobSummary) -> None:
        mine = [file for file in self.files if not file.is_lost]
        summary.inputs = [file.path for file in mine]
        summary.outputs = [file.output for file in mine]
        summary.num_files_elsewhere = self.num_elsewhere
        summary.refused = self.refused
        super().add_to_summary(summary)

    def _list_files_again(self) -> None:
        """List the files again, with those that other runs took over: these may die, too."""
        for number, file in enumerate(self.files):
            is_open = file.is_lost and not file.is_finished
            if (
                is_open
                and file.path not in self._refused
                and number not in self._given_back
            ):
                self._settled.discard(file.path)
                self._given_back.add(number)
        try:
            self._paths = self._find_paths()
            self._refused.pop(WATCHED, None)
        except UsageError as error:
            self._refused[WATCHED] = str(error)

    def _find_free_files(self) -> Iterator[tuple[Path, Path]]:
        """Yield each input that is free, and its output."""
        self.num_elsewhere = 0
        self._must_look_again = False
        has_claim = find_claimed(self._paths.outputs)
        for path, output in zip(self._paths.inputs, self._paths.outputs, strict=True):
            # What was refused is looked at again: another run may have completed it since.
            is_known = path in self._settled and path not in self._refused
            if (
                is_known
                or not path.exists()
                or not self._is_left(path, output, has_claim)
            ):
                continue
            if output in has_claim and self._note_elsewhere(output):
                self._free_rows.pop(path, None)
            else:
                yield path, output

    def _note_elsewhere(self, output: Path) -> bool:
        """Note whether another run has claimed an output; return whether one has.

        A claim without its owner's name was torn by a kill, or is just being written.
        """
        living = [claim for claim in read_claims(output) if not claim.is_dead]
        self.num_elsewhere += bool(living)
        if not all(claim.is_whole for claim in living):
            self._must_look_again = True
        return bool(living)

    def _is_left(self, path: Path, output: Path, has_claim: set[Path]) -> bool:
        """Return whether a file is still to be answered, and was not refused."""
        try:
            completed = self._find_completed(path, output)
            # A file that is young, in a folder that is watched, may still be written.
            is_left = (completed is None and path not in self._refused) and not (
                self._is_watching
                and -YOUNG_S < path.stat().st_mtime - read_disk_clock(path.parent) <= 0
            )
        except (UsageError, OSError) as error:
            self._note_refused(path, error)
            return False
        if completed is None:
            return is_left
        self._complete[path] = completed.counts.done
        self._settled.add(path)
        self._refused.pop(path, None)
        if output in has_claim:
            Hold(output, self._terms.claims).remove_leftovers()
        return False

    def _find_completed(self, path: Path, output: Path) -> CompletedOutput | None:
        """Return a complete output whose input has not changed since; None: it is none."""
        if not output.exists() or journal_path(output).exists():
            return None
        completed = find_completed(output)
        if completed is None or (
            self._terms.restart and completed.ended_before(self._terms.started_s)
        ):
            return None
        completed.check_settings(self._terms.fingerprint)
        if not completed.is_of_input_changed_at(
            read_changed_ns(path)
        ) or completed.has_rows_left(self._terms.limit, self._terms.started_s):
            return None
        completed.check_unedited()
        return completed

    def _claim_file(self, path: Path, output: Path) -> JournaledInput | None:
        """Open a file that no other run has claimed meanwhile, and that can be answered."""
        with raising_disk_errors(output):
            output.parent.mkdir(parents=True, exist_ok=True)
        claim = self._terms.claims.acquire(output)
        self._free_rows.pop(path, None)
        if claim is None:
            if not self._note_elsewhere(output):  # its owner has released it since
                self._must_look_again = True
            return None
        try:
            file = JournaledInput(path, len(self.files), output, self._terms, claim)
            file.begin()
        except BaseException as error:
            claim.release()
            # by a run that knows no claims, or is slow
            if isinstance(error, InUseError):
                self.num_elsewhere += 1
            # The input's errors; the output's are others.
            elif isinstance(error, UsageError | OSError):
                self._note_refused(path, error)
            else:
                raise
            return None
        self._settled.add(path)
        self.files.append(file)
        self._count_rows()
        return file

    def _note_refused(self, path: Path, error: Exception) -> None:
        """Note that a file cannot be answered, and why."""
        self._settled.add(path)
        self._refused[path] = str(error)

    def _count_free_rows(self, path: Path) -> None:
        try:
            terms = self._terms
            self._free_rows[path] = count_lines(path, terms.limit, terms.row_template)
        except UsageError as error:  # it cannot be read
            del self._free_rows[path]
            self._note_refused(path, error)

    def _count_rows(self) -> None:
        left = (file.num_left for file in self.files)
        self.num_rows = sum_counts([*left, *self._free_rows.values()])
