"""What travels between a run and its pipelines, each of which is a process with an engine.

Down go lists of lines, END, and the seconds of grace of a stop; up what is defined here. Both ends
are this very program, so that Python's own pickles do.
"""

from __future__ import annotations

from dataclasses import dataclass

from fminfer.engine.stats import EngineStats
from fminfer.output.records import Record

END = None  # no more lines
GO_ON = "go on"  # all pipelines have their weights: the memory that is left can be shared out


@dataclass(slots=True, frozen=True)
class Loaded:
    """The weights are in memory."""

    file_digests: dict[str, str]  # of their files, which all pipelines must have the same


@dataclass(slots=True, frozen=True)
class Ready:
    """The pipeline can answer."""

    device: str
    why_slower: str  # why it is slower than it could be


@dataclass(slots=True, frozen=True)
class Taken:
    """One line was taken in: there is room for another."""


@dataclass(slots=True, frozen=True)
class Answered:
    """A line's record, and now and then what was counted so far."""

    record: Record
    stats: EngineStats | None


@dataclass(slots=True, frozen=True)
class Ended:
    """All is answered, or what could be in the grace of a stop."""

    stats: EngineStats
    warnings: dict[str, int]  # rows by kind
    is_stopped: bool


@dataclass(slots=True, frozen=True)
class Failed:
    """The pipeline cannot go on."""

    text: str
    kind: str  # the name of one of fminfer's errors


Report = Loaded | Ready | Taken | Answered | Ended | Failed
