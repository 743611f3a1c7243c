"""The logprobs that score a choice, whatever form they have."""

from __future__ import annotations

from typing import Any


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
