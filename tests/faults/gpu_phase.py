"""A phase of scripts/try_gpu in which everything happens that can."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from benchmarks.gpu.cases import Case, Figures, Setting, Skipped, expect


def cases(setting: Setting) -> Iterator[Case]:
    yield Case("right", lambda: {"GB/s": 12.5})
    yield Case("wrong", give_something_else)
    yield Case("fails", fail)
    yield Case("breaks the GPU", break_gpu)
    yield Case("dies", lambda: os._exit(7))
    yield Case("skipped", skip)
    yield Case("hangs", lambda: time.sleep(60) or {})
    yield Case("never begins", lambda: {})


def give_something_else() -> Figures:
    expect(False, "off by 3", {"error": 3.0})
    return {}


def fail() -> Figures:
    raise RuntimeError("an illegal memory access was encountered")


def break_gpu() -> Figures:
    """Leave a torch whose GPU answers nothing any more."""
    torch: Any = ModuleType("torch")
    torch.cuda = ModuleType("torch.cuda")
    torch.cuda.synchronize = fail
    sys.modules["torch"] = torch
    return fail()


def skip() -> Figures:
    raise Skipped("no tool")
