"""Names of the files beside an output: made of its own name, and never too long for a folder."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

MOST_BYTES = 255  # of a file's name, on nearly every file system


def beside(path: Path, ending: str, *, without: str = "") -> Path:
    """Return the file beside `path` whose name is its own with another ending.

    Args:
        without: an ending that is taken off first, if it is there.
    """
    return path.with_name(fit_name(path.name.removesuffix(without), ending))


def fit_name(start: str, ending: str) -> str:
    """Join a name; one that is too long is cut in the middle, and a digest tells it from others."""
    if len(os.fsencode(start + ending)) <= MOST_BYTES:
        return start + ending
    raw = os.fsencode(start)
    end = f"~{hashlib.blake2b(raw, digest_size=6).hexdigest()}{ending}"
    return raw[: MOST_BYTES - len(end)].decode(errors="ignore") + end
