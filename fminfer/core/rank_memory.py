"""The most memory that each rank of a run has had, beside its forecast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fminfer.core.quantities import counted, show_bytes

MOST_TOLD = 4  # ranks that a line tells of one by one


@dataclass(slots=True, frozen=True)
class MemoryPeak:
    """The most memory that a process has had so far, in bytes."""

    host_bytes: int
    gpu_bytes: int = 0  # in torch's tensors
    gpu_reserved_bytes: int = 0  # that torch has taken of the GPU, with what is free in it


@dataclass(slots=True, frozen=True)
class RankMemory:
    """One rank's peak, as it last reported it, and its forecast."""

    rank: int  # counted over all pipelines
    is_on_gpu: bool
    foreseen_bytes: int  # the forecast of `fminfer check`: of the GPU, or else of the host
    peak: MemoryPeak

    @property
    def peak_bytes(self) -> int:
        """The peak that the forecast is compared with."""
        return self.peak.gpu_reserved_bytes if self.is_on_gpu else self.peak.host_bytes

    def to_text(self) -> str:
        """Tell the peak beside the forecast."""
        place = "GPU" if self.is_on_gpu else "CPU"
        text = f"{place} {show_bytes(self.peak_bytes)}"
        text += f" ({show_bytes(self.foreseen_bytes)} foreseen)"
        return text + f", CPU {show_bytes(self.peak.host_bytes)}" * self.is_on_gpu


def show_memory(ranks: Sequence[RankMemory]) -> str:
    """Tell the peaks in a line: of each rank if there are few, or else of the largest."""
    told = ranks if len(ranks) <= MOST_TOLD else [max(ranks, key=lambda each: each.peak_bytes)]
    parts = [f"rank {each.rank}: " * (len(ranks) > 1) + each.to_text() for each in told]
    others = f"; the most of {counted(len(ranks), 'rank')}" * (len(told) < len(ranks))
    return "; ".join(parts) + others


def memory_table(ranks: Sequence[RankMemory]) -> list[str]:
    """Return a table of all ranks' peaks for people."""
    rows = [["rank", "CPU peak", "GPU peak", "GPU reserved", "foreseen"]]
    for each in ranks:
        peak = each.peak
        on_gpu = peak.gpu_bytes, peak.gpu_reserved_bytes
        shown = [show_bytes(size) if each.is_on_gpu else "-" for size in on_gpu]
        first, last = show_bytes(peak.host_bytes), show_bytes(each.foreseen_bytes)
        rows.append([str(each.rank), first, *shown, last])
    return ["".join(f"{cell:>13}" for cell in row).removeprefix(" " * 9) for row in rows]
