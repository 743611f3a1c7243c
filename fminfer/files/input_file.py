"""One input of a run, which may be edited while the run is at work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fminfer.contract.envelope import Line
from fminfer.core.errors import UsageError
from fminfer.core.quantities import counted
from fminfer.files.line_reader import count_to_last, read_lines
from fminfer.files.streams import A_PIPE, Digest, changed_ns, digest_of


class InputFile:
    """An input's lines, and whether its bytes are still those that were there at the last look.

    Args:
        source: its number in the run.
        limit: read only so many lines, the first ones; None: all.
    """

    def __init__(self, path: Path, source: int, limit: int | None) -> None:
        self.path, self.limit = path, limit
        self._source = source
        self.changed_ns = changed_ns(path)  # before the digest: a later change is noticed
        self.digest = digest_of(path)
        self.num_rows: int | None = None  # not counted, or not known before its end
        self.num_read = 0
        self._last_number = 0  # of the last line that was read or counted
        self.is_read = False  # to its end

    def count_rows(self) -> None:
        """Count the lines to answer, where that is cheaper than to answer them."""
        self.num_rows, self._last_number = count_to_last(self.path, self.limit)

    def take_count(self, num_rows: int, last_number: int) -> None:
        """Take note of the lines to answer that somebody has counted."""
        self.num_rows, self._last_number = num_rows, last_number

    def skip(self, num_rows: int) -> None:
        """Take it as read: all of its lines have their record."""
        self.num_read, self.is_read = num_rows, True

    def look_again(self) -> bool:
        """Tell whether it holds other bytes than at the last look."""
        now_ns = changed_ns(self.path)
        if now_ns == self.changed_ns:
            return False
        before = self.digest
        self.changed_ns, self.digest = now_ns, digest_of(self.path)
        return self.digest != before

    def lines(self) -> Iterator[Line]:
        """Read it; refuse one that was edited meanwhile, by a UsageError."""
        digest = Digest()
        for line in read_lines(self.path, self._source, digest, self.limit):
            self.num_read += 1
            self._last_number = max(self._last_number, line.number)
            yield line
        found = str(digest) if self.limit is None else digest_of(self.path)
        if self.digest not in (found, A_PIPE):
            raise UsageError(
                f"{self.path} was changed while it was being answered. Run the same command again: "
                "it keeps the answers to lines that are still there (--restart answers all anew)"
            )
        self.num_rows, self.is_read = self.num_read, True

    def has_all(self, num_answered: int, last_answered: int) -> bool:
        """Return whether so many answers are all that it needs; while it is read, nobody knows.

        Raises:
            UsageError: it has fewer lines than that, or the last answer is beyond the limit.
        """
        if not self.is_read:
            return False
        self.check_limit(last_answered)
        if num_answered > self.num_read:
            raise UsageError(
                f"an earlier run has answered {counted(num_answered, 'line')} of {self.path}, and "
                f"now it has {self.num_read}; give --restart to answer all from the start"
            )
        return num_answered == self.num_read

    def check_limit(self, last_answered: int) -> None:
        """Refuse an answer to a line beyond the limit, if it is known which lines these are.

        Answers come in another order than lines, so their number says nothing of it.
        """
        if self.limit is not None and 0 < self._last_number < last_answered:
            raise UsageError(
                f"an earlier run has answered more than the first {self.limit} lines of "
                f"{self.path}; give a larger --limit or none to go on with them, or --restart"
            )
