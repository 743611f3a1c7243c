"""Facts of the runs that answered an output, kept in its status file for a report."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fminfer.core.messages import ConstraintMass
from fminfer.files.status_file import fminfer_fields

LONGEST_FIRST_S = 1.0  # what the first step after a wait counts as, at most
MAX_RUNS = 8  # of one output; older ones are only counted
MAX_POINTS = 200
FIRST_WIDTH_S = 0.125  # of a point; it doubles when there are too many
# Of a point in JSON, in the order of its fields.
COLUMNS = {
    "fed": "num_fed",
    "drawn": "num_drawn",
    "done": "num_done",
    "running": "most_running",
}


@dataclass(slots=True)
class Point:
    """What was done in one span of time."""

    num_fed: int = 0  # prompt tokens that were computed
    num_drawn: int = 0  # tokens that were drawn
    num_done: int = 0  # rows that got their record
    most_running: int = 0  # sequences in flight, at most

    def add(self, other: Point) -> None:
        self.num_fed += other.num_fed
        self.num_drawn += other.num_drawn
        self.num_done += other.num_done
        self.most_running = max(self.most_running, other.most_running)

    def cut_share(self, start: float, end: float) -> Point:
        """Return the counts between two shares of the time; sequences in flight stay."""
        counts = self.num_fed, self.num_drawn, self.num_done
        fed, drawn, done = (
            round(end * count) - round(start * count) for count in counts
        )
        return Point(fed, drawn, done, self.most_running)


@dataclass(slots=True)
class TimeLine:
    """Points of equal width. If they are more than `MAX_POINTS`, neighbours are merged."""

    width_s: float = FIRST_WIDTH_S
    points: list[Point] = field(default_factory=list)

    def add(self, part: Point, from_s: float, to_s: float) -> None:
        """Spread what was done evenly over a span of time, in seconds since the start."""
        while to_s >= self.width_s * MAX_POINTS:
            self._merge_points()
        first, last = int(from_s / self.width_s), int(to_s / self.width_s)
        self.points += [Point() for _ in range(last + 1 - len(self.points))]
        if first == last:
            self.points[last].add(part)
            return
        done = 0.0
        for place in range(first, last + 1):
            end_s = min(to_s, (place + 1) * self.width_s)
            share = (end_s - from_s) / (to_s - from_s)
            self.points[place].add(part.cut_share(done, share))
            done = share

    def _merge_points(self) -> None:
        """Make one point of every two."""
        for kept, merged in zip(self.points[::2], self.points[1::2], strict=False):
            kept.add(merged)
        self.points = self.points[::2]
        self.width_s *= 2

    def to_dict(self) -> dict[str, float | str]:
        """Return it for JSON; each column is one string of numbers, which takes one line."""
        texts = {
            name: " ".join(str(getattr(point, count)) for point in self.points)
            for name, count in COLUMNS.items()
        }
        return {"every_s": self.width_s, **texts}


def parse_time_line(fields: object) -> TimeLine | None:
    """Parse what `to_dict` has written; None: it is not that."""
    if not isinstance(fields, dict):
        return None
    try:
        columns = [[int(word) for word in fields[name].split()] for name in COLUMNS]
        points = [Point(*values) for values in zip(*columns, strict=True)]
        width_s = float(fields["every_s"])
    except (KeyError, ValueError, TypeError, AttributeError):
        return None
    return (
        TimeLine(width_s, points) if width_s > 0 and len(points) <= MAX_POINTS else None
    )


@dataclass(slots=True)
class CurrentRun:
    """What one run is, and what it has done so far. All of its outputs share it."""

    # options that are not the defaults
    settings: dict[str, str] = field(default_factory=dict)
    # device, dtype and so on
    place: dict[str, Any] = field(default_factory=dict)
    # the engine's counts, as they are now
    read_stats: Callable[[], dict[str, int]] = dict
    # of the constrained rows that were measured; None: there are none
    read_mass: Callable[[], ConstraintMass | None] = lambda: None
    id: str = field(default_factory=lambda: secrets.token_hex(4))
    time_line: TimeLine = field(default_factory=TimeLine)
    _started_at: int = 0
    _started_s: float | None = None  # None: no row is being answered yet
    _last_step_s: float = 0.0  # its end, since the start
    _was_running: bool = False  # something was in flight then

    def begin(self) -> None:
        """Start the clock: rows are answered from now on."""
        self._started_at = int(time.time())
        self._started_s = time.perf_counter()

    def add_step(self, num_fed: int, num_drawn: int, num_running: int) -> None:
        """Count a step that has just ended; it began when the last one ended."""
        if self._started_s is not None:
            now_s = self._seconds
            from_s = self._last_step_s
            if not self._was_running:  # it may have waited for lines since then
                from_s = max(from_s, now_s - LONGEST_FIRST_S)
            part = Point(num_fed, num_drawn, most_running=num_running)
            self.time_line.add(part, from_s, now_s)
            self._last_step_s = now_s
            self._was_running = num_running > 0

    def add_row(self) -> None:
        """Count a row that has just got its record."""
        if self._started_s is not None:
            now_s = self._seconds
            self.time_line.add(Point(num_done=1), now_s, now_s)

    @property
    def _seconds(self) -> float:
        return 0.0 if self._started_s is None else time.perf_counter() - self._started_s

    def to_list(self) -> list[dict[str, Any]]:
        """Return it for JSON, in a list; an empty one if no row was answered."""
        if not any(point.num_done for point in self.time_line.points):
            return []
        mass = self.read_mass()
        return [
            {
                "id": self.id,
                "started_at": self._started_at,
                "seconds": round(self._seconds, 3),
                **self.place,
                "settings": self.settings,
                "stats": self.read_stats(),
                "time_line": self.time_line.to_dict(),
                **({} if mass is None else {"allowed": mass.to_text()}),
            }
        ]


class RunHistory:
    """All runs that answered one output: the earlier ones, and the one that goes on."""

    def __init__(self, current: CurrentRun, earlier: list[dict[str, Any]]) -> None:
        self._current = current
        # A run may lose an output and take it again.
        self._earlier = [run for run in earlier if run.get("id") != current.id]

    def drop_earlier_runs(self) -> None:
        """Drop the earlier runs: none of their rows is kept."""
        self._earlier = []

    def to_list(self) -> list[dict[str, Any]]:
        """Return the runs for JSON, the oldest first; `runs_before` counts those left out."""
        runs = [*self._earlier, *self._current.to_list()]
        num_left_out = max(0, len(runs) - MAX_RUNS)
        if num_left_out:
            before = sum(_num_runs_before(run) for run in runs[: num_left_out + 1])
            runs = runs[num_left_out:]
            runs[0] = runs[0] | {"runs_before": before + num_left_out}
        return runs


def _num_runs_before(run: dict[str, Any]) -> int:
    number = run.get("runs_before")
    return number if isinstance(number, int) else 0


def parse_runs(status: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the runs that a status file tells of; none if an older version wrote it."""
    runs = fminfer_fields(status).get("runs")
    return (
        [run for run in runs if isinstance(run, dict)] if isinstance(runs, list) else []
    )
