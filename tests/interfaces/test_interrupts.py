"""Ctrl-C in a notebook's cell: the engine is usable afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fminfer import Engine, UsageError
from tests.interfaces.test_async_engine import make_requests

ROOT = Path(__file__).parents[2]
# Each round is interrupted at a drawn moment: in a step, in the books, or in the loop.
STORM = """
import os, random, signal, sys, threading, time
import fminfer
from tests.interfaces.test_async_engine import make_requests

engine = fminfer.Engine(dtype="float32", max_rows=12)
requests = make_requests(30)

def answer():
    records = sorted(engine.run(requests), key=lambda record: record.line.number)
    return [[choice.text for choice in record.choices] for record in records]

expected = answer()
started = time.perf_counter()
assert answer() == expected
seconds = time.perf_counter() - started
num_interrupted = 0
draws = random.Random(3)
for round in range(int(sys.argv[1])):
    timer = threading.Timer(
        draws.uniform(0.0, seconds), os.kill, (os.getpid(), signal.SIGINT)
    )
    try:
        try:
            timer.start()
            answer()
        finally:
            timer.cancel()
            timer.join()
    except KeyboardInterrupt:
        num_interrupted += 1
    if round % 5 == 0:
        assert answer() == expected, round
        engine._core.check_books()
assert answer() == expected
assert not engine._core._open and not engine.has_work
print(num_interrupted)
"""


def test_interrupts_at_any_moment_leave_the_books_clean() -> None:
    num_rounds = 40
    command = [sys.executable, "-c", STORM, str(num_rounds)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > num_rounds // 8, "few were in time"


def test_a_run_that_a_shell_keeps_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell keeps the frames of the last error, and with them the loop's generator."""
    requests = make_requests(80)
    with Engine(dtype="float32", max_rows=4) as engine:
        kept = engine.run(requests)
        next(kept)
        with pytest.raises(UsageError, match="in the middle of a run"):
            next(engine.run(requests[:2]))
        monkeypatch.setattr(sys, "last_type", KeyboardInterrupt, raising=False)
        assert len([*engine.run(requests[:5])]) == 5
        with pytest.raises(UsageError, match="a newer run has ended this one"):
            for _ in kept:
                pass
        assert len([*engine.run(requests[:3])]) == 3
