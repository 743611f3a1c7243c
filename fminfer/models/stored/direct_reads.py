"""Reads parts of files again and again, past the system's cache, in several threads.

Weights that do not fit the memory would drive everything else out of that cache, and would not be
found there in the next pass anyway.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from fminfer.core.errors import MachineError

UNIT = mmap.PAGESIZE  # disks give whole sectors, and memory takes whole pages
PIECE = 8 << 20  # bytes of one read: a disk's queue has NUM_THREADS of them
NUM_THREADS = 4
NEAR = 1 << 16  # bytes between two spans that are read with them


@dataclass(slots=True, frozen=True)
class Span:
    """Some bytes of a file."""

    file: Path
    first: int
    last: int

    @property
    def whole(self) -> range:
        """The same with the units around it, which is what is read."""
        return range(self.first // UNIT * UNIT, -(-self.last // UNIT) * UNIT)


@dataclass(slots=True, frozen=True)
class SpanPlace:
    """Where a span lies in a buffer."""

    span: Span
    start: int  # in the buffer, of the unit in which the span begins

    def at(self, byte: int) -> int:
        """Return where a byte of the file lies in the buffer."""
        return self.start + byte - self.span.whole.start


@dataclass(slots=True, frozen=True)
class Lent:
    """Spans of files, as they lie in a buffer that others will have."""

    places: Sequence[SpanPlace]
    buffer: torch.Tensor

    def find(self, span: Span) -> torch.Tensor:
        """Return some bytes of a file, which have a place."""
        at = self.place_of(span).at
        return self.buffer[at(span.first) : at(span.last)]

    def place_of(self, span: Span) -> SpanPlace:
        """Return the place in which a span lies."""
        return next(
            place
            for place in self.places
            if place.span.file == span.file
            and place.span.first <= span.first
            and span.last <= place.span.last
        )


def merge(spans: Iterable[Span]) -> list[Span]:
    """Return spans that cover the same bytes, those that are near to each other as one."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda each: (each.file, each.first)):
        last = found[-1] if found else None
        if last and last.file == span.file and span.first <= last.last + NEAR:
            found[-1] = Span(span.file, last.first, max(last.last, span.last))
        elif span.last > span.first:
            found.append(span)
    return found


def place_all(spans: Iterable[Span]) -> list[SpanPlace]:
    """Return where spans go in a buffer, one after another."""
    places: list[SpanPlace] = []
    for span in spans:
        places.append(SpanPlace(span, end_of(places)))
    return places


def end_of(places: Sequence[SpanPlace]) -> int:
    """Return how many bytes a buffer for spans has."""
    return places[-1].start + len(places[-1].span.whole) if places else 0


FileFacts = tuple[int, int]  # size in bytes, and when it was written to last, in ns


def facts_of(path: Path) -> FileFacts:
    """Return what tells whether a file was changed."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns


class OpenFile:
    """A file that must not change.

    Args:
        is_direct: past the system's cache.
        seen: what it was when its header was read; None: as it is now.

    Raises:
        MachineError: it cannot be opened.
    """

    def __init__(self, path: Path, *, is_direct: bool, seen: FileFacts | None) -> None:
        self._path = path
        direct = getattr(os, "O_DIRECT", 0) if is_direct else 0
        try:
            try:
                self._fd = os.open(path, os.O_RDONLY | direct)
            except OSError:  # of some file systems, such as those in memory
                self._fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise MachineError(f"{path} cannot be read: {error.strerror}") from error
        self._was = seen or self._facts()

    def read(self, start: int, target: memoryview, least: int) -> None:
        """Read bytes from `start` on, until the target is full, or the file ends behind `least`.

        Raises:
            MachineError: it cannot be read, ends too early, or was changed.
        """
        done = 0
        while done < least:
            try:
                num = os.preadv(self._fd, [target[done:]], start + done)
            except OSError as error:
                if error.errno == errno.EINVAL and self._leave_direct():
                    continue
                raise self._trouble(f"cannot be read ({error.strerror})") from error
            if num == 0:
                raise self._trouble(f"ends at byte {start + done}; it was cut off")
            done += num
        if self._facts() != self._was:
            raise self._trouble("was changed, or touched,")

    def close(self) -> None:
        os.close(self._fd)

    def _leave_direct(self) -> bool:
        """Read through the system's cache from now on; tell whether that is new."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        direct = getattr(os, "O_DIRECT", 0)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~direct)
        return bool(flags & direct)

    def _facts(self) -> FileFacts:
        found = os.fstat(self._fd)
        return found.st_size, found.st_mtime_ns

    def _trouble(self, what: str) -> MachineError:
        return MachineError(
            f"{self._path} {what} while its weights were read in each step (--offload). Finished "
            "rows are kept; put the file or disk right, and run the same command to go on"
        )


Reading = Sequence["Future[None]"]  # of the pieces of spans that are being read


def finish(reading: Reading) -> None:
    """Wait until all pieces are there.

    Raises:
        MachineError: a file cannot be read, ends too early, or was changed.
    """
    wait(reading)
    for piece in reading:
        piece.result()


class DirectReads:
    """Reads spans of files into buffers, and keeps count.

    Files stay open, so that one that another takes the place of is read on.

    Args:
        is_direct: past the system's cache; otherwise from there, where processes share it.
    """

    def __init__(self, *, is_direct: bool = True, num_threads: int = NUM_THREADS) -> None:
        self._files: dict[Path, OpenFile] = {}
        self._is_direct = is_direct
        self._threads = ThreadPoolExecutor(num_threads, "fminfer layers")
        self._lock = threading.Lock()
        self.num_bytes, self.busy_s = 0, 0.0  # read so far, and while at least one read went on
        self._num_going, self._since_s = 0, 0.0

    def start(self, lent: Lent, spans: Sequence[Span]) -> Reading:
        """Begin to read spans to their places.

        Args:
            lent: has a place around each span, and a buffer that begins with a whole unit.
        """
        whole = memoryview(lent.buffer.numpy().data)
        futures = []
        for span in spans:
            self.open([span.file])
            file, at = self._files[span.file], lent.place_of(span).at
            for first in range(span.whole.start, span.whole.stop, PIECE):
                last = min(first + PIECE, span.whole.stop)
                target, least = whole[at(first) : at(last)], min(last, span.last) - first
                futures.append(self._threads.submit(self._read, file, first, target, least))
        return futures

    def close(self) -> None:
        """Stop reading."""
        self._threads.shutdown(cancel_futures=True)
        for file in self._files.values():
            with suppress(OSError):
                file.close()

    def open(
        self, paths: Iterable[Path], seen: Mapping[Path, FileFacts] = MappingProxyType({})
    ) -> None:
        """Open files that are not open.

        Args:
            seen: what files were when their headers were read.

        Raises:
            MachineError: one cannot be opened.
        """
        for path in paths:
            if path not in self._files:
                facts = seen.get(path)
                self._files[path] = OpenFile(path, is_direct=self._is_direct, seen=facts)

    def _read(self, file: OpenFile, first: int, target: memoryview, least: int) -> None:
        self._count(1, 0)
        try:
            file.read(first, target, least)
        finally:
            self._count(-1, len(target))

    def _count(self, begun: int, num_bytes: int) -> None:
        now_s = time.monotonic()
        with self._lock:
            if self._num_going:
                self.busy_s += now_s - self._since_s
            self._num_going, self._since_s = self._num_going + begun, now_s
            self.num_bytes += num_bytes

    @property
    def bytes_per_s(self) -> float:
        """How fast files were read while they were; 0: nothing was."""
        return self.num_bytes / self.busy_s if self.busy_s else 0.0
