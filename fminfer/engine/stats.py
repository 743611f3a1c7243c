"""What an engine counts, and how it stands: for progress, summaries and servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from fminfer.core.html_table import make_html_table
from fminfer.core.messages import StageSpan
from fminfer.engine.sequence import PreparedRequest, PromptState

MUCH_READ = 1 << 26  # bytes: the speed of fewer says little


@dataclass(slots=True)
class StageStats:
    """What one stage did, all its steps together."""

    busy_s: float = 0.0
    first_s: float = 0.0  # start of its first step, time.time() of its machine
    last_s: float = 0.0  # end of its last step
    sent_bytes: int = 0
    # most tokens at once since memory ran out; 0: it has not run out
    max_tokens: int = 0
    # Of streamed layers (--offload):
    num_passes: int = 0
    waited_s: float = 0.0  # the part of busy_s in which nothing computed
    read_bytes: int = 0
    read_s: float = 0.0  # while reads went on
    slowest_read: float = 0.0  # bytes a second of the slowest pass; 0: none was read

    def add(self, span: StageSpan) -> None:
        self.first_s = self.first_s or span.start_s
        self.last_s = span.end_s
        self.busy_s += span.end_s - span.start_s + span.earlier_s
        self.sent_bytes += span.sent_bytes
        self.max_tokens = span.max_tokens
        self.num_passes += bool(span.brought)
        self.waited_s += span.waited_s
        self.read_bytes += span.read_bytes
        self.read_s += span.read_s
        if span.read_bytes >= MUCH_READ and span.read_s:
            rate = span.read_bytes / span.read_s
            self.slowest_read = min(self.slowest_read or rate, rate)


@dataclass(slots=True)
class ReadWork:
    """What requests ask for; wrong lines, and those that take an answer, ask for nothing."""

    # lines that were read, also wrong ones and those that take an answer
    num_rows: int = 0
    num_seeded: int = 0  # lines with a seed of their own
    num_tokens: int = 0  # prompt tokens, computed or found in the prefix cache
    num_sequences: int = 0
    max_draws: int = 0  # their max_tokens together

    def add(self, num_tokens: int, num_sequences: int, max_tokens: int) -> None:
        self.num_tokens += num_tokens
        self.num_sequences += num_sequences
        self.max_draws += num_sequences * max_tokens


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine started. Tokens are those the model computed or drew."""

    num_steps: int = 0
    num_prompt_tokens: int = 0  # fed to the model
    # prompt tokens not fed, because the prefix cache had them
    num_cached_tokens: int = 0
    # Of the prompts for which the best possible cache (a trie over them) was counted:
    num_counted_tokens: int = 0
    num_counted_cached: int = 0  # those not fed
    num_counted_shareable: int = 0  # those that the best possible cache would not feed
    num_generated_tokens: int = 0
    num_ended: int = 0  # sequences
    num_stopped: int = 0  # those of them that ended before max_tokens
    num_undrawn: int = 0  # tokens by which they did
    # those that ended at max_tokens where their grammar allows no end
    num_cut_off: int = 0
    # of sequences that ended in their thought: by max_tokens, and by their own end
    num_open_thoughts: int = 0
    num_ended_thoughts: int = 0
    num_truncated_thoughts: int = 0  # that a budget ended
    num_put_back: int = 0  # preempted rows, which were fed again
    # rows that gave nan, and were fed again without the prefix cache
    num_apart: int = 0
    num_again_tokens: int = 0  # the part of num_prompt_tokens that was fed for both
    num_label_tokens: int = 0  # another part: labels', behind their prompts
    num_copied_requests: int = 0  # requests that took the answer of an equal one
    num_kept_requests: int = 0  # requests that took an answer of the result cache
    num_begun: int = 0  # requests that no longer wait: admitted, or ended without
    num_begun_behind: int = 0  # those of them with the priority `BEHIND_ALL`
    max_rows_running: int = 0
    num_kv_tokens: int = 0  # the size of the KV cache
    max_kv_tokens: int = 0  # of these, most that were in use at once
    stages: list[StageStats] = field(default_factory=list)  # one a stage
    read: ReadWork = field(default_factory=ReadWork)

    def add(self, other: EngineStats) -> None:
        """Add what another engine has counted."""
        for mine, its in ((self, other), (self.read, other.read)):
            for name in (each.name for each in fields(mine)):
                if name != "read":
                    setattr(mine, name, getattr(mine, name) + getattr(its, name))

    def _repr_html_(self) -> str:
        """Return a table for a notebook; counts of 0 are left out."""
        counts = ((each.name, getattr(self, each.name)) for each in fields(self))
        return make_html_table(
            (name.removeprefix("num_").replace("_", " "), f"{value:,}")
            for name, value in counts
            if isinstance(value, int) and value
        )

    def count_request(self, prepared: PreparedRequest) -> None:
        """Count what a request asks for."""
        params = prepared.params
        for place, prompt in enumerate(prepared.prompts):
            num_tokens = len(prompt.ids)
            num_to_feed = (
                num_tokens
                if prepared.is_pooled
                else params.count_fed_tokens(num_tokens)
            )
            if num_to_feed and prepared.sources:
                num_to_feed += len(prepared.sources[place].ids)
            if num_to_feed:
                self.read.add(num_to_feed, params.num_candidates, params.max_tokens)

    def count_admitted(self, prompt: PromptState) -> None:
        """Count a prompt that is to be fed, perhaps once more."""
        if prompt.is_inner_branch and not prompt.is_apart:
            self.num_label_tokens += prompt.num_unfed
        elif prompt.has_run:
            self.num_put_back += not prompt.is_apart
            self.num_apart += prompt.is_apart
            self.num_again_tokens += prompt.num_unfed
        else:
            self.num_cached_tokens += prompt.num_cached
            self.num_counted_cached += prompt.num_cached * prompt.is_counted

    def count_ended(self, num_undrawn: int) -> None:
        self.num_ended += 1
        self.num_stopped += num_undrawn > 0
        self.num_undrawn += num_undrawn

    def add_spans(self, spans: list[StageSpan]) -> None:
        """Count what each stage did in one step."""
        while len(self.stages) < len(spans):
            self.stages.append(StageStats())
        for stage, span in zip(self.stages, spans, strict=True):
            stage.add(span)


@dataclass(slots=True, frozen=True)
class EngineState:
    """How an engine stands. A team's state adds up what its pipelines reported last."""

    # prompts (of a team: requests) not begun, without those behind all others
    num_waiting: int = 0
    num_waiting_behind: int = 0  # those whose priority is `engine_core.BEHIND_ALL`
    num_running: int = 0  # sequences that hold KV cache
    kv_usage: float = 0.0  # the part of the KV cache that they hold, from 0 to 1
    has_begun: bool = False  # rows run, or have run and are to run again
    longest_row: int = 0  # the most tokens that a running row may still draw
    # requests so far that no longer wait: admitted, or ended without
    num_begun: int = 0
    num_begun_behind: int = 0  # those whose priority is `BEHIND_ALL`

    @classmethod
    def sum_states(cls, states: Sequence[EngineState], **known: Any) -> EngineState:
        """Return the state of several pipelines together; fields in `known` are as given."""
        every = {
            f.name: [getattr(state, f.name) for state in states] for f in fields(cls)
        }
        total = {name: sum(values) for name, values in every.items()}
        total["kv_usage"] /= max(1, len(states))
        total["has_begun"] = any(every["has_begun"])
        total["longest_row"] = max(every["longest_row"], default=0)
        return cls(**total | known)


class ObservableEngine(Protocol):
    """What any thread may ask of an engine, at any moment."""

    @property
    def stats(self) -> EngineStats:
        """What was counted so far."""

    @property
    def state(self) -> EngineState:
        """How it stands. Computing it visits every row, so hot loops ask for parts of it."""
