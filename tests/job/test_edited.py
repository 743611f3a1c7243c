"""Inputs that are edited while a run is at work: answers never pass for those of other bytes."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fminfer.answers.carrying_over import RunTerms
from fminfer.contract.envelope import Line, parse_envelope
from fminfer.contract.record import Record
from fminfer.core.errors import UsageError
from fminfer.files.journal import journal_path
from fminfer.files.output_paths import OutputPaths
from fminfer.files.status_file import read_status
from fminfer.files.streams import digest_file, find_zstd
from fminfer.job.file_job import read_remaining_lines
from fminfer.job.journaled_input import JournaledInput
from fminfer.job.shared_folder import SharedFiles
from fminfer.machine.stopper import Stopper
from tests.shards.answer_shards import share

zstd = find_zstd()
assert zstd is not None, "the tests need fminfer[zst]"
PACK: dict[str, Callable[[bytes], bytes]] = {
    ".jsonl": bytes,
    ".jsonl.gz": gzip.compress,
    ".jsonl.zst": zstd.compress,
}


def rows(name: str, count: int = 3) -> bytes:
    noise = random.Random(name)
    texts = [f"{name} {i} {noise.random()}"[:20] for i in range(count)]
    return b"".join(json.dumps({"prompt": text}).encode() + b"\n" for text in texts)


def opened(path: Path) -> JournaledInput:
    output = path.with_name("out.jsonl")
    file = JournaledInput(path, 0, output, RunTerms("m", {"seed": "1"}, started_s=0.0))
    file.begin()
    return file


def answer(file: JournaledInput, line: Line) -> None:
    file.add(Record(line, parse_envelope(line), {"answer": line.number}))


def answer_all(file: JournaledInput) -> None:
    for line in file.read_lines(lambda line: None):
        answer(file, line)


def stamped(output: Path) -> str:
    status = read_status(output)
    assert status is not None and status["status"] == "completed"
    return str(status["metadata"]["the input"])


def test_an_input_edited_before_its_turn_is_stamped_with_what_was_answered(
    tmp_path: Path,
) -> None:
    """`run a b`: b was digested as the run began, and its answers were stamped with that."""
    path = tmp_path / "b.jsonl"
    output = tmp_path / "out.jsonl"
    path.write_bytes(rows("old"))
    file = opened(path)
    path.write_bytes(rows("new", 4))
    answer_all(file)
    assert stamped(output) == digest_file(path)
    assert output.read_bytes().count(b'"new') == 4
    assert opened(path).is_finished
    path.write_bytes(rows("old"))
    with pytest.raises(UsageError, match="the input was"):
        opened(path)


def test_an_input_edited_before_its_turn_is_refused_where_rows_are_kept(
    tmp_path: Path,
) -> None:
    path = tmp_path / "b.jsonl"
    path.write_bytes(rows("old"))
    first = opened(path)
    lines = first.read_lines(lambda line: None)
    answer(first, next(lines))
    first.abandon(KeyboardInterrupt())
    file = opened(path)
    path.write_bytes(rows("old", 1) + rows("new", 2))
    with pytest.raises(UsageError, match=r"b\.jsonl was changed since .*--restart"):
        answer_all(file)
    assert journal_path(file.output).read_bytes().count(b'"answer":') == 1


@pytest.mark.parametrize("ending", PACK)
def test_an_input_edited_while_it_is_read_is_refused(
    tmp_path: Path, ending: str
) -> None:
    """Its answers were of some lines of each, and stamped as those of the first."""
    path = tmp_path / f"b{ending}"
    old = PACK[ending](rows("old", 20_000))
    path.write_bytes(old)
    file = opened(path)
    lines = file.read_lines(lambda line: None)
    answer(file, next(lines))
    with path.open("r+b") as edited:  # bytes that were not read yet
        edited.seek(-20, os.SEEK_END)
        edited.write(b"x" * 20)
    with pytest.raises(
        UsageError, match=r"changed while it was being answered.*--restart"
    ):
        assert len(list(lines)) > 9_000
    assert not file.output.exists()
    assert journal_path(file.output).read_bytes().count(b'"answer":') == 1


@pytest.mark.parametrize("ending", PACK)
def test_what_was_read_counts_and_not_what_stands_there_later(
    tmp_path: Path, ending: str
) -> None:
    """An editor puts a new file in the old one's place; the old one is read to its end."""
    path = tmp_path / f"b{ending}"
    other = tmp_path / "other"
    path.write_bytes(PACK[ending](rows("old")))
    old_digest = digest_file(path)
    file = opened(path)
    lines = file.read_lines(lambda line: None)
    answer(file, next(lines))
    other.write_bytes(PACK[ending](rows("new")))
    other.replace(path)
    for line in lines:
        answer(file, line)
    assert stamped(file.output) == old_digest
    with pytest.raises(UsageError, match="the input was"):
        opened(path)


def test_a_file_of_a_folder_edited_while_it_was_answered_is_not_taken_for_complete(
    tmp_path: Path,
) -> None:
    """Where the size stayed, a change before the output's own time went unnoticed."""
    path = tmp_path / "b.jsonl"
    output = tmp_path / "out.jsonl"
    path.write_bytes(rows("old"))

    def look() -> SharedFiles:
        files = SharedFiles(
            lambda: OutputPaths([path], [output]),
            RunTerms("m", {"seed": "1"}),
            is_watching=False,
        )
        files.scan()
        return files

    files = look()
    for file in files.iterate_files():
        assert file is not None
        lines = file.read_lines(lambda line: None)
        read = list(lines)
        path.write_bytes(rows("new"))
        for line in read:
            answer(file, line)
        assert file.is_finished
    files = look()
    assert not list(filter(None, files.iterate_files()))
    assert "the input was" in files.refused[str(path)]


def test_a_file_of_a_folder_edited_while_it_is_read_costs_itself(
    tmp_path: Path,
) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.jsonl").write_bytes(rows(name))
    files = share(tmp_path)
    files.scan()
    engine: Any = SimpleNamespace(add_answered_line=lambda line: None)
    late = []
    for line in read_remaining_lines(files, engine, Stopper(0.0)):
        if line is None:
            continue
        file = files.files[line.source]
        if file.path.name == "b.jsonl" and line.number == 1:
            file.path.write_bytes(rows("other", 9))
            late.append((file, line))
        else:
            answer(file, line)
    for file, line in late:
        answer(file, line)
    assert [file.is_finished for file in files.files] == [
        True,
        False,
        True,
    ] and files.is_finished
    (reason,) = files.refused.values()
    assert "b.jsonl was changed while it was being answered" in reason
    assert read_status(files.files[1].output)["status"] == "failed"  # type: ignore[index]
