"""Opens input files as bytes: plain, gzip, zstd, or stdin. It knows no lines and no JSON."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import sys
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from fminfer.errors import DamagedInputError, UsageError

STDIN = Path("-")
COMPRESSED = (".gz", ".zst")
CHUNK_BYTES = 2**16
DIGEST_CHUNK_BYTES = 2**20
A_PIPE = "a pipe"  # instead of a digest


def read_chunks(path: Path) -> Iterator[bytes]:
    """Yield a file's bytes, decompressed, in pieces of at most `CHUNK_BYTES`.

    stdin's come as soon as they are there.

    Raises:
        DamagedInputError: compressed data that is cut off or damaged; what could be decompressed
            was yielded before.
        UsageError: zstd data, and nothing is installed that reads it.
    """
    file, damages = _open(path)
    with file as stream:
        while True:
            try:
                chunk = stream.read1(CHUNK_BYTES)
            except damages as error:
                raise DamagedInputError(
                    f"the compressed data is damaged or cut off here ({error})"
                ) from error
            if not chunk:
                return
            yield chunk


def digest_of(path: Path) -> str:
    """Return a file's size and digest, for people; for a pipe, which is read once, its kind."""
    if path == STDIN or (path.exists() and not path.is_file()):
        return A_PIPE
    digest = hashlib.blake2b(digest_size=8)
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(DIGEST_CHUNK_BYTES):
            digest.update(chunk)
    return f"{path.stat().st_size:,} bytes ({digest.hexdigest()})"


def check_readable(path: Path) -> None:
    """Refuse zstd where nothing is installed that reads it.

    Raises:
        UsageError: says what to install.
    """
    if path.suffix == ".zst" and find_zstd() is None:
        raise UsageError(
            f"{path} is compressed with zstd, which Python reads from 3.14 on; install "
            "fminfer[zst], or decompress it (zstd -d does it)"
        )


def find_zstd() -> Any | None:
    """Return the standard library's zstd module (Python ≥ 3.14), its backport, or None."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def _open(path: Path) -> tuple[Any, tuple[type[Exception], ...]]:
    """Return a context manager of a stream, and what it raises where its data is damaged."""
    if path == STDIN:
        return nullcontext(sys.stdin.buffer), ()
    if path.suffix == ".gz":
        return gzip.open(path), (EOFError, gzip.BadGzipFile, zlib.error)
    if path.suffix == ".zst":
        check_readable(path)
        zstd = find_zstd()
        assert zstd is not None
        return zstd.ZstdFile(path), (EOFError, zstd.ZstdError)
    return path.open("rb"), ()
