"""The interface of an engine, of one pipeline or several: its events and methods."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from fminfer.core.errors import RequestError
from fminfer.engine.observation import ObservedMass
from fminfer.engine.sequence import AnswerKind, FinishReason, PreparedRequest
from fminfer.engine.stats import EngineStats, ObservableEngine

# What a choice has beside its text where probabilities of labels were asked for, or
# a budget ended its thought.
FURTHER_FIELDS = ("label_probabilities", "label_mass", "reasoning_truncated")


@dataclass(slots=True, frozen=True)
class Delta:
    """The new part of one choice. The joined deltas of a choice are the choice of the answer.

    Text that may become a stop string, a tag, a tool call or half a character comes later.
    """

    request_id: int
    index: int  # of the choice
    text: str  # in chat the content of the message
    token_ids: list[int]  # all that were drawn, also an EOS that the text does not show
    # of these tokens, as in a choice; None: not asked for
    logprobs: dict[str, Any] | None = None
    finish_reason: FinishReason | None = None  # of the last delta of a choice
    stop_reason: str | int | None = None  # the stop string or the stop token's id
    # In chat: whole calls, as a message has them, each with its `index` among them.
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    further_fields: dict[str, Any] = field(default_factory=dict)  # FURTHER_FIELDS
    reasoning: str = ""  # in chat, the thought before the text
    has_content: bool = (
        True  # False: the choice ended in its thought, or is to be calls
    )


@dataclass(slots=True, frozen=True)
class Finished:
    """A request's answer."""

    request_id: int
    choices: list[dict[str, Any]]  # or what stands in their place, see `part`
    usage: dict[str, Any]
    times: dict[str, float]  # `request_time` of a record, seconds
    kind: AnswerKind = "openai"
    observed_mass: ObservedMass | None = None  # of a request with an observation

    @property
    def result(self) -> dict[str, Any]:
        """Return what an answer of the API has in it."""
        return {self.part: self.choices, "usage": self.usage}

    @property
    def part(self) -> str:
        """The name under which its answers stand."""
        if self.kind in ("plain", "openai", "chat"):
            return "choices"
        return "results" if self.kind == "rerank" else "data"


@dataclass(slots=True, frozen=True)
class Failed:
    """The error of a request without an answer."""

    request_id: int
    error: RequestError


Event = Delta | Finished | Failed


BEHIND_ALL = -(2**62)  # the priority of requests that wait behind all others


class RequestCore(Protocol):
    """Accepts prepared requests, and returns events."""

    def add(self, prepared: PreparedRequest, *, is_counted: bool = False) -> int:
        """Queue a request, which may be a line that was counted; return its id in events."""

    def cancel(self, request_id: int) -> None:
        """Forget a request, in any state."""

    def step(self) -> list[Event]:
        """Return the next events."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""

    @property
    def num_waiting(self) -> int:
        """Prompts that have not begun."""


class EngineCore(RequestCore, ObservableEngine, Protocol):
    """A whole engine. `add`, `cancel`, `wait` and `wake` are for any thread, others for one."""

    lines: EngineStats  # counts of lines that were read, a part of `stats`

    def add(
        self,
        prepared: PreparedRequest,
        *,
        is_counted: bool = False,
        priority: int = 0,
        is_streamed: bool = False,
        request_id: int | None = None,
    ) -> int:
        """Queue a request; return the id by which events name it.

        Args:
            priority: higher ones are admitted first, and may preempt rows of lower ones.
            is_streamed: return its tokens as they come.
            request_id: its id, if the caller numbers its requests; None: the next one.

        Raises:
            RequestError: it can never run here. A team returns that as an event.
        """

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for work, at most until `wake` or the timeout; return whether there is any."""

    def wake(self) -> None:
        """End a `wait`, or the next one if none goes on."""

    def start_run(self) -> None:
        """Count the steps of a run anew; no longer drain."""

    def drain(self, until_s: float) -> None:
        """Let no more requests begin; those whose rows run go on.

        A team returns a step's events by the time `until_s` of `time.perf_counter`.
        """

    def expect_no_more_requests(self) -> None:
        """Note that no more requests come: prefixes that none of them shares can be evicted."""

    def check_books(self) -> None:
        """Prove the books once nothing is left to do."""

    @property
    def num_waiting_behind(self) -> int:
        """As in the state."""

    @property
    def is_computing(self) -> bool:
        """Whether computing goes on while the caller does other things."""

    @property
    def has_begun(self) -> bool:
        """As in the state."""
