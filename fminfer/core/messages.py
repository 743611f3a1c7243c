"""What stages, ranks and grammars report, without arrays: a command starts without numpy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fminfer.core.quantities import describe_bytes, describe_share, with_noun

INVERTED = bytes(range(255, -1, -1))
MAX_FEW = 256  # allowed tokens, whose ids are listed
MAX_LISTED_RANKS = 4  # ranks that a line lists one by one


@dataclass(slots=True, frozen=True)
class Mask:
    """The tokens that may be drawn next."""

    # Bit i % 8 of byte i // 8 is of token i; the last bit is of all ids behind, too.
    # Words of 64.
    bits: bytes
    # the ids in order where they are at most MAX_FEW, else None
    few: tuple[int, ...] | None


def make_mask(bits: bytes) -> Mask:
    """Return the mask of these bits, which fill words of 64."""
    assert bits and len(bits) % 8 == 0, "a mask is whole words of 64 bits"
    if bits[-1] > 127 or int.from_bytes(bits, "little").bit_count() > MAX_FEW:
        return Mask(bits, None)
    import numpy as np  # not needed to start

    is_allowed = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").view(
        np.bool_
    )
    return Mask(bits, tuple(np.flatnonzero(is_allowed).tolist()))


def pack_token_ids(ids: Iterable[int], num_bytes: int) -> bytes:
    """Return the bits of these tokens, as a mask has them."""
    bits = bytearray(num_bytes)
    for token_id in ids:
        bits[token_id >> 3] |= 1 << (token_id & 7)
    return bytes(bits)


def invert_mask(bits: bytes) -> bytes:
    """Return the bits of all other tokens."""
    return bits.translate(INVERTED)


@dataclass(slots=True, frozen=True)
class StageSpan:
    """When one stage worked on a step, and what it then sent on."""

    start_s: float  # time.time() of its machine
    end_s: float
    sent_bytes: int = 0
    # that the stage computes at once since memory ran out; 0: it has not
    max_tokens: int = 0
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


@dataclass(slots=True, frozen=True)
class ConstraintMass:
    """How much of the model's probability constraints left in the rows that were measured."""

    num_rows: int
    median: float
    worst: dict[str, float]  # of the rows with the least, by their names

    def to_text(self) -> str:
        """Return the median and the worst rows, for people."""
        worst = ", ".join(
            f"{name} ({describe_share(mass)})" for name, mass in self.worst.items()
        )
        return (
            f"constraints left {describe_share(self.median)} of the model's probability "
            f"(median of {with_noun(self.num_rows, 'measured row')}); least: {worst}"
        )


@dataclass(slots=True, frozen=True)
class MemoryPeak:
    """The most memory that a process has had so far, in bytes."""

    host_bytes: int
    gpu_bytes: int = 0  # in torch's tensors
    # that torch has taken of the GPU, with what is free in it
    gpu_reserved_bytes: int = 0


@dataclass(slots=True, frozen=True)
class RankMemory:
    """One rank's peak, as it last reported it, and its forecast."""

    rank: int  # counted over all pipelines
    is_on_gpu: bool
    # the forecast of `fminfer check`: of the GPU, or else of the host
    foreseen_bytes: int
    peak: MemoryPeak

    @property
    def peak_bytes(self) -> int:
        """The peak that the forecast is compared with."""
        return self.peak.gpu_reserved_bytes if self.is_on_gpu else self.peak.host_bytes

    def to_text(self) -> str:
        """Return the peak beside the forecast, for people."""
        place = "GPU" if self.is_on_gpu else "CPU"
        sizes = (
            f"{describe_bytes(self.peak_bytes)} ({describe_bytes(self.foreseen_bytes)} "
            "foreseen)"
        )
        host = f", CPU {describe_bytes(self.peak.host_bytes)}" if self.is_on_gpu else ""
        return f"{place} {sizes}{host}"


def describe_memory(ranks: Sequence[RankMemory]) -> str:
    """Describe the peaks in a line: each rank's if there are few, or else the largest."""
    shown = (
        ranks
        if len(ranks) <= MAX_LISTED_RANKS
        else [max(ranks, key=lambda each: each.peak_bytes)]
    )
    parts = [
        f"rank {each.rank}: {each.to_text()}" if len(ranks) > 1 else each.to_text()
        for each in shown
    ]
    text = "; ".join(parts)

    if len(shown) < len(ranks):
        text += f"; the most of {with_noun(len(ranks), 'rank')}"
    return text


def make_memory_table(ranks: Sequence[RankMemory]) -> list[str]:
    """Return a table of all ranks' peaks for people."""
    rows = [["rank", "CPU peak", "GPU peak", "GPU reserved", "foreseen"]]
    for each in ranks:
        peak = each.peak
        gpu_sizes = (peak.gpu_bytes, peak.gpu_reserved_bytes)
        shown = [describe_bytes(size) if each.is_on_gpu else "-" for size in gpu_sizes]
        foreseen = describe_bytes(each.foreseen_bytes)
        rows.append([str(each.rank), describe_bytes(peak.host_bytes), *shown, foreseen])
    return [
        "".join(f"{cell:>13}" for cell in row).removeprefix(" " * 9) for row in rows
    ]
