"""Splits the bytes of an input into numbered values: lines, or the values of a .json file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from fminfer.core.errors import DamagedInputError
from fminfer.files.json_values import (
    CutValue,
    ReadAhead,
    ValueBytes,
    explain_spread_objects,
    split_values,
)
from fminfer.files.streams import (
    CHUNK_BYTES,
    COMPRESSED,
    explain_bytes,
    find_split_folder,
    opens_array,
)

UTF8_BOM = b"\xef\xbb\xbf"
HEAD_LINES = 100
MAX_HEAD_BYTES = 2**20  # of a .json file, by which its layout is told


def number_values(
    path: Path, chunks: Iterator[bytes]
) -> Iterator[tuple[int, bytes | CutValue, str]]:
    """Yield each value with its number and what is wrong with it, as far as other lines tell."""
    if find_split_folder(path):
        return explain_spread_objects(split_lines(chunks))
    chunks = ReadAhead(strip_bom(chunks))
    first, head = skip_blank_lines(chunks)
    if trouble := explain_bytes(head):
        raise DamagedInputError(f"these are no JSON lines: {trouble}")
    is_json = strip_compression(path).suffix == ".json"
    is_array = head.lstrip().startswith(b"[")
    # a stream has lines, and may not have more of them yet
    if is_array and not is_json:
        more = read_head(chunks, 1) if path.is_file() else b""
        is_array = path.is_file() and opens_array(head, is_whole=not more)
        head += more
    if is_array:
        values = split_values(chain([head.lstrip()[1:]], chunks), is_array=True)
    elif is_json and is_spread(
        head := read_head(chain([head], chunks), MAX_HEAD_BYTES)
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


def is_spread(head: bytes) -> bool:
    """Tell whether the objects in a .json file's head are spread over lines; any may be bad."""
    lines = head.lstrip().split(b"\n")
    if not lines[0].startswith(b"{") or _is_object(lines[0]):
        return False
    with contextlib.suppress(DamagedInputError):
        first = next(split_values(iter([head]), is_array=False), b"")
        if isinstance(first, bytes) and b"\n" in first.strip() and _is_object(first):
            return True
    return not any(map(_is_object, lines))


def strip_compression(path: Path) -> Path:
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


def strip_bom(chunks: Iterator[bytes]) -> Iterator[bytes]:
    head = b""
    for chunk in chunks:
        head += chunk
        if len(head) >= len(UTF8_BOM):
            break
    yield head.removeprefix(UTF8_BOM)
    yield from chunks


def skip_blank_lines(chunks: Iterator[bytes]) -> tuple[int, bytes]:
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


def read_head(chunks: Iterator[bytes], num_bytes: int) -> bytes:
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
