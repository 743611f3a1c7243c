"""Reads mapped weights ahead of those who use them, so that the disk works while others pack."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from fminfer.host_memory import read_mapped

Group = Sequence[torch.Tensor]
AHEAD = 1 << 29  # bytes that are read before they are asked for; one group is in any case


@contextmanager
def reading_ahead(groups: Sequence[Group]) -> Iterator[Callable[[], None]]:
    """Have a thread bring groups of mapped tensors into memory, one after the other.

    It waits when it is too far ahead. At the end it has read all, unless an error came first.

    Yields:
        what is to be called when a group has been used.
    """
    largest = max((sum(tensor.nbytes for tensor in group) for group in groups), default=0)
    room = threading.Semaphore(max(1, AHEAD // max(1, largest)))
    is_over = threading.Event()

    def read() -> None:
        for group in groups:
            room.acquire()
            for tensor in group:
                if is_over.is_set():
                    return
                read_mapped(tensor.data_ptr(), tensor.nbytes)

    thread = threading.Thread(target=read, name="fminfer weights", daemon=True)
    thread.start()
    try:
        yield room.release
    except BaseException:
        is_over.set()
        raise
    finally:
        room.release(len(groups) or 1)
        thread.join()
