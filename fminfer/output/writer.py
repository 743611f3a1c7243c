"""Writes one input's records: each at once to a partial file, in input order at the end.

Finished rows are on disk as soon as they are finished; the final names appear only when every line
of the input has its record. It knows nothing of the records' contents.
"""

from __future__ import annotations

import os
from array import array
from pathlib import Path

PARTIAL = ".partial"  # added to the final name while the file is being made


def errors_path(output: Path) -> Path:
    """Return where an output's errors go: `answers.errors.jsonl` for `answers.jsonl`."""
    return output.with_name(output.name.removesuffix(".jsonl") + ".errors.jsonl")


class OrderedFile:
    """Takes lines in any order, each with its number; `finish` puts them in order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._partial = path.with_name(path.name + PARTIAL)
        self._file = self._partial.open("wb")
        # Where each line stands in the partial file; three integers a line are all that is held.
        self._numbers = array("q")
        self._starts = array("q")
        self._sizes = array("q")
        self._end = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def append(self, number: int, line: bytes) -> None:
        """Write a line (without its newline) and hand it to the system at once."""
        self._file.write(line + b"\n")
        self._file.flush()
        self._numbers.append(number)
        self._starts.append(self._end)
        self._sizes.append(len(line) + 1)
        self._end += len(line) + 1

    def finish(self) -> None:
        """Write all lines in the order of their numbers under the final name, atomically."""
        self._file.close()
        ordered = self._partial.with_name(self.path.name + ".ordered")
        places = sorted(range(len(self._numbers)), key=self._numbers.__getitem__)
        with self._partial.open("rb") as source, ordered.open("wb") as target:
            for place in places:
                source.seek(self._starts[place])
                target.write(source.read(self._sizes[place]))
            target.flush()
            os.fsync(target.fileno())
        os.replace(ordered, self.path)
        self._partial.unlink()

    def close(self) -> None:
        """Stop without finishing; the partial file stays, unless it is empty."""
        self._file.close()
        if not self._numbers:
            self._partial.unlink(missing_ok=True)


class OutputFile:
    """The answers and the errors of one input file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._answers = OrderedFile(path)
        self._errors: OrderedFile | None = None

    @property
    def num_records(self) -> int:
        return len(self._answers) + (len(self._errors) if self._errors is not None else 0)

    def append(self, number: int, line: bytes, *, is_error: bool) -> None:
        """Write the record of line `number` of the input."""
        if not is_error:
            self._answers.append(number, line)
            return
        if self._errors is None:
            self._errors = OrderedFile(errors_path(self.path))
        self._errors.append(number, line)

    def finish(self) -> None:
        """Give the files their final names, the answers last: where they are, all is complete."""
        if self._errors is not None:
            self._errors.finish()
        else:
            errors_path(self.path).unlink(missing_ok=True)  # of an earlier run
        self._answers.finish()

    def close(self) -> None:
        """Stop without finishing; what was written stays in the partial files."""
        self._answers.close()
        if self._errors is not None:
            self._errors.close()
