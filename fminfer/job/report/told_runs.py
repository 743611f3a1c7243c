"""The runs that answered outputs, as their status files tell of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fminfer.files.run_facts import runs_in
from fminfer.files.time_line import TimeLine, read_time_line
from fminfer.job.report.told_outputs import ToldOutput


@dataclass(slots=True)
class ToldRun:
    """One run. What is not told is 0 or empty."""

    started_at: float
    seconds: float
    device: str
    num_threads: int
    ready_s: float
    settings: dict[str, str] = field(default_factory=dict)
    stats: Counter[str] = field(default_factory=Counter)
    time_line: TimeLine | None = None
    num_before: int = 0  # older runs, of which only the number is known

    def widths(self) -> list[float]:
        """Return the seconds of each point of the time line; the last one may be cut."""
        if self.time_line is None:
            return []
        width_s, number = self.time_line.width_s, len(self.time_line.points)
        last_s = min(width_s, max(self.seconds - width_s * (number - 1), width_s / 100))
        return [width_s] * (number - 1) + [last_s] * (number > 0)


def find_runs(outputs: Iterable[ToldOutput]) -> list[ToldRun]:
    """Return the runs of all outputs, each once and in its latest state, the oldest first."""
    found: dict[str, dict[str, Any]] = {}
    for output in outputs:
        for run in runs_in(output.status):
            key = str(run.get("id"))
            if key not in found or _number(run, "seconds") > _number(found[key], "seconds"):
                found[key] = run
    return sorted(map(_read_run, found.values()), key=lambda run: run.started_at)


def sum_stats(runs: Iterable[ToldRun]) -> Counter[str]:
    """Return the engine's counts of all runs together."""
    total: Counter[str] = Counter()
    for run in runs:
        total.update(run.stats)
    return total


def _read_run(told: dict[str, Any]) -> ToldRun:
    settings, stats = told.get("settings"), told.get("stats")
    return ToldRun(
        started_at=_number(told, "started_at"),
        seconds=_number(told, "seconds"),
        device=str(told.get("device") or ""),
        num_threads=int(_number(told, "num_threads")),
        ready_s=_number(told, "ready_s"),
        settings={str(k): str(v) for k, v in settings.items()}
        if isinstance(settings, dict)
        else {},
        stats=Counter({str(k): v for k, v in stats.items() if isinstance(v, int)})
        if isinstance(stats, dict)
        else Counter(),
        time_line=read_time_line(told.get("time_line")),
        num_before=int(_number(told, "runs_before")),
    )


def _number(fields: dict[str, Any], name: str) -> float:
    value = fields.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
