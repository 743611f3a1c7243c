"""Where each line of a file stands, how long its prompt is, and to which group it belongs.

Each line is parsed once, and 20 bytes of it are kept. Input that cannot be read at any place
(packed files, stdin, arrays) is copied to a plain file as it is read.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path

from fminfer.contract.envelope import open_envelope
from fminfer.contract.fields import show
from fminfer.contract.json_spans import on_one_line
from fminfer.contract.line import Line
from fminfer.core.errors import DamagedInputError
from fminfer.files.line_reader import UTF8_BOM, holds_plain_lines, read_lines, split_lines
from fminfer.files.pieces import CutValue
from fminfer.files.streams import read_chunks
from fminfer.runtime.lines.line_intake import EqualLines, digest_id
from fminfer.runtime.lines.seen_counts import SeenCounts
from fminfer.split.grouping import Groups, find_length

BLANK = -1  # instead of a group
MAX_NAMED = 5  # lines in a message


class LineIndex:
    """One entry a line, blank ones too, in the order of the file."""

    def __init__(self, path: Path) -> None:
        self.path = path  # of the plain file
        self.groups = array("i")
        self.lengths = array("I")  # of prompts
        self.starts = array("q")  # and, once all are read, the end of the last
        self.num_equal = array("I")  # equal ones before each in the file that count, for draws
        self.num_bad = 0  # lines that hold no request
        self.num_doubles = 0  # lines with a custom_id that an earlier one has
        self.doubles: list[str] = []  # the first few of them, for people

    def __len__(self) -> int:
        return len(self.groups)

    def add(self, start: int, group: int = BLANK, length: int = 0, num_equal: int = 0) -> None:
        self.starts.append(start)
        self.num_equal.append(num_equal)
        self.groups.append(group)
        self.lengths.append(length)

    def add_double(self, told: str) -> None:
        self.num_doubles += 1
        if self.num_doubles <= MAX_NAMED:
            self.doubles.append(told)


def read_index(path: Path, copy: Path, groups: Groups) -> LineIndex:
    """Read all lines of a file.

    Args:
        copy: where a plain copy is written if it is needed.
        groups: filled in.

    Raises:
        DamagedInputError: the file breaks off.
    """
    is_plain = holds_plain_lines(path)
    index = LineIndex(path if is_plain else copy)
    equal, ids, end = EqualLines(), SeenCounts(), 0
    for line, start, stop in _read_plain(path) if is_plain else _read_copied(path, copy):
        while len(index) < line.number - 1:
            index.add(end)  # blank lines between
        envelope = open_envelope(line)
        if envelope.error is not None:
            index.num_bad += 1
        name, fields = envelope.custom_id_text, envelope.fields
        is_double = name is not None and bool(ids.add(digest_id(name)))
        if is_double:
            index.add_double(f"{show(name)} of line {line.number}")
        num_equal = 0 if is_double else equal.count(line, envelope)
        index.add(start, groups.add(fields), find_length(fields), num_equal)
        end = stop
    index.starts.append(end)
    return index


def _read_plain(path: Path) -> Iterator[tuple[Line, int, int]]:
    """Yield lines that are not blank, each with the places where it begins and ends."""
    place, size = 0, path.stat().st_size
    for number, value in enumerate(split_lines(read_chunks(path)), start=1):
        if isinstance(value, CutValue):
            raw, num_bytes, fault = value.head, value.num_bytes, value.fault
        else:
            raw, num_bytes, fault = value, len(value), ""
        start, place = place, min(place + num_bytes + 1, size)
        if number == 1 and raw.startswith(UTF8_BOM):
            start, raw = len(UTF8_BOM), raw[len(UTF8_BOM) :]
        if raw.strip():
            yield Line(0, number, raw, fault=fault, is_cut=bool(fault)), start, place


def _read_copied(path: Path, copy: Path) -> Iterator[tuple[Line, int, int]]:
    place = 0
    with copy.open("wb") as file:
        for line in read_lines(path, 0):
            if line.damage:
                raise DamagedInputError(
                    f"{path} breaks off at line {line.number}, and its rest would be lost: "
                    f"{line.damage.partition('. What stands')[0]}. Mend the file, and split it then"
                )
            if line.is_cut:
                raise DamagedInputError(f"line {line.number} of {path}: {line.fault}")
            raw = _one_line(line) + b"\n"
            file.write(raw)
            start, place = place, place + len(raw)
            yield line, start, place


def _one_line(line: Line) -> bytes:
    """Return a line's bytes; a value that is spread over lines, as a run would write it."""
    if b"\n" not in line.raw:
        return line.raw
    if open_envelope(line).error is None:
        return on_one_line(line.raw.strip())
    # What is no request must not become one where its pieces meet.
    return line.raw.strip().replace(b"\r", b" ").replace(b"\n", b" ")
