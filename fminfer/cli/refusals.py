"""Groups wrong lines by reason: one sentence for each reason, with the numbers of its lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fminfer.core.quantities import with_noun

MAX_REASONS = 20  # reasons that `fminfer check` prints
MAX_RANGES = 12  # of line numbers in a sentence
# what may differ in messages of one reason
VALUES = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d[\d.,]*')


@dataclass(slots=True)
class Refusal:
    """Why some lines are wrong, in the words of the first one, and which lines they are."""

    text: str
    num_lines: int = 0
    # source, first and last number
    ranges: list[list[int]] = field(default_factory=list)

    def add(self, source: int, number: int) -> None:
        """Add a line. Beyond MAX_RANGES it is only counted."""
        self.num_lines += 1
        last = self.ranges[-1] if self.ranges else [-1, 0, 0]
        if [source, number - 1] == [last[0], last[2]]:
            last[2] = number
        elif len(self.ranges) <= MAX_RANGES:
            self.ranges.append([source, number, number])

    def describe(self, files: Sequence[Path]) -> str:
        """Return the message with the place of the first line, and the numbers of all lines."""
        home, number, _ = self.ranges[0]
        text = f"{files[home]}:{number}: {self.text}"
        if self.num_lines == 1:
            return text
        shown = [
            ("" if source == home else f"{files[source]}:")
            + (f"{first}" if first == last else f"{first}-{last}")
            for source, first, last in self.ranges[:MAX_RANGES]
        ]
        more = ", …" if len(self.ranges) > MAX_RANGES else ""
        return f"{text}; {self.num_lines:,} lines alike: {', '.join(shown)}{more}"


class Refusals:
    """Gathers wrong lines by what is wrong with them, whatever the values in the message."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._by_reason: dict[tuple[str, str | None], Refusal] = {}
        self._num_others = 0  # lines of reasons beyond MAX_REASONS

    def add(self, source: int, number: int, text: str, param: str | None) -> None:
        """Add a line, by its file's index among the inputs and its number in that file."""
        key = VALUES.sub("0", text), param
        if key not in self._by_reason and len(self._by_reason) == MAX_REASONS:
            self._num_others += 1
            return
        self._by_reason.setdefault(key, Refusal(text)).add(source, number)

    def describe_reasons(self) -> Iterator[str]:
        """Yield a sentence for each reason, in the order of their first lines."""
        for refusal in self._by_reason.values():
            yield refusal.describe(self._files)
        if self._num_others:
            others = with_noun(self._num_others, "line")
            yield f"… and {others} for other reasons; --all shows each line"
