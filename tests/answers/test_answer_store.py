"""The file of kept answers: what is found is what was kept, and no damage ever costs more."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from fminfer.answers import answer_file, answer_store
from fminfer.answers.answer_store import FILE, AnswerStore
from fminfer.answers.cache_place import DEFAULT_BYTES, CachePlace, KeptAnswers
from fminfer.core.errors import UsageError

MIB = 2**20


def key_of(number: int) -> bytes:
    return hashlib.blake2b(b"%d" % number, digest_size=32).digest()


def value_of(number: int, size: int = 200) -> bytes:
    return random.Random(number).randbytes(size // 2) + b"%d" % number * (size // 8)


@contextmanager
def opened(
    folder: Path, max_bytes: int = 64 * MIB, now: Callable[[], float] = time.time
) -> Iterator[tuple[AnswerStore, list[str]]]:
    told: list[str] = []
    store = AnswerStore(CachePlace(folder, max_bytes), told.append, now)
    try:
        yield store, told
    finally:
        store.close()


def fill(folder: Path, numbers: range, **how: Any) -> None:
    with opened(folder, **how) as (store, told):
        for number in numbers:
            store.add(key_of(number), value_of(number))
    assert told == [] and store.trouble == ""


def found(folder: Path, numbers: range, **how: Any) -> list[int]:
    """Return those that are there; each must be what was kept."""
    there = []
    with opened(folder, **how) as (store, _):
        for number in numbers:
            value = store.find(key_of(number))
            assert value in (None, value_of(number))
            there += [number] * (value is not None)
    return there


@pytest.fixture
def quick_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_store, "WRITE_EACH_S", 0.05)


def test_answers_outlive_the_process(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "cache"
    fill(folder, range(500))
    assert found(folder, range(600)) == [*range(500)]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert FILE in modes and set(modes.values()) == {0o600}


def test_it_is_found_before_it_is_written(tmp_path: Path) -> None:
    with opened(tmp_path) as (store, _):
        store.add(key_of(1), b"one")
        assert store.find(key_of(1)) == b"one" and store.find(key_of(2)) is None


@pytest.mark.usefixtures("quick_writes")
def test_answers_are_written_while_the_run_goes_on(tmp_path: Path) -> None:
    """A run that is killed loses those of the last second or two."""
    with opened(tmp_path) as (store, _), opened(tmp_path) as (other, _):
        store.add(key_of(1), b"one")
        until_s = time.monotonic() + 20
        while store._pending and time.monotonic() < until_s:
            time.sleep(0.05)
        assert other.find(key_of(1)) == b"one"
        assert not store._pending and not store._pending_bytes


@pytest.mark.parametrize(
    "value", [b"", b"{}", b"\x00\xff" * 5, b"x" * 3_000_000, b"z" + b"-" * 999]
)
def test_any_bytes_come_back(value: bytes, tmp_path: Path) -> None:
    with opened(tmp_path) as (store, _):
        store.add(key_of(1), value)
    with opened(tmp_path) as (store, told):
        assert store.find(key_of(1)) == value and not told
    assert (tmp_path / FILE).stat().st_size < 100_000, "a large value is compressed"


def test_who_keeps_an_answer_never_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server's event loop would; another thread may be reading from a slow disk."""
    is_reading = threading.Event()
    goes_on = threading.Event()

    def read(self: Any, key: bytes) -> None:
        is_reading.set()
        assert goes_on.wait(20)

    monkeypatch.setattr(answer_file.AnswerFile, "read", read)
    with opened(tmp_path) as (store, told):
        reading = threading.Thread(target=store.find, args=(key_of(1),))
        reading.start()
        assert is_reading.wait(20)
        store.add(key_of(2), b"two")
        assert store.find(key_of(2)) == b"two", "what waits is found as well"
        goes_on.set()
        reading.join(20)
    assert told == []


def test_two_processes_at_once(tmp_path: Path) -> None:
    """Both begin the file, and write and read it together."""
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from tests.answers.test_answer_store import answer_store, key_of, value_of, opened\n"
        "first = int(sys.argv[2])\n"
        "answer_store.WRITE_EACH_S = 0.1\n"
        "with opened(Path(sys.argv[1])) as (store, told):\n"
        "    for number in range(first, first + 1200):\n"
        "        store.add(key_of(number), value_of(number))\n"
        "        value = store.find(key_of(number - 800))\n"
        "        assert value in (None, value_of(number - 800))\n"
        "        time.sleep(0.0005)\n"
        "assert told == [] and store.trouble == '', told\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "new")]
    both = [subprocess.Popen([*command, str(first)]) for first in (0, 800)]
    assert [process.wait(120) for process in both] == [0, 0]
    assert found(tmp_path / "new", range(2000)) == [*range(2000)]


@pytest.mark.parametrize("step", ["_read_pragma", "_read_tables"])
def test_another_process_makes_the_tables_meanwhile(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "answers.sqlite"
    look = getattr(answer_file.AnswerFile, step)

    def look_while_another_makes_them(*of_what: Any) -> object:
        monkeypatch.undo()
        seen = look(*of_what)
        answer_file.AnswerFile(path, 1).close()
        return seen

    monkeypatch.setattr(answer_file.AnswerFile, step, look_while_another_makes_them)
    answer_file.AnswerFile(path, 1).close()


# What is done to the file, and whether it is noticed for certain.
DAMAGES: dict[str, tuple[Callable[[Path], object], bool]] = {
    "garbage": (lambda path: path.write_bytes(os.urandom(50_000)), True),
    "another form": (lambda path: run(path, "PRAGMA user_version = 99"), True),
    "another program's": (lambda path: run(path, "PRAGMA application_id = 5"), True),
    "other tables": (lambda path: run(path, "CREATE TABLE more (a)"), True),
    "a missing table": (lambda path: run(path, "DROP TABLE answers"), True),
    "cut short": (lambda path: os.truncate(path, path.stat().st_size // 2), True),
    "cut to the header": (lambda path: os.truncate(path, 100), True),
    "a wrong header": (lambda path: write_at(path, 0, b"SQLite format 4"), True),
    "a page of zeros": (lambda path: write_at(path, 8192, bytes(4096)), False),
    "a header that forbids to write": (
        lambda path: write_at(path, 18, b"\x03\x03"),
        True,
    ),
    "a folder": (lambda path: make_folder(path), True),
    "empty": (lambda path: path.write_bytes(b""), False),
    "gone": (lambda path: path.unlink(), False),
}


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def run(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute(statement)


def write_at(path: Path, place: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        file.write(data)


REASONS = {
    "another form": "its form is version",
    "another program's": "it is a database of another program",
    "a missing table": "its tables are not those of this fminfer",
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_put_aside(name: str, tmp_path: Path) -> None:
    damage, is_noticed = DAMAGES[name]
    fill(tmp_path, range(1000))
    damage(tmp_path / FILE)
    with opened(tmp_path) as (store, told):
        for number in range(1000):
            assert store.find(key_of(number)) in (None, value_of(number))
            store.add(key_of(number), value_of(number))
    assert store.trouble == ""
    aside = [path for path in tmp_path.iterdir() if ".damaged-" in path.name]
    if is_noticed:
        assert len(told) == 1 and "is damaged" in told[0] and len(aside) >= 1
        assert aside[0].name in told[0] or len(aside) > 1
        assert REASONS.get(name, "") in told[0]
    with opened(tmp_path) as (_, told):
        assert told == []
    assert found(tmp_path, range(1000)) == [*range(1000)], "what followed is kept"


def test_any_flipped_byte(tmp_path: Path) -> None:
    """No answer that is found is another than was kept, and nothing raises."""
    # imports torch, for which children have no use
    from tests.conftest import IS_ALL, num_examples

    fill(tmp_path / "whole", range(300))
    whole = (tmp_path / "whole" / FILE).read_bytes()
    chance = random.Random(5)
    # SQLite's header has 100 bytes, and that of its first page follows.
    places = [*range(0, 110, 1 if IS_ALL else 3)]
    places += [chance.randrange(len(whole)) for _ in range(num_examples(150))]
    num_told = 0
    for place in places:
        folder = tmp_path / str(place)
        folder.mkdir(exist_ok=True)
        damaged = bytearray(whole)
        damaged[place] ^= 1 << chance.randrange(8)
        (folder / FILE).write_bytes(damaged)
        with opened(folder) as (store, told):
            for number in range(300):
                assert store.find(key_of(number)) in (None, value_of(number))
            store.add(key_of(300), value_of(300))
        num_told += len(told)
        shutil.rmtree(folder)
    assert num_told > len(places) // 8


def test_one_wrong_answer_puts_the_file_aside(tmp_path: Path) -> None:
    """Whether its value was changed, or stands under another's key."""
    for statement in (
        "UPDATE answers SET value = x'2d6f6e65'",
        "UPDATE answers SET value = 'text'",
        "UPDATE answers SET value = CAST(x'ff' AS TEXT)",
        "UPDATE answers SET used = 'now'",
        "UPDATE answers SET checksum = (SELECT checksum FROM answers LIMIT 1)",
    ):
        fill(tmp_path, range(2))
        run(tmp_path / FILE, statement)
        with opened(tmp_path) as (store, told):
            got = [store.find(key_of(number)) for number in range(2)]
            assert None in got and all(
                v in (None, value_of(n)) for n, v in enumerate(got)
            )
            store.add(key_of(5), value_of(5))
        assert len(told) == 1 and "is damaged" in told[0]
        assert found(tmp_path, range(6)) == [5]


def test_damage_that_the_last_write_meets(tmp_path: Path) -> None:
    """The answers of the end go into the new file."""
    fill(tmp_path, range(2000))
    with opened(tmp_path) as (store, told):
        size = (tmp_path / FILE).stat().st_size
        write_at(tmp_path / FILE, 4096, os.urandom(size - 4096))
        store.add(key_of(5000), value_of(5000))
    assert len(told) == 1 and "is damaged" in told[0] and store.trouble == ""
    assert found(tmp_path, range(4990, 5010)) == [5000]


@pytest.mark.usefixtures("quick_writes")
def test_a_file_that_is_damaged_again_and_again_is_given_up(tmp_path: Path) -> None:
    with opened(tmp_path) as (store, told):
        for _ in range(answer_store.MAX_SET_ASIDE + 1):
            until_s = time.monotonic() + 20
            while store._reader is None and time.monotonic() < until_s:
                time.sleep(0.02)
            with store._file_lock:
                store._note_damage("a test says so")
        until_s = time.monotonic() + 20
        while not store.trouble and time.monotonic() < until_s:
            time.sleep(0.02)
        store.add(key_of(1), b"one")
        assert store.find(key_of(1)) is None
    assert store.trouble == "it is damaged again and again"
    assert (
        len(told) == answer_store.MAX_SET_ASIDE + 2 and "goes on without it" in told[-1]
    )


def test_another_process_has_put_it_aside(tmp_path: Path) -> None:
    """The new file in its place is not touched."""
    fill(tmp_path, range(10))
    with opened(tmp_path) as (store, told):
        (tmp_path / FILE).rename(tmp_path / "aside")
        fill(tmp_path, range(20, 30))
        with store._file_lock:
            store._note_damage("a test says so")
        store.add(key_of(40), value_of(40))
    assert told == [] and not [
        path for path in tmp_path.iterdir() if "damaged" in path.name
    ]
    assert found(tmp_path, range(50)) == [*range(20, 30), 40]


@pytest.mark.usefixtures("quick_writes")
@pytest.mark.parametrize("words", ["database or disk is full", "disk I/O error"])
def test_a_disk_that_fails_costs_one_warning(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, range(5))

    def fail(*_: Any) -> None:
        raise sqlite3.OperationalError(words)

    monkeypatch.setattr(answer_file.AnswerFile, "write", fail)
    with opened(tmp_path) as (store, told):
        for number in range(10, 20):
            store.add(key_of(number), value_of(number))
        until_s = time.monotonic() + 20
        while not told and time.monotonic() < until_s:
            time.sleep(0.02)
        for number in range(20, 30):
            store.add(key_of(number), value_of(number))
        is_full = "full" in words
        assert (store.find(key_of(1)) is not None) is is_full, "a full disk can be read"
        assert store.find(key_of(25)) is None
    assert len(told) == 1 and words in told[0] and store.trouble == words
    monkeypatch.undo()
    assert found(tmp_path, range(40)) == [*range(5)]


def test_a_full_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite itself says so, in the middle of a write: what was there before stays."""
    fill(tmp_path, range(50))
    prepare = answer_file.AnswerFile._prepare_tables

    def prepare_small(self: Any) -> None:
        prepare(self)
        self._database.execute("PRAGMA max_page_count = 1")  # as many as there are

    monkeypatch.setattr(answer_file.AnswerFile, "_prepare_tables", prepare_small)
    with opened(tmp_path) as (store, told):
        for number in range(50, 500):
            store.add(key_of(number), value_of(number))
    assert len(told) == 1 and "full" in told[0]
    monkeypatch.undo()
    assert found(tmp_path, range(500)) == [*range(50)]


@pytest.mark.usefixtures("quick_writes")
def test_a_locked_file_is_waited_for_and_then_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, range(5))
    monkeypatch.setattr(answer_store, "READ_S", 0.01)
    monkeypatch.setattr(answer_store, "WRITE_S", 0.01)
    with (
        opened(tmp_path) as (store, told),
        closing(sqlite3.connect(tmp_path / FILE)) as other,
    ):
        for again in (False, True):
            store.add(key_of(7 + again), b"new")
            until_s = time.monotonic() + 20
            while store._pending and time.monotonic() < until_s:
                time.sleep(0.02)
            other.execute("BEGIN EXCLUSIVE")
            for _ in range(answer_store.MAX_BUSY - 1):
                assert store.find(key_of(1)) is None and told == []
            other.rollback()
        assert store.find(key_of(1)) == value_of(1)
        other.execute("BEGIN EXCLUSIVE")
        for _ in range(answer_store.MAX_BUSY + 5):
            assert store.find(key_of(1)) is None
        other.rollback()
        assert len(told) == 1 and "locked" in told[0]
        assert store.find(key_of(1)) is None, "it stays given up"


def test_one_that_is_locked_when_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, range(5))
    monkeypatch.setattr(answer_file, "OPEN_S", 0.05)
    with closing(sqlite3.connect(tmp_path / FILE)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with opened(tmp_path) as (store, told):
            store.add(key_of(9), b"nine")
            assert store.find(key_of(1)) is None
    assert len(told) == 1 and "locked" in told[0] and "locked" in store.trouble


def test_a_folder_that_goes_away(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with opened(folder) as (store, told):
        store.add(key_of(1), b"one")
        shutil.rmtree(folder)
        store.add(key_of(2), b"two")
    assert len(told) <= 2 and all("Warning" in text for text in told)


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with opened(tmp_path / "file" / "cache") as (store, told):
        store.add(key_of(1), b"one")
        assert store.find(key_of(1)) is None
    assert len(told) == 1 and store.trouble


@pytest.mark.usefixtures("quick_writes")
def test_a_file_that_can_only_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers are taken from it, and none is added."""
    fill(tmp_path, range(5))
    connect = sqlite3.connect

    # root may write anything
    def connect_to_read(path: Path, **how: Any) -> sqlite3.Connection:
        database: sqlite3.Connection = connect(f"file:{path}?mode=ro", uri=True, **how)
        return database

    monkeypatch.setattr(sqlite3, "connect", connect_to_read)
    monkeypatch.setattr(answer_file.AnswerFile, "_may_write", lambda self: False)
    with opened(tmp_path) as (store, told):
        assert store.find(key_of(1)) == value_of(1)
        store.add(key_of(9), b"nine")
        until_s = time.monotonic() + 20
        while not told and time.monotonic() < until_s:
            time.sleep(0.02)
        assert store.find(key_of(2)) == value_of(2) and store.find(key_of(9)) is None
    assert len(told) == 1 and "none is added" in told[0]


def test_the_oldest_use_goes_first_and_the_size_holds(tmp_path: Path) -> None:
    now = [1000.0]

    def clock() -> float:
        return now[0]

    for first in range(0, 6000, 1000):
        with opened(tmp_path, MIB, clock) as (store, told):
            for number in range(first, first + 1000):
                store.add(key_of(number), value_of(number, 400))
        now[0] += answer_file.TOUCH_AFTER_S
        with opened(tmp_path, MIB, clock) as (store, told):
            for number in range(10):  # used again and again
                assert store.find(key_of(number)) == value_of(number, 400)
        assert (tmp_path / FILE).stat().st_size <= MIB and not told
    with opened(tmp_path, MIB, clock) as (store, _):
        there = [n for n in range(6000) if store.find(key_of(n)) is not None]
    assert there[:10] == [*range(10)] and there[-1] == 5999
    assert 500 < len(there) < 3000 and there[10:] == [*range(there[10], 6000)], (
        "a part at the end"
    )


def test_a_smaller_limit_gives_room_back(tmp_path: Path) -> None:
    with opened(tmp_path, 16 * MIB) as (store, _):
        for number in range(5000):
            store.add(key_of(number), random.Random(number).randbytes(900))
    assert (tmp_path / FILE).stat().st_size > 4 * MIB
    fill(tmp_path, range(5000, 5010), max_bytes=MIB)
    assert (tmp_path / FILE).stat().st_size <= MIB
    assert found(tmp_path, range(5000, 5010)) == [*range(5000, 5010)]


def test_an_answer_that_is_too_large_is_left_out(tmp_path: Path) -> None:
    with opened(tmp_path, MIB) as (store, told):
        store.add(key_of(1), os.urandom(MIB // 2))
        store.add(key_of(2), value_of(2))
    assert not told and found(tmp_path, range(5)) == [2]


def test_answers_that_wait_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_store, "MAX_PENDING_BYTES", 1000)
    with opened(tmp_path) as (store, told):
        for number in range(10):
            store.add(key_of(number), b"x" * 300)
        assert store._pending_bytes <= 1000 and len(store._pending) == 3
    assert not told


def test_what_the_options_refuse(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    wrong: list[tuple[Path | str | None, int | None, str]] = [
        (None, 2**30, "has no effect without --result-cache"),
        ("s3://bucket/cache", None, "is a URL"),
        (tmp_path / "file", None, "is a file"),
        (tmp_path, 1000, "at least 1 MiB"),
    ]
    for folder, size, says in wrong:
        with pytest.raises(UsageError, match=says):
            KeptAnswers(result_cache=folder, result_cache_bytes=size)
    assert KeptAnswers().cache_place is None
    assert KeptAnswers(result_cache=tmp_path).cache_place == CachePlace(
        tmp_path, DEFAULT_BYTES
    )
