"""Writes one input's records: each at once to a partial file, in input order at the end.

Finished rows are on disk as soon as they are finished; the final names appear only when every line
of the input has its record. It knows nothing of the records' contents.
"""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from typing import BinaryIO

PARTIAL = ".partial"  # added to the final name while the file is being made


def errors_path(output: Path) -> Path:
    """Return where an output's errors go: `answers.errors.jsonl` for `answers.jsonl`."""
    return output.with_name(output.name.removesuffix(".jsonl") + ".errors.jsonl")


def traces(output: Path) -> list[Path]:
    """List every file that answering into `output` may write under a name of its own."""
    finals = [output, errors_path(output)]
    return finals + [path.with_name(path.name + PARTIAL) for path in finals]


class OrderedFile:
    """Takes lines in any order, each with its number; `finish` puts them in order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._partial = path.with_name(path.name + PARTIAL)
        self._file: BinaryIO | None = None  # opened with the first line
        # Where each line stands in the partial file; three integers a line are all that is held.
        self._numbers = array("q")
        self._starts = array("q")
        self._sizes = array("q")
        self._end = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def append(self, number: int, line: bytes) -> None:
        """Write a line (without its newline) and hand it to the system at once."""
        if self._file is None:
            self._file = self._partial.open("wb")
        self._file.write(line + b"\n")
        self._file.flush()
        self._numbers.append(number)
        self._starts.append(self._end)
        self._sizes.append(len(line) + 1)
        self._end += len(line) + 1

    def finish(self) -> None:
        """Write all lines in the order of their numbers under the final name, atomically."""
        self.close()
        ordered = self.path.with_name(self.path.name + ".ordered")
        with ordered.open("wb") as target:
            if len(self):
                self._copy_in_order(target)
            target.flush()
            os.fsync(target.fileno())
        os.replace(ordered, self.path)
        self._partial.unlink(missing_ok=True)

    def _copy_in_order(self, target: BinaryIO) -> None:
        places = sorted(range(len(self)), key=self._numbers.__getitem__)
        with self._partial.open("rb") as source:
            for place in places:
                source.seek(self._starts[place])
                target.write(source.read(self._sizes[place]))

    def close(self) -> None:
        """Stop writing; the partial file stays."""
        if self._file is not None:
            self._file.close()
            self._file = None


class OutputFile:
    """The answers and the errors of one input file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._answers = OrderedFile(path)
        self._errors = OrderedFile(errors_path(path))

    @property
    def num_records(self) -> int:
        return len(self._answers) + len(self._errors)

    def append(self, number: int, line: bytes, *, is_error: bool) -> None:
        """Write the record of line `number` of the input."""
        (self._errors if is_error else self._answers).append(number, line)

    def finish(self) -> None:
        """Give the files their final names, the answers last: where they are, all is complete."""
        if len(self._errors):
            self._errors.finish()
        else:  # what an earlier run may have left
            for path in traces(self.path)[1::2]:
                path.unlink(missing_ok=True)
        self._answers.finish()

    def close(self) -> None:
        """Stop without finishing; what was written stays in the partial files."""
        self._answers.close()
        self._errors.close()
