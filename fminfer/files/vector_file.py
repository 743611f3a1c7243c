"""The vectors of an output as one .npy file beside it: a row for each line of the input."""

from __future__ import annotations

import hashlib
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from fminfer.files.disk import beside

MOST_GAP = 1 << 20  # bytes of absent rows that are written at once


def vectors_path(output: Path) -> Path:
    """Return where an output's vectors go: `answers.npy` for `answers.jsonl`."""
    return beside(output, ".npy", without=".jsonl")


class VectorWriter:
    """Writes vectors in the order of their lines; a line without one has a row of nan.

    Args:
        num_rows: lines of the input, blank ones too.
        size: numbers of a vector.
        digest: is told of every byte.
    """

    def __init__(self, file: BinaryIO, num_rows: int, size: int, digest: hashlib.blake2b) -> None:
        import numpy as np  # only here: `fminfer --help` needs none

        self._file, self._digest = file, digest
        self._num_rows, self._num_written = num_rows, 0
        self._absent = np.full(size, np.nan, "<f4").tobytes()
        header = {"descr": "<f4", "fortran_order": False, "shape": (num_rows, size)}
        start = BytesIO()
        np.lib.format.write_array_header_1_0(start, header)
        self._write(start.getvalue())

    def add(self, number: int, vector: bytes) -> None:
        """Write the vector of a line, whose number is larger than those before."""
        assert len(vector) == len(self._absent), "a run's vectors have one size"
        self._fill(number - 1)
        self._write(vector)
        self._num_written += 1

    def finish(self) -> None:
        """Write the rows of the last lines if they have no vectors."""
        self._fill(self._num_rows)

    def _fill(self, until: int) -> None:
        most = max(1, MOST_GAP // len(self._absent))
        while (left := until - self._num_written) > 0:
            self._write(self._absent * min(left, most))
            self._num_written += min(left, most)

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)


class VectorReader:
    """The vectors of a complete output, from the file that was written with it."""

    def __init__(self, output: Path) -> None:
        import numpy as np

        self._rows = np.load(vectors_path(output), mmap_mode="r")

    def of(self, number: int) -> bytes:
        """Return the vector of a line that was answered."""
        return bytes(self._rows[number - 1].tobytes())
