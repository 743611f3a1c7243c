"""Files that several runs answer together, each by one of them: whoever is ready claims the next.

It finds, claims and opens them, and knows nothing of what stands in them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fminfer.errors import InUseError, UsageError
from fminfer.input.lines import count_rows
from fminfer.input.streams import changed_ns
from fminfer.output.claims import Claim, Claims, claimed, look_at, remove_dead
from fminfer.output.disk import told
from fminfer.output.job_file import JournaledInput, is_short_of, is_worth_another_try
from fminfer.output.journal import Fingerprint, check_fingerprint, journal_path
from fminfer.output.places import Plan
from fminfer.output.status import read_status

SCAN_EVERY_S = 2.0  # where nothing is free

YOUNG_S = 5.0  # a file that was written so lately may not be whole

MOST_COUNTED_BYTES = 4 << 30  # of which rows are counted before any is answered

WATCHED = "what came while watching"  # in the place of an input that is refused

OpenFile = Callable[[Path, int, Path, Claim], JournaledInput]


class SharedFiles:
    """The inputs of a run that shares them with others, opened one by one.

    Args:
        find: lists the inputs and the output of each, as they are now.
        open_file: opens an input that this run has claimed: path, number, output, claim.
        fingerprint: of the run, without the inputs' own.
        restart: answer again what was complete before this run began.
        is_watching: wait for more files when all are answered.
        started_s: time.time() as the run began.
        limit: of each input, the first so many lines are answered.
    """

    def __init__(
        self,
        find: Callable[[], Plan],
        open_file: OpenFile,
        claims: Claims,
        fingerprint: Fingerprint,
        *,
        restart: bool,
        is_watching: bool,
        started_s: float,
        limit: int | None = None,
    ) -> None:
        self.files: list[JournaledInput] = []  # claimed by this run, by their number
        self._refused: dict[str, str] = {}  # when they were opened
        self.num_kept_rows = self.num_kept_errors = 0  # of files that were complete before
        self._plan: Plan | None = None
        self._given_back: set[int] = set()  # numbers of `files` that were lost, and may come free
        self.num_elsewhere = 0  # at the last look, those that other runs answer
        self._find, self._open_file = find, open_file
        self._claims = claims
        self._fingerprint = fingerprint
        self._restart = restart
        self._is_watching = is_watching
        self._started_s = started_s
        self._limit = limit
        self._settled: set[Path] = set()
        self._num_free: dict[Path, int | None] = {}  # rows of files that nobody has
        self.num_rows: int | None = None  # if no other run takes a file; None: not known
        self._next_scan_s = 0.0
        self._was_idle = False  # at the last look: nothing was left of this run's own
        self._has_ended = False

    @property
    def refused(self) -> dict[str, str]:
        """Inputs that cannot be answered, and why; as the folder is now."""
        planned = {} if self._plan is None else self._plan.refused
        return {str(path): reason for path, reason in planned.items()} | self._refused

    @property
    def is_finished(self) -> bool:
        """Tell whether nothing is left that this run could answer, now or later."""
        return self._has_ended and all(file.is_settled for file in self.files)

    def look(self) -> bool:
        """Tell whether there is anything to answer, before a model is loaded for it.

        Raises:
            UsageError: an output is another model's, or was made with other settings.
        """
        self._plan = self._find()
        free = [path for path, _ in self._free(self._plan)]
        for reason in self._refused.values():
            raise UsageError(reason)
        if not self._is_watching and sum(path.stat().st_size for path in free) < MOST_COUNTED_BYTES:
            for path in free:
                self._count_free(path)
        else:
            self._num_free = dict.fromkeys(free)
        free = [path for path in free if path not in self._settled]
        self._count_rows()
        self._has_ended = not (free or self._is_watching)
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
            for path, output in self._free(self._list()):
                file = self._claim(path, output)
                if file is not None:
                    yield file
            if len(self.files) == opened:
                # What others answer may become free as long as this run has work of its own.
                self._has_ended = is_idle and not self._is_watching
                took_s = time.monotonic() - began_s  # thousands of names take their time
                self._next_scan_s = time.monotonic() + max(SCAN_EVERY_S, 20 * took_s)

    def give_up(self, file: JournaledInput, error: UsageError) -> None:
        """Leave a file that turned out to be another than when it was opened."""
        if not isinstance(error, InUseError):  # otherwise it may come free
            self._refuse(file.path, error)
        file.abandon(error)
        file.is_lost = True  # records of its rows that run are not written

    def check_kept(self) -> None:
        """What other runs have taken over is theirs to end, and `num_elsewhere` counts it."""

    def _list(self) -> Plan:
        """List the inputs anew; files that came since and cannot be answered end nothing."""
        for file in self.files:  # another run took it over, and may die as well
            is_open = file.is_lost and not file.is_finished and str(file.path) not in self._refused
            if is_open and file.source not in self._given_back:
                self._settled.discard(file.path)
                self._given_back.add(file.source)
        try:
            self._plan = self._find()
            self._refused.pop(WATCHED, None)
        except UsageError as error:
            self._refused[WATCHED] = str(error)
        assert self._plan is not None, "look was not called"
        return self._plan

    def _free(self, plan: Plan) -> Iterator[tuple[Path, Path]]:
        """Yield what is neither complete nor claimed by a process that lives.

        What was refused is looked at again: another run may have completed it since.
        """
        self.num_elsewhere = 0
        has_claim = claimed(plan.outputs)
        for path, output in zip(plan.inputs, plan.outputs, strict=True):
            is_refused = str(path) in self._refused
            if (path in self._settled and not is_refused) or not path.exists():
                continue
            try:
                if self._is_watching and _is_young(path):
                    continue
                if self._is_complete(path, output):
                    self._settled.add(path)
                    self._refused.pop(str(path), None)
                    if output in has_claim:
                        remove_dead(output)
                    continue
            except (UsageError, OSError) as error:
                self._refuse(path, error)
                continue
            if is_refused:
                continue
            if output in has_claim and any(not claim.is_dead for claim in look_at(output)):
                self.num_elsewhere += 1
                self._num_free.pop(path, None)
            else:
                yield path, output

    def _is_complete(self, path: Path, output: Path) -> bool:
        """Tell it of an input that was not changed since; otherwise it is opened, and looked at."""
        if not output.exists() or journal_path(output).exists():
            return False
        status = read_status(output)
        if status is None or status.get("status") != "completed":
            return False
        if self._restart and int(status.get("completed_at") or 0) < int(self._started_s):
            return False
        found = dict(status.get("metadata") or {})
        check_fingerprint(output, found | {"the input": ""}, self._fingerprint | {"the input": ""})
        if (status.get("fminfer") or {}).get("input_changed_ns") != changed_ns(path):
            return False
        if is_worth_another_try(output, status, self._started_s):
            return False
        if is_short_of(status, self._limit):
            return False
        counts = status["request_counts"]
        self.num_kept_rows += counts["completed"] + counts["failed"]
        self.num_kept_errors += counts["failed"]
        return True

    def _claim(self, path: Path, output: Path) -> JournaledInput | None:
        with told(output):
            output.parent.mkdir(parents=True, exist_ok=True)
        claim = self._claims.take(output)
        self._num_free.pop(path, None)
        if claim is None:
            self.num_elsewhere += 1
            return None
        try:
            file = self._open_file(path, len(self.files), output, claim)
            file.begin()
        except InUseError:  # by a run that knows no claims, or is slow to give it back
            claim.release()
            self.num_elsewhere += 1
            return None
        except (UsageError, OSError) as error:  # of the input: the output's are OutputErrors
            claim.release()
            self._refuse(path, error)
            return None
        except BaseException:
            claim.release()
            raise
        self._settled.add(path)
        self.files.append(file)
        self._count_rows()
        return file

    def _count_rows(self) -> None:
        rows = [*(file.num_rows_at_start for file in self.files), *self._num_free.values()]
        self.num_rows = None if None in rows else sum(row or 0 for row in rows)

    def _count_free(self, path: Path) -> None:
        try:
            self._num_free[path] = count_rows(path, self._limit)
        except UsageError as error:  # it cannot be read
            self._refuse(path, error)

    def _refuse(self, path: Path, error: Exception) -> None:
        self._settled.add(path)
        self._refused[str(path)] = str(error)


def _is_young(path: Path) -> bool:
    return time.time() - path.stat().st_mtime < YOUNG_S
