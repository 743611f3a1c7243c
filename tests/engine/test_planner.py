"""The order in which prompts run: what it saves, and that it loses and starves none."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from fminfer.contract.envelope import Line
from fminfer.core.errors import StoppedError
from fminfer.engine.waiting import order_prompts
from fminfer.runtime.lines.line_intake import LineIntake, LineRequest
from fminfer.runtime.lines.runner import LOOKAHEAD, WINDOW, _in_order
from tests.engine.test_contract import Bench


def prefix(number: int, length: int = 100) -> list[int]:
    return random.Random(number).choices(range(1, 256), k=length)


def interleaved(num_prefixes: int, num_each: int) -> list[dict[str, Any]]:
    """Rows that take the prefixes in turn, as in a file that was shuffled."""
    return [
        {"prompt": [*prefix(i % num_prefixes), *prefix(1000 + i, 5)], "max_tokens": 2}
        for i in range(num_prefixes * num_each)
    ]


def share_saved(bench: Bench) -> float:
    stats = bench.loop.stats
    return stats.num_counted_cached / stats.num_counted_shareable


def test_prefixes_that_do_not_fit_together_are_shared_all_the_same() -> None:
    """In the file's order the cache has lost each prefix when its next row comes."""
    options = {"context": 200, "num_blocks": 100, "chunk_size": 64}  # four rows fit
    rows = interleaved(num_prefixes=20, num_each=12)
    planned = Bench(**options)
    unplanned = Bench(**options)
    records = planned.run(*rows, read_ahead=WINDOW)
    assert [record.line.number for record in records] == list(range(1, 241))
    assert not any(record.error for record in records)
    assert share_saved(planned) >= 0.99
    unplanned.run(*rows)
    assert share_saved(unplanned) < 0.8


def test_long_rows_do_not_run_alone_at_the_end() -> None:
    lengths = [2] * 60 + [60] * 4  # the file ends with the long ones
    rows = [
        {"prompt": prefix(i, 4), "max_tokens": n, "ignore_eos": True}
        for i, n in enumerate(lengths)
    ]
    steps = []
    for in_order in (rows, rows[::-1]):
        bench = Bench(context=200, num_blocks=200)
        bench.run(*in_order, read_ahead=WINDOW)
        steps.append(bench.loop.stats.num_steps)
    assert steps[0] == pytest.approx(steps[1], abs=4) and steps[0] < 80


def asked(rows: list[dict[str, Any]], source: int = 0) -> list[LineRequest]:
    intake = LineIntake(Bench(context=200).intake)
    found = []
    for number, row in enumerate(rows, start=1):
        line = intake.open(Line(source, number, json.dumps(row).encode()))
        assert isinstance(line, LineRequest)
        found.append(line)
    return found


def test_the_order() -> None:
    """Groups by their longest row, a group's rows together; of equals the file's order."""
    a = prefix(1)
    b = prefix(2)
    c = prefix(3, 10)
    rows = [
        {"prompt": [*a, 7], "max_tokens": 5},
        {"prompt": [*c, 1], "max_tokens": 6},
        {"prompt": [*b, 1], "max_tokens": 5},
        {"prompt": [*a, 3], "max_tokens": 5},
        {"prompt": [*b, 2], "max_tokens": 9},
        {"prompt": [*c, 1], "max_tokens": 6, "user": "too short a prefix to matter"},
    ]
    lines = asked(rows)
    assert [lines.index(line) for line in order_prompts(lines)] == [4, 2, 1, 5, 3, 0]
    others = asked(rows, source=1)
    assert _in_order(lines + others) == order_prompts(lines) + order_prompts(others)
    assert order_prompts([]) == []


def test_every_prompt_once_whatever_the_window() -> None:
    rng = random.Random(5)
    rows = [
        {
            "prompt": [*prefix(rng.randrange(5), rng.randrange(1, 60))],
            "max_tokens": rng.randrange(6),
        }
        for _ in range(400)
    ]
    for read_ahead in (1, 7, LOOKAHEAD, WINDOW):
        records = Bench(context=200, num_blocks=60).run(*rows, read_ahead=read_ahead)
        assert [record.line.number for record in records] == list(range(1, 401))
        assert not any(record.error for record in records)


@pytest.mark.parametrize("read_ahead", [LOOKAHEAD, WINDOW])
def test_no_more_is_read_than_allowed(read_ahead: int) -> None:
    num_read = itertools.count()

    def lines() -> Iterator[Line]:
        for number in range(1, 20_000):
            next(num_read)
            row = {"prompt": prefix(number, 20), "max_tokens": 10, "ignore_eos": True}
            yield Line(0, number, json.dumps(row).encode())

    bench = Bench(context=200)
    run = bench.run_lines(lines(), read_ahead)
    seen = {next(run).line.number for _ in range(200)}
    assert len(seen) == 200
    assert next(num_read) <= 200 + read_ahead + 2 * LOOKAHEAD + 10
    run.close()
    while bench.loop.has_work:  # steps in flight
        bench.loop.step()
    assert bench.scheduler.is_idle


def test_a_run_that_is_told_to_stop_does_not_call_itself_complete() -> None:
    """What was read and does not wait yet is left over, too."""
    rows = [
        {"prompt": prefix(i, 20), "max_tokens": 2, "ignore_eos": True}
        for i in range(1300)
    ]
    bench = Bench(context=200)
    lines = [
        Line(0, i, json.dumps(row).encode()) for i, row in enumerate(rows, start=1)
    ]
    runner = bench.start_run(WINDOW)
    run = runner.run(lines)
    next(run)
    while not (runner._has_all and runner._window):
        next(run)
    runner.stop(60.0)
    with pytest.raises(StoppedError):
        list(run)
