"""Where answers are kept from run to run, and how much room they may take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fminfer.core.errors import UsageError
from fminfer.core.option import Bytes, Options, option
from fminfer.core.quantities import describe_bytes

DEFAULT_BYTES = 4 * 2**30
LEAST_BYTES = 2**20


@dataclass(slots=True, frozen=True)
class CachePlace:
    """A folder for answers, and the size that they may have in it."""

    folder: Path
    max_bytes: int


_option = partial(option, group="Kept answers", commands=("run", "serve"))


@dataclass(frozen=True)
class KeptAnswers(Options):
    """Whether answers are kept on the disk."""

    result_cache: Path | str | None = _option(
        "Keep answers here, and take them for equal requests of other runs and servers: greedy "
        "and scored requests, and those with a seed of their own.  [default: none is kept]",
        metavar="FOLDER",
    )
    result_cache_bytes: Bytes | None = _option(
        "Most disk space of these answers: 500M, 10G. The least recently used ones are evicted "
        f"first.  [default: {DEFAULT_BYTES // 2**30}G]"
    )

    def check(self) -> None:
        """Raise a UsageError for a place that is no folder, or a wrong size."""
        folder = self.result_cache
        size = self.result_cache_bytes
        if folder is None and size is not None:
            raise UsageError(
                "--result-cache-size has no effect without --result-cache FOLDER"
            )
        if isinstance(folder, str):
            raise UsageError(
                f"--result-cache {folder} is a URL; give a folder of a file system"
            )
        if folder is not None and folder.exists() and not folder.is_dir():
            raise UsageError(f"--result-cache {folder} is a file; give a folder")
        if size is not None and size < LEAST_BYTES:
            raise UsageError(
                f"--result-cache-size is {size:,} bytes; give at least "
                f"{describe_bytes(LEAST_BYTES)}"
            )

    @property
    def cache_place(self) -> CachePlace | None:
        """Where answers are kept on the disk; None: nowhere."""
        if not isinstance(self.result_cache, Path):
            return None
        return CachePlace(self.result_cache, self.result_cache_bytes or DEFAULT_BYTES)
