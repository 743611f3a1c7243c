"""What stages and grammars report, without arrays: a command starts without importing numpy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

INVERTED = bytes(range(255, -1, -1))
MAX_FEW = 256  # allowed tokens, whose ids are listed


@dataclass(slots=True, frozen=True)
class Mask:
    """The tokens that may be drawn next."""

    # Bit i % 8 of byte i // 8 is of token i; the last bit is of all ids behind, too. Words of 64.
    bits: bytes
    few: tuple[int, ...] | None  # the ids in order where they are at most MAX_FEW, else None


def make_mask(bits: bytes) -> Mask:
    """Return the mask of these bits, which fill words of 64."""
    assert bits and len(bits) % 8 == 0, "a mask is whole words of 64 bits"
    if bits[-1] > 127 or int.from_bytes(bits, "little").bit_count() > MAX_FEW:
        return Mask(bits, None)
    import numpy as np  # not needed to start

    is_allowed = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").view(np.bool_)
    return Mask(bits, tuple(np.flatnonzero(is_allowed).tolist()))


def pack_ids(ids: Iterable[int], num_bytes: int) -> bytes:
    """Return the bits of these tokens, as a mask has them."""
    bits = bytearray(num_bytes)
    for token_id in ids:
        bits[token_id >> 3] |= 1 << (token_id & 7)
    return bytes(bits)


def invert(bits: bytes) -> bytes:
    """Return the bits of all other tokens."""
    return bits.translate(INVERTED)


@dataclass(slots=True, frozen=True)
class StageSpan:
    """When one stage worked on a step, and what it then sent on."""

    start_s: float  # time.time() of its machine
    end_s: float
    sent_bytes: int = 0
    max_tokens: int = 0  # that the stage computes at once since memory ran out; 0: it has not
    earlier_s: float = 0.0  # what earlier steps took beyond their own spans, on a GPU
    # Of streamed layers (--offload): bytes read since the last step, and how long reads went on.
    read_bytes: int = 0
    read_s: float = 0.0
    # Of each streamed layer: when it was asked for, when it was there, when it was computed.
    brought: list[list[float]] = field(default_factory=list)

    @property
    def waited_s(self) -> float:
        """How long the stage waited for layers."""
        return sum(came_s - asked_s for asked_s, came_s, _ in self.brought)
