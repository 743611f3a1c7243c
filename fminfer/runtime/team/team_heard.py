"""Streams that go on after a pipeline died: another one begins anew, and nothing is sent twice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fminfer.engine.events import Delta


@dataclass(slots=True)
class Heard:
    """How much of a choice was sent, and how much of it the new pipeline will repeat."""

    num_chars: int = 0
    num_ids: int = 0
    num_listed: int = 0  # tokens with logprobs
    num_calls: int = 0  # of tools
    chars_again: int = 0
    ids_again: int = 0
    listed_again: int = 0
    calls_again: int = 0
    is_over: bool = False  # its end was told

    def begin_anew(self) -> None:
        """Expect everything that was sent once more."""
        self.chars_again, self.ids_again = self.num_chars, self.num_ids
        self.listed_again, self.calls_again = self.num_listed, self.num_calls

    def take(self, delta: Delta) -> Delta | None:
        """Return the new part of a delta; None: nothing is new."""
        text = delta.text[self.chars_again :]
        ids = delta.token_ids[self.ids_again :]
        calls = delta.tool_calls[self.calls_again :]
        logprobs = delta.logprobs
        if logprobs is not None:
            skip = self.listed_again
            logprobs = {k: v if v is None else v[skip:] for k, v in logprobs.items()}
        self.chars_again = max(0, self.chars_again - len(delta.text))
        self.ids_again = max(0, self.ids_again - len(delta.token_ids))
        self.calls_again = max(0, self.calls_again - len(delta.tool_calls))
        self.listed_again = max(0, self.listed_again - _num_listed(delta.logprobs))
        self.num_chars += len(text)
        self.num_ids += len(ids)
        self.num_calls += len(calls)
        self.num_listed += _num_listed(logprobs)
        is_end = delta.finish_reason is not None and not self.is_over
        if not (text or ids or calls or _num_listed(logprobs) or is_end):
            return None
        self.is_over = is_end
        return replace(delta, text=text, token_ids=ids, logprobs=logprobs, tool_calls=calls)


def _num_listed(logprobs: dict[str, Any] | None) -> int:
    """Count tokens in completions' logprobs, or in chat's."""
    if logprobs is None:
        return 0
    return len(logprobs["content" if "content" in logprobs else "tokens"])
