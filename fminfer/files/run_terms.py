"""What holds for every input of a run."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from fminfer.files.claims import Claims
from fminfer.files.journal_head import Fingerprint
from fminfer.files.run_facts import RunFacts


@dataclass(slots=True, frozen=True)
class RunTerms:
    """What holds for every input of a run."""

    model: str  # its name, for people
    fingerprint: Fingerprint  # what must be the same for rows to be kept, without the inputs' own
    restart: bool = False  # answer all lines again, whatever earlier runs have done
    limit: int | None = None  # of each input, answer the first so many lines
    claims: Claims = field(default_factory=Claims)
    facts: RunFacts = field(default_factory=RunFacts)  # for each output's status file
    # In time.time(). What has failed since then was tried beside this run, and is not tried again.
    started_s: float = field(default_factory=time.time)
