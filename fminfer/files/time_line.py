"""What a run did over its time: a bounded number of points, however long it takes."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_POINTS = 200
FIRST_WIDTH_S = 0.125  # of a point; it doubles when there are too many


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

    def scaled(self, share: float) -> Point:
        """Return a share of the counts; what is in flight is so all the time."""
        fed, drawn = round(share * self.num_fed), round(share * self.num_drawn)
        return Point(fed, drawn, round(share * self.num_done), self.most_running)

    def without(self, other: Point) -> Point:
        """Return the counts without those of another."""
        return Point(
            self.num_fed - other.num_fed,
            self.num_drawn - other.num_drawn,
            self.num_done - other.num_done,
            self.most_running,
        )


@dataclass(slots=True)
class TimeLine:
    """Points of equal width. If they are more than `MAX_POINTS`, neighbours are merged."""

    width_s: float = FIRST_WIDTH_S
    points: list[Point] = field(default_factory=list)

    def add(self, part: Point, from_s: float, to_s: float) -> None:
        """Count what was done from one time to another, in seconds since the start.

        It is spread evenly over the points between them: a step may take longer than a point.
        """
        while to_s >= self.width_s * MAX_POINTS:
            self._merge()
        first, last = int(from_s / self.width_s), int(to_s / self.width_s)
        self.points += [Point() for _ in range(last + 1 - len(self.points))]
        if first == last:
            self.points[last].add(part)
            return
        done = Point()
        for place in range(first, last + 1):
            end_s = min(to_s, (place + 1) * self.width_s)
            share = (end_s - from_s) / (to_s - from_s)
            soon = part.scaled(share)
            self.points[place].add(soon.without(done))
            done = soon

    def _merge(self) -> None:
        """Make one point of every two."""
        for kept, merged in zip(self.points[::2], self.points[1::2], strict=False):
            kept.add(merged)
        self.points = self.points[::2]
        self.width_s *= 2

    def to_dict(self) -> dict[str, float | str]:
        """Return it for JSON; each column is one string of numbers, which takes one line."""
        columns = {
            "fed": [point.num_fed for point in self.points],
            "drawn": [point.num_drawn for point in self.points],
            "done": [point.num_done for point in self.points],
            "running": [point.most_running for point in self.points],
        }
        texts = {name: " ".join(map(str, column)) for name, column in columns.items()}
        return {"every_s": self.width_s, **texts}


def read_time_line(told: object) -> TimeLine | None:
    """Read what `to_dict` has written; None: it is not that."""
    if not isinstance(told, dict):
        return None
    try:
        columns = [
            [int(word) for word in told[name].split()]
            for name in ("fed", "drawn", "done", "running")
        ]
        points = [Point(*values) for values in zip(*columns, strict=True)]
        width_s = float(told["every_s"])
    except (KeyError, ValueError, TypeError, AttributeError):
        return None
    return TimeLine(width_s, points) if width_s > 0 and len(points) <= MAX_POINTS else None
