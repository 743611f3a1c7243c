"""Tells by a file's first bytes how it is packed, what its values are, and what is no request."""

from __future__ import annotations

import codecs
import json
import re
from contextlib import suppress

_PACKED = ((b"\x1f\x8b", ".gz"), (b"\x28\xb5\x2f\xfd", ".zst"))
_LINE = 'A request is a line such as {"prompt": "…", "max_tokens": 8}'
_TO_LINES = (
    f"turn its rows into JSON lines (pandas: to_json(orient='records', lines=True)). {_LINE}"
)
_TO_UTF8 = "save it as UTF-8 (iconv -f {0} -t UTF-8 FILE > NEW does it)"
# The first bytes of what holds no JSON lines; what it is, and what to do.
_OTHERS = (
    (b"\xff\xfe", "text in UTF-16", _TO_UTF8.format("UTF-16")),
    (b"\xfe\xff", "text in UTF-16", _TO_UTF8.format("UTF-16")),
    (b"PAR1", "a Parquet table", _TO_LINES),
    (b"PK\x03\x04", "a ZIP archive, as .xlsx files are", f"unpack it. Of a sheet, {_TO_LINES}"),
    (b"SQLite format 3\0", "an SQLite database", _TO_LINES),
    (b"BZh", "packed by bzip2", "unpack it (bunzip2 does it), or pack it with gzip or zstd"),
    (b"\xfd7zXZ\0", "packed by xz", "unpack it (unxz does it), or pack it with gzip or zstd"),
    (b"version https://git-lfs", "a pointer of Git LFS, not the file", "fetch it: git lfs pull"),
)
_PAGE = re.compile(rb"\s*<(!doctype|html|\?xml)", re.IGNORECASE)
_PAGE_REMEDY = "open it: it may ask for a login, or tell an error. Fetch the file itself"
_ENDED_BY_CR = re.compile(rb"\}[ \t]*\r[ \t]*\{")
_CONTROL = re.compile(rb"[\0-\x08\x0e-\x1f]")


def packing_of(head: bytes, ending: str) -> str:
    """Return .gz, .zst, or another text for what is not packed.

    The ending of the name counts where the bytes are neither packed as we read it, nor text.
    """
    packing = next((packing for magic, packing in _PACKED if head.startswith(magic)), "")
    return packing or ("" if head and (_is_text(head) or explain_bytes(head)) else ending)


def explain_bytes(head: bytes) -> str:
    """Say what a file is that holds no JSON lines, and what to do; "" if it may hold some."""
    for magic, what, remedy in _OTHERS:
        if head.startswith(magic):
            return f"it is {what}; {remedy}"
    zeros = tuple(byte == 0 for byte in head[:4])
    if zeros in ((False, True) * 2, (True, False) * 2):
        return f"it is text in UTF-16; {_TO_UTF8.format('UTF-16' + 'BL'[zeros[1]] + 'E')}"
    if _PAGE.match(head):
        return f"it is a page of the web, or XML; {_PAGE_REMEDY}"
    return ""


def explain_text(head: bytes) -> str:
    """Say what a text file is whose lines are no requests, and what to do; as `explain_bytes`."""
    if b"\n" not in head and _ENDED_BY_CR.search(head):
        return "its lines end in CR alone; end them in LF (tr '\\r' '\\n' < FILE > NEW does it)"
    is_table = _is_text(head) and _is_table(head)
    return f"its lines look like a table (CSV); {_TO_LINES}" if is_table else ""


def opens_array(head: bytes, *, is_whole: bool) -> bool:
    """Tell a file that is one array of objects from lines of which the first one is wrong."""
    text = head.decode("utf-8", errors="replace").strip()
    if not text.startswith("["):
        return False
    if is_whole:
        with suppress(ValueError, RecursionError):
            return isinstance(json.loads(text), list)
        return False
    first, place = _read_object(text, 1)
    if not first:  # one that is longer than all these bytes has many lines, or it is a wrong line
        return "\n" in text and text[1:].lstrip().startswith("{")
    second, end = _read_object(text, place + 1)
    begins = text[place + 1 :].lstrip().startswith("{")
    return (
        text[place : place + 1] == ","
        and begins
        and (not second or text[end : end + 1] in (",", "]"))
    )


def _read_object(text: str, place: int) -> tuple[bool, int]:
    """Tell whether a whole object stands there, and where what is behind it begins."""
    with suppress(ValueError, RecursionError):
        rest = text[place:].lstrip()
        _, length = json.JSONDecoder().raw_decode(rest)
        return True, len(text) - len(rest[length:].lstrip())
    return False, place


def _is_text(head: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return not _CONTROL.search(head)


def _is_table(head: bytes) -> bool:
    """Tell lines that are cut into the same number of columns, none of them an object."""
    lines = [line for line in head.splitlines() if line.strip()]
    if len(lines) < 2 or any(line.lstrip().startswith((b"{", b"[")) for line in lines):
        return False
    return any(0 < lines[0].count(sign) <= lines[1].count(sign) for sign in (b",", b"\t", b";"))
