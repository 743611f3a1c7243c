"""The machine's memory: how much is free, and making it ready before it is needed."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fminfer.machine import control_groups
from fminfer.machine.control_groups import find_group_folders, read_system_file

# Bytes touched, and read, at a time. Between two pieces Python stops what the process
# imports: for milliseconds, where other work has the cores.
PIECE = 32 << 20
READ_PIECE = 1 << 20
NUM_PIECES = 128
HUGE_PAGE = 2 << 20
POPULATE_READ = 22  # Linux's MADV_POPULATE_READ, which mmap lacks
MOST_OF_FREE = 0.25
MOST_TOUCHED = 4 << 30
# Of a control group, by version: its limit and its use; and in its statistics what of that are
# cached files, used once or often: the system drops both before it ends a process.
NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}
CACHED = ("inactive_file", "active_file")


def measure_free_host_bytes() -> int:
    """Return the bytes that the system and its control groups leave without swapping."""
    available = _read_system_bytes("proc/meminfo", "MemAvailable")
    if available is None:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([available, *_measure_group_room()])


def measure_free_swap_bytes() -> int:
    """Return the bytes of swap that are free. What is swapped is slow."""
    return _read_system_bytes("proc/meminfo", "SwapFree") or 0


def measure_process_bytes() -> int:
    """Return the memory that this process has now; 0 where the system does not tell."""
    return _read_system_bytes("proc/self/status", "VmRSS") or 0


def trim_host_memory() -> None:
    """Return freed memory to the system."""
    with suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def measure_peak_host_bytes() -> int:
    """Return this process's peak memory, mapped files included.

    The older count, `ru_maxrss`, begins with the memory of the process that started it.
    """
    peak = _read_system_bytes("proc/self/status", "VmHWM")
    return (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if peak is None
        else peak
    )


def _read_system_bytes(file: str, name: str) -> int | None:
    """Return bytes that Linux tells of; None: it does not."""
    for line in read_system_file(control_groups.SYSTEM / file).splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _measure_group_room() -> Iterator[int]:
    """Yield the bytes that each control group with a limit, or one above it, has left."""
    for folder, version in find_group_folders("memory"):
        limit, used, prefix = NAMES[version]
        cached = [f"{prefix}{name}" for name in CACHED]
        with suppress(OSError, ValueError):  # "max": no limit
            left = int((folder / limit).read_text()) - int((folder / used).read_text())
            with suppress(OSError):  # not told: then files count as used
                for line in (folder / "memory.stat").read_text().splitlines():
                    name, count = line.split()[:2]
                    if name in cached:
                        left += int(count)
            yield left


def advise_small_pages(address: int, num_bytes: int) -> None:
    """Have the system allocate these bytes page by page: few of them will be used."""
    page = mmap.PAGESIZE
    first = -(-address // page) * page
    end = (address + num_bytes) // page * page
    if hasattr(mmap, "MADV_NOHUGEPAGE") and end - first >= HUGE_PAGE:
        _advise_system(first, end - first, mmap.MADV_NOHUGEPAGE)


def read_mapped_bytes(address: int, num_bytes: int) -> None:
    """Have the system read mapped bytes of a file; from Linux 5.14 on, at once."""
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform == "linux":
        _advise_system(first, address + num_bytes - first, POPULATE_READ)


def _advise_system(address: int, num_bytes: int, advice: int) -> int:
    """Advise the system how memory will be used; return -1 if it refuses."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return int(madvise(address, num_bytes, advice))


@contextmanager
def touching_memory(num_bytes: int) -> Iterator[None]:
    """Have a thread touch so much memory meanwhile, and free it afterwards.

    The host of a virtual machine takes 1 to 3 seconds to give it a GB, once it is
    touched. What is touched here stays with the machine for some seconds. It is no more
    than `_choose_ready_bytes`.
    """
    memory = _allocate_untouched(num_bytes)
    if memory is None:
        yield
        return
    try:
        with _running_thread(
            "fminfer memory", lambda is_over: _touch_pages(memory, is_over)
        ):
            yield
    finally:
        memory.close()
        with suppress(OSError):  # "5" resets the peak, which this must not raise
            Path("/proc/self/clear_refs").write_text("5")


@contextmanager
def reading_files(paths: Iterable[Path]) -> Iterator[None]:
    """Have a thread read files into the system's cache, at most `_choose_ready_bytes`."""
    with _running_thread("fminfer files", lambda is_over: _read_files(paths, is_over)):
        yield


@contextmanager
def _running_thread(
    name: str, work: Callable[[threading.Event], None]
) -> Iterator[None]:
    """Have a thread work meanwhile; the event tells it when to stop."""
    is_over = threading.Event()
    thread = threading.Thread(target=work, args=(is_over,), name=name)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _read_files(paths: Iterable[Path], is_over: threading.Event) -> None:
    # Copied, not mapped: so a virtual machine gets the memory in which the file stays
    # here, and not once it is used. docs/performance.md has the figures.
    left = _choose_ready_bytes()
    pieces = [bytearray(READ_PIECE)] * NUM_PIECES  # one buffer, many times
    with suppress(OSError):  # loading will say what is wrong
        for path in paths:
            with open(path, "rb", buffering=0) as file:
                num_bytes = 1
                while num_bytes and left > 0 and not is_over.is_set():
                    num_bytes = os.readv(file.fileno(), pieces)
                    left -= num_bytes


def _choose_ready_bytes() -> int:
    """Return how many bytes may be made ready before it is known that they are needed."""
    return min(int(measure_free_host_bytes() * MOST_OF_FREE), MOST_TOUCHED)


def _allocate_untouched(num_bytes: int) -> mmap.mmap | None:
    """Return memory that nothing has touched; None: it would be of no use."""
    if sys.platform != "linux" or num_bytes == 0 or len(os.sched_getaffinity(0)) == 1:
        return None
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return None  # it would count as used
    size = min(num_bytes, _choose_ready_bytes())
    with suppress(OSError, ValueError, OverflowError):  # the system has none
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory
    return None


def _touch_pages(memory: mmap.mmap, is_over: threading.Event) -> None:
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    size = len(memory)
    for place in range(0, size, PIECE):
        if is_over.is_set():
            return
        # other threads run meanwhile
        ctypes.memset(start + place, 0, min(PIECE, size - place))
