"""Progress, as a terminal and a log see it."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import termios
from pathlib import Path
from typing import Any

import pytest

from fminfer.compute.values.step import StepResult
from fminfer.contract.envelope import Line
from fminfer.core.config import EngineConfig, StepSizes
from fminfer.engine.answer import AnswerStyle
from fminfer.engine.intake import Intake
from fminfer.engine.packing import PlannedStep, pack_rows
from fminfer.engine.prompt_fit import RequestLimits
from fminfer.engine.start import RequestStarter
from fminfer.engine.stats import EngineState, EngineStats
from fminfer.estimate.simulation import PretendPipeline
from fminfer.job.progress import ProgressBar, TimeLeft
from fminfer.runtime.load.assembly import build_loop
from fminfer.text.tokenizer import Tokenizer
from tests.forked import Forked
from tests.job.test_time_left import Clock, Told, drawing
from tests.line_bench import over_lines

END_ID = 7


def test_nothing_is_said_of_what_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows without tokens ended the run with a division by zero, on a terminal only."""
    clock = Clock()
    monkeypatch.setattr("fminfer.job.progress.time", clock)
    bar = ProgressBar(3, is_quiet=True)
    engine = Told(EngineStats(), drawing(0))
    assert bar.predict_left_s(engine) is None
    engine.stats.read.num_rows = 3
    assert (
        bar.predict_left_s(engine) is None
        and ProgressBar(None, is_quiet=True).predict_left_s(engine) is None
    )
    for _ in range(2):
        assert bar.predict_left_s(engine) is None, (
            "the first step says nothing of others"
        )
        clock.now_s += 1.0
        engine.stats.num_steps += 1
        bar.add_work(engine.stats, 5, 0)
    assert bar.predict_left_s(engine) == 0.0


def test_a_bound_is_shown_as_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until a row has ended, nobody knows whether rows stop early; lines may be unread, too."""
    monkeypatch.setattr("fminfer.job.progress.FIRST_LINE_S", -1.0)
    monkeypatch.setattr("fminfer.job.progress.LINE_EVERY_S", -1.0)
    monkeypatch.setattr("fminfer.job.progress.LEFT_EVERY_S", 0.0)
    clock = Clock()
    monkeypatch.setattr("fminfer.job.progress.time", clock)
    stats = EngineStats(
        num_prompt_tokens=8, num_generated_tokens=20, max_rows_running=2
    )
    engine = Told(stats, drawing(90))
    stats.read.num_rows = 2
    stats.read.add(8, 2, 100)
    bar = ProgressBar(2, is_quiet=False)
    bar.add_work(stats, 8, 2)
    stats.num_steps = 9
    clock.now_s = 4.5
    bar.add_work(stats, 0, 18)
    bar.update(0, 0, engine)
    stats.count_ended(90)
    bar.update(1, 0, engine)
    bar.total_rows = None
    bar.update(1, 0, engine)
    lefts = re.findall(r"left (\S+)", capsys.readouterr().err)
    assert lefts[0] == "<0:45" and lefts[1].startswith("~") and lefts[2] == "?", lefts


def test_a_log_has_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After 5 s, then 10, 20 and 30 s; with the tokens of all steps, and their mean rate."""
    clock = Clock()
    monkeypatch.setattr("fminfer.job.progress.time", clock)
    engine = Told(EngineStats(), drawing(0))
    told = {}
    bar = ProgressBar(100, is_quiet=False)
    for second in range(150):
        clock.now_s = float(second)
        bar.add_work(engine.stats, 900 * (second > 0), 100 * (second > 0))
        bar.update(second, second // 60, engine)
        if line := capsys.readouterr().err:
            told[second] = line
    assert [*told] == [6, 17, 38, 69, 100, 131]
    assert told[6] == "6/100 rows, 6,000 tokens, 1,000 tok/s, left ?\n"
    assert told[131] == "131/100 rows, 131,000 tokens, 1,000 tok/s, left ?, 2 errors\n"


def test_a_narrow_terminal_has_shorter_texts() -> None:
    bar = ProgressBar(9, is_quiet=True, is_slowed=lambda: True)
    bar.update(3, 1, Told(EngineStats(), drawing(0)))
    assert bar._make_texts() == [
        "0 tokens, 0 tok/s, left ?, 1 error, slowed by other work",
        "0 tok/s, left ?, 1 error, slowed by other work",
        "0 tok/s, left ?, 1 error, slowed",
        "left ?, 1 error, slowed",
        "left ?, 1 error",
        "left ?",
    ]
    assert ProgressBar(9, is_quiet=True)._make_texts()[0] == "0 tokens, 0 tok/s, left ?"


def test_the_rate_is_that_of_the_last_minute() -> None:
    """What was ten times as slow before is forgotten; the first step counts for nothing."""
    left = TimeLeft()
    engine = Told(EngineStats(), drawing(100, num_running=0))
    assert left.predict_running_s(engine) is None
    engine.state = drawing(100, num_running=1)
    for number in range(400):
        engine.stats.num_steps += 1
        left.add_steps(
            0.0 if not number else 10.0 if number < 50 else 1.0, engine.stats, 0, 1
        )
        if not number:
            assert left.predict_running_s(engine) is None
        if number in (40, 109, 300):
            assert left.predict_running_s(engine) == pytest.approx(
                1000 if number == 40 else 100
            )


@pytest.mark.parametrize("size", [(0, 0), (24, 120), (0, 120)])
def test_a_terminal_sees_what_happens_from_the_start(
    size: tuple[int, int], tmp_path: Path
) -> None:
    """It saw nothing until the model was ready.

    There was no bar with 0 columns, as in a container, or with 0 lines.
    """
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "x", "max_tokens": 20, "ignore_eos": true}\n' * 99)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, size)
    said: list[bytes] = []
    run = Forked(["run", str(rows), "--kernels", "off"], files=(None, None, theirs))
    os.close(theirs)
    with contextlib.suppress(OSError):  # the other end is closed
        while data := os.read(ours, 4096):
            said.append(data)
    os.close(ours)
    assert run.wait(60) == 0
    text = b"".join(said).decode()
    assert "Loading fminfer-demo (" in text and "Ready after" in text
    assert re.search(
        r"fminfer: +\d+%\|.*\| \d+/99 rows, [\d,]+ tokens, [\d,]+ tok/s", text
    ), text


def test_what_running_rows_may_still_draw_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C waited 10 s for rows that needed longer, and did not know it."""
    told: list[int] = []

    class LineRequest(PretendPipeline):
        def collect(self) -> StepResult:
            told.append(loop.state.longest_row)
            return super().collect()

    def asked_while_packing(*args: Any) -> PlannedStep:
        """Rows were in no list for a moment, and a signal then found none."""
        while_packing.append(loop.state.longest_row)
        return pack_rows(*args)

    while_packing: list[int] = []
    monkeypatch.setattr("fminfer.engine.scheduler.pack_rows", asked_while_packing)
    tokenizer = Tokenizer(None)
    limits = RequestLimits(2048, 256, eos_ids=frozenset({END_ID}))
    loop = build_loop(
        EngineConfig(),
        RequestStarter(tokenizer, limits.eos_ids, seed=1),
        LineRequest(32),
        AnswerStyle(tokenizer, "auto"),
        sizes=StepSizes(chunk_size=512, max_rows=2),
        num_blocks=4096,
        num_stages=1,
    )
    rows = [
        {"prompt": [9, 10, 11 + i], "max_tokens": n} for i, n in enumerate((5, 9, 30))
    ]
    lines = (Line(0, i, json.dumps(row).encode()) for i, row in enumerate(rows, 1))
    assert not loop.state.longest_row
    assert len(list(over_lines(loop, Intake(tokenizer, limits)).run(lines))) == 3
    # While each step is computed: long rows first, two at once, the third when one has ended.
    assert told == [*range(30, 0, -1)]
    assert while_packing == told
    bar = ProgressBar(None, is_quiet=True)
    engine = Told(EngineStats(), drawing(7, 2))
    idle = Told(EngineStats(), EngineState())
    assert bar.predict_running_s(engine) is None, "nothing was computed yet"
    clock = Clock()
    monkeypatch.setattr("fminfer.job.progress.time", clock)
    bar.add_work(EngineStats(num_steps=5), 0, 10)
    clock.now_s += 4.0
    bar.add_work(EngineStats(num_steps=9), 0, 8)
    assert bar.predict_running_s(engine) == pytest.approx(7.0), (
        "as many steps, of two rows"
    )
    assert bar.predict_running_s(idle) is None


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_bar_fits_a_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stood at the end was cut off: errors, and that other work slows the run."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    stats = EngineStats(max_rows_running=256)
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        monkeypatch.setattr("fminfer.job.progress.BAR_EVERY_S", -1.0)
        bar = ProgressBar(1_000_000, is_quiet=False, is_slowed=lambda: True)
        stats.read.num_rows = 4_000
        stats.num_steps = 10
        stats.read.add(400_000, 4_000, 100)
        bar.add_work(stats, 12_345_678, 0)
        bar.add_work(stats, 0, 87_654_321)
        bar.update(450_000, 12_345, Told(stats, drawing(91)))
        bar.close()
    said = b""
    with contextlib.suppress(OSError):
        while data := os.read(ours, 4096):
            said += data
    os.close(ours)
    frames = [
        each
        for each in re.split(r"[\r\n]", said.decode())
        if "450000/1000000 rows" in each
    ]
    assert frames and all(len(frame) <= columns for frame in frames), frames
    assert "45%|" in frames[0] and "left ~" in frames[0], frames
    assert (", 12,345 errors, slowed" in frames[0]) == (columns > 60), frames
    assert (
        (" tok/s, left " in frames[0])
        == ("slowed by other work" in frames[0])
        == (columns > 80)
    )
    assert "left" not in frames[-1] and "12,345 errors" in frames[-1], (
        "as it stays when all is done"
    )
    assert (" tok/s, 12,345 errors" in frames[-1]) == (columns > 80), frames


def test_progress_is_honest_about_what_it_does_not_know(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fminfer.job.progress.FIRST_LINE_S", -1.0)
    bar = ProgressBar(None, is_quiet=False)
    bar.update(3, 0, Told(EngineStats(), drawing(0)))
    bar.close()
    found = capsys.readouterr().err
    assert found.startswith("3/? rows,") and found.endswith("left ?\n")


def test_progress_shows_tokens_while_no_row_has_ended(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stayed at 0 of 300 rows for half a minute."""
    monkeypatch.setattr("fminfer.job.progress.FIRST_LINE_S", -1.0)
    bar = ProgressBar(300, is_quiet=False)
    bar.add_work(EngineStats(num_steps=1), 1200, 3)
    bar.add_work(EngineStats(num_steps=2), 0, 31)
    bar.update(0, 0, Told(EngineStats(), drawing(0)))
    bar.close()
    assert capsys.readouterr().err.startswith("0/300 rows, 1,234 tokens, ")
