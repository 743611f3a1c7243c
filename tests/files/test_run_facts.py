"""What a run has done over its time, and the runs that answered one output."""

from __future__ import annotations

import time
from dataclasses import astuple
from typing import Any

import pytest

from fminfer.files.run_facts import (
    MAX_POINTS,
    MAX_RUNS,
    CurrentRun,
    Point,
    RunHistory,
    TimeLine,
    parse_runs,
    parse_time_line,
)


def columns(line: TimeLine) -> list[tuple[int, ...]]:
    return [astuple(point) for point in line.points]


def test_what_was_done_is_spread_over_its_time() -> None:
    line = TimeLine(width_s=1.0)
    line.add(Point(10, 4, 2, 3), 0.5, 2.5)
    assert columns(line) == [(2, 1, 0, 3), (6, 2, 2, 3), (2, 1, 0, 3)]
    line.add(Point(1, 1, 1, 2), 2.1, 2.2)
    line.add(Point(0, 0, 1, 5), 4.0, 4.0)
    assert columns(line)[2:] == [(3, 2, 1, 3), (0, 0, 0, 0), (0, 0, 1, 5)]


def test_a_long_time_line_has_wider_points() -> None:
    line = TimeLine(width_s=1.0)
    for second in range(MAX_POINTS):
        line.add(Point(1, 2, 3, second), second + 0.5, second + 0.5)
    line.add(Point(1, 2, 3, 1), MAX_POINTS, MAX_POINTS)
    assert line.width_s == 2 and len(line.points) == MAX_POINTS // 2 + 1
    assert columns(line)[1] == (2, 4, 6, 3) and columns(line)[-1] == (1, 2, 3, 1)
    assert parse_time_line(line.to_dict()) == line


@pytest.mark.parametrize(
    "changes",
    [
        {"every_s": 0},
        {"every_s": "x"},
        {"every_s": None},
        {"fed": "1 x"},
        {"fed": "1 2"},
        {"fed": 5},
    ],
)
def test_what_is_no_time_line_is_passed_over(changes: dict[str, Any]) -> None:
    told = TimeLine(1.0, [Point(1, 2, 3, 4)]).to_dict()
    name = next(iter(told.keys() - {"every_s"}))
    told |= {name if key == "fed" else key: value for key, value in changes.items()}
    assert parse_time_line(told) is None
    assert parse_time_line([]) is None and parse_time_line({}) is None


def test_steps_and_rows_count_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    facts = CurrentRun(
        {"--seed": "1"}, {"device": "cpu"}, read_stats=lambda: {"steps": 2}
    )
    facts.add_step(1, 1, 1)
    facts.add_row()
    assert facts.to_list() == [] and facts.time_line.points == []
    facts.begin()
    now += 1.5
    facts.add_step(7, 3, 2)
    assert facts.to_list() == [], "no row is done"
    now += 1
    facts.add_step(0, 5, 0)
    facts.add_row()
    (told,) = facts.to_list()
    assert abs(told["started_at"] - time.time()) < 60
    assert (told["seconds"], told["device"], told["stats"]) == (
        2.5,
        "cpu",
        {"steps": 2},
    )
    assert told["settings"] == {"--seed": "1"} and len(told["id"]) == 8
    found = [sum(counts) for counts in zip(*columns(facts.time_line), strict=True)][:3]
    assert found == [7, 8, 1]
    assert told["id"] != CurrentRun().id


def test_runs_of_an_output() -> None:
    facts = CurrentRun()
    earlier = [{"id": str(number)} for number in range(MAX_RUNS - 1)]
    assert RunHistory(facts, [*earlier, {"id": facts.id}]).to_list() == earlier
    facts.begin()
    facts.add_row()
    history = RunHistory(facts, earlier)
    assert [run["id"] for run in history.to_list()] == [
        *(run["id"] for run in earlier),
        facts.id,
    ]
    older = [{"id": "a", "runs_before": 5}, {"id": "b"}, *earlier]
    runs = RunHistory(facts, older).to_list()
    assert len(runs) == MAX_RUNS and runs[0] == {"id": "0", "runs_before": 7}
    history.drop_earlier_runs()
    assert [run["id"] for run in history.to_list()] == [facts.id]


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({"fminfer": {"runs": [{"id": "a"}, 5]}}, [{"id": "a"}]),
        ({"fminfer": {"runs": {}}}, []),
        ({"fminfer": {}}, []),
        (None, []),
    ],
)
def test_runs_that_a_status_tells_of(status: Any, expected: list[Any]) -> None:
    assert parse_runs(status) == expected
