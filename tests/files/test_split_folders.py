"""Parts of a split: which of their lines have equal ones before them in what was split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fminfer.core.errors import UsageError
from fminfer.files.line_reader import read_lines
from fminfer.files.split_folders import find_num_equal, is_split_folder
from fminfer.split.manifest import MANIFEST
from fminfer.split.splitting import SplitOptions, split_file


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """Split lines of three models: each is there twice, but of the second model once."""
    lines = [
        {"prompt": f"x{number}", "engine": f"e{number}"}
        for number in (0, 1, 2, 0, 2, 2)
    ]
    source = tmp_path / "all.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    split_file(source, tmp_path / "parts", SplitOptions(100, 200))
    return sorted((tmp_path / "parts").rglob("*.jsonl"))


def equal_of(parts: list[Path]) -> list[list[int] | None]:
    return [found and [*found] for found in map(find_num_equal, parts)]


def test_each_part_has_the_counts_of_its_lines(parts: list[Path]) -> None:
    assert equal_of(parts) == [[0, 1], None, [0, 1], [2]]
    assert [[line.num_equal for line in read_lines(part, 0)] for part in parts] == [
        [None, 1],
        [None],
        [None, 1],
        [2],
    ]


def test_a_part_that_was_edited_has_none(parts: list[Path]) -> None:
    parts[2].write_text(parts[2].read_text() + "\n")
    parts[3].unlink()
    assert equal_of(parts) == [[0, 1], None, None, None]
    assert [line.num_equal for line in read_lines(parts[2], 0)] == [None, None]


def test_a_split_that_was_not_finished_is_refused(
    tmp_path: Path, parts: list[Path]
) -> None:
    folder = tmp_path / "parts"
    assert is_split_folder(folder) and not is_split_folder(tmp_path)
    manifest = (folder / MANIFEST).read_bytes()
    (folder / MANIFEST).write_bytes(manifest.replace(b"true", b"false", 1))
    with pytest.raises(UsageError, match="was not finished; repeat its command"):
        is_split_folder(folder)
    (folder / MANIFEST).write_bytes(b"{}\n")
    assert not is_split_folder(folder)
