"""Files that several runs answer together: whoever is ready claims the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fminfer.answers.run_terms import RunTerms
from fminfer.core.errors import InUseError, UsageError
from fminfer.files.disk import told
from fminfer.files.output_paths import Plan
from fminfer.files.row_counts import RowCounts
from fminfer.job.free_files import FreeFiles
from fminfer.job.journaled_input import JournaledInput
from fminfer.job.run_inputs import RunInput, add_files, sum_saved
from fminfer.job.run_summary import JobSummary

SCAN_EVERY_S = 2.0  # while no file is free


class SharedFiles:
    """The inputs of a run that shares them with others, opened one by one, when it is their turn.

    Args:
        find: lists the inputs and the output of each, as they are now.
        is_watching: wait for more files when all are answered.
    """

    def __init__(self, find: Callable[[], Plan], terms: RunTerms, *, is_watching: bool) -> None:
        self.files: list[JournaledInput] = []  # claimed by this run, by their number
        self.num_rows: int | None = None  # if no other run takes a file; None: not known
        self._terms, self._is_watching = terms, is_watching
        self._free = FreeFiles(find, terms, is_watching=is_watching)
        self._given_back: set[int] = set()  # numbers of `files` that were lost, and may come free
        self._num_beaten = 0  # files that another run claimed first, since the last look
        self._next_scan_s = 0.0
        self._was_idle = False  # at the last look: nothing was left of this run's own
        self._has_ended = False

    @property
    def refused(self) -> dict[str, str]:
        """Inputs that cannot be answered, and why; as the folder is now."""
        return self._free.refused

    @property
    def num_elsewhere(self) -> int:
        """Files that other runs were answering at the last look."""
        return self._free.num_elsewhere + self._num_beaten

    @property
    def kept(self) -> RowCounts:
        """Rows of other runs: each once, also of a file that changed hands."""
        kept, own = dict(self._free.complete), dict.fromkeys(self._free.complete, RowCounts())
        for file in self.files:
            before = own.get(file.path, RowCounts())
            own[file.path] = before + file.own
            if file.path not in self._free.complete:
                kept[file.path] = file.kept.without(before)
        for path in self._free.complete:
            kept[path] = kept[path].without(own[path])
        return sum(kept.values(), RowCounts())

    @property
    def num_saved_rows(self) -> int | None:
        return sum_saved([*{file.path: file for file in self.files}.values()])

    @property
    def is_finished(self) -> bool:
        """Return whether nothing is left that this run could answer, now or later."""
        return self._has_ended and all(file.is_settled for file in self.files)

    def look(self) -> bool:
        """Return whether there is anything to answer, before a model is loaded for it.

        Raises:
            UsageError: an output is another model's, or was made with other settings.
        """
        is_left = self._free.look()
        self._count_rows()
        self._has_ended = not (is_left or self._is_watching)
        return not self._has_ended

    def turns(self) -> Iterator[JournaledInput | None]:
        """Yield each file as it is claimed; None where none is free at the moment."""
        while not self._has_ended:
            is_idle = all(file.is_settled for file in self.files)
            # Once its own work is done, a run looks at once whether it is over.
            if time.monotonic() < self._next_scan_s and is_idle == self._was_idle:
                yield None
                continue
            self._was_idle = is_idle
            opened, began_s = len(self.files), time.monotonic()
            self._give_back_lost()
            self._num_beaten = 0
            for path, output in self._free.find():
                file = self._claim(path, output)
                if file is not None:
                    yield file
            if len(self.files) == opened:
                # What others answer may become free as long as this run has work of its own.
                self._has_ended = is_idle and not self._is_watching
                took_s = time.monotonic() - began_s  # thousands of names take their time
                self._next_scan_s = time.monotonic() + max(SCAN_EVERY_S, 20 * took_s)

    def give_up(self, file: RunInput, error: UsageError) -> None:
        """Leave a file that has changed since it was opened."""
        if not isinstance(error, InUseError):  # otherwise it may come free
            self._free.refuse(file.path, error)
        file.abandon(error)

    def check_kept(self) -> None:
        """Do nothing: other runs finish what they took over, and `num_elsewhere` counts it."""

    def abandon(self, error: BaseException) -> None:
        for file in self.files:
            file.abandon(error)

    def add_to(self, summary: JobSummary) -> None:
        mine = [file for file in self.files if not file.is_lost]
        summary.inputs = [file.path for file in mine]
        summary.outputs = [file.output for file in mine]
        summary.num_files_elsewhere = self.num_elsewhere
        summary.refused = self.refused
        add_files(self.files, self.kept, summary)

    def _give_back_lost(self) -> None:
        """Look again at files that another run took over: that run may die, too."""
        for number, file in enumerate(self.files):
            is_open = file.is_lost and not file.is_finished
            if is_open and not self._free.is_refused(file.path) and number not in self._given_back:
                self._free.give_back(file.path)
                self._given_back.add(number)

    def _claim(self, path: Path, output: Path) -> JournaledInput | None:
        with told(output):
            output.parent.mkdir(parents=True, exist_ok=True)
        claim = self._terms.claims.take(output)
        self._free.num_rows.pop(path, None)
        if claim is None:
            self._num_beaten += 1
            return None
        try:
            file = JournaledInput(path, len(self.files), output, self._terms, claim)
            file.begin()
        except InUseError:  # by a run that knows no claims, or is slow to give it back
            claim.release()
            self._num_beaten += 1
            return None
        except (UsageError, OSError) as error:  # of the input: the output's are OutputErrors
            claim.release()
            self._free.refuse(path, error)
            return None
        except BaseException:
            claim.release()
            raise
        self._free.take(path)
        self.files.append(file)
        self._count_rows()
        return file

    def _count_rows(self) -> None:
        rows = [*(file.num_left for file in self.files), *self._free.num_rows.values()]
        self.num_rows = None if None in rows else sum(row or 0 for row in rows)
