"""Counts of one input's rows: those that this run answered, and those that it keeps of others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class RowCounts:
    """Rows that have their record, and how many of these are errors."""

    num_rows: int = 0
    num_errors: int = 0

    def __add__(self, other: RowCounts) -> RowCounts:
        return RowCounts(self.num_rows + other.num_rows, self.num_errors + other.num_errors)

    def without(self, other: RowCounts) -> RowCounts:
        """Take away rows that are counted elsewhere."""
        return RowCounts(
            max(0, self.num_rows - other.num_rows), max(0, self.num_errors - other.num_errors)
        )


@dataclass(slots=True)
class Counts:
    """What was done of one input. Tokens are those of answered lines, as in `usage`."""

    num_rows: int = 0  # known so far: all of them once the input is read
    num_completed: int = 0
    num_failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    kept: RowCounts = RowCounts()  # of those, answered or refused by other runs

    @property
    def done(self) -> RowCounts:
        return RowCounts(self.num_completed + self.num_failed, self.num_failed)

    @property
    def own(self) -> RowCounts:
        """Count what this run has done itself."""
        return self.done.without(self.kept)

    def add(self, *, is_error: bool, tokens: Sequence[int]) -> None:
        """Count a record; tokens: of the prompt, those not computed again, drawn ones."""
        self.num_failed += is_error
        self.num_completed += not is_error
        self.input_tokens += tokens[0]
        self.cached_tokens += tokens[1]
        self.output_tokens += tokens[2]

    @property
    def tokens(self) -> tuple[int, int, int]:
        """Tokens of the prompt, those not computed again, and drawn ones."""
        return self.input_tokens, self.cached_tokens, self.output_tokens

    def start_from(self, earlier: Counts) -> None:
        """Begin with what earlier runs have done."""
        self.num_completed, self.num_failed = earlier.num_completed, earlier.num_failed
        self.input_tokens, self.cached_tokens, self.output_tokens = earlier.tokens
        self.kept = self.done

    def see_completed(self, whole: Counts) -> None:
        """Take in that another run has completed the output; this run's own rows stay its own."""
        own = self.own
        self.num_rows, self.num_completed = whole.num_rows, whole.num_completed
        self.num_failed = whole.num_failed
        self.kept = self.done.without(own)
