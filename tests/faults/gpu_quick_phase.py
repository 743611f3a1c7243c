"""A phase of scripts/try_gpu that says in which process it runs."""

from __future__ import annotations

import os
from collections.abc import Iterator

from benchmarks.gpu.cases import Case, Setting


def cases(setting: Setting) -> Iterator[Case]:
    for name in ("first", "second"):
        yield Case(name, lambda: {"process": os.getpid()})
