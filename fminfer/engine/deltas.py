"""The new and certain part of a request's choices: no later token takes it back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fminfer.engine.answer import AnswerForm, MessageReader, chosen, list_logprobs, name_call
from fminfer.engine.engine_core import Delta
from fminfer.engine.results import len_of_possible_stop
from fminfer.engine.sequence import PromptState, RequestState, Sequence


@dataclass(slots=True)
class _Told:
    """How much of a sequence was returned."""

    reader: MessageReader
    num_chars: int = 0  # read; of these, some may be held back as the beginning of a call
    num_listed: int = 0  # tokens in the logprobs arrays
    num_drawn: int = 0  # tokens in all
    has_prompt: bool = False  # the echoed prompt
    is_over: bool = False


class Deltas:
    """Returns a request's tokens as they come."""

    def __init__(self, state: RequestState, form: AnswerForm) -> None:
        self._state = state
        self._is_chat = state.prepared.kind == "chat"
        self._spelling = form.spelling(state.prepared.kind)
        self._told: dict[int, _Told] = {}  # by the sequence's id()

    def take(self) -> Iterator[Delta]:
        """Return what is new since the last call."""
        if self._state.error is not None:
            return
        for prompt in self._state.prompts:
            first = prompt.index * prompt.params.n
            for place, sequence in enumerate(_tellable(prompt)):
                copies = prompt.params.n if len(prompt.sequences) == 1 else 1
                yield from self._news(sequence, range(first + place, first + place + copies))

    def _news(self, sequence: Sequence, indices: range) -> Iterator[Delta]:
        told = self._told_of(sequence)
        params = sequence.prompt.params
        is_over = sequence.finish_reason is not None
        if told.is_over or not (sequence.tokens or is_over):
            return  # before the first token the echoed prompt's scores are not all there
        num_chars, num_listed = _certain(sequence)
        new_text = sequence.text[told.num_chars : num_chars]
        text, calls = told.reader.read(new_text, is_over=is_over)
        told.num_chars = num_chars
        tells_prompt = params.echo and not told.has_prompt
        if tells_prompt:
            text = sequence.prompt.encoded.text + text
        # In chat, calls are held back for many tokens, which are not worth an empty delta each.
        has_listed = num_listed > told.num_listed
        if self._is_chat and params.logprobs is None:
            has_listed = False
        if not (text or calls or has_listed or is_over):
            return
        new_ids = [token.token_id for token in sequence.tokens[told.num_drawn :]]
        logprobs = list_logprobs(
            sequence, self._spelling, told.num_listed, num_listed, with_prompt=tells_prompt
        )
        first_call = told.reader.num_calls - len(calls)
        for index in indices:
            named = [
                {"index": place} | name_call(call, sequence, index, place)
                for place, call in enumerate(calls, first_call)
            ]
            reason = told.reader.finish_reason_of(sequence)
            stop_reason = sequence.stop_reason
            yield Delta(self._state.id, index, text, new_ids, logprobs, reason, stop_reason, named)
        told.num_listed, told.num_drawn = num_listed, len(sequence.tokens)
        told.has_prompt, told.is_over = told.has_prompt or tells_prompt, is_over

    def _told_of(self, sequence: Sequence) -> _Told:
        if id(sequence) not in self._told:
            self._told[id(sequence)] = _Told(MessageReader(self._state.prepared))
        return self._told[id(sequence)]


def _tellable(prompt: PromptState) -> list[Sequence]:
    """Return the sequences that are choices; with best_of above n they are known at the end."""
    if len(prompt.sequences) == 1 or prompt.params.best_of == prompt.params.n:
        return prompt.sequences
    return chosen(prompt) if prompt.is_finished else []


def _certain(sequence: Sequence) -> tuple[int, int]:
    """Return how many characters and listed tokens no later token takes back."""
    if sequence.finish_reason is not None:
        return len(sequence.text), len(sequence.listed_tokens)
    detokenizer, params = sequence.detokenizer, sequence.prompt.params
    num_tokens = len(sequence.tokens)
    if detokenizer is None or not num_tokens:
        return 0, 0
    num_chars = len(sequence.text) - len_of_possible_stop(sequence.text, params.stop)
    num_listed = num_tokens - detokenizer.num_open
    if params.stop:  # a stop's cut drops the tokens that start behind it
        while num_listed and sequence.tokens[num_listed - 1].offset >= num_chars:
            num_listed -= 1
    return num_chars, num_listed
