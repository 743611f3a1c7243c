"""The choices of a chat answer: messages, tool calls, and logprobs in chat's form."""

from __future__ import annotations

import hashlib
from array import array
from itertools import chain
from typing import Any

from fminfer.engine.sequence import FinishReason, Prepared, Sequence, TokenReport
from fminfer.text.spelling import Spelling
from fminfer.text.tool_calls import ToolCall, ToolCallReader, make_reader

LOWEST_LOGPROB = -9999.0  # what -inf and everything below it becomes


class MessageReader:
    """Tells a choice's content from its tool calls, as its text grows."""

    def __init__(self, prepared: Prepared) -> None:
        self._reader: ToolCallReader | None = None  # all is content
        if prepared.tool_parser is not None:
            self._reader = make_reader(prepared.tool_parser, keeps_one=prepared.keeps_one_call)
        self.num_calls = 0

    def read(self, text: str, *, is_over: bool) -> tuple[str, list[ToolCall]]:
        """Take the next text; return the content and the calls that are certain with it.

        Args:
            is_over: no more comes.
        """
        if self._reader is None:
            return text, []
        content, calls = self._reader.feed(text)
        if is_over:
            rest, more = self._reader.finish()
            content, calls = content + rest, [*calls, *more]
        self.num_calls += len(calls)
        return content, calls

    def finish_reason_of(self, sequence: Sequence) -> FinishReason | None:
        """Return why a choice ended, once all of it is read; None: it goes on."""
        reason = sequence.finish_reason
        return "tool_calls" if reason == "stop" and self.num_calls else reason


def build_chat_choice(sequence: Sequence, index: int, spelling: Spelling) -> dict[str, Any]:
    """Return a choice of a chat answer."""
    params = sequence.prompt.params
    reader = MessageReader(sequence.prompt.owner.prepared)
    content, calls = reader.read(sequence.text, is_over=True)
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if calls:
        named = [name_call(call, sequence, index, place) for place, call in enumerate(calls)]
        message |= {"content": content or None, "tool_calls": named}
    logprobs = None
    if params.logprobs is not None:
        logprobs = list_chat_logprobs(sequence, spelling, 0, len(sequence.listed_tokens))
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": reader.finish_reason_of(sequence),
    }


def list_chat_logprobs(
    sequence: Sequence, spelling: Spelling, start: int, end: int
) -> dict[str, Any]:
    """Return the logprobs of some drawn tokens.

    Args:
        start, end: the first of these tokens, and the one behind the last.
    """
    prompt = sequence.prompt
    first = spelling.find_first(
        chain(prompt.ids, (token.token_id for token in sequence.tokens)),
        skip_special_tokens=prompt.params.skip_special_tokens,
    )
    first -= len(prompt.ids)
    content = [
        _list_entry(report, prompt.num_top, spelling, is_first=place == first)
        for place, report in enumerate(sequence.tokens[start:end], start)
    ]
    return {"content": content, "refusal": None}


def _list_entry(
    report: TokenReport, num_top: int, spelling: Spelling, *, is_first: bool
) -> dict[str, Any]:
    """Return one token and its alternatives, best first."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": spelling.spell(token_id, is_first=is_first),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(spelling.spell_bytes(token_id, is_first=is_first)),
        }

    top = [entry(token_id, logprob) for token_id, logprob in report.top[:num_top]]
    return entry(report.token_id, report.logprob) | {"top_logprobs": top}


def name_call(call: ToolCall, sequence: Sequence, index: int, place: int) -> dict[str, Any]:
    """Return a call as a message has it; its id is the same whenever the request is answered.

    Args:
        index: of the choice.
        place: of the call among those of the choice.
    """
    prepared = sequence.prompt.owner.prepared
    # Greedy requests are answered together whatever their seeds.
    asked = (prepared.meaning, prepared.repeat, prepared.params.own_seed, index, place)
    digest = hashlib.blake2b(array("q", sequence.prompt.ids).tobytes(), digest_size=12)
    digest.update(repr(asked).encode())
    return {
        "id": f"call_{digest.hexdigest()}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
