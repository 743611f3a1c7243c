"""Opens input files as bytes: plain, gzip, zstd, or stdin. Their first bytes say which."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import io
import stat
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fminfer.core.errors import DamagedInputError, UsageError
from fminfer.files.first_bytes import packing_of

STDIN = Path("-")
DEVICES = (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))  # no place for files
COMPRESSED = (".gz", ".zst")
CHUNK_BYTES = 2**16
DIGEST_CHUNK_BYTES = 2**20
A_PIPE = "a pipe"  # instead of a digest


def is_stream(path: Path) -> bool:
    """Tell whether an input is stdin, or a shell's `<(…)`: nothing can stand beside it."""
    return path == STDIN or path.parent in DEVICES


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


def read_chunks(path: Path, digest: Digest | None = None) -> Iterator[bytes]:
    """Yield a file's bytes, decompressed, in pieces of at most `CHUNK_BYTES`; stdin's as they come.

    Args:
        digest: takes all of the file's own bytes, as they are read.

    Raises:
        DamagedInputError: compressed data that is cut off or damaged, once the rest was yielded.
        UsageError: it cannot be opened or read, or is zstd data and nothing is installed for it.
    """
    with reading_file(path), ExitStack() as open_files:
        raw: Any = sys.stdin.buffer
        if path != STDIN:
            raw = open_files.enter_context(path.open("rb"))
            raw = raw if digest is None else io.BufferedReader(_Tap(raw, digest))
        stream, damages = _decompress(path, raw)
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


def digest_of(path: Path) -> str:
    """Return a file's size and digest, for people; for a pipe, which is read once, its kind."""
    if path == STDIN or (path.exists() and not path.is_file()):
        return A_PIPE
    digest = Digest()
    with reading_file(path), path.open("rb", buffering=0) as file:
        while chunk := file.read(DIGEST_CHUNK_BYTES):
            digest.add(chunk)
    return str(digest)


def changed_ns(path: Path) -> int:
    """Return when a file's bytes or its entry last changed; 0: it is a pipe."""
    if path == STDIN:
        return 0
    with reading_file(path):
        facts = path.stat()
    # A copy may have an old time of writing, but not of its entry.
    return max(facts.st_mtime_ns, facts.st_ctime_ns) if stat.S_ISREG(facts.st_mode) else 0


@contextmanager
def reading_file(path: Path) -> Iterator[None]:
    """Turn the system's errors into ours."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror or error}. See that it is there, that you may "
            "read it, and that its disk is sound"
        ) from error


def require_zstd(path: Path) -> Any:
    """Return the module for zstd; refuse the file where none is installed, by a UsageError."""
    if (zstd := find_zstd()) is None:
        raise UsageError(
            f"{path} is compressed with zstd, which Python reads from 3.14 on; pip install "
            "backports.zstd, or decompress it (zstd -d does it)"
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


class _Tap(io.RawIOBase):
    """A file that shows a digest all that is read of it."""

    def __init__(self, file: io.BufferedReader, digest: Digest) -> None:
        self._file, self._digest = file, digest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto1(buffer)
        self._digest.add(memoryview(buffer)[:count])
        return count


def _decompress(path: Path, raw: Any) -> tuple[Any, tuple[type[Exception], ...]]:
    """Return a stream of what a file holds, and what it raises where its data is damaged."""
    head = raw.peek(1) if hasattr(raw, "peek") else b"{"  # a stand-in for stdin: not packed
    kind = packing_of(head, path.suffix)
    if kind == ".gz":
        return gzip.GzipFile(fileobj=raw), (EOFError, gzip.BadGzipFile, zlib.error)
    if kind == ".zst":
        zstd = require_zstd(path)
        return zstd.ZstdFile(raw), (EOFError, zstd.ZstdError)
    return raw, ()
