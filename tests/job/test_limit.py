"""`run --limit N`: the first N requests, and later the others, without answering any twice."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from fminfer.answers.carrying_over import RunTerms
from fminfer.core.errors import UsageError
from fminfer.files.journal import journal_path
from fminfer.files.output_paths import OutputPaths
from fminfer.files.status_file import read_status
from fminfer.job.journaled_input import JournaledInput
from fminfer.job.run_inputs import open_files
from fminfer.job.shared_folder import SharedFiles
from tests.job.test_try_again import ALL, LASTING, answer, read, record_of, write_input


def open_limited(source: Path, output: Path, limit: int | None) -> JournaledInput:
    files = open_files([source], [output], RunTerms("m", {}, limit=limit))
    (file,) = files.files
    assert isinstance(file, JournaledInput)
    return file


def test_a_limited_run_is_complete_and_a_later_one_goes_on(tmp_path: Path) -> None:
    source, output = write_input(tmp_path)
    assert answer(open_limited(source, output, 3), LASTING) == [1, 2, 4]
    status = read_status(output)
    assert status is not None and status["status"] == "completed"
    assert status["fminfer"]["limit"] == 3 and status["request_counts"]["total"] == 3
    first = read(output)[0]
    assert open_limited(source, output, 3).is_finished
    assert open_limited(source, output, 2).is_finished
    assert answer(open_limited(source, output, 5), LASTING) == [5, 6]
    assert answer(open_limited(source, output, None), LASTING) == [7, 8]
    assert open_limited(source, output, None).is_finished
    assert open_limited(source, output, 3).is_finished, (
        "all are answered, more than was asked"
    )
    whole, one_output = write_input(tmp_path / "one")
    assert answer(open_limited(whole, one_output, None), LASTING) == sorted(ALL)
    assert read(output) == read(one_output) and read(output)[0].startswith(first)
    status = read_status(output)
    assert status is not None and status["fminfer"]["limit"] is None


def test_a_limit_beyond_the_end(tmp_path: Path) -> None:
    source, output = write_input(tmp_path)
    assert answer(open_limited(source, output, 100), LASTING) == sorted(ALL)
    assert open_limited(source, output, 100).is_finished
    assert answer(open_limited(source, output, None), LASTING) == []


def test_a_run_that_broke_off_goes_on_with_another_limit(tmp_path: Path) -> None:
    source, output = write_input(tmp_path)
    file = open_limited(source, output, 5)
    lines = list(file.read_lines(lambda line: None))
    for line in lines[:4]:
        file.add(record_of(line, LASTING))
    file.abandon(KeyboardInterrupt())
    with pytest.raises(
        UsageError, match=r"more than the first 2 lines.*larger --limit"
    ):
        open_limited(source, output, 2)
    assert answer(open_limited(source, output, 6), LASTING) == [6, 7]


def test_answers_beyond_the_limit_are_not_taken_for_those_before_it(
    tmp_path: Path,
) -> None:
    """As many answers as the limit were taken for those of the first lines."""
    source, output = write_input(tmp_path)
    file = open_limited(source, output, None)
    lines = list(file.read_lines(lambda line: None))
    for line in (lines[0], lines[6]):
        file.add(record_of(line, LASTING))
    file.abandon(KeyboardInterrupt())
    for limit in (3, 2):
        with pytest.raises(UsageError, match="larger --limit"):
            open_limited(source, output, limit)
    assert answer(open_limited(source, output, 7), LASTING) == [2, 4, 5, 6, 7]


def test_it_is_noticed_once_a_packed_file_is_read(tmp_path: Path) -> None:
    """How many lines it has, and which, shows only then."""
    plain, output = write_input(tmp_path)
    source = plain.with_suffix(".jsonl.gz")
    source.write_bytes(gzip.compress(plain.read_bytes()))
    file = open_limited(source, output, None)
    lines = list(file.read_lines(lambda line: None))
    for line in (lines[0], lines[6]):
        file.add(record_of(line, LASTING))
    file.abandon(KeyboardInterrupt())
    file = open_limited(source, output, 2)
    with pytest.raises(UsageError, match="larger --limit"):
        list(file.read_lines(lambda line: None))
    file.abandon(KeyboardInterrupt())
    assert not output.exists() and journal_path(output).exists()


def test_files_of_a_folder_are_limited_each(tmp_path: Path) -> None:
    source, output = write_input(tmp_path)
    for limit, expected in ((2, [1, 2]), (2, None), (4, [4, 5])):
        shared = SharedFiles(
            lambda: OutputPaths([source], [output]),
            RunTerms("m", {}, limit=limit),
            is_watching=False,
        )
        is_left = shared.scan()
        assert is_left == (expected is not None)
        if expected is not None:
            assert shared.num_rows == (2 if limit == 2 else 4)
            file = next(shared.iterate_files())
            assert file is not None and answer(file, LASTING) == expected
