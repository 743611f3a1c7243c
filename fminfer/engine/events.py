"""Events of an engine's requests: new tokens, answers and errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fminfer.core.errors import RequestError
from fminfer.engine.sequence import AnswerKind, FinishReason


@dataclass(slots=True, frozen=True)
class Delta:
    """The new part of one choice. The joined deltas of a choice are the choice of the answer.

    Text that may become a stop string, a tool call or half a character comes with a later delta.
    """

    request_id: int
    index: int  # of the choice
    text: str  # in chat the content of the message
    token_ids: list[int]  # all that were drawn, also an EOS that the text does not show
    logprobs: dict[str, Any] | None = None  # of these tokens, as in a choice; None: not asked for
    finish_reason: FinishReason | None = None  # of the last delta of a choice
    stop_reason: str | int | None = None  # the stop string or the stop token's id
    # In chat: whole calls, as a message has them, each with its `index` among them.
    tool_calls: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class Finished:
    """A request's answer."""

    request_id: int
    choices: list[dict[str, Any]]  # or what stands in their place, see `part`
    usage: dict[str, Any]
    times: dict[str, float]  # `request_time` of a record, seconds
    kind: AnswerKind = "openai"

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
