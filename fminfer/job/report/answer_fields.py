"""Reads an output's record, of any of the three shapes, into the fields that a report needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fminfer.contract.record import load_record

Shape = Literal["bare", "wrapped", "batch"]
# What a record raises that has the names of a record, and other values.
ODD_RECORD = (TypeError, ValueError, LookupError, AttributeError, OverflowError)
RESERVED = frozenset({"request", "result", "line", "custom_id", "error", "retryable"})


@dataclass(slots=True)
class AnswerFields:
    """One record. What its shape does not hold is None or empty."""

    shape: Shape
    request: Any  # as it stands there; None: the shape has none
    choices: list[dict[str, Any]]
    usage: dict[str, Any]
    times: dict[str, float]
    error: dict[str, Any] | None
    fields: dict[str, Any]  # the whole record

    @property
    def is_chat(self) -> bool:
        return bool(self.choices) and "message" in self.choices[0]

    @property
    def custom_id(self) -> Any:
        return self.fields.get("custom_id")

    @property
    def others(self) -> dict[str, Any]:
        """The further keys of a wrapped line."""
        if self.shape == "batch":
            return {}
        return {name: value for name, value in self.fields.items() if name not in RESERVED}


def read_answer(raw: bytes) -> AnswerFields | None:
    """Read a record of an output or of an errors file; None: it is none."""
    try:
        fields = load_record(raw)
    except (ValueError, RecursionError):
        return None
    found = _from_batch(fields) if "response" in fields else _from_result(fields)
    if found is None or (found.error is None and not _are_choices(found.choices)):
        return None
    return found


def _from_result(fields: dict[str, Any]) -> AnswerFields | None:
    if "request" not in fields:
        return None
    result, request = fields.get("result"), fields["request"]
    shape: Shape = "bare" if len(fields) == 2 else "wrapped"
    if isinstance(result, dict):
        times = result.get("request_time")
        times = {k: v for k, v in _dict(times).items() if type(v) in (float, int)}
        choices, usage = _choices(result), result.get("usage")
        return AnswerFields(shape, request, choices, _dict(usage), times, None, fields)
    error = fields.get("error")
    if not isinstance(error, dict):
        return None
    shape = "wrapped" if fields.keys() - RESERVED else "bare"
    return AnswerFields(shape, request, [], {}, {}, error, fields)


def _from_batch(fields: dict[str, Any]) -> AnswerFields | None:
    response = fields["response"]
    body = response.get("body") if isinstance(response, dict) else None
    if not isinstance(body, dict):
        return None
    if isinstance(error := body.get("error"), dict):
        return AnswerFields("batch", None, [], {}, {}, error, fields)
    choices, usage = _choices(body), body.get("usage")
    return AnswerFields("batch", None, choices, _dict(usage), {}, None, fields)


def _choices(result: dict[str, Any]) -> Any:
    """Return the choices of an answer; one that is made of vectors has none."""
    is_of_vectors = isinstance(result.get("data", result.get("results")), list)
    return result.get("choices", [] if is_of_vectors else None)


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _are_choices(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(choice, dict) for choice in value)


def choice_logprobs(choice: dict[str, Any], prompt: Any, *, is_echo: bool) -> list[float]:
    """Return the logprobs of drawn tokens, or of an echoed prompt that drew none.

    Args:
        prompt: of the choice; under echo its tokens stand before the drawn ones.
    """
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        return []
    if isinstance(entries := logprobs.get("content"), list):
        return [entry["logprob"] for entry in entries]
    values = logprobs.get("token_logprobs")
    if not isinstance(values, list):
        return []
    if is_echo:
        values = values[num_echoed(logprobs, prompt) :] or values
    return [value for value in values if value is not None]


def num_echoed(logprobs: dict[str, Any], prompt: Any) -> int:
    """Return how many tokens of an echoed prompt stand before the drawn ones."""
    if isinstance(prompt, list):
        return len(prompt)
    offsets = logprobs.get("text_offset") or []
    if not isinstance(prompt, str):
        return 0
    if not prompt:  # one token stands for an empty prompt
        return 1
    return sum(1 for offset in offsets if offset < len(prompt))


def prompt_of(request: Any, index: int) -> Any:
    """Return the prompt that the choice of this index goes on with; None: it is not known."""
    if not isinstance(request, dict):
        return None
    prompt = request.get("prompt")
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int):
        return prompt
    n = request.get("n") or 1
    place = index // int(n) if isinstance(n, int | float) else 0
    return prompt[place] if place < len(prompt) else None
