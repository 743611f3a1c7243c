"""The journal: whatever happens to a run, finished rows stay finished, each once and in
order."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fminfer.core.errors import OutputError, UsageError
from fminfer.core.version import DRAWING
from fminfer.files import journal as journals
from fminfer.files import ordered_output
from fminfer.files.journal import (
    Journal,
    check_journal_settings,
    find_fingerprint,
    inspect_journal,
    journal_path,
)
from fminfer.files.journal_rows import (
    CLOCK,
    INPUT,
    Row,
    is_of_other_input,
    parse_row,
)
from fminfer.files.ordered_output import (
    VectorReader,
    errors_path,
    read_seal,
    write_ordered_output,
)

MODEL = {"the model": "a"}


def row(number: int, *, is_error: bool = False, text: str = "x") -> Row:
    record = json.dumps({"row": number, "text": text}).encode()
    return Row(number, is_error, (number, 0, 2), number * 77, record)


def finish(journal: Journal) -> None:
    write_ordered_output(journal)
    journal.remove()


def written(folder: Path, rows: list[Row]) -> Path:
    """Write rows into a journal, and leave it as a killed run does."""
    output = folder / "answers.jsonl"
    journal = Journal(output, MODEL)
    for each in rows:
        journal.append(each)
    journal.close()
    return output


def test_output_is_in_input_order_and_appears_only_when_complete(
    tmp_path: Path,
) -> None:
    output = tmp_path / "answers.jsonl"
    errors_path(output).write_text("stale\n")
    journal = Journal(output, MODEL)
    for number in (3, 1, 12, 2):
        journal.append(row(number))
        lines = journal_path(output).read_bytes().splitlines()
        assert json.loads(lines[-1])["record"] == {"row": number, "text": "x"}, (
            "at once"
        )
    assert not output.exists()
    finish(journal)
    assert [json.loads(line)["row"] for line in output.open()] == [1, 2, 3, 12]
    assert [p.name for p in tmp_path.iterdir()] == ["answers.jsonl"], (
        "old errors go too"
    )


def test_errors_stand_in_their_own_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "answers.jsonl", MODEL)
    for number, is_error in ((2, True), (3, False), (1, True)):
        journal.append(row(number, is_error=is_error))
    finish(journal)
    assert (tmp_path / "answers.jsonl").read_bytes() == row(3).record + b"\n"
    errors = (tmp_path / "answers.errors.jsonl").read_bytes()
    assert errors == row(1).record + b"\n" + row(2).record + b"\n"


@pytest.mark.parametrize("most", [1, 2**20])
def test_vectors_stand_in_the_row_of_their_line(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines without one have a row of nan."""
    monkeypatch.setattr(ordered_output, "MOST_GAP", most)
    vectors = {number: np.arange(3, dtype="<f4") + number for number in (2, 7)}
    journal = Journal(tmp_path / "a.jsonl", MODEL)
    for number in (7, 2):
        journal.append(row(number)._replace(vector=vectors[number].tobytes()))
    journal.append(row(9, is_error=True))
    seals = write_ordered_output(journal)
    journal.remove()
    found = np.load(tmp_path / "a.npy")
    assert found.shape == (9, 3) and found.dtype == np.float32
    for number, vector in enumerate(found, start=1):
        np.testing.assert_array_equal(vector, vectors.get(number, [np.nan] * 3))
    assert VectorReader(tmp_path / "a.jsonl").read(7) == vectors[7].tobytes()
    assert seals == {
        name: read_seal(tmp_path / f"a{end}")
        for name, end in {
            "output": ".jsonl",
            "errors": ".errors.jsonl",
            "vectors": ".npy",
        }.items()
    }


def test_errors_of_our_own_are_tried_again_and_counted_once(tmp_path: Path) -> None:
    ours = [row(number, is_error=True)._replace(is_ours=True) for number in (2, 2, 4)]
    output = written(tmp_path, [row(1), *ours, row(5, is_error=True)])
    with contextlib.closing(Journal(output, MODEL)) as journal:
        assert [number for number in range(9) if number in journal] == [1, 5]
        assert journal.num_tried == 2


def test_a_disk_that_fails_as_a_journal_closes_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "x")

    journal = Journal(tmp_path / "answers.jsonl", MODEL)
    journal.append(row(1))
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(
        OutputError, match="journal cannot be written: Input/output error"
    ):
        journal.close()
    monkeypatch.undo()
    journal.close()
    with contextlib.closing(Journal(tmp_path / "answers.jsonl", MODEL)) as again:
        assert 1 in again, "the lock was given up"


def test_what_a_journal_says_of_its_run(tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    assert find_fingerprint(output) is None
    check_journal_settings(output, MODEL)
    written(tmp_path, [row(1)])
    assert find_fingerprint(output, needs_row=True) == MODEL
    check_journal_settings(output, MODEL)
    with pytest.raises(UsageError, match="the model was a, is b"):
        check_journal_settings(output, {"the model": "b"})
    path = journal_path(output)
    head = path.read_bytes().splitlines(keepends=True)[0]
    path.write_bytes(head + b'{"line":1')
    assert (
        find_fingerprint(output, needs_row=True) is None
        and find_fingerprint(output) == MODEL
    )
    check_journal_settings(
        output, {"the model": "b"}
    )  # it holds no row, and there is no output
    output.touch()
    with pytest.raises(UsageError, match="the model was a, is b"):
        check_journal_settings(output, {"the model": "b"})
    path.write_bytes(head[:-1])
    assert find_fingerprint(output) is None


def test_rows_are_kept_byte_for_byte(tmp_path: Path) -> None:
    rows = [row(n, is_error=n == 4, text="é\u2028 \\n" * n) for n in (5, 1, 4)]
    output = written(tmp_path, rows)
    journal = Journal(output, MODEL)
    assert (journal.num_rows, journal.num_damaged) == (3, 0)
    assert [n for n in range(9) if n in journal] == [1, 4, 5]
    assert list(journal.read_rows()) == sorted(rows, key=lambda each: each.number)
    kept = journal.kept
    assert (kept.num_completed, kept.num_failed, kept.tokens) == (2, 1, (10, 0, 6))
    assert journal.has_input_crc(4, 4 * 77) and not journal.has_input_crc(4, 5)
    journal.close()


def test_a_power_cut_at_every_byte_of_the_last_two_rows(tmp_path: Path) -> None:
    rows = [row(n, text="t" * n) for n in range(1, 6)]
    output = written(tmp_path, rows)
    path = journal_path(output)
    whole = path.read_bytes()
    starts = [whole.index(each.to_line()) for each in rows]
    for size in range(starts[3], len(whole) + 1):
        path.write_bytes(whole[:size])
        expected = [
            n
            for n, start in enumerate(starts, 1)
            if start + len(rows[n - 1].to_line()) <= size
        ]
        journal = Journal(output, MODEL)
        assert [n for n in range(9) if n in journal] == expected, size
        for each in rows[len(expected) :]:
            journal.append(each)
        journal.close()
        assert path.read_bytes() == whole, "the torn tail is gone, the rest goes on"


def test_a_power_cut_at_every_byte_of_the_head(tmp_path: Path) -> None:
    output = written(tmp_path, [])
    whole = journal_path(output).read_bytes()
    for size in range(len(whole)):
        journal_path(output).write_bytes(whole[:size])
        Journal(output, MODEL).close()
        assert journal_path(output).read_bytes() == whole


def test_a_damaged_row_is_answered_again_and_the_others_are_kept(
    tmp_path: Path,
) -> None:
    """A disk may keep later blocks and lose an earlier one, which is then zeros, or old data."""
    rows = [row(n, text="t" * 40) for n in range(1, 6)]
    output = written(tmp_path, rows)
    path = journal_path(output)
    whole = path.read_bytes()
    start = whole.index(rows[2].to_line())
    end = start + len(rows[2].to_line())
    for place in range(start, end):
        data = bytearray(whole)
        data[place] ^= 1
        path.write_bytes(data)
        journal = Journal(output, MODEL)
        left = [n for n in range(9) if n in journal]
        assert left in ([1, 2, 4, 5], [1, 2, 5]), (
            "the line before the next may be joined to it"
        )
        assert [each.record for each in journal.read_rows()] == [
            rows[n - 1].record for n in left
        ]
        journal.close()
    path.write_bytes(whole[:start] + bytes(end - start - 1) + whole[end - 1 :])
    journal = Journal(output, MODEL)
    assert (journal.num_rows, journal.num_damaged) == (4, 1)
    journal.append(rows[2])
    finish(journal)
    assert output.read_bytes() == b"".join(each.record + b"\n" for each in rows)


def test_any_bytes_are_read_without_a_wrong_row(tmp_path: Path) -> None:
    source = random.Random(5)
    rows = {row(n).to_line() for n in range(1, 30)}
    path = journal_path(written(tmp_path, []))
    head = path.read_bytes()
    for _ in range(300):
        data = bytearray(b"".join(source.sample(sorted(rows), 8)))
        for _ in range(source.randrange(4)):
            kind = source.randrange(3)
            place = source.randrange(len(data))
            if kind == 0:
                data[place] = source.randrange(256)
            elif kind == 1:
                del data[place : place + source.randrange(60)]
            else:
                data[place:place] = source.randbytes(source.randrange(60))
        path.write_bytes(head + data)
        journal = Journal(tmp_path / "answers.jsonl", MODEL)
        assert {each.to_line() for each in journal.read_rows()} <= rows
        journal.close()


def test_another_runs_rows_are_refused_by_what_differs(tmp_path: Path) -> None:
    output = written(tmp_path, [row(1)])
    before = journal_path(output).read_bytes()
    for read in (
        lambda f: inspect_journal(output, f, restart=False),
        lambda f: Journal(output, f),
    ):
        with pytest.raises(
            UsageError, match=r": --seed was not given, is 1; the model was a, is b"
        ):
            read({"the model": "b", "--seed": "1"})
        with pytest.raises(
            UsageError, match=r"differs: --model-name was not given, is B\. Repeat"
        ):
            read({"the model": "b", "the tokenizer": "b", "--model-name": "B"})
    assert journal_path(output).read_bytes() == before
    assert inspect_journal(output, {"the model": "b"}, restart=True)
    journal = Journal(output, {"the model": "b"}, restart=True)
    assert journal.num_rows == 0
    journal.close()
    journal_path(output).write_text('{"some": "file"}\n')
    with pytest.raises(UsageError, match="its first line is damaged"):
        Journal(output, MODEL)


def test_templates_read_the_time_of_the_run_that_began(tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    for clock in ("noon", "midnight"):
        with contextlib.closing(Journal(output, MODEL | {CLOCK: clock})) as journal:
            assert journal.clock == "noon"
            journal.append(row(1))


def test_answers_that_were_drawn_another_way_are_not_gone_on_with(
    tmp_path: Path,
) -> None:
    """A journal of a version that inverted cumulated weights says nothing of drawing."""
    output = written(tmp_path, [row(1)])
    new = MODEL | {DRAWING: "Gumbel-max"}
    for read in (
        lambda: inspect_journal(output, new, restart=False),
        lambda: Journal(output, new),
    ):
        with pytest.raises(
            UsageError, match=r"drawn in another way now\. Finish .* --restart"
        ):
            read()
    assert len(journal_path(output).read_bytes().splitlines()) == 2
    Journal(output, new, restart=True).close()
    Journal(output, new).close()


def test_a_run_that_finished_no_row_refuses_none_after_it(tmp_path: Path) -> None:
    """A run that ended before its first row, its budget too large say, left a journal
    without rows.

    The next command, with other settings, was refused: "belongs to a run that differs".
    """
    output = written(tmp_path, [])
    assert inspect_journal(output, {"the model": "b"}, restart=False)
    journal = Journal(output, {"the model": "b"})
    journal.append(row(1))
    journal.close()
    with pytest.raises(UsageError, match="the model was b, is a"):
        Journal(output, {"the model": "a"})
    journal_path(output).unlink()
    written(tmp_path, [])
    output.write_text("{}\n")  # a restart of it ended before its first row
    for read in (
        lambda f: inspect_journal(output, f, restart=False),
        lambda f: Journal(output, f),
    ):
        with pytest.raises(UsageError, match="the model was a, is b"):
            read({"the model": "b"})


def test_two_runs_on_one_output(tmp_path: Path) -> None:
    """The second is refused while the first lives; a dead one's lock is nobody's."""
    output = tmp_path / "answers.jsonl"
    code = (
        "import sys, time; from pathlib import Path; from fminfer.files.journal import "
        "Journal"
    )
    code += (
        f"; j = Journal(Path({str(output)!r}), {MODEL!r}); print('open', flush=True)"
    )
    code += "; time.sleep(60)"
    other = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None and other.stdout.readline() == "open\n"
        for attempt in (
            lambda: Journal(output, MODEL),
            lambda: inspect_journal(output, MODEL, restart=True),
        ):
            with pytest.raises(UsageError, match="another process writes"):
                attempt()
    finally:
        other.kill()
        other.communicate()
    Journal(output, MODEL).close()


def test_a_process_that_was_forked_does_not_keep_the_lock(tmp_path: Path) -> None:
    """Another thread may start a program just then; its process shares what was open."""
    journal = Journal(tmp_path / "out.jsonl", {})
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    journal.close()
    try:
        Journal(tmp_path / "out.jsonl", {}).close()
    finally:
        os.close(writer)
        os.close(reader)
        os.waitpid(child, 0)


def test_file_systems_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.flock", refuse)
    journal = Journal(tmp_path / "answers.jsonl", MODEL)
    assert not journal.has_locks
    journal.close()


def fail_after(count: int, error: int, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a system call that fails once it was called so often, forever."""
    calls = 0

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > count:
            raise OSError(error, os.strerror(error))
        return call(*args)

    return failing


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.ESTALE])
def test_a_disk_that_fails_costs_no_finished_row(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "answers.jsonl"
    journal = Journal(output, MODEL)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail_after(3, error, os.pwrite))
        patch.setattr(os, "ftruncate", fail_after(0, error, os.ftruncate))
        for number in (1, 2, 3):
            journal.append(row(number))
        with pytest.raises(
            OutputError, match=r"cannot be written: .*run the same command again"
        ):
            journal.append(row(4))
    journal.close()
    journal = Journal(output, MODEL)
    assert journal.num_rows == 3 and journal.num_damaged == 0
    journal.append(row(4))
    finish(journal)
    assert len(output.read_bytes().splitlines()) == 4


def test_a_disk_that_takes_half_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "answers.jsonl", MODEL)
    journal.append(row(1))
    size = journal.path.stat().st_size
    pwrite = os.pwrite
    calls = iter([True, False])

    def take_half(fd: int, data: memoryview, place: int) -> int:
        if next(calls):
            return pwrite(fd, data[: len(data) // 2], place)
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", take_half)
        with pytest.raises(OutputError, match="make room"):
            journal.append(row(2))
    assert journal.path.stat().st_size == size, "the half is taken back"
    journal.append(row(2))  # somebody made room
    finish(journal)


def test_a_sync_that_fails_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "answers.jsonl", MODEL)
    monkeypatch.setattr(journals, "SYNC_EVERY_S", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_after(0, errno.EIO, os.fsync))
        journal.append(row(1))
        with pytest.raises(OutputError, match="Input/output error"):
            for number in range(2, 200):
                time.sleep(0.01)
                journal.append(row(number))
    journal.close()


def test_rows_reach_the_disk_within_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "answers.jsonl", MODEL)
    sync = os.fsync
    sizes = list[int]()

    def watch(fd: int) -> None:
        sync(fd)
        # and not another test's
        if os.path.samestat(os.fstat(fd), journal.path.stat()):
            sizes.append(os.fstat(fd).st_size)

    monkeypatch.setattr(os, "fsync", watch)
    journal.append(row(1))
    assert journals.SYNC_EVERY_S <= 0.5, "and as long again for the disk"
    deadline = time.monotonic() + 10  # the test's machine may be busy
    while not sizes and time.monotonic() < deadline:
        time.sleep(0.02)
    assert sizes and sizes[-1] == journal.path.stat().st_size
    journal.close()


def test_a_slow_disk_does_not_hold_rows_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sync that takes for ever, and slow writes in pieces: rows go out, and all stand."""
    monkeypatch.setattr(journals, "SYNC_EVERY_S", 0.01)
    is_syncing = threading.Event()
    may_end = threading.Event()
    sync = os.fsync
    write = os.pwrite

    def hang(fd: int) -> None:
        is_syncing.set()
        assert may_end.wait(60)
        sync(fd)

    def dawdle(fd: int, data: bytes, place: int) -> int:
        time.sleep(0.01)
        return write(fd, data[:40], place)

    journal = Journal(tmp_path / "answers.jsonl", MODEL)
    monkeypatch.setattr(os, "fsync", hang)
    monkeypatch.setattr(os, "pwrite", dawdle)
    journal.append(row(1))
    assert is_syncing.wait(60)
    for number in range(2, 30):
        journal.append(row(number))
    assert journal.path.read_bytes().count(b"\n") == 30, "the head and 29 rows"
    may_end.set()
    finish(journal)
    assert [json.loads(line)["row"] for line in journal.output.open()] == list(
        range(1, 30)
    )


class Killed(BaseException):
    """Stands for kill -9: nothing of the program runs after it."""


def test_finishing_can_be_killed_at_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each system call that changes a file, before and after it."""
    rows = [row(n, is_error=n % 3 == 0) for n in (4, 2, 6, 1, 3, 5)]
    answers = b"".join(row(n).record + b"\n" for n in (1, 2, 4, 5))
    errors = b"".join(row(n).record + b"\n" for n in (3, 6))
    for moment in range(100):
        folder = tmp_path / str(moment)
        folder.mkdir()
        journal = Journal(written(folder, rows), MODEL)
        output = journal.output
        was_killed = kill_at(moment, lambda j=journal: finish(j), monkeypatch)  # type: ignore[misc]
        if was_killed:
            with contextlib.suppress(OSError):
                os.close(journal._fd)  # as the system does
            assert not output.exists() or output.read_bytes() == answers
            assert journal_path(output).exists() or output.exists()
        if journal_path(output).exists():
            finish(Journal(output, MODEL))
        assert output.read_bytes() == answers
        assert errors_path(output).read_bytes() == errors
        assert sorted(p.name for p in folder.iterdir()) == [
            "answers.errors.jsonl",
            "answers.jsonl",
        ]
        if not was_killed:
            break
    assert moment > 8, "there are so many steps at least"


def kill_at(
    moment: int, work: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Run some work up to its n-th change of a file; tell whether it got so far."""
    count = 0
    was_killed = False

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            nonlocal count, was_killed
            if was_killed:
                raise Killed
            for is_done in (False, True):
                if count == moment:
                    was_killed = True
                    raise Killed
                count += 1
                if not is_done:
                    result = call(*args, **options)
            return result

        return run

    with monkeypatch.context() as patch:
        for name in ("fsync", "replace"):
            patch.setattr(os, name, watched(getattr(os, name)))
        for name in ("unlink", "open", "rmdir"):
            patch.setattr(Path, name, watched(getattr(Path, name)))
        patch.setattr(
            ordered_output, "_write_rows", watched(ordered_output._write_rows)
        )
        try:
            work()
        except Killed:
            return True
    return False


def test_lines_prove_themselves() -> None:
    line = row(7).to_line()
    assert parse_row(line) == row(7)
    for other in (
        b"",
        b"\n",
        b"{}\n",
        line[:-1],
        line[1:],
        line.replace(b"21b", b"21c"),
        line * 2,
    ):
        assert parse_row(other) is None, other


def test_blank_lines_take_no_memory(tmp_path: Path) -> None:
    """300 million of them before a request, 300 kB as .gz, took 5.9 GB."""
    numbers = [3 * 10**8, 5, 3 * 10**8 + 1, 2000]
    output = written(
        tmp_path, [row(number)._replace(input_crc=number) for number in numbers]
    )
    tracemalloc.start()
    journal = Journal(output, MODEL)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert [each.number for each in journal.read_rows()] == sorted(numbers)
    assert journal.last_number == max(numbers) and journal.num_rows == 4
    asked = (0, 5, 6, 1024, 2000, 2 * 10**8)
    assert [number for number in asked if number in journal] == [5, 2000]
    assert journal.has_input_crc(2000, 2000) and not journal.has_input_crc(5, 6)
    journal.close()


@pytest.mark.parametrize("asked", [("auto", "on"), ("on", "auto"), ("on", "on")])
def test_same_answers_are_not_mixed_with_others(
    asked: tuple[str, str], tmp_path: Path
) -> None:
    """A run of --same-answers on goes on with rows of such runs alone."""
    before, now = ({"--same-answers": "on"} if a == "on" else {} for a in asked)
    goes_on = asked == ("on", "on")
    output = tmp_path / "answers.jsonl"
    journal = Journal(output, MODEL | {INPUT: "1"} | before)
    journal.append(row(1))
    journal.close()
    was = MODEL | {INPUT: "1"} | before
    assert is_of_other_input(was, MODEL | {INPUT: "2"} | now) == goes_on
    if goes_on:
        again = Journal(output, MODEL | {INPUT: "1"} | now)
        assert again.num_rows == 1
        again.close()
    else:
        with pytest.raises(
            UsageError, match=r"--same-answers was (on|not given), is (on|not given)"
        ):
            Journal(output, MODEL | {INPUT: "1"} | now)
