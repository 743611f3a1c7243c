"""What is strange about a line that is answered all the same: told once, counted by kind."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from fminfer.core.errors import make_printable

MAX_NAMES = 300  # of a kind that are told, whatever the number of lines
MAX_NAME_CHARS = 60


@dataclass(slots=True, frozen=True)
class RowWarning:
    """What is strange about a line: one of a few kinds, and what it is called there."""

    kind: str
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return _describe_warning(self.kind, self.names)


@dataclass(slots=True)
class KindCount:
    """How many lines had one kind of warning, and the first few names."""

    num_rows: int = 0
    names: list[str] = field(default_factory=list)
    has_more: bool = False  # names that are not listed


class WarningCounts:
    """Counts warnings in bounded memory, on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.kinds: dict[str, KindCount] = {}

    def add(self, warning: RowWarning, num_rows: int = 1) -> str:
        """Count a warning. Return its text if something in it is new, else "".

        Args:
            num_rows: lines that have it.
        """
        with self._lock:
            is_new = warning.kind not in self.kinds
            count = self.kinds.setdefault(warning.kind, KindCount())
            count.num_rows += num_rows
            new = [
                name for name in dict.fromkeys(warning.names) if name not in count.names
            ]
            fitting = new[: MAX_NAMES - len(count.names)]
            count.names += fitting
            is_full = len(fitting) < len(new) and not count.has_more
            count.has_more |= is_full
        listed = list(fitting)
        if is_full:
            listed.append("others, which are not named")
        return _describe_warning(warning.kind, listed) if listed or is_new else ""

    def clear(self) -> None:
        self.kinds.clear()

    def to_dict(self) -> dict[str, int]:
        """Return the number of lines by the text of their warning."""
        return {
            _describe_count(kind, count): count.num_rows
            for kind, count in self.kinds.items()
        }


def _describe_count(kind: str, count: KindCount) -> str:
    """Write a kind of warning with the names of all its lines."""
    text = _describe_warning(kind, count.names)
    return f"{text} and others" if count.has_more else text


def _describe_warning(kind: str, names: list[str] | tuple[str, ...]) -> str:
    """Write a warning with the names that belong to it, on one line."""
    shown = (
        make_printable(name).replace("\n", r"\n").replace("\t", r"\t") for name in names
    )
    return f"{kind}: {', '.join(shown)}" if names else kind


def cut_name(name: str) -> str:
    """Return the beginning of a name that a line gave."""
    return name if len(name) <= MAX_NAME_CHARS else name[:MAX_NAME_CHARS] + "…"
