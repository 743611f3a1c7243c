"""Reads weights ahead of those who use them, so that the disk works while others pack."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Waiting:
    """A part of a file that somebody will use."""

    nbytes: int
    fetch: Callable[[], None]  # has the system read it


Group = Sequence[Waiting]
AHEAD = 1 << 29  # bytes that are read before they are asked for; one group is in any case


@contextmanager
def reading_ahead(groups: Sequence[Group]) -> Iterator[Callable[[], None]]:
    """Have a thread bring groups of tensors into memory, one after the other.

    It waits when it is too far ahead. At the end it has read all, unless an error came first.

    Yields:
        what is to be called when a group has been used.
    """
    largest = max((sum(part.nbytes for part in group) for group in groups), default=0)
    room = threading.Semaphore(max(1, AHEAD // max(1, largest)))
    is_over = threading.Event()

    def read() -> None:
        for group in groups:
            room.acquire()
            for part in group:
                if is_over.is_set():
                    return
                part.fetch()

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
