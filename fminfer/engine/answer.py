"""What is returned of a request: its choices as they come, and its answer (contract, 6 and 8).

A choice is all of its deltas, joined.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from fminfer.core.config import TokenFormat
from fminfer.core.errors import RequestError
from fminfer.core.timing import RowTimes
from fminfer.engine.engine_core import Delta, Event, Failed, Finished
from fminfer.engine.results import count_possible_stop_chars
from fminfer.engine.sequence import (
    AnswerKind,
    PreparedRequest,
    PromptState,
    RequestState,
    Sequence,
    TokenReport,
)
from fminfer.engine.thinking import ThoughtMatcher
from fminfer.engine.vector_answer import make_vector_entries
from fminfer.text.calls.call_reader import ToolCallReader
from fminfer.text.calls.tool_call import ToolCall
from fminfer.text.spelling import Spelling
from fminfer.text.tokenizer import Tokenizer

PIECE_TOKENS = 256  # tokens of an answer that are built at once
LOWEST_LOGPROB = -9999.0  # what -inf and everything below it becomes


@dataclass(slots=True)
class AnswerStyle:
    """What the answers of an engine have in common."""

    tokenizer: Tokenizer
    token_format: TokenFormat
    explain_nan: Callable[[], str] = lambda: "Try --dtype float32 or bfloat16"
    _spellings: dict[bool, Spelling] = field(default_factory=dict)

    def choose_spelling(self, kind: AnswerKind) -> Spelling:
        """Return how tokens are spelled in answers of a kind."""
        is_text = self.token_format == "text" or (
            self.token_format == "auto" and kind != "plain"
        )
        if is_text not in self._spellings:
            self._spellings[is_text] = Spelling(self.tokenizer, is_text=is_text)
        return self._spellings[is_text]


def build_answer(state: RequestState, style: AnswerStyle) -> Iterator[Event | None]:
    """Build the answer of a request whose prompts are all finished.

    Yields None after each piece: a long answer does not hold up a step. The answer is last.
    """
    prepared = state.prepared
    choices: list[dict[str, Any]] = []
    size = 0
    for delta in DeltaStream(state, style).make_deltas():
        choices.append(_make_choice(delta, state, style.choose_spelling(prepared.kind)))
        size += 1 + len(delta.token_ids) + len(delta.text) * prepared.params.echo
        if size > PIECE_TOKENS:
            size = 0
            yield None
    if state.error is not None:
        error = state.error
        if error.code == "nan_logits":
            message = f"{error.message}. {style.explain_nan()}"
            error = RequestError(error.code, message, error.param)
        yield Failed(state.id, error)
        return
    num_prompt = sum(prompt.num_prompt_tokens for prompt in state.prompts)
    usage: dict[str, Any] = {"prompt_tokens": num_prompt}
    if prepared.vectors is not None:
        choices = make_vector_entries(state, prepared.vectors)
    else:
        usage["completion_tokens"] = sum(
            _count_drawn(prompt) for prompt in state.prompts
        )
    usage["total_tokens"] = sum(usage.values())
    details = {"cached_tokens": sum(prompt.num_cached for prompt in state.prompts)}
    if num_cut := sum(
        (prompt.source or prompt.encoded).num_cut for prompt in state.prompts
    ):
        details["truncated_tokens"] = num_cut
    usage["prompt_tokens_details"] = details
    if prepared.params.thought is not None:
        num_thought = sum(map(_count_thought_tokens, state.prompts))
        usage["completion_tokens_details"] = {"reasoning_tokens": num_thought}
    # one that was never admitted took no time
    times = state.times or RowTimes(state.added_s, 0.0, finished_s=state.added_s)
    yield Finished(
        state.id,
        choices,
        usage,
        times.to_dict(state.added_s),
        prepared.kind,
        state.prompts[0].observed_mass,
    )


def _count_drawn(prompt: PromptState) -> int:
    """Count completion tokens."""
    num_tokens = sum(len(sequence.tokens) for sequence in prompt.sequences)
    return _count_copies(prompt) * num_tokens


def _count_thought_tokens(prompt: PromptState) -> int:
    """Count the completion tokens before answers, tags among them."""
    thoughts = (sequence.thought for sequence in prompt.sequences)
    num_tokens = sum(thought.num_tokens for thought in thoughts if thought is not None)
    return _count_copies(prompt) * num_tokens


def _count_copies(prompt: PromptState) -> int:
    """Count how often a sequence counts: a greedy one as often as it was asked for."""
    return prompt.params.best_of if len(prompt.sequences) == 1 else 1


def _make_choice(
    delta: Delta, state: RequestState, spelling: Spelling
) -> dict[str, Any]:
    """Return a choice of which this is the only delta."""
    kind = state.prepared.kind
    params = state.prepared.params
    choice: dict[str, Any] = {"text": delta.text, "index": delta.index}
    if kind == "chat":
        message: dict[str, Any] = {
            "role": "assistant",
            "content": delta.text if delta.has_content else None,
            "refusal": None,
        }
        if params.thought is not None and params.thought.is_told:
            message["reasoning_content"] = delta.reasoning or None
        if delta.tool_calls:
            names = ("id", "type", "function")  # without its place
            calls = [{name: call[name] for name in names} for call in delta.tool_calls]
            message |= {"content": delta.text or None, "tool_calls": calls}
        choice = {"index": delta.index, "message": message}
    # OpenAI's schema has the key always; HELM's client raises on a null.
    if delta.logprobs is not None or kind != "plain":
        choice["logprobs"] = delta.logprobs
    choice["finish_reason"] = delta.finish_reason
    if delta.stop_reason is not None:
        choice["stop_reason"] = delta.stop_reason
    choice |= delta.further_fields
    if params.return_token_ids or not spelling.has_words:
        choice["prompt_token_ids"] = state.prompts[delta.index // params.n].ids
        choice["token_ids"] = delta.token_ids
    return choice


@dataclass(slots=True)
class _StreamedPart:
    """What was returned of a sequence so far."""

    reader: ToolCallReader | None  # None: all of its text is content
    num_calls: int = 0  # of which the last one may go on
    # read; of these, some may be held back as the beginning of a call
    num_chars: int = 0
    num_listed: int = 0  # tokens in the logprobs arrays
    num_drawn: int = 0  # tokens in all
    num_thought_chars: int = (
        0  # those up to the end of what was returned of the thought
    )
    num_answer_chars: int = 0  # those up to the end of what was returned of the answer
    has_prompt: bool = False  # the echoed prompt
    is_over: bool = False

    def pop_reasoning(self, text: str, thought: ThoughtMatcher | None) -> str:
        """Return what is new of the thought; thoughts after each other are lines."""
        if thought is None or not thought.reader.thought.is_told:
            return ""
        reasoning = ""
        for number, (start, end) in enumerate(thought.reader.spans):
            if new := text[max(start, self.num_thought_chars) : end]:
                is_next = number > 0 and start > self.num_thought_chars
                reasoning += f"\n{new}" if is_next else new
                self.num_thought_chars = end
        return reasoning

    def pop_answer(self, sequence: Sequence, num_chars: int) -> str:
        """Return what is new of the answer's text, of which so many are certain."""
        self.num_chars = num_chars
        thought = sequence.thought
        if thought is not None:
            if thought.reader.phase != "answer":
                return ""
            start = thought.reader.answer_start
            self.num_answer_chars = max(start, self.num_answer_chars)
        text = sequence.text[self.num_answer_chars : num_chars]
        self.num_answer_chars += len(text)
        return text

    def split_calls(self, text: str, *, is_over: bool) -> tuple[str, list[ToolCall]]:
        """Add the next text, or the last; return the content and calls that are now certain."""
        if self.reader is None:
            return text, []
        return self.reader.finish(text) if is_over else self.reader.feed(text)


class DeltaStream:
    """Returns a request's tokens as they come."""

    def __init__(self, state: RequestState, style: AnswerStyle) -> None:
        self._state = state
        self._spelling = style.choose_spelling(state.prepared.kind)
        self._streamed: dict[Sequence, _StreamedPart] = {}
        self.touched = dict.fromkeys(state.prompts)  # prompts that may have new tokens

    def make_deltas(self) -> Iterator[Delta]:
        """Return what is new since the last call."""
        if self._state.error is not None:
            return
        prompts = self.touched
        self.touched = {}
        try:
            for prompt in prompts:
                first = prompt.index * prompt.params.n
                for place, sequence in enumerate(_choose_sequences(prompt)):
                    copies = prompt.params.n if len(prompt.sequences) == 1 else 1
                    yield from self._make_sequence_deltas(
                        sequence, range(first + place, first + place + copies)
                    )
        except RequestError as error:  # the tokenizer fails at it
            self._state.error = error

    def _make_sequence_deltas(
        self, sequence: Sequence, indices: range
    ) -> Iterator[Delta]:
        params = sequence.prompt.params
        prepared = self._state.prepared
        if (part := self._streamed.get(sequence)) is None:
            part = self._streamed[sequence] = _StreamedPart(_make_reader(prepared))
        is_over = sequence.finish_reason is not None
        if part.is_over or not (sequence.tokens or is_over):
            # before the first token the echoed prompt's scores are not all there
            return
        if is_over and sequence.thought is not None:
            sequence.thought.reader.finish()
        num_chars, num_listed = _count_certain(sequence, part.num_chars)
        reasoning = part.pop_reasoning(sequence.text, sequence.thought)
        text, calls = part.split_calls(
            part.pop_answer(sequence, num_chars), is_over=is_over
        )
        is_forced = prepared.call_mode != "auto"
        if is_forced:
            text = ""  # the beginning of a call that was cut
        adds_prompt = params.echo and not part.has_prompt
        if adds_prompt:
            text = sequence.prompt.encoded.text + text
        # In chat, calls are held back for many tokens, which are not worth an empty delta each.
        is_quiet = prepared.kind == "chat" and params.logprobs is None
        has_listed = num_listed > part.num_listed and not is_quiet
        if not (text or reasoning or calls or has_listed or is_over):
            return
        new_ids = [token.token_id for token in sequence.tokens[part.num_drawn :]]
        logprobs = _make_logprobs(
            sequence,
            self._spelling,
            part.num_listed,
            num_listed,
            with_prompt=adds_prompt,
        )
        first_place = part.num_calls
        part.num_calls += sum(not call.goes_on for call in calls)
        ends_by_calls = part.num_calls and _ends_by_calls(sequence)
        reason = "tool_calls" if ends_by_calls else sequence.finish_reason
        for index in indices:
            named = _make_call_entries(calls, sequence, index, first_place)
            yield Delta(
                self._state.id,
                index,
                text,
                new_ids,
                logprobs,
                reason,
                _find_stop_reason(sequence),
                named,
                _make_further_fields(sequence) if is_over else {},
                reasoning,
                not (is_over and (is_forced or sequence.is_thinking)),
            )
        part.num_listed = num_listed
        part.num_drawn = len(sequence.tokens)
        part.has_prompt = part.has_prompt or adds_prompt
        part.is_over = is_over


def _make_reader(prepared: PreparedRequest) -> ToolCallReader | None:
    """Return what reads the calls of one choice; None: they stay text."""
    if prepared.tool_parser is None:
        return None
    return ToolCallReader(
        prepared.tool_parser,
        prepared.tools,
        keeps_one=prepared.keeps_one_call,
        is_certain=prepared.params.constraint is not None,
    )


def _ends_by_calls(sequence: Sequence) -> bool:
    """Return whether an answer with calls ended because of them.

    As in OpenAI's API, the call of a function that the request names ends with "stop".
    """
    prepared = sequence.prompt.owner.prepared
    is_held = prepared.params.constraint is not None
    may_be_broken = is_held and _find_stop_reason(sequence) is not None
    is_over = sequence.finish_reason == "stop"
    return is_over and prepared.call_mode != "one" and not may_be_broken


def _find_stop_reason(sequence: Sequence) -> str | int | None:
    """Return which of the request's stops ended a choice, not what ends answers of its form."""
    thought = sequence.prompt.params.thought
    is_of_form = thought is not None and sequence.stop_reason == thought.form.answer_end
    return None if is_of_form else sequence.stop_reason


def _make_further_fields(sequence: Sequence) -> dict[str, Any]:
    """Return the `FURTHER_FIELDS` of a choice that has ended."""
    fields = {} if sequence.walk is None else sequence.walk.describe_answer()
    if sequence.thought is not None and sequence.thought.is_truncated:
        fields["reasoning_truncated"] = True
    return fields


def _choose_sequences(prompt: PromptState) -> list[Sequence]:
    """Return the sequences that are choices: all, or at the end the best n of best_of."""
    n = prompt.params.n
    if len(prompt.sequences) == 1 or prompt.params.best_of == n:
        return prompt.sequences
    if not prompt.is_finished:
        return []
    return sorted(prompt.sequences, key=lambda s: s.mean_logprob, reverse=True)[:n]


def _count_certain(sequence: Sequence, num_known: int) -> tuple[int, int]:
    """Return how many characters and listed tokens no later token can change.

    Args:
        num_known: characters that are known to be certain.
    """
    if sequence.finish_reason is not None:
        return len(sequence.text), len(sequence.listed_tokens)
    detokenizer = sequence.detokenizer
    params = sequence.prompt.params
    assert detokenizer is not None, "it has drawn a token"
    num_open = count_possible_stop_chars(sequence.text, params.stop, num_known)
    if sequence.thought is not None:
        num_open = max(num_open, sequence.thought.reader.num_undecided)
    num_chars = len(sequence.text) - num_open
    num_listed = len(sequence.tokens) - detokenizer.num_open_starts
    if params.stop or num_open:  # a stop's cut drops the tokens that start behind it
        while num_listed and sequence.tokens[num_listed - 1].offset >= num_chars:
            num_listed -= 1
    return num_chars, num_listed


def _make_logprobs(
    sequence: Sequence, spelling: Spelling, start: int, end: int, *, with_prompt: bool
) -> dict[str, Any] | None:
    """Return the logprobs of the drawn tokens from `start` to `end`, or also of the prompt's.

    None: the request does not want them.
    """
    prompt = sequence.prompt
    tokens = sequence.tokens[start:end]
    params = prompt.params
    k = prompt.num_top
    prepared = prompt.owner.prepared
    if params.logprobs is None:
        return None
    num_start = prepared.num_start  # of no request: not returned, but before the rest
    drawn = (token.token_id for token in sequence.tokens)
    first = spelling.find_first_text(
        chain(prompt.ids, drawn), skip_special_tokens=params.skip_special_tokens
    )
    first -= num_start if with_prompt else len(prompt.ids) + start
    if prepared.kind == "chat":
        content = [
            _make_chat_entry(token, k, spelling, is_first=place == first)
            for place, token in enumerate(tokens)
        ]
        return {"content": content, "refusal": None}
    ids = [token.token_id for token in tokens]
    reports: list[TokenReport | None] = list(tokens)
    base = len(prompt.encoded.text)
    offsets = [base + token.offset for token in tokens]
    if with_prompt:
        ids = prompt.ids[num_start:] + ids
        reports = [None, *prompt.reports, *reports][num_start:]
        offsets = prompt.encoded.offsets[num_start:] + offsets
    top = [
        None
        if r is None
        else _make_alternatives(r, k, spelling, is_first=place == first)
        for place, r in enumerate(reports)
    ]
    return {
        "tokens": [
            spelling.spell_token(token_id, is_first=place == first)
            for place, token_id in enumerate(ids)
        ],
        "token_logprobs": [
            None if r is None else _clamp_logprob(r.logprob) for r in reports
        ],
        "top_logprobs": None if k == 0 else top,
        "text_offset": offsets,
    }


def _make_chat_entry(
    report: TokenReport, num_top: int, spelling: Spelling, *, is_first: bool
) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": spelling.spell_token(token_id, is_first=is_first),
            "logprob": _clamp_logprob(logprob),
            "bytes": list(spelling.spell_bytes(token_id, is_first=is_first)),
        }

    top = [
        entry(token_id, logprob)
        for token_id, logprob in report.best_alternatives(num_top)
    ]
    return entry(report.token_id, report.logprob) | {"top_logprobs": top}


def _make_alternatives(
    report: TokenReport, k: int, spelling: Spelling, *, is_first: bool
) -> dict[str, float]:
    """Return the k best, best first, then the chosen one; of equal spellings the better
    stays."""
    pairs = [*report.best_alternatives(k), (report.token_id, report.logprob)]
    alternatives: dict[str, float] = {}
    for token_id, logprob in pairs:
        alternatives.setdefault(
            spelling.spell_token(token_id, is_first=is_first), _clamp_logprob(logprob)
        )
    return alternatives


def _clamp_logprob(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def _make_call_entries(
    calls: list[ToolCall], sequence: Sequence, index: int, num_before: int
) -> list[dict[str, Any]]:
    """Return calls and pieces of calls as a delta has them, behind so many begun calls."""
    entries = []
    place = num_before - 1
    for call in calls:
        entry: dict[str, Any] = {"function": {"arguments": call.arguments}}
        if not call.goes_on:
            place += 1
            entry = _make_call_entry(call, sequence, index, place)
        entries.append({"index": place} | entry)
    return entries


def _make_call_entry(
    call: ToolCall, sequence: Sequence, index: int, place: int
) -> dict[str, Any]:
    """Return a call as a message has it; its id is the same whenever the request is answered.

    `place` is its own among the calls of the choice of that index.
    """
    prepared = sequence.prompt.owner.prepared
    # Greedy requests are answered together whatever their seeds.
    seed = None if prepared.params.is_greedy else prepared.params.seed
    call_key = (prepared.meaning, prepared.repeat, seed, index, place)
    digest = hashlib.blake2b(array("q", sequence.prompt.ids).tobytes(), digest_size=12)
    digest.update(repr(call_key).encode())
    return {
        "id": f"call_{digest.hexdigest()}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
