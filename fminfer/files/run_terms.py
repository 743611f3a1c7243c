"""What holds for every input of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from fminfer.contract.endpoints import Endpoint
from fminfer.contract.envelope import Envelope, Line
from fminfer.files.claims import Claims
from fminfer.files.journal_rows import Fingerprint, is_of_other_input
from fminfer.files.run_facts import RunFacts


class LineCounter(Protocol):
    """Counts the lines of a file in their order, as the run does that answers them."""

    def count(self, line: Line, envelope: Envelope) -> int | None:
        """Return how many equal ones came before it; None: chance has no part in its answer.

        Raises:
            RequestError: what is wrong with it, as far as that shows without its tokens.
        """

    def count_request(
        self, fields: dict[str, Any], *, endpoint: Endpoint | None = None, times: int = 1
    ) -> int | None:
        """Count a request by itself, so many times; as `count`."""


CountLines = Callable[[], LineCounter]  # begins with a file's first line


@dataclass(slots=True, frozen=True)
class RunTerms:
    """What holds for every input of a run."""

    model: str  # its name, for people
    fingerprint: Fingerprint  # what must be the same for rows to be kept, without the inputs' own
    restart: bool = False  # answer all lines again, whatever earlier runs have done
    limit: int | None = None  # of each input, answer the first so many lines
    claims: Claims = field(default_factory=Claims)
    # Begins to count a file's lines; None: answers to a file that has changed are not taken.
    count_lines: CountLines | None = None
    tell: Callable[[str], None] = lambda text: None  # told how far a long task is
    facts: RunFacts = field(default_factory=RunFacts)  # for each output's status file
    # In time.time(). What has failed since then was tried beside this run, and is not tried again.
    started_s: float = field(default_factory=time.time)

    def takes_over(self, old: Fingerprint, new: Fingerprint) -> bool:
        """Tell whether answers of a run are taken where their lines still stand in a new input."""
        return self.count_lines is not None and is_of_other_input(old, new)
