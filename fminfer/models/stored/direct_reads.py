"""Reads parts of files again and again, past the system's cache, in several threads.

Weights that do not fit the memory would evict everything else from that cache, and would not be
there in the next pass either.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch

from fminfer.core.errors import MachineError

UNIT = mmap.PAGESIZE  # disks give whole sectors, and memory takes whole pages
PIECE = 8 << 20  # bytes of one read: a disk's queue has NUM_THREADS of them
NUM_THREADS = 4
NEAR = 1 << 16  # spans this many bytes apart are read as one
O_DIRECT = getattr(os, "O_DIRECT", 0)  # not every system has it


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
class Lent:
    """Spans of files, one after another in a buffer that will be used again."""

    spans: Sequence[Span]
    buffer: torch.Tensor

    def find(self, span: Span) -> torch.Tensor:
        """Return bytes of a file that are in one of the spans."""
        offset = self.offset_of(span)
        return self.buffer[offset + span.first : offset + span.last]

    def offset_of(self, span: Span) -> int:
        """Return the place of a byte in the buffer, less its place in the file."""
        start = 0
        for each in self.spans:
            if (
                each.file == span.file
                and each.first <= span.first
                and span.last <= each.last
            ):
                return start - each.whole.start
            start += len(each.whole)
        raise AssertionError(f"{span} is in none of the spans")


def size_of(spans: Iterable[Span]) -> int:
    """Return the bytes of a buffer for spans."""
    return sum(len(span.whole) for span in spans)


def merge(spans: Iterable[Span]) -> list[Span]:
    """Return spans that cover the same bytes; near ones become one."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda each: (each.file, each.first)):
        last = found[-1] if found else None
        if last and last.file == span.file and span.first <= last.last + NEAR:
            found[-1] = Span(span.file, last.first, max(last.last, span.last))
        elif span.last > span.first:
            found.append(span)
    return found


FileFacts = tuple[int, int]  # size in bytes, and when it was written to last, in ns


def facts_of(file: Path | int) -> FileFacts:
    """Return facts by which a change of a file shows."""
    found = os.stat(file)
    return found.st_size, found.st_mtime_ns


class OpenFile:
    """A file that must not change since its facts were seen (None: since now).

    Raises:
        MachineError: it cannot be opened, or read; it ends too early, or was changed.
    """

    def __init__(self, path: Path, *, is_direct: bool, seen: FileFacts | None) -> None:
        self._path = path
        try:
            self._file = (is_direct and _open_direct(path)) or FileIO(path)
        except OSError as error:
            raise MachineError(f"{path} cannot be read: {error.strerror}") from error
        self._was = seen or facts_of(self._file.fileno())

    def read(self, start: int, target: memoryview, least: int) -> None:
        """Read bytes from `start` on, until the target is full, or the file ends behind
        `least`."""
        number = self._file.fileno()
        done = 0
        facts = self._was
        while done < least:
            try:
                num = os.preadv(number, [target[done:]], start + done)
                facts = facts_of(number)
            except OSError as error:
                raise self._trouble(f"cannot be read ({error.strerror})") from error
            if num == 0:
                raise self._trouble(f"ends at byte {start + done}; it was cut off")
            done += num
        if facts != self._was:
            raise self._trouble("was changed, or touched,")

    def close(self) -> None:
        self._file.close()

    def _trouble(self, what: str) -> MachineError:
        return MachineError(
            f"{self._path} {what} while its weights were read in each step "
            "(--offload). Finished rows are kept; repair the file or disk, and run the "
            "same command to go on"
        )


def _open_direct(path: Path) -> FileIO | None:
    """Open a file past the system's cache; None: its file system refuses that, or such
    a read."""
    with suppress(OSError), ExitStack() as stack:
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | O_DIRECT)
        file = stack.enter_context(FileIO(number))
        os.preadv(number, [mmap.mmap(-1, UNIT)], 0)
        stack.pop_all()
        return file
    return None


Reading = Sequence["Future[None]"]  # of the pieces of spans that are being read


def finish(reading: Reading) -> None:
    """Wait until all pieces are there; errors are those of `OpenFile`."""
    wait(reading)
    for piece in reading:
        piece.result()


class DirectReads:
    """Reads spans of files into buffers, and counts bytes and seconds.

    Files stay open, so that a file that another replaces is read on. They are read past the
    system's cache (`is_direct`), or through it, where processes share it.

    Raises:
        MachineError: a file cannot be opened.
    """

    def __init__(
        self, seen: Mapping[Path, FileFacts | None], *, is_direct: bool = True
    ) -> None:
        self._files = {
            path: OpenFile(path, is_direct=is_direct, seen=facts)
            for path, facts in seen.items()
        }
        self._threads = ThreadPoolExecutor(NUM_THREADS, "fminfer layers")
        self._lock = threading.Lock()
        self.num_bytes = 0
        self.busy_s = 0.0  # read so far, and while at least one read went on
        self._num_going = 0
        self._since_s = 0.0

    def start(self, lent: Lent, spans: Sequence[Span]) -> Reading:
        """Begin to read spans to their places in a buffer, which begins with a whole unit."""
        buffer = lent.buffer.numpy().data
        futures = []
        for span in spans:
            file = self._files[span.file]
            offset = lent.offset_of(span)
            for first in range(span.whole.start, span.whole.stop, PIECE):
                last = min(first + PIECE, span.whole.stop)
                target = buffer[offset + first : offset + last]
                least = min(last, span.last) - first
                futures.append(
                    self._threads.submit(self._read, file, first, target, least)
                )
        return futures

    def close(self) -> None:
        """Stop reading."""
        self._threads.shutdown(cancel_futures=True)
        for file in self._files.values():
            file.close()

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
            self._num_going = self._num_going + begun
            self._since_s = now_s
            self.num_bytes += num_bytes

    @property
    def bytes_per_s(self) -> float:
        """How fast files were read while they were; 0: nothing was."""
        return self.num_bytes / self.busy_s if self.busy_s else 0.0
