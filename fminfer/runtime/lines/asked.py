"""A line that can be answered, between reading and its record."""

from __future__ import annotations

import time
from base64 import b64decode
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fminfer.contract.envelope import Envelope, Line
from fminfer.contract.record import Record, make_id
from fminfer.contract.request import SamplingParams
from fminfer.engine.engine_core import Failed, Finished
from fminfer.engine.sequence import Prepared
from fminfer.engine.vector_answer import head_of_answer

Answer = Finished | Failed


@dataclass(slots=True, eq=False)
class LineRequest:
    """One line with its request."""

    line: Line
    envelope: Envelope
    prepared: Prepared
    key: bytes | None  # that requests of one answer have in common; None: chance has a part in it
    read_s: float = field(default_factory=time.perf_counter)
    added_s: float = 0.0  # when the engine had it
    answer: Answer | None = None
    followers: list[LineRequest] = field(default_factory=list)  # equal ones, which take its answer

    @property
    def ids(self) -> list[int]:
        """Return the first prompt's, by which lines are put in order."""
        return self.prepared.prompts[0].ids

    @property
    def params(self) -> SamplingParams:
        return self.prepared.params

    @property
    def num_prompts(self) -> int:
        return len(self.prepared.prompts)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self.prepared.prompts)


def answer_of(asked: LineRequest, leader: LineRequest) -> Answer:
    """Return what a line gets whose answer another had computed."""
    assert leader.answer is not None
    if isinstance(leader.answer, Failed):
        return leader.answer
    return copy_answer(leader.answer, queue_s=time.perf_counter() - asked.read_s)


def copy_answer(answer: Finished, queue_s: float) -> Finished:
    """Return an answer for another request that must have it: no time, and no token fed.

    Args:
        queue_s: that the request has waited for it.
    """
    cached = {"cached_tokens": answer.usage["prompt_tokens"]}
    details = answer.usage["prompt_tokens_details"] | cached
    usage = answer.usage | {"prompt_tokens_details": details}
    times = {"batch_time": 0.0, "batch_size": 1.0, "queue_time": queue_s}
    times |= {"prefill_time": 0.0, "decode_time": 0.0}
    return replace(answer, usage=usage, times=times)


def _take_vector(answer: Finished) -> tuple[Finished, bytes]:
    """Return an answer without its only vector, and that one."""
    (entry,) = answer.choices
    vector = entry["embedding"]
    raw = b64decode(vector) if isinstance(vector, str) else np.asarray(vector, "<f4").tobytes()
    return replace(answer, choices=[entry | {"embedding": None}]), raw


@dataclass(slots=True, frozen=True)
class RecordForm:
    """What the records of a run have in common.

    `created` is the Unix time at which the run began, seconds.
    """

    model_name: str
    created: int
    keeps_vectors_apart: bool = False  # they go to a file of their own

    def build(self, asked: LineRequest, answer: Answer) -> Record:
        """Return a line's record."""
        line, envelope = asked.line, asked.envelope
        if isinstance(answer, Failed):
            return Record(line, envelope, error=answer.error, repeat=asked.prepared.repeat)
        usage, vector = answer.usage, b""
        if self.keeps_vectors_apart:
            answer, vector = _take_vector(answer)
        if envelope.shape == "batch":
            result = self._head(asked) | answer.result
        else:
            times = dict(answer.times)
            times["queue_time"] += max(0.0, asked.added_s - asked.read_s)
            result = {answer.part: answer.choices, "request_time": times, "usage": usage}
        return Record(
            line,
            envelope,
            result=result,
            num_prompt_tokens=usage["prompt_tokens"],
            num_cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            num_completion_tokens=usage.get("completion_tokens", 0),
            repeat=asked.prepared.repeat,
            vector=vector,
        )

    def _head(self, asked: LineRequest) -> dict[str, Any]:
        """Return what an OpenAI object has before its answers."""
        model = asked.envelope.fields.get("model")
        return head_of_answer(
            asked.prepared.kind,
            make_id(asked.line, asked.envelope),
            self.created,
            model if isinstance(model, str) and model else self.model_name,
        )
