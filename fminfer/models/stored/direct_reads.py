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
    def whole_units(self) -> range:
        """The whole units around it, which are read."""
        return range(self.first // UNIT * UNIT, -(-self.last // UNIT) * UNIT)


@dataclass(slots=True, frozen=True)
class LentBuffer:
    """A buffer that holds spans of files one after another, and will be used again."""

    spans: Sequence[Span]
    buffer: torch.Tensor

    def find_bytes(self, span: Span) -> torch.Tensor:
        """Return bytes of a file that are in one of the spans."""
        offset = self.find_offset(span)
        return self.buffer[offset + span.first : offset + span.last]

    def find_offset(self, span: Span) -> int:
        """Return a byte's offset in the buffer, less its offset in the file."""
        start = 0
        for each in self.spans:
            if (
                each.file == span.file
                and each.first <= span.first
                and span.last <= each.last
            ):
                return start - each.whole_units.start
            start += len(each.whole_units)
        raise AssertionError(f"{span} is in none of the spans")


def buffer_size_of(spans: Iterable[Span]) -> int:
    """Return the bytes of a buffer for spans."""
    return sum(len(span.whole_units) for span in spans)


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """Return spans that cover the same bytes; near ones become one."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda each: (each.file, each.first)):
        last = merged[-1] if merged else None
        if last and last.file == span.file and span.first <= last.last + NEAR:
            merged[-1] = Span(span.file, last.first, max(last.last, span.last))
        elif span.last > span.first:
            merged.append(span)
    return merged


FileStamp = tuple[int, int]  # size in bytes, and when it was written to last, in ns


def read_file_stamp(file: Path | int) -> FileStamp:
    """Return a file's size and time, by which a change shows."""
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns


class OpenFile:
    """A file that must not change since its stamp was read (None: since now).

    Raises:
        MachineError: it cannot be opened, or read; it ends too early, or was changed.
    """

    def __init__(self, path: Path, *, is_direct: bool, seen: FileStamp | None) -> None:
        self._path = path
        try:
            self._file = (is_direct and _open_direct(path)) or FileIO(path)
        except OSError as error:
            raise MachineError(f"{path} cannot be read: {error.strerror}") from error
        self._was = seen or read_file_stamp(self._file.fileno())

    def read(self, start: int, target: memoryview, least: int) -> None:
        """Read bytes from `start` on, until the target is full or `least` bytes are there."""
        number = self._file.fileno()
        done = 0
        facts = self._was
        while done < least:
            try:
                num = os.preadv(number, [target[done:]], start + done)
                facts = read_file_stamp(number)
            except OSError as error:
                raise self._read_error(f"cannot be read ({error.strerror})") from error
            if num == 0:
                raise self._read_error(f"ends at byte {start + done}; it was cut off")
            done += num
        if facts != self._was:
            raise self._read_error("was changed, or touched,")

    def close(self) -> None:
        self._file.close()

    def _read_error(self, what: str) -> MachineError:
        return MachineError(
            f"{self._path} {what} while its weights were read in each step "
            "(--offload). Finished rows are kept; repair the file or disk, and run the "
            "same command to go on"
        )


def _open_direct(path: Path) -> FileIO | None:
    """Open a file past the system's cache; None: its file system cannot do that."""
    with suppress(OSError), ExitStack() as stack:
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | O_DIRECT)
        file = stack.enter_context(FileIO(number))
        os.preadv(number, [mmap.mmap(-1, UNIT)], 0)
        stack.pop_all()
        return file
    return None


PendingReads = Sequence["Future[None]"]  # of the pieces of spans that are being read


def wait_for_reads(reading: PendingReads) -> None:
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
        self, seen: Mapping[Path, FileStamp | None], *, is_direct: bool = True
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

    def start(self, lent: LentBuffer, spans: Sequence[Span]) -> PendingReads:
        """Begin to read spans to their places in a buffer, which begins with a whole unit."""
        buffer = lent.buffer.numpy().data
        futures = []
        for span in spans:
            file = self._files[span.file]
            offset = lent.find_offset(span)
            for first in range(span.whole_units.start, span.whole_units.stop, PIECE):
                last = min(first + PIECE, span.whole_units.stop)
                target = buffer[offset + first : offset + last]
                least = min(last, span.last) - first
                futures.append(
                    self._threads.submit(self._read_piece, file, first, target, least)
                )
        return futures

    def close(self) -> None:
        """Stop reading."""
        self._threads.shutdown(cancel_futures=True)
        for file in self._files.values():
            file.close()

    def _read_piece(
        self, file: OpenFile, first: int, target: memoryview, least: int
    ) -> None:
        self._count_read(1, 0)
        try:
            file.read(first, target, least)
        finally:
            self._count_read(-1, len(target))

    def _count_read(self, begun: int, num_bytes: int) -> None:
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
