"""Opens input files as bytes (plain, gzip, zstd, stdin), and recognizes what they hold."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import importlib
import io
import json
import os
import re
import stat
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from fminfer.core.errors import DamagedInputError, UsageError
from fminfer.machine.installation import describe_install

STDIN = Path("-")
DEVICES = (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))  # no place for files
COMPRESSED = (".gz", ".zst")
CHUNK_BYTES = 2**16
DIGEST_CHUNK_BYTES = 2**20
A_PIPE = "a pipe"  # instead of a digest
MANIFEST = "manifest.json"  # of a split's folder; the parts may stand below it
MANIFEST_HEAD = b'{"fminfer_split"'
PART_NAME = re.compile(r"request_(0|[1-9][0-9]{0,17})\.jsonl")
_PACKED = ((b"\x1f\x8b", ".gz"), (b"\x28\xb5\x2f\xfd", ".zst"))
_LINE = 'A request is a line such as {"prompt": "…", "max_tokens": 8}'
_TO_LINES = (
    "turn its rows into JSON lines (pandas: to_json(orient='records', lines=True)). "
    f"{_LINE}"
)
_TO_TEMPLATE = "rename it to end in {} and give --prompt-template, or "
_TO_UTF8 = "save it as UTF-8 (iconv -f {0} -t UTF-8 FILE > NEW does it)"
# The first bytes of what holds no JSON lines; what it is, and what to do.
_OTHERS = (
    (b"\xff\xfe", "text in UTF-16", _TO_UTF8.format("UTF-16")),
    (b"\xfe\xff", "text in UTF-16", _TO_UTF8.format("UTF-16")),
    (b"PAR1", "a Parquet table", _TO_TEMPLATE.format(".parquet") + _TO_LINES),
    (
        b"PK\x03\x04",
        "a ZIP archive, as .xlsx files are",
        f"unpack it. Of a sheet, {_TO_LINES}",
    ),
    (b"SQLite format 3\0", "an SQLite database", _TO_LINES),
    (
        b"BZh",
        "packed by bzip2",
        "unpack it (bunzip2 does it), or pack it with gzip or zstd",
    ),
    (
        b"\xfd7zXZ\0",
        "packed by xz",
        "unpack it (unxz does it), or pack it with gzip or zstd",
    ),
    (
        b"version https://git-lfs",
        "a pointer of Git LFS, not the file",
        "fetch it: git lfs pull",
    ),
)
# A name, a mode, and the mark of POSIX in the first block.
_TAR = re.compile(rb".{100}[0-7 \0]{8}.{149}ustar", re.DOTALL)
_PAGE = re.compile(rb"\s*<(!doctype|html|\?xml)", re.IGNORECASE)
_PAGE_REMEDY = (
    "open it: it may ask for a login, or tell an error. Fetch the file itself"
)
_ENDED_BY_CR = re.compile(rb"\}[ \t]*\r[ \t]*\{")
_CONTROL = re.compile(rb"[\0-\x08\x0e-\x1f]")


def is_stream(path: Path) -> bool:
    """Tell whether an input is stdin, or a shell's `<(…)`: nothing can stand beside it."""
    return path == STDIN or path.parent in DEVICES


def find_split_folder(path: Path) -> Path | None:
    """Return the folder of the split of which a file is a part; None: it is none.

    A part has plain lines, whatever a wrong first one looks like.
    """
    for folder in path.absolute().parents if PART_NAME.fullmatch(path.name) else ():
        if read_manifest_head(folder):
            return folder
    return None


def read_manifest_head(folder: Path) -> bytes:
    """Return the first line of a split's manifest; b"": the folder has none."""
    with (
        suppress(OSError),
        open(folder / MANIFEST, "rb", opener=open_unblocked) as file,
    ):
        head = file.readline(CHUNK_BYTES)
        return head if head.startswith(MANIFEST_HEAD) else b""
    return b""


def open_unblocked(path: str, flags: int) -> int:
    """Open a file for open(); a pipe in its place is not waited for."""
    return os.open(path, flags | os.O_NONBLOCK)


class Digest:
    """The size and digest of bytes, for people: `1,234 bytes (0123456789abcdef)`."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)
        self._num_bytes = 0

    def add(self, data: bytes | memoryview) -> None:
        self._hash.update(data)
        self._num_bytes += len(data)

    def __str__(self) -> str:
        return f"{self._num_bytes:,} bytes ({self._hash.hexdigest()})"


def _close_quietly(file: BinaryIO) -> None:
    """Close a file that was only read: an error of that costs nothing."""
    with suppress(OSError):
        file.close()


def read_chunks(path: Path, digest: Digest | None = None) -> Iterator[bytes]:
    """Yield a file's bytes, decompressed, in pieces of at most `CHUNK_BYTES`.

    Those of stdin are yielded as they come.

    Args:
        digest: takes all of the file's own bytes, as they are read.

    Raises:
        DamagedInputError: compressed data that is cut off or damaged, once the rest was yielded.
        UsageError: it cannot be opened or read, or is zstd data and nothing is installed for it.
    """
    with raising_read_errors(path), ExitStack() as open_files:
        raw: Any = sys.stdin.buffer
        if path != STDIN:
            raw = path.open("rb")
            open_files.callback(_close_quietly, raw)
            raw = (
                raw
                if digest is None
                else io.BufferedReader(_DigestingReader(raw, digest))
            )
        stream, damages = _open_decompressed(path, raw)
        damage = None
        try:
            while chunk := stream.read1(CHUNK_BYTES):
                yield chunk
        except damages as error:
            damage = error
        while digest is not None and raw.read(CHUNK_BYTES):
            pass  # what stands behind the data
        if damage is not None:
            raise DamagedInputError(
                f"the compressed data is damaged or cut off here ({damage})"
            ) from damage


def digest_file(path: Path) -> str:
    """Return a file's size and digest, for people; for a pipe, which is read once, its kind."""
    if path == STDIN or (path.exists() and not path.is_file()):
        return A_PIPE
    digest = Digest()
    with raising_read_errors(path), path.open("rb", buffering=0) as file:
        while chunk := file.read(DIGEST_CHUNK_BYTES):
            digest.add(chunk)
    return str(digest)


def read_changed_ns(path: Path) -> int:
    """Return when a file's bytes or its entry last changed; 0: it is a pipe."""
    if path == STDIN:
        return 0
    with raising_read_errors(path):
        facts = path.stat()
    # A copy may have an old time of writing, but not of its entry.
    return (
        max(facts.st_mtime_ns, facts.st_ctime_ns) if stat.S_ISREG(facts.st_mode) else 0
    )


@contextmanager
def raising_read_errors(path: Path) -> Iterator[None]:
    """Turn the system's errors into ours."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror or error}. See that it is there, "
            "that you may read it, and that its disk is sound"
        ) from error


def require_zstd(path: Path) -> Any:
    """Return the module for zstd; raise a UsageError if none is installed."""
    if (zstd := find_zstd()) is None:
        raise UsageError(
            f"{path} is compressed with zstd, which Python reads from 3.14 on; "
            f"{describe_install('zst')}, or decompress it (zstd -d does it)"
        )
    return zstd


def find_zstd() -> Any | None:
    """Return the standard library's zstd module (Python ≥ 3.14), its backport, or None."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


class _DigestingReader(io.RawIOBase):
    """A file that shows a digest all that is read of it."""

    def __init__(self, file: io.BufferedReader, digest: Digest) -> None:
        self._file = file
        self._digest = digest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto1(buffer)
        self._digest.add(memoryview(buffer)[:count])
        return count


def _open_decompressed(path: Path, raw: Any) -> tuple[Any, tuple[type[Exception], ...]]:
    """Return a stream of what a file holds, and what it raises where its data is damaged."""
    # a stand-in for stdin: not packed
    head = raw.peek(1) if hasattr(raw, "peek") else b"{"
    kind = "" if find_split_folder(path) else packing_of(head, path.suffix)
    if kind == ".gz":
        return gzip.GzipFile(fileobj=raw), (EOFError, gzip.BadGzipFile, zlib.error)
    if kind == ".zst":
        zstd = require_zstd(path)
        return zstd.ZstdFile(raw), (EOFError, zstd.ZstdError)
    return raw, ()


def packing_of(head: bytes, ending: str) -> str:
    """Return .gz, .zst, or another text for what is not packed.

    The ending of the name counts where the bytes are neither packed as we read it, nor text.
    """
    packing = next(
        (packing for magic, packing in _PACKED if head.startswith(magic)), ""
    )
    return packing or (
        "" if head and (_is_text(head) or explain_bytes(head)) else ending
    )


def explain_bytes(head: bytes) -> str:
    """Say what a file is that holds no JSON lines, and what to do; "" if it may hold some."""
    for magic, what, remedy in _OTHERS:
        if head.startswith(magic):
            return f"it is {what}; {remedy}"
    if _TAR.match(head):
        return f"it is a tar archive; unpack it (tar -xf FILE does it). {_LINE}"
    zeros = tuple(byte == 0 for byte in head[:4])
    if zeros in ((False, True) * 2, (True, False) * 2):
        return (
            f"it is text in UTF-16; {_TO_UTF8.format('UTF-16' + 'BL'[zeros[1]] + 'E')}"
        )
    return (
        f"it is a page of the web, or XML; {_PAGE_REMEDY}" if _PAGE.match(head) else ""
    )


def explain_text(head: bytes) -> str:
    """Say what a text file without requests is, and what to do; as `explain_bytes`."""
    if b"\n" not in head and _ENDED_BY_CR.search(head):
        return "its lines end in CR alone; end them in LF (tr '\\r' '\\n' < FILE > NEW does it)"
    is_table = _is_text(head) and _is_table(head)
    remedy = _TO_TEMPLATE.format(".csv or .tsv") + _TO_LINES
    return f"its lines look like a table (CSV); {remedy}" if is_table else ""


def opens_array(head: bytes, *, is_whole: bool) -> bool:
    """Tell whether a file is one array of objects, and not lines whose first one is wrong."""
    text = head.decode("utf-8", errors="replace").strip()
    if not text.startswith("["):
        return False
    if is_whole:
        with suppress(ValueError, RecursionError):
            return isinstance(json.loads(text), list)
        return False
    first, place = _parse_object(text, 1)
    # one that is longer than all these bytes has many lines, or it is a wrong line
    if not first:
        return "\n" in text and text[1:].lstrip().startswith("{")
    second, end = _parse_object(text, place + 1)
    begins = text[place + 1 :].lstrip().startswith("{")
    return (
        text[place : place + 1] == ","
        and begins
        and (not second or text[end : end + 1] in (",", "]"))
    )


def _parse_object(text: str, place: int) -> tuple[bool, int]:
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
    """Tell whether lines have the same number of columns, and none of them is an object."""
    lines = [line for line in head.splitlines() if line.strip()]
    if len(lines) < 2 or any(line.lstrip().startswith((b"{", b"[")) for line in lines):
        return False
    return any(
        0 < lines[0].count(sign) <= lines[1].count(sign) for sign in (b",", b"\t", b";")
    )
