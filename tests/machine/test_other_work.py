"""What is said of other work: only what others took, not what threads do to each other."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from fminfer.engine.stats import EngineState, EngineStats
from fminfer.job.progress import ProgressBar
from fminfer.job.run_summary import JobSummary
from fminfer.machine import control_groups, other_work
from fminfer.machine.other_work import OtherWork, WorkCounts, compute_held_up_s

START = WorkCounts(100.0, 5.0, {1: 0.5, 2: 0.25}, {0: 50.0, 1: 60.0, 2: 70.0})


def after(
    own_s: float,
    in_line_s: dict[int, float],
    busy_s: dict[int, float],
    throttled_s: float = 0.0,
) -> WorkCounts:
    """Return what is counted ten seconds after START."""
    line_s = {t: START.in_line_s.get(t, 0.0) + s for t, s in in_line_s.items()}
    cores_s = {core: START.busy_s[core] + s for core, s in busy_s.items()}
    return WorkCounts(110.0, START.own_s + own_s, line_s, cores_s, throttled_s)


# Ten seconds on cores 0 and 1, two threads that compute.
QUIET = after(18.0, {1: 0.3, 2: 0.2, 3: 0.1}, {0: 9.2, 1: 9.1, 2: 10.0})
BESIDE_ONE = after(13.0, {1: 3.0, 2: 3.5}, {0: 10.0, 1: 10.0, 2: 0.0})
# As many seconds in line, and nobody else there: more threads than cores.
CROWDED = after(19.9, {1: 10.0, 2: 10.0, 3: 10.0, 4: 8.0}, {0: 10.0, 1: 10.0, 2: 0.0})
THROTTLED = after(10.0, {1: 5.0, 2: 5.0}, {0: 10.0, 1: 10.0, 2: 0.0}, throttled_s=9.8)


def found_by(
    last: WorkCounts, monkeypatch: pytest.MonkeyPatch, num_threads: int = 2
) -> tuple[OtherWork, bool]:
    looks = iter([START, last])
    monkeypatch.setattr(other_work, "read_work_counts", lambda: next(looks))
    found = OtherWork(num_threads, lambda: {0, 1})
    return found, found.is_notable()


@pytest.mark.parametrize(
    ("last", "seconds", "is_notable"),
    [
        (QUIET, 0.3, False),
        (BESIDE_ONE, 6.5, True),
        (CROWDED, 0.1, False),
        (THROTTLED, 0.2, False),
    ],
)
def test_only_what_others_took_is_other_work(
    last: WorkCounts, seconds: float, is_notable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted by switches, a run that was alone was "slowed by other work", 144 times a
    second."""
    assert compute_held_up_s(START, last, {0, 1}) == pytest.approx(seconds)
    found, says = found_by(last, monkeypatch, 4 if last is CROWDED else 2)
    assert says == is_notable and found.held_up_s == pytest.approx(seconds)
    assert found.share == pytest.approx(seconds / 20), "of two cores"


def test_a_thread_on_one_core_of_many_is_held_up_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    last = after(9.0, {1: 1.0}, {0: 10.0, 1: 10.0})
    assert found_by(last, monkeypatch, 1)[0].share == pytest.approx(0.1)


def test_nothing_is_said_of_a_short_run_or_where_linux_does_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    short = WorkCounts(101.0, 5.0, {1: 1.5, 2: 1.25}, {0: 52.0, 1: 62.0})
    assert not found_by(short, monkeypatch)[1]
    monkeypatch.undo()
    monkeypatch.setattr(other_work, "PROC", tmp_path / "no")
    monkeypatch.setattr(control_groups, "SYSTEM", tmp_path / "no")
    nothing = other_work.read_work_counts()
    assert (nothing.in_line_s, nothing.busy_s, nothing.throttled_s) == ({}, {}, 0.0)
    assert compute_held_up_s(nothing, nothing, {0}) == 0.0


def test_what_linux_counts_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(other_work, "PROC", tmp_path / "proc")
    monkeypatch.setattr(control_groups, "SYSTEM", tmp_path)
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    for thread, text in (("7", "9000000000 2500000000 12\n"), ("8", "1 250000000 1\n")):
        (tmp_path / "proc/self/task" / thread).mkdir(parents=True)
        (tmp_path / "proc/self/task" / thread / "schedstat").write_text(text)
    (tmp_path / "proc/self/task/9").mkdir()  # it has just ended
    lines = ["cpu  1 1 1 1 1 1 1 1 0 0", "cpu0 100 20 30 999 999 4 6 500 0 0"]
    lines += ["cpu12 1000 0 0 0 0 0 0 0 0 0", "intr 5 0 1", "ctxt 77"]
    (tmp_path / "proc/stat").write_text("\n".join(lines) + "\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    (tmp_path / "sys/fs/cgroup/job").mkdir(parents=True)
    counts = "usage_usec 5\nnr_throttled 3\nthrottled_usec 1500000\n"
    (tmp_path / "sys/fs/cgroup/job/cpu.stat").write_text(counts)
    found = other_work.read_work_counts()
    assert found.in_line_s == {7: 2.5, 8: 0.25}
    assert found.busy_s == {0: 1.6, 12: 10.0}
    assert found.throttled_s == 1.5


@pytest.fixture
def one_core() -> Iterator[int]:
    """Have this thread, and what it starts, run on one core."""
    if not (
        hasattr(os, "sched_setaffinity") and other_work.read_work_counts().in_line_s
    ):
        pytest.skip("Linux does not tell here how long threads stand in line")
    before = os.sched_getaffinity(0)
    core = min(before)
    os.sched_setaffinity(0, {core})
    yield core
    os.sched_setaffinity(0, before)


def test_a_busy_process_on_the_same_core_is_seen(one_core: int) -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        found = OtherWork(1, lambda: {one_core})
        end_s = time.monotonic() + other_work.LEAST_S + 0.5
        while time.monotonic() < end_s:
            pass
        assert found.is_notable() and found.share > 0.2
    finally:
        busy.kill()
        busy.wait()


@pytest.mark.parametrize("is_slowed", [True, False])
def test_progress_tells_of_it(
    is_slowed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run beside a busy process took six times as long, and showed "stage busy 100%"."""
    monkeypatch.setattr("fminfer.job.progress.FIRST_LINE_S", -1.0)
    bar = ProgressBar(3, is_quiet=False, is_slowed=lambda: is_slowed)
    bar.update(1, 0, SimpleNamespace(stats=EngineStats(), state=EngineState()))
    bar.close()
    assert ("slowed by other work" in capsys.readouterr().err) == is_slowed


def test_the_summary_tells_of_it() -> None:
    summary = JobSummary("m", "float32", [], [], wall_s=10.0, engine={"stages": []})
    summary.other_work_s = 6.5
    summary.other_work_share = 0.325
    assert "other work" not in summary.to_text()
    summary.is_beside_other_work = True
    assert (
        "other work slowed this run: threads stood in line for it 6.5 s, 32%"
        in summary.to_text()
    )
