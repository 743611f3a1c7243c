"""The machine's memory: how much is free, and having it at hand before it is needed.

It needs no torch, so that it can be asked while that is imported.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PIECE = 8 << 20  # bytes touched at a time
MOST_OF_FREE = 0.25


def free_host_bytes() -> int:
    """Return the bytes that can be used without swapping, by the system or its control group."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    available = int(line.split()[1]) * 1024
        with (
            open("/sys/fs/cgroup/memory.max") as limit,
            open("/sys/fs/cgroup/memory.current") as used,
        ):
            available = min(available, int(limit.read()) - int(used.read()))
    except (OSError, ValueError):
        pass  # no Linux, or no limit ("max")
    return available


@contextmanager
def touching_memory(num_bytes: int) -> Iterator[None]:
    """Have a thread touch so much memory meanwhile, as far as it gets; it is free again afterwards.

    A virtual machine often has a page of memory only once it was touched, and its host takes 1 to 3
    seconds to give it a GB. What is touched here stays with the machine for some seconds, so that
    who needs memory next has it in a fraction of the time.

    Args:
        num_bytes: no more than a quarter of what is free is touched, in any case.
    """
    memory = _reserve(num_bytes)
    if memory is None:
        yield
        return
    is_over = threading.Event()
    thread = threading.Thread(target=_touch, args=(memory, is_over), name="fminfer memory")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        memory.close()


def _reserve(num_bytes: int) -> mmap.mmap | None:
    """Return memory that nothing has touched; None: it would be of no use."""
    if sys.platform != "linux" or num_bytes == 0 or len(os.sched_getaffinity(0)) == 1:
        return None
    size = min(num_bytes, int(free_host_bytes() * MOST_OF_FREE))
    with suppress(OSError, ValueError, OverflowError):  # the system has none
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory
    return None


def _touch(memory: mmap.mmap, is_over: threading.Event) -> None:
    start, size = ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory)
    for place in range(0, size, PIECE):
        if is_over.is_set():
            return
        ctypes.memset(start + place, 0, min(PIECE, size - place))  # other threads run meanwhile
