"""A server that is abused for a few seconds; `scripts/abuse` does it for longer."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tests.conftest import IS_ALL

from .abuse import Report, compare, run_abuse
from .beside import ASKED, run_beside
from .outside_view import View, look
from .raw_http import Response
from .wrong_requests import FIELDS, check_refusal

NUM_REQUESTS = 90
CALM = {"num_running": 0, "num_waiting": 0, "kv_usage": 0.0}
VIEW = View(num_sockets=4, num_files=9, num_threads=6, rss_mb=300, peak_mb=400)


@pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="/proc tells what is held"
)
def test_nothing_is_left_of_clients_that_misbehave() -> None:
    report = Report()
    run_abuse(NUM_REQUESTS, seed=1, report=report)
    assert report.problems == []
    assert set(report.met) == {"good", "leaving", "unread", "wrong"}


def test_a_live_client_beside_hostile_loads(tmp_path: Path) -> None:
    """All loads with FMINFER_TEST_ALL; `scripts/abuse --beside` prints the figures."""
    names = [*ASKED] if IS_ALL else ["many_prompts_with_biases"]
    problems = run_beside(names, tmp_path, warms_up=IS_ALL)
    # In seconds only where all is measured: other tests may have the cores.
    assert [each for each in problems if IS_ALL or "refused" in each] == []


@pytest.mark.parametrize(
    ("stats", "num_open", "view", "told"),
    [
        (CALM | {"kv_usage": 0.01}, 0, VIEW, "kv_usage"),
        (CALM | {"num_waiting": 1}, 0, VIEW, "num_waiting"),
        (CALM, 1, VIEW, "connections"),
        (CALM, 0, View(5, 9, 6, 300, 400), "num_sockets"),
        (CALM, 0, View(4, 9, 7, 300, 400), "num_threads"),
        (CALM, 0, View(4, 9, 6, 360, 400), "memory"),
    ],
)
def test_what_is_left_is_told(
    stats: dict[str, float], num_open: int, view: View, told: str
) -> None:
    report = Report()
    compare(stats, num_open, VIEW, view, report)
    (problem,) = report.problems
    assert told in problem
    report.problems.clear()
    compare(CALM, 0, VIEW, VIEW, report)
    assert report.problems == []


def test_a_view_counts_sockets() -> None:
    before = look(os.getpid())
    with socket.socket():
        after = look(os.getpid())
    assert after.num_sockets == before.num_sockets + 1
    assert (
        after.rss_mb > 10 and after.peak_mb >= after.rss_mb and after.num_threads >= 1
    )


@pytest.mark.parametrize(
    ("status", "body"),
    [(200, b"{}"), (500, b'{"error": {"message": "x"}}'), (400, b"no json")],
)
def test_other_refusals_are_told(status: int, body: bytes) -> None:
    with pytest.raises(AssertionError):
        check_refusal(FIELDS[0], Response(status, {}, body))
