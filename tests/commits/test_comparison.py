"""What `scripts/same_answers` and `scripts/walk_start` notice, without running a commit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commits.comparison import (
    compare,
    names_of_fields,
    without_numbers,
    without_times,
)
from tests.commits.same_answers import ERRORS, OUTPUT, Result, differences_of, summarize
from tests.commits.varied_requests import NUM_LINES, make_lines, write_lines
from tests.commits.walk_start import count_walk

RECORD = (
    b'{"request":{"prompt": "x"},"result":{"choices":[{"text":" north","index":0}],'
    b'"request_time":{"batch_time":0.5,"batch_size":2.0},"usage":{"total_tokens":3}}}\n'
)


@pytest.mark.parametrize("place", range(0, len(RECORD) - 1, 7))
def test_one_other_byte_of_an_answer_is_a_difference(place: int) -> None:
    other = RECORD[:place] + bytes([RECORD[place] ^ 1]) + RECORD[place + 1 :]
    difference = compare(OUTPUT, RECORD + RECORD, RECORD + other)
    assert difference is not None
    assert (difference.num_bytes, difference.line) == (1, 2)
    assert difference.base != difference.head
    files = {OUTPUT: RECORD, ERRORS: b""}
    found = differences_of(files, {**files, OUTPUT: other})
    assert not summarize("HEAD~1", [Result("plain", 1, found, 0.0)])["is_same"]


def test_equal_files_have_no_difference() -> None:
    assert compare(OUTPUT, RECORD, RECORD) is None
    assert summarize("HEAD~1", [Result("plain", 1, [], 0.0)])["is_same"]


@pytest.mark.parametrize("head", [b"", RECORD, RECORD + RECORD[:-1], RECORD * 3])
def test_lines_that_are_absent_or_more_are_a_difference(head: bytes) -> None:
    difference = compare(OUTPUT, RECORD * 2, head)
    assert difference is not None
    assert difference.num_bytes == abs(len(RECORD * 2) - len(head))


def test_only_times_are_left_out_of_records() -> None:
    other = RECORD.replace(b"0.5", b"7.25e-05")
    assert other != RECORD
    assert without_times(other) == without_times(RECORD)
    assert without_times(b'{"created":17,"n":1}') == without_times(
        b'{"created":9,"n":1}'
    )
    assert len(without_times(RECORD)) > len(RECORD) - 60


def test_numbers_of_messages_and_values_of_reports_may_differ() -> None:
    assert without_numbers(b"Ready after 2.7 s\n") == without_numbers(
        b"Ready after 13 s\n"
    )
    assert without_numbers(b"Ready after 2.7 s\n") != without_numbers(
        b"Ready in 2.7 s\n"
    )
    progress = b"3/160 rows, 1,234 tokens, 99 tok/s, left ~0:01\n"
    assert without_numbers(progress + b"Ready\n") == b"Ready\n"
    assert names_of_fields(b'{"a": [{"b": 1}, {"b": 2}]}') == b".a[].b\n"
    assert names_of_fields(b'{"a": 1}') != names_of_fields(b'{"b": 1}')


def test_the_lines_are_of_every_kind_and_the_same_each_time(tmp_path: Path) -> None:
    lines = list(make_lines())
    assert len(lines) == NUM_LINES
    write_lines(tmp_path / "one.jsonl")
    write_lines(tmp_path / "two.jsonl")
    text = (tmp_path / "one.jsonl").read_bytes()
    assert text == (tmp_path / "two.jsonl").read_bytes()
    assert len([line for line in text.splitlines() if line.strip()]) == NUM_LINES
    repeated = len(lines) - len(set(lines))
    assert repeated >= 5
    for word in (
        "best_of",
        "logprobs",
        "echo",
        "guided_regex",
        "messages",
        "custom_id",
        "min_p",
    ):
        assert json.dumps(word).encode() in text


def test_a_stop_is_a_pair_of_functions_in_two_files() -> None:
    notes = {
        "functions": [["plan/a.py", "f"], ["core/b.py", "g"], ["core/b.py", "h"]],
        "steps": [
            ["plan/a.py", "f", "core/b.py", "g", 3],
            ["core/b.py", "g", "core/b.py", "h", 1],
            ["core/b.py", "h", "plan/a.py", "f", 1],
        ],
        "plans": [["plan/a.py:f"]],
        "scans": [],
    }
    figures = count_walk(notes)
    assert (figures["functions"], figures["files"]) == (3, 2)
    assert (figures["stops"], figures["climbs"], figures["calls"]) == (2, 1, 4)
    assert (figures["plans"], figures["scans"]) == (1, 0)
