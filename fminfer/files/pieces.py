"""Gathers the bytes of a line that come piece by piece, and never holds a giant one."""

from __future__ import annotations

from dataclasses import dataclass

# A line, or a value of a .json file. Parsed, it takes up to 25 times as much.
MAX_VALUE_BYTES = 32 << 20
HEAD_BYTES = 400  # that are kept of a longer one


@dataclass(slots=True, frozen=True)
class CutValue:
    """The beginning of a value that is too long to be held."""

    head: bytes
    num_bytes: int  # of the whole value

    @property
    def fault(self) -> str:
        """Say that it is too long."""
        return (
            f"the line has {self.num_bytes:,} bytes, and at most {MAX_VALUE_BYTES:,} are read; put "
            "its prompts on several lines"
        )


class ValueBytes:
    """Gathers the pieces of a value; of one that is too long only the beginning."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._num_bytes = 0

    def add(self, piece: bytes) -> None:
        if self._num_bytes <= MAX_VALUE_BYTES:
            self._parts.append(piece)
        self._num_bytes += len(piece)
        if self._num_bytes > MAX_VALUE_BYTES and len(self._parts) > 1:
            self._parts = [self.head]

    @property
    def head(self) -> bytes:
        """Return the value if it can be held, or else its beginning."""
        whole = b"".join(self._parts)
        return whole if self._num_bytes <= MAX_VALUE_BYTES else whole[:HEAD_BYTES]

    def take(self) -> bytes | CutValue:
        """Return the value, and begin another."""
        head, num_bytes = self.head, self._num_bytes
        self._parts, self._num_bytes = [], 0
        return head if num_bytes <= MAX_VALUE_BYTES else CutValue(head, num_bytes)


def cut_if_long(value: bytes) -> bytes | CutValue:
    """Return a value that is there as a whole, or its beginning if it is longer than allowed."""
    gathered = ValueBytes()
    gathered.add(value)
    return gathered.take()
