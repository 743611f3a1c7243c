"""Which files of a folder are free: neither answered, nor another run's, nor refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fminfer.answers.run_terms import RunTerms
from fminfer.core.errors import UsageError
from fminfer.files.claims import Hold, claimed, look_at
from fminfer.files.completed import CompletedOutput, find_completed
from fminfer.files.journal import journal_path
from fminfer.files.line_reader import count_rows
from fminfer.files.output_paths import Plan
from fminfer.files.row_counts import RowCounts
from fminfer.files.streams import changed_ns

YOUNG_S = 5.0  # a file that was written so lately may not be whole

MOST_COUNTED_BYTES = 4 << 30  # size of the files whose rows are counted before the first answer

WATCHED = "what came while watching"  # in place of a path, when a whole look fails


class FreeFiles:
    """The inputs of a run that shares them, as they stand at each look.

    Args:
        find: lists the inputs and the output of each, as they are now.
        is_watching: more files may come, and may be only half there.
    """

    def __init__(self, find: Callable[[], Plan], terms: RunTerms, *, is_watching: bool) -> None:
        self.complete: dict[Path, RowCounts] = {}  # rows of files that other runs have completed
        self.num_elsewhere = 0  # at the last look, those that other runs answer
        self.num_rows: dict[Path, int | None] = {}  # of each that is free
        self._find, self._terms, self._is_watching = find, terms, is_watching
        self._plan: Plan | None = None
        self._refused: dict[Path | str, str] = {}  # since they were looked at
        self._settled: set[Path] = set()  # answered, refused, or this run's own

    @property
    def refused(self) -> dict[str, str]:
        """Inputs that cannot be answered, and why; as the folder is now."""
        planned = {} if self._plan is None else self._plan.refused
        return {str(path): reason for path, reason in (*planned.items(), *self._refused.items())}

    def is_refused(self, path: Path) -> bool:
        return path in self._refused

    def look(self) -> bool:
        """Look for the first time, and tell whether any file is free.

        Raises:
            UsageError: an output is another model's, or was made with other settings.
        """
        self._plan = self._find()
        free = [path for path, _ in self._free(self._plan)]
        for reason in self._refused.values():
            raise UsageError(reason)
        if not self._is_watching and sum(path.stat().st_size for path in free) < MOST_COUNTED_BYTES:
            for path in free:
                self._count(path)
        else:
            self.num_rows = dict.fromkeys(free)
        return any(path not in self._settled for path in free)

    def find(self) -> Iterator[tuple[Path, Path]]:
        """Look again: yield each input that is free, and its output.

        Files that came since and cannot be answered end nothing.
        """
        try:
            self._plan = self._find()
            self._refused.pop(WATCHED, None)
        except UsageError as error:
            self._refused[WATCHED] = str(error)
        assert self._plan is not None, "look was not called"
        return self._free(self._plan)

    def take(self, path: Path) -> None:
        """Record that a file now belongs to this run."""
        self._settled.add(path)

    def give_back(self, path: Path) -> None:
        """Look at a file again: this run has lost it, and it may come free."""
        self._settled.discard(path)

    def refuse(self, path: Path, error: Exception) -> None:
        """Leave a file that cannot be answered."""
        self._settled.add(path)
        self._refused[path] = str(error)

    def _free(self, plan: Plan) -> Iterator[tuple[Path, Path]]:
        self.num_elsewhere = 0
        has_claim = claimed(plan.outputs)
        for path, output in zip(plan.inputs, plan.outputs, strict=True):
            # What was refused is looked at again: another run may have completed it since.
            is_known = path in self._settled and path not in self._refused
            if is_known or not path.exists() or not self._is_left(path, output, has_claim):
                continue
            if output in has_claim and any(not claim.is_dead for claim in look_at(output)):
                self.num_elsewhere += 1
                self.num_rows.pop(path, None)
            else:
                yield path, output

    def _is_left(self, path: Path, output: Path, has_claim: set[Path]) -> bool:
        """Return whether a file is still to be answered, and was not refused."""
        try:
            if self._is_watching and _is_young(path):
                return False
            completed = self._find_completed(path, output)
        except (UsageError, OSError) as error:
            self.refuse(path, error)
            return False
        if completed is None:
            return path not in self._refused
        self.complete[path] = completed.counts.done
        self._settled.add(path)
        self._refused.pop(path, None)
        if output in has_claim:
            Hold(output, self._terms.claims).settle()
        return False

    def _find_completed(self, path: Path, output: Path) -> CompletedOutput | None:
        """Return an output that is complete, of an input that was not changed since.

        None: the file is to be opened, and looked at.

        Raises:
            UsageError: it is another run's, or was edited.
        """
        if not output.exists() or journal_path(output).exists():
            return None
        completed = find_completed(output)
        if completed is None:
            return None
        if self._terms.restart and completed.ended_before(self._terms.started_s):
            return None
        completed.check_settings(self._terms.fingerprint)
        if not completed.is_of_input_changed_at(changed_ns(path)):
            return None
        if completed.leaves_rows(self._terms.limit, self._terms.started_s):
            return None
        completed.check_unedited()
        return completed

    def _count(self, path: Path) -> None:
        try:
            self.num_rows[path] = count_rows(path, self._terms.limit)
        except UsageError as error:  # it cannot be read
            self.refuse(path, error)


def _is_young(path: Path) -> bool:
    return time.time() - path.stat().st_mtime < YOUNG_S
