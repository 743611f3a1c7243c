"""Halves work that does not fit the memory, and remembers the size that fits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

import torch

from fminfer.core.errors import OutOfMemoryError

Result = TypeVar("Result")
# What torch's allocators say, in a plain RuntimeError; and CUDA where it needs some of its own.
_SIGNS = (
    "can't allocate memory",
    "not enough memory",
    "bad_alloc",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # cuBLAS found no room for itself
    "[CUDA]: out of memory",  # triton's
    "ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that memory could not be had."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        sign in str(error) for sign in _SIGNS
    )


class SizeLimit:
    """How much of one kind of work is done at once: all, until memory runs out.

    Args:
        name: of the work's unit, for people: "tokens".
        is_shared: other processes do the same work in the same parts; `run` does not halve it.
    """

    def __init__(self, name: str, *, is_shared: bool = False) -> None:
        self._name = name
        self._is_shared = is_shared
        self.most = sys.maxsize

    def run(self, size: int, work: Callable[[int, int], Result]) -> list[Result]:
        """Do work of a size in as few equal parts as memory allows, one after another.

        Args:
            work: does the part from one place to another; it may be called again for a place.

        Raises:
            OutOfMemoryError: not even one can be done.
        """
        results: list[Result] = []
        first = 0
        while first < size:
            last = min(size, first + self.most)
            try:
                results.append(work(first, last))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).partition("\n")[0]
            else:
                first = last
                continue
            # Outside of `except`, so that nothing holds the failed part's tensors.
            self._halve(last - first, min(size, self.most), reason)
        return results

    def _halve(self, num_failed: int, size: int, reason: str) -> None:
        """Halve the size of parts, after so much of one failed; the last part may be small."""
        if self._is_shared:
            raise OutOfMemoryError(
                f"there is no memory for a step of {num_failed} {self._name} ({reason}), which "
                "ranks that share layers compute together. Finished rows are kept; run the same "
                "command with a smaller --chunk-size or --budget"
            )
        if num_failed == 1:
            raise OutOfMemoryError(
                f"there is no memory for a step of even one of its {self._name} ({reason}). "
                "Finished rows are kept; run the same command with a smaller --budget, or on a "
                "machine with more memory"
            )
        self.most = (size + 1) // 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
