"""Turns a finished request into its answer: choices, logprobs, usage, times (contract, 6 and 8)."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from fminfer.core.config import TokenFormat
from fminfer.core.timing import RowTimes
from fminfer.engine.chat_answer import LOWEST_LOGPROB, build_chat_choice
from fminfer.engine.events import Event, Failed, Finished
from fminfer.engine.sequence import (
    AnswerKind,
    PromptState,
    RequestState,
    Sequence,
    TokenReport,
)
from fminfer.engine.vector_answer import make_of_vectors
from fminfer.text.spelling import Spelling
from fminfer.text.tokenizer import Tokenizer


@dataclass(slots=True)
class AnswerForm:
    """What the answers of an engine have in common."""

    tokenizer: Tokenizer
    token_format: TokenFormat
    _spellings: dict[bool, Spelling] = field(default_factory=dict)

    def spelling(self, kind: AnswerKind) -> Spelling:
        """Return how tokens are spelled in answers of a kind."""
        is_text = self.token_format == "text" or (self.token_format == "auto" and kind != "plain")
        if is_text not in self._spellings:
            self._spellings[is_text] = Spelling(self.tokenizer, is_text=is_text)
        return self._spellings[is_text]


def build_answer(state: RequestState, form: AnswerForm) -> Event:
    """Build the answer of a request whose prompts are all finished."""
    if state.error is not None:
        return Failed(state.id, state.error)
    kind, wish = state.prepared.kind, state.prepared.vectors
    num_prompt = sum(prompt.num_prompt_tokens for prompt in state.prompts)
    usage: dict[str, Any] = {"prompt_tokens": num_prompt}
    choices: list[dict[str, Any]] = []
    if wish is not None:
        choices = make_of_vectors(state, wish)
    else:
        spelling = form.spelling(kind)
        for prompt in state.prompts:
            for sequence in chosen(prompt):
                choices.append(_choice(sequence, len(choices), spelling, kind))
        usage["completion_tokens"] = sum(_num_drawn(prompt) for prompt in state.prompts)
    usage["total_tokens"] = sum(usage.values())
    usage["prompt_tokens_details"] = _prompt_details(state)
    return Finished(state.id, choices, usage, _request_time(state), kind)


def _prompt_details(state: RequestState) -> dict[str, int]:
    details = {"cached_tokens": sum(prompt.num_cached for prompt in state.prompts)}
    num_cut = sum((prompt.source or prompt.encoded).num_cut for prompt in state.prompts)
    return details | ({"truncated_tokens": num_cut} if num_cut else {})


def chosen(prompt: PromptState) -> list[Sequence]:
    """Return the n sequences to answer with: the best of best_of, or copies of a greedy one."""
    n, best_of = prompt.params.n, prompt.params.best_of
    if len(prompt.sequences) == 1:
        return prompt.sequences * n
    if best_of == n:
        return prompt.sequences
    return sorted(prompt.sequences, key=lambda s: s.mean_logprob, reverse=True)[:n]


def _num_drawn(prompt: PromptState) -> int:
    """Count completion tokens; a greedy candidate counts as often as it was asked for."""
    copies = prompt.params.best_of if len(prompt.sequences) == 1 else 1
    return copies * sum(len(sequence.tokens) for sequence in prompt.sequences)


def _choice(sequence: Sequence, index: int, spelling: Spelling, kind: AnswerKind) -> dict[str, Any]:
    params = sequence.prompt.params
    if kind == "chat":
        choice = build_chat_choice(sequence, index, spelling)
    else:
        choice = _text_choice(sequence, index, spelling, is_openai=kind == "openai")
    if sequence.stop_reason is not None:
        choice["stop_reason"] = sequence.stop_reason
    if params.return_token_ids or not spelling.has_words:
        choice["prompt_token_ids"] = sequence.prompt.ids
        choice["token_ids"] = [token.token_id for token in sequence.tokens]
    return choice


def _text_choice(
    sequence: Sequence, index: int, spelling: Spelling, *, is_openai: bool
) -> dict[str, Any]:
    params = sequence.prompt.params
    text = sequence.prompt.encoded.text + sequence.text if params.echo else sequence.text
    choice: dict[str, Any] = {"text": text, "index": index}
    if params.logprobs is not None:
        choice["logprobs"] = list_logprobs(
            sequence, spelling, 0, len(sequence.listed_tokens), with_prompt=params.echo
        )
    elif is_openai:  # its schema has the key always; HELM's client raises on a null
        choice["logprobs"] = None
    choice["finish_reason"] = sequence.finish_reason
    return choice


def list_logprobs(
    sequence: Sequence, spelling: Spelling, start: int, end: int, *, with_prompt: bool
) -> dict[str, Any]:
    """Return the logprobs of some drawn tokens, and before them those of the prompt.

    Args:
        start, end: the first of these tokens, and the one behind the last.
    """
    prompt, tokens = sequence.prompt, sequence.tokens[start:end]
    k = prompt.num_top
    ids = [token.token_id for token in tokens]
    first = spelling.find_first(
        chain(prompt.ids, (token.token_id for token in sequence.tokens)),
        skip_special_tokens=prompt.params.skip_special_tokens,
    )
    reports: list[TokenReport | None] = list(tokens)
    base = len(prompt.encoded.text)
    offsets = [base + token.offset for token in tokens]
    if with_prompt:
        num_start = prompt.owner.prepared.num_start  # of no request: not told, but before the rest
        ids = prompt.ids[num_start:] + ids
        reports = [None, *prompt.reports, *reports][num_start:]
        offsets = prompt.encoded.offsets[num_start:] + offsets
        first -= num_start
    else:
        first -= len(prompt.ids) + start
    top = [
        None if r is None else _alternatives(r, k, spelling, is_first=place == first)
        for place, r in enumerate(reports)
    ]
    return {
        "tokens": [
            spelling.spell(token_id, is_first=place == first) for place, token_id in enumerate(ids)
        ],
        "token_logprobs": [None if r is None else _floor(r.logprob) for r in reports],
        "top_logprobs": None if k == 0 else top,
        "text_offset": offsets,
    }


def _alternatives(
    report: TokenReport, k: int, spelling: Spelling, *, is_first: bool
) -> dict[str, float]:
    """Return the k best, best first, then the chosen one; of equal spellings the better stays."""
    pairs = [*report.top[:k], (report.token_id, report.logprob)]
    found: dict[str, float] = {}
    for token_id, logprob in pairs:
        found.setdefault(spelling.spell(token_id, is_first=is_first), _floor(logprob))
    return found


def _floor(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def _request_time(state: RequestState) -> dict[str, float]:
    """Return seconds; HELM takes runtime = batch_time, and batch_time / batch_size a row."""
    times = state.times or RowTimes(state.added_s, 0.0, finished_s=state.added_s)
    first_token_s = times.first_token_s if times.first_token_s is not None else times.finished_s
    return {
        "batch_time": times.batch_time_s,
        "batch_size": times.batch_size,
        "queue_time": times.admitted_s - state.added_s,
        "prefill_time": first_token_s - times.admitted_s,
        "decode_time": times.finished_s - first_token_s,
    }
