"""Where answers are kept from run to run, and how much room they may take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fminfer.core.errors import UsageError
from fminfer.core.quantities import show_bytes

DEFAULT_BYTES = 4 * 2**30
LEAST_BYTES = 2**20


@dataclass(slots=True, frozen=True)
class CachePlace:
    """A folder for answers, and the size that they may have in it."""

    folder: Path
    max_bytes: int


def find_place(folder: Path | str | None, max_bytes: int | None) -> CachePlace | None:
    """Return what --result-cache and --result-cache-size say; None: no answers are kept.

    Args:
        folder: a text is a URL.

    Raises:
        UsageError: they cannot be.
    """
    if folder is None:
        if max_bytes is not None:
            raise UsageError("--result-cache-size has no effect without --result-cache FOLDER")
        return None
    if isinstance(folder, str):
        raise UsageError(f"--result-cache {folder} is a URL; give a folder of a file system")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--result-cache {folder} is a file; give a folder")
    if max_bytes is not None and max_bytes < LEAST_BYTES:
        raise UsageError(
            f"--result-cache-size is {max_bytes:,} bytes; give at least {show_bytes(LEAST_BYTES)}"
        )
    return CachePlace(folder, max_bytes or DEFAULT_BYTES)
