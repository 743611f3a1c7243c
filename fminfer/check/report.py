"""What a check found: for people, and as JSON. It knows counts, bytes and seconds only."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fminfer.check.footprint import Footprint
from fminfer.check.lines import LineCounts
from fminfer.output.progress import show_seconds

MAX_SHOWN = 1000  # characters of the first prompt


@dataclass(slots=True, frozen=True)
class FirstPrompt:
    """The first prompt that can be answered, as the model will see it."""

    file: str
    line: int
    text: str  # special tokens written out
    num_ids: int


@dataclass(slots=True, frozen=True)
class Work:
    """What a run will do at most: every row draws all of its max_tokens."""

    num_steps: int
    max_rows_running: int
    num_kv_tokens: int  # of the KV cache that are used
    seconds: float | None  # loading left out; None: not predicted
    why_not: str  # predicted
    sample_lines: int  # the beginning of the input that this was found with; 0: all of it


@dataclass(slots=True, frozen=True)
class CheckReport:
    """What a check found."""

    model: str
    dtype: str
    device: str
    context_length: int
    inputs: list[str]
    counts: LineCounts
    warnings: dict[str, int]
    first: FirstPrompt | None
    footprints: list[Footprint]
    kv_tokens: int  # the size of the KV cache
    work: Work

    def used_kv_tokens(self) -> int:
        """Return the tokens of KV cache that take memory: a GPU's is taken whole."""
        return self.work.num_kv_tokens if self.device == "cpu" else self.kv_tokens

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the errors of single lines."""
        counts = asdict(self.counts)
        counts["reserved_tokens"] = self.counts.reserved_tokens
        memory = [
            asdict(each) | {"total": each.total(self.used_kv_tokens())} for each in self.footprints
        ]
        found = {
            name: getattr(self, name)
            for name in ("model", "dtype", "device", "context_length", "inputs", "warnings")
        }
        return found | {
            "counts": counts,
            "first_prompt": None if self.first is None else asdict(self.first),
            "memory": {"processes": memory, "kv_tokens": self.kv_tokens},
            "work": asdict(self.work),
        }

    def to_text(self) -> str:
        """Return the report for people."""
        counts = self.counts
        codes = ", ".join(f"{count} {code}" for code, count in counts.errors_by_code.items())
        wrong = f", {counts.num_wrong:,} wrong ({codes})" if codes else ""
        equal = f"; {counts.num_equal:,} have the answer of an equal one" * bool(counts.num_equal)
        lines = [
            f"model     {self.model} ({self.dtype} on {self.device})",
            f"lines     {counts.num_right:,} right{wrong}{equal}",
            f"tokens    {counts.prompt_tokens:,} prompt + at most {counts.max_drawn_tokens:,} "
            f"generated = {counts.reserved_tokens:,} reserved; longest row "
            f"{counts.longest_row:,} of {self.context_length:,}",
            *self._prefix_lines(),
            *self._work_lines(),
            *self._first_lines(),
        ]
        return "\n".join([*lines, *(f"warning   {t} ({n} rows)" for t, n in self.warnings.items())])

    def _prefix_lines(self) -> list[str]:
        counts = self.counts
        if not counts.num_shared_tokens:
            return []
        part = "" if counts.num_counted_tokens == counts.tokens_to_feed else " of the first"
        return [
            f"prefix    {counts.num_shared_tokens:,}{part} of {counts.num_counted_tokens:,} prompt "
            f"tokens ({counts.shared_share:.0%}) are shared, and computed once"
        ]

    def _work_lines(self) -> list[str]:
        work = self.work
        if not self.counts.num_right:
            return []
        sample = f", estimated from the first {work.sample_lines:,} lines" * bool(work.sample_lines)
        lines = [
            f"steps     {work.num_steps:,} micro-batches at most, up to {work.max_rows_running:,} "
            f"rows at once{sample}",
            *map(self._memory_line, self.footprints),
        ]
        if work.seconds is None:
            return [*lines, f"time      not predicted: {work.why_not}"]
        took = show_seconds(work.seconds) if work.seconds >= 60 else f"{work.seconds:.1f} s"
        return [*lines, f"time      at most {took}{sample}; loading is not counted"]

    def _memory_line(self, each: Footprint) -> str:
        used = self.used_kv_tokens()
        rank = "memory    " if len(self.footprints) == 1 else f"rank {each.rank:<5}"
        return (
            f"{rank}{show_bytes(each.total(used))}: libraries {show_bytes(each.libraries)}, "
            f"weights {show_bytes(each.weights)}, work {show_bytes(each.work)}, KV cache "
            f"{show_bytes(used * each.kv_token)} ({used:,} tokens of {self.kv_tokens:,} allowed)"
        )

    def _first_lines(self) -> list[str]:
        if self.first is None:
            return []
        text = self.first.text
        if len(text) > MAX_SHOWN:
            half = MAX_SHOWN // 2
            text = f"{text[:half]}\n[… {len(text) - 2 * half:,} characters …]\n{text[-half:]}"
        head = f"first     {self.first.file}:{self.first.line}, {self.first.num_ids:,} tokens:"
        return [head, *(f"    {line}" for line in text.split("\n"))]


def show_bytes(count: int) -> str:
    """Write 1610612736 as 1.50 GiB."""
    return f"{count / 2**30:.2f} GiB" if count >= 1 << 30 else f"{count / 2**20:.0f} MiB"
