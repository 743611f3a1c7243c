"""A broken line costs its own line: each of 1 MB, of its worst shapes, is read in
little time."""

import gzip
import time
from pathlib import Path

import pytest

from fminfer.contract.envelope import parse_envelope
from fminfer.files.first_lines import classify_lines
from fminfer.files.line_reader import identify_input, read_lines

MEGABYTE = 1 << 20
LEAST_S = 2.0  # of CPU for each file; the slowest takes 0.6 s
GOOD = b'{"prompt": "a", "max_tokens": 1}\n'
STAIRS = b"".join(b" " * step + b'{"a": [\n' for step in range(990))
SHAPES = {
    "quotes that are escaped": b'{"prompt": "'
    + b'\\"' * (MEGABYTE // 2)
    + b"\n"
    + b"text}\n" * 8,
    "backslashes": b'{"prompt": "' + b"\\" * MEGABYTE + b"\n" + b"text}\n" * 8,
    "braces": b"{" * MEGABYTE + b"\n" + b"}\n" * 8,
    "brackets": b'{"a":' + b"[" * MEGABYTE + b"\n" + b"]}\n" * 8,
    "objects in objects": b'{"a":' * (MEGABYTE // 5) + b"\n" + b"}\n" * 8,
    "quotes": b"{" + b'"' * MEGABYTE + b"\n" + b"}\n" * 8,
    "commas before brackets": b'{"a":[' + b"[1,]," * 50_000 + b"\n1]}\n",
    "strings that are not closed": b'{"a": "x\n' * 5_000,
    "objects that are not closed": b'{"a": \n' * 5_000,
    "objects further and further right": (STAIRS + b"}\n") * 4 + b"}\n" * 5_000,
    "many ends": b'{"a": [\n' + (b"x" * 1000 + b"}\n") * 5_000,
    "objects over several lines": b'{\n"prompt": "x",\n"max_tokens": 1\n}\n' * 2_000,
    "objects on one line": b'{"prompt":"x"}' * 70_000 + b"\n",
}


@pytest.mark.parametrize("ending", [".jsonl", ".json"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_broken_line_costs_little_time(
    tmp_path: Path, shape: str, ending: str
) -> None:
    r"""Of 20 KB of \" a run read for ever: each end was tried, and each quote in it."""
    path = tmp_path / f"a{ending}"
    path.write_bytes(GOOD + SHAPES[shape] + GOOD)
    start_s = time.process_time()

    classify_lines(path)
    identify_input(path)
    lines = list(read_lines(path, 0))
    is_wrong = [parse_envelope(line).error is not None for line in lines]

    assert time.process_time() - start_s < LEAST_S
    assert lines[0].raw == lines[-1].raw == GOOD.strip() and not (
        is_wrong[0] or is_wrong[-1]
    )
    assert all(is_wrong[1:-1]) and len(lines) > 2


def test_an_object_in_what_is_not_closed_is_not_searched_again(tmp_path: Path) -> None:
    """Lines that a search has passed begin none: nested searches were quadratic."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": [\n {"b":\n  1}\n{"c":\n2}\n' + GOOD)
    lines = list(read_lines(path, 0))
    assert [bool(line.fault) for line in lines] == [
        False,
        False,
        False,
        True,
        True,
        False,
    ]
    assert "lines 4 to 5 are one object" in lines[3].fault


def test_blank_lines_cost_their_bytes(tmp_path: Path) -> None:
    """Of a small .gz, 30 million of them between two requests took 27 s, and no word
    was said."""
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(GOOD + b"\r\n" * 1_000_000 + b" " * 100_000 + b"\n" + GOOD)
    start_s = time.process_time()
    first, last = read_lines(path, 0)
    assert time.process_time() - start_s < LEAST_S
    assert (first.number, last.number) == (1, 1_000_003) and last.raw == GOOD.strip()


def test_damage_behind_blank_lines_has_its_number(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(GOOD + b"\n" * 200_000 + b'{"a": 1')[:-8])
    *_, damaged = read_lines(path, 0)
    assert damaged.damage and damaged.number == 200_002


def test_an_object_behind_a_string_that_is_not_closed_is_explained(
    tmp_path: Path,
) -> None:
    """No string holds a newline, so that the broken line is no beginning of what follows."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "x\n {"prompt": "y",\n "max_tokens": 1\n }\n' + GOOD)
    lines = list(read_lines(path, 0))
    assert [bool(line.fault) for line in lines] == [False, True, True, True, False]
    assert "lines 2 to 4 are one object" in lines[1].fault
