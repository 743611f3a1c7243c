"""Reads input files lazily, line by line; and one that may be edited while a run is at work."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, repeat
from pathlib import Path

from fminfer.contract.envelope import Line as Line
from fminfer.core.errors import DamagedInputError, UsageError
from fminfer.core.quantities import with_noun
from fminfer.files.json_values import (
    CutValue,
    ReadAhead,
    ValueBytes,
    explain_spread_objects,
    split_values,
)
from fminfer.files.split_folders import find_num_equal
from fminfer.files.streams import (
    A_PIPE,
    CHUNK_BYTES,
    COMPRESSED,
    STDIN,
    Digest,
    digest_file,
    explain_bytes,
    find_split_folder,
    opens_array,
    packing_of,
    raising_read_errors,
    read_changed_ns,
    read_chunks,
)

UTF8_BOM = b"\xef\xbb\xbf"
HEAD_LINES = 100
MAX_HEAD_BYTES = 2**20  # of a .json file, by which its layout is told
LINES = (".jsonl", ".ndjson")  # one request a line, unless the bytes say otherwise
ENDINGS = tuple(
    f"{kind}{packing}" for kind in (*LINES, ".json") for packing in ("", *COMPRESSED)
)
NAMED_ENDINGS = (
    f"{', '.join(LINES)} and .json, each also with {' or '.join(COMPRESSED)}"
)


def is_input_name(name: str) -> bool:
    """Tell whether a name is an input's, and none that a run or a split writes."""
    is_written = name.startswith("output_") or name == "manifest.json"
    is_written = is_written or name.endswith((".errors.jsonl", ".status.json"))
    return name.endswith(ENDINGS) and not is_written


def input_stem(path: Path) -> str:
    """Return an input's name without its ending: `a` for `a.jsonl` and `a.json.gz`."""
    return "stdin" if path == STDIN else _strip_compression(path).stem


def count_lines(path: Path, limit: int | None = None) -> int | None:
    """Count the lines to answer; None if they would be decompressed or parsed twice."""
    return count_to_last_line(path, limit)[0]


def count_to_last_line(path: Path, limit: int | None = None) -> tuple[int | None, int]:
    """Count the lines to answer, and return the last one's number.

    None and 0 if they would be decompressed or parsed twice.
    """
    if not holds_plain_lines(path):
        return None, 0
    count = last_number = 0
    for line in read_lines(path, 0, limit=limit):
        count = count + 1
        last_number = line.number
    return count, last_number


def sum_counts(counts: Sequence[int | None]) -> int | None:
    """Add up the lines of several files; None: one of the numbers is not known."""
    return None if None in counts else sum(count or 0 for count in counts)


def holds_plain_lines(path: Path) -> bool:
    """Tell whether a file is one request a line, unpacked, and can be read more than once."""
    if path.suffix not in LINES or not path.is_file():
        return False
    if find_split_folder(path):
        return True
    with raising_read_errors(path), path.open("rb") as file:
        head = file.read(CHUNK_BYTES)
        is_whole = not file.read(1)
    return not (
        packing_of(head, "")
        or opens_array(head.removeprefix(UTF8_BOM), is_whole=is_whole)
    )


def identify_input(path: Path) -> str:
    """Return an input's size and digest, and how it is read where its name has a part in that.

    Under another name the same bytes may be other requests, and then have other errors.
    """
    digest = digest_file(path)
    if digest == A_PIPE or _strip_compression(path).suffix != ".json":
        return digest
    head = _read_head(_strip_bom(read_chunks(path)), MAX_HEAD_BYTES)
    if opens_array(head, is_whole=False):  # whatever its name is
        return digest
    is_values = head.lstrip().startswith(b"[") or _is_spread(head)
    return f"{digest}, read as JSON values" if is_values else digest


def read_first_bytes(path: Path) -> bytes:
    """Return the first bytes of a file that are not blank, unpacked, as far as they can be."""
    return _skip_blank_lines(_strip_bom(read_chunks(path)))[1]


def read_lines(
    path: Path, source: int, digest: Digest | None = None, limit: int | None = None
) -> Iterator[Line]:
    """Yield the lines of one file; blank ones are skipped but counted.

    Where the file breaks off, its last line says so in `damage`.

    Args:
        digest: takes all of the file's bytes; with a limit, those that were read.
    """
    lines = islice(_read_file_lines(path, source, digest), limit)
    equal = find_num_equal(path)
    if equal is None:
        return lines
    # A line that no equal one precedes is counted as any other.
    counts = chain(equal, repeat(0))
    return (replace(line, num_equal=next(counts) or None) for line in lines)


class InputFile:
    """An input's lines, and whether its bytes are still those of the last look."""

    def __init__(self, path: Path, source: int, limit: int | None) -> None:
        self.path = path
        self.limit = limit
        self._source = source
        # before the digest: a later change is noticed
        self.changed_ns = read_changed_ns(path)
        self.digest = identify_input(path)
        self.num_rows: int | None = None  # not counted, or not known before its end
        self.num_read = 0
        self._last_number = 0  # of the last line that was read or counted
        self.is_read = False  # to its end

    def count_rows(self) -> None:
        """Count the lines to answer, where that is cheaper than to answer them."""
        self.num_rows, self._last_number = count_to_last_line(self.path, self.limit)

    def set_count(self, num_rows: int, last_number: int) -> None:
        """Note how many lines are to be answered, which another part has counted."""
        self.num_rows = num_rows
        self._last_number = last_number

    def mark_read(self, num_rows: int) -> None:
        """Note that all of its lines have their record."""
        self.num_read = num_rows
        self.is_read = True

    def update_digest(self) -> bool:
        """Tell whether it holds other bytes than at the last look."""
        now_ns = read_changed_ns(self.path)
        if now_ns == self.changed_ns:
            return False
        before = self.digest
        self.digest = identify_input(self.path)
        self.changed_ns = now_ns
        return self.digest != before

    def read_lines(self) -> Iterator[Line]:
        """Read the lines; raise a UsageError if the file was edited meanwhile."""
        digest = Digest()
        for line in read_lines(self.path, self._source, digest, self.limit):
            self.num_read += 1
            self._last_number = max(self._last_number, line.number)
            yield line
        digest_now = str(digest) if self.limit is None else digest_file(self.path)
        if self.digest != A_PIPE and not self.digest.startswith(digest_now):
            raise UsageError(
                f"{self.path} was changed while it was being answered. Run the same "
                "command again: it keeps the answers to lines that are still there "
                "(--restart answers all anew)"
            )
        self.num_rows = self.num_read
        self.is_read = True

    def has_all_answers(self, num_answered: int, last_answered: int) -> bool:
        """Tell whether so many answers are all that it needs; False while it is read."""
        if not self.is_read:
            return False
        self.check_limit(last_answered)
        if num_answered > self.num_read:
            raise UsageError(
                f"an earlier run has answered {with_noun(num_answered, 'line')} of "
                f"{self.path}, and now it has {self.num_read}; give --restart to "
                "answer all from the start"
            )
        return num_answered == self.num_read

    def check_limit(self, last_answered: int) -> None:
        """Raise a UsageError if a line beyond the limit is answered, as far as that is known.

        Answers come in another order than lines, so their number says nothing of it.
        """
        if self.limit is not None and 0 < self._last_number < last_answered:
            raise UsageError(
                f"an earlier run has answered more than the first {self.limit} lines of "
                f"{self.path}; give a larger --limit or none to go on with them, or --restart"
            )


def _read_file_lines(path: Path, source: int, digest: Digest | None) -> Iterator[Line]:
    number = 0
    chunks = read_chunks(path, digest)
    try:
        for number, raw, fault in _number_values(path, chunks):
            if isinstance(raw, CutValue):
                yield Line(source, number, raw.head, fault=raw.fault, is_cut=True)
            elif raw.strip():
                yield Line(source, number, raw, fault=fault)
    except DamagedInputError as error:
        with contextlib.suppress(DamagedInputError):
            for _ in chunks if digest is not None else ():
                pass
        yield Line(
            source,
            number + 1,
            error.rest,
            damage=f"{error}. The lines before it are answered, those after it are lost. Repair "
            "the file and answer it again with --restart",
        )


def _number_values(
    path: Path, chunks: Iterator[bytes]
) -> Iterator[tuple[int, bytes | CutValue, str]]:
    """Yield each value with its number and what is wrong with it, as far as other lines tell."""
    if find_split_folder(path):
        return explain_spread_objects(split_lines(chunks))
    chunks = ReadAhead(_strip_bom(chunks))
    first, head = _skip_blank_lines(chunks)
    if trouble := explain_bytes(head):
        raise DamagedInputError(f"these are no JSON lines: {trouble}")
    is_json = _strip_compression(path).suffix == ".json"
    is_array = head.lstrip().startswith(b"[")
    # a stream has lines, and may not have more of them yet
    if is_array and not is_json:
        more = _read_head(chunks, 1) if path.is_file() else b""
        is_array = path.is_file() and opens_array(head, is_whole=not more)
        head += more
    if is_array:
        values = split_values(chain([head.lstrip()[1:]], chunks), is_array=True)
    elif is_json and _is_spread(
        head := _read_head(chain([head], chunks), MAX_HEAD_BYTES)
    ):
        values = split_values(chain([head], chunks), is_array=False)
    else:
        lines = split_lines(chain([head], chunks), first)
        # Whoever writes a pipe may wait for the answer to a line before the next.
        is_file = not is_json and path.is_file()
        return (
            explain_spread_objects(lines)
            if is_file
            else ((number, raw, "") for number, raw in lines)
        )
    return ((number, raw, "") for number, raw in enumerate(values, 1))


def _is_spread(head: bytes) -> bool:
    """Tell whether the objects in a .json file's head are spread over lines; any may be bad."""
    lines = head.lstrip().split(b"\n")
    if not lines[0].startswith(b"{") or _is_object(lines[0]):
        return False
    with contextlib.suppress(DamagedInputError):
        first = next(split_values(iter([head]), is_array=False), b"")
        if isinstance(first, bytes) and b"\n" in first.strip() and _is_object(first):
            return True
    return not any(map(_is_object, lines))


def _strip_compression(path: Path) -> Path:
    return path.with_suffix("") if path.suffix in COMPRESSED else path


def split_lines(
    chunks: Iterator[bytes], number: int = 1, *, passes_blank: bool = True
) -> Iterator[tuple[int, bytes | CutValue]]:
    """Yield lines without their newlines, with their numbers; the last one too if it has none.

    With `passes_blank`, many blank lines are only counted, and cost no more than their bytes.
    """
    line = ValueBytes()  # the one being read
    try:
        for chunk in chunks:
            if passes_blank and line.is_empty and not chunk.strip():
                number += chunk.count(b"\n")
                continue
            first, *others = chunk.split(b"\n")
            line.add(first)
            if others:
                yield number, line.pop()
                yield from enumerate(others[:-1], number + 1)  # whole lines
                number += len(others)
                line.add(others[-1])
    except DamagedInputError as error:
        error.rest = line.head
        yield number - 1, b""  # the line that breaks off has the next number
        raise
    yield number, line.pop()


def _strip_bom(chunks: Iterator[bytes]) -> Iterator[bytes]:
    head = b""
    for chunk in chunks:
        head += chunk
        if len(head) >= len(UTF8_BOM):
            break
    yield head.removeprefix(UTF8_BOM)
    yield from chunks


def _skip_blank_lines(chunks: Iterator[bytes]) -> tuple[int, bytes]:
    """Pass over a file's first blank lines but the last; return that one's number and bytes."""
    number = 1
    head = b""
    with contextlib.suppress(DamagedInputError):  # whoever reads on meets it
        for chunk in chunks:
            head += chunk
            if chunk.strip():
                break
            passed, newline, head = head.rpartition(b"\n")
            number += passed.count(b"\n")
            head = newline + head[-CHUNK_BYTES:]
    return number, head


def _read_head(chunks: Iterator[bytes], num_bytes: int) -> bytes:
    """Read chunks until so many bytes or `HEAD_LINES` lines are there, or to damaged data."""
    parts: list[bytes] = []
    num_lines = HEAD_LINES
    with contextlib.suppress(DamagedInputError):  # whoever reads on meets it
        for chunk in chunks:
            parts.append(chunk)
            num_bytes -= len(chunk)
            num_lines -= chunk.count(b"\n")
            if num_bytes <= 0 or num_lines <= 0:
                break
    return b"".join(parts)


def _is_object(text: bytes) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
