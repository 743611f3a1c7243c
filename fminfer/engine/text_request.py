"""The request that a text by itself stands for."""

from __future__ import annotations

from typing import Any

from fminfer.contract.chat import overwrite
from fminfer.contract.request import DEFAULTS, RAW_TOKENS
from fminfer.engine.intake import Intake
from fminfer.engine.prompt_fit import MAX_COUNTED_CHARS


def request_of_text(
    text: str, fields: dict[str, Any], intake: Intake, *, as_chat: bool
) -> dict[str, Any]:
    """Return the request: a chat whose user writes the text, or a completion of it.

    Args:
        fields: of the request, by their names in completions.
    """
    if not {"temperature", "top_p", "top_k", "n", "best_of"} & {*fields}:
        fields["temperature"] = 0
    if as_chat:
        return overwrite({"messages": [{"role": "user", "content": text}]}, fields)
    most = fields.get("best_of") or fields.get("n") or 1
    return {"prompt": text, "max_tokens": _most_raw_tokens(intake, text, most)} | fields


def _most_raw_tokens(intake: Intake, text: str, num_sequences: int) -> int:
    """Return how many tokens a completion of a text may have, if it does not say."""
    limits, tokenizer = intake.limits, intake.tokenizer
    if not tokenizer.has_words or len(text) > MAX_COUNTED_CHARS:
        return DEFAULTS.max_tokens
    num_tokens = len(tokenizer.encode(text.encode(errors="replace").decode()).ids)
    room = limits.context_length - num_tokens
    if limits.kv_size is not None:
        room = min(room, limits.kv_size.most_draws(num_tokens, num_sequences))
    return min(RAW_TOKENS, room) if room > 0 else DEFAULTS.max_tokens
