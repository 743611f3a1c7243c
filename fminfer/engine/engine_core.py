"""The interface of what answers requests: one pipeline, or several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from fminfer.engine.events import Event
from fminfer.engine.sequence import Prepared
from fminfer.engine.stats import EngineStats


@dataclass(slots=True, frozen=True)
class Facts:
    """One pipeline, as its first rank sees it."""

    device: str  # such as cpu or cuda:0
    dtype: str  # type of weights and hidden states, such as float32
    kv_dtype: str  # type of the KV cache
    num_threads: int  # computing threads in each process
    is_alone: bool  # the pipeline has no other process
    max_rows: int  # most sequences that run at once
    num_kv_blocks: int  # the size of its KV cache
    weight_bytes: int  # this rank's weights
    kv_bytes_per_token: int  # this rank's part of a token
    has_kernel: bool  # attention is compiled
    why_plain: str  # why a kernel that should be used is not
    why_slower: str  # why it is slower than it could be


# Of a line's answer: the model; an equal line, which had it computed; or the result cache.
Origin = Literal["computed", "copied", "kept"]

BEHIND_ALL = -(2**62)  # the priority of requests that wait behind all others


class EngineCore(Protocol):
    """Takes prepared requests, and returns events.

    `add`, `cancel` and `wait` may be called from any thread, the rest from one.
    """

    @property
    def stats(self) -> EngineStats: ...

    def add(
        self,
        prepared: Prepared,
        *,
        priority: int = 0,
        is_streamed: bool = False,
        is_counted: bool = False,
    ) -> int:
        """Queue a request; return the id by which events name it."""

    def cancel(self, request_id: int) -> None:
        """Forget a request."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for work, at most until the timeout; return whether there is any."""

    def step(self) -> list[Event]:
        """Compute a step and return its events."""

    def start_run(self) -> None:
        """Count the steps of a run anew; no longer drain."""

    def drain(self, until_s: float) -> None:
        """Let no more requests begin; those whose rows run go on.

        Args:
            until_s: when the caller must have a step's events back, a time of `time.perf_counter`.
                A pipeline of this process gives them with each step in any case.
        """

    def expect_no_more(self) -> None:
        """Note that no more requests come: prefixes that none of them shares can be evicted."""

    def check_idle(self) -> None:
        """Prove the books once nothing is left to do."""

    def count_row(self, prepared: Prepared | None, origin: Origin = "computed") -> None:
        """Count a line that was read, for progress.

        Args:
            prepared: its request; None: it is wrong.
        """

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""

    @property
    def num_waiting(self) -> int:
        """Prompts that have not begun."""

    @property
    def num_waiting_behind(self) -> int:
        """Those of them whose priority is `BEHIND_ALL`. Any thread may ask."""

    @property
    def num_running(self) -> int:
        """Sequences that hold KV cache. Any thread may ask, as for `num_waiting`."""

    @property
    def kv_usage(self) -> float:
        """The part of the KV cache that sequences hold, from 0 to 1. Any thread may ask."""

    @property
    def is_computing(self) -> bool:
        """Whether computing goes on while the caller does other things."""

    @property
    def has_begun(self) -> bool:
        """Whether rows run, or have run and are to run again."""

    @property
    def longest_row(self) -> int:
        """The most tokens that a running row may still draw, as far as it is known."""
