"""What the engine counts while it runs; the progress bar and the summary read it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from fminfer.core.messages import StageSpan


@dataclass(slots=True)
class StageStats:
    """What one stage did, all its steps together."""

    busy_s: float = 0.0
    first_s: float = 0.0  # start of its first step, time.time() of its machine
    last_s: float = 0.0  # end of its last step
    sent_bytes: int = 0
    max_tokens: int = 0  # most tokens at once since memory ran out; 0: it has not run out

    def add(self, span: StageSpan) -> None:
        """Count one step."""
        self.first_s = self.first_s or span.start_s
        self.last_s = span.end_s
        self.busy_s += span.end_s - span.start_s + span.earlier_s
        self.sent_bytes += span.sent_bytes
        self.max_tokens = span.max_tokens


MAX_BITS = 32  # of max_tokens


def _by_length() -> list[int]:
    return [0] * (MAX_BITS + 1)


@dataclass(slots=True)
class RunningRows:
    """The sequences that hold KV cache, in one order."""

    num_drawn: list[int] = field(default_factory=list)
    num_left: list[int] = field(default_factory=list)  # most tokens that each may still draw

    def add(self, other: RunningRows) -> None:
        """Add those of another engine."""
        self.num_drawn += other.num_drawn
        self.num_left += other.num_left


@dataclass(slots=True)
class RowEnds:
    """How long sequences are. Each list goes by the bits of a number: those of 4 to 7 are one."""

    num_read: list[int] = field(default_factory=_by_length)  # sequences, by max_tokens
    num_open: list[int] = field(default_factory=_by_length)  # the same, not ended
    max_draws_read: list[int] = field(default_factory=_by_length)  # their max_tokens together
    max_draws_open: list[int] = field(default_factory=_by_length)
    num_stopped: list[int] = field(default_factory=_by_length)  # ended before, by tokens drawn
    num_drawn: list[int] = field(default_factory=_by_length)  # draws of ended ones, by their place

    @property
    def read_rows(self) -> list[tuple[int, float]]:
        """How many sequences were read, and their max_tokens; the longest ones are first."""
        pairs = zip(reversed(self.num_read), reversed(self.max_draws_read), strict=True)
        return [(count, total / count) for count, total in pairs if count]

    def add(self, num_sequences: int, max_tokens: int) -> None:
        """Count sequences that were read."""
        place = max_tokens.bit_length()
        for counts in (self.num_read, self.num_open):
            counts[place] += num_sequences
        for draws in (self.max_draws_read, self.max_draws_open):
            draws[place] += num_sequences * max_tokens

    def end(self, num_drawn: int, max_tokens: int) -> None:
        """Count a sequence that ended."""
        place = max_tokens.bit_length()
        self.num_open[place] -= 1
        self.max_draws_open[place] -= max_tokens
        self.num_stopped[num_drawn.bit_length()] += num_drawn < max_tokens
        self.spread(num_drawn, self.num_drawn)

    def add_all(self, other: RowEnds) -> None:
        """Add what another engine has counted."""
        for each in fields(RowEnds):
            pairs = zip(getattr(self, each.name), getattr(other, each.name), strict=True)
            setattr(self, each.name, [mine + its for mine, its in pairs])

    @staticmethod
    def spread(num_drawn: int, by_place: list[int]) -> None:
        """Add the draws of a sequence to the counts of their places."""
        for place in range(1, num_drawn.bit_length() + 1):
            first = 1 << (place - 1)
            by_place[place] += min(first, num_drawn + 1 - first)


@dataclass(slots=True)
class ReadWork:
    """What requests ask for; wrong lines, and those that take an answer, ask for nothing."""

    num_rows: int = 0  # lines that were read, also wrong ones and those that take an answer
    num_seeded: int = 0  # lines with a seed of their own
    num_tokens: int = 0  # prompt tokens, computed or found in the prefix cache
    ends: RowEnds = field(default_factory=RowEnds)

    def add(self, num_tokens: int, num_sequences: int, max_tokens: int) -> None:
        """Count a prompt."""
        self.num_tokens += num_tokens
        self.ends.add(num_sequences, max_tokens)


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine started. Tokens are those the model computed or drew."""

    num_steps: int = 0
    num_prompt_tokens: int = 0  # fed to the model
    num_cached_tokens: int = 0  # prompt tokens not fed, because the prefix cache had them
    # Of the prompts for which the best possible cache (a trie over them) was counted:
    num_counted_tokens: int = 0
    num_counted_cached: int = 0  # those not fed
    num_counted_shareable: int = 0  # those that the best possible cache would not feed
    num_generated_tokens: int = 0
    num_keys: int = 0  # tokens of KV cache that the rows of all steps have read
    num_put_back: int = 0  # preempted rows, which were fed again
    num_apart: int = 0  # rows that gave nan, and were fed again without the prefix cache
    num_again_tokens: int = 0  # the part of num_prompt_tokens that was fed for both
    num_copied_requests: int = 0  # requests that took the answer of an equal one
    num_kept_requests: int = 0  # requests that took an answer of the result cache
    num_begun: int = 0  # requests that no longer wait: admitted, or ended without
    max_rows_running: int = 0
    max_rows: int = 0  # sequences that may run at once
    num_kv_tokens: int = 0  # the size of the KV cache
    stages: list[StageStats] = field(default_factory=list)  # one a stage
    read: ReadWork = field(default_factory=ReadWork)

    def add(self, other: EngineStats) -> None:
        """Add what another engine has counted."""
        for mine, its in ((self, other), (self.read, other.read)):
            for name in (each.name for each in fields(mine)):
                if name not in ("read", "ends"):
                    setattr(mine, name, getattr(mine, name) + getattr(its, name))
        self.read.ends.add_all(other.read.ends)

    def to_dict(self) -> dict[str, Any]:
        """Return the counts for a run's summary."""
        counts = asdict(self)
        del counts["read"]["ends"]
        return counts

    def add_spans(self, spans: list[StageSpan]) -> None:
        """Count what each stage did in one step."""
        while len(self.stages) < len(spans):
            self.stages.append(StageStats())
        for stage, span in zip(self.stages, spans, strict=True):
            stage.add(span)
