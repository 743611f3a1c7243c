"""What a process does before it computes: it settles how torch works, and imports it."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

from fminfer.machine.library_imports import import_transformers
from fminfer.machine.threads import wait_briefly

# What comes and goes in a few steps of hundreds of rows. Python's own 700 had the collector look at
# all rows' tokens so often that it took a third of the time between steps.
MOST_NEW_OBJECTS = 10_000


def prepare_torch() -> None:
    """Settle how torch, which is not imported yet, asks for memory and waits for work.

    It takes pages of 2 MB for what is larger than that: weights and KV cache are read from end to
    end at each step. docs/performance.md has the figures.
    """
    wait_briefly()
    if os.path.exists("/sys/kernel/mm/transparent_hugepage"):
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


@contextmanager
def importing() -> Iterator[None]:
    """Keep the collector of garbage away from half a million objects that stay to the end.

    It would look at all of them again and again: that takes a third of the imports' time.
    """
    gc.disable()
    try:
        import_transformers()
        yield
    finally:
        gc.freeze()
        gc.set_threshold(MOST_NEW_OBJECTS)
        gc.enable()
