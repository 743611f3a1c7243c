"""Turns a finished request into its record: choices, logprobs, usage, times (contract, 6 and 8)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fminfer.config import TokenFormat
from fminfer.engine.sequence import PromptState, RequestState, Sequence, TokenReport
from fminfer.input.envelope import Shape
from fminfer.output.records import Record, make_id
from fminfer.spelling import Spelling
from fminfer.timing import RowTimes
from fminfer.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0  # what -inf and everything below it becomes


@dataclass(slots=True)
class AnswerForm:
    """What the answers of a run have in common.

    `created` is the Unix time at which the run began, seconds.
    """

    tokenizer: Tokenizer
    model_name: str
    token_format: TokenFormat
    created: int = 0
    _spellings: dict[bool, Spelling] = field(default_factory=dict)

    def spelling(self, shape: Shape) -> Spelling:
        """Return how tokens are spelled in answers to lines of this shape."""
        is_text = self.token_format == "text" or (self.token_format == "auto" and shape == "batch")
        if is_text not in self._spellings:
            self._spellings[is_text] = Spelling(self.tokenizer, is_text=is_text)
        return self._spellings[is_text]


def build_record(state: RequestState, form: AnswerForm, finished_s: float) -> Record:
    """Build the record of a request whose prompts are all finished."""
    if state.error is not None:
        return Record(state.line, state.envelope, error=state.error)
    is_batch = state.envelope.shape == "batch"
    spelling = form.spelling(state.envelope.shape)
    choices: list[dict[str, Any]] = []
    for prompt in state.prompts:
        for sequence in _chosen(prompt):
            choices.append(_choice(sequence, len(choices), spelling, is_batch))
    num_prompt = sum(len(prompt.ids) for prompt in state.prompts)
    num_completion = sum(_num_drawn(prompt) for prompt in state.prompts)
    details = _prompt_details(state)
    usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": details,
    }
    head = _completion_head(state, form) if is_batch else {}
    time = {} if is_batch else {"request_time": _request_time(state, finished_s)}
    return Record(
        state.line,
        state.envelope,
        result=head | {"choices": choices} | time | {"usage": usage},
        num_prompt_tokens=num_prompt,
        num_cached_tokens=details["cached_tokens"],
        num_completion_tokens=num_completion,
    )


def _completion_head(state: RequestState, form: AnswerForm) -> dict[str, Any]:
    """Return what an OpenAI completion object has before its choices."""
    model = state.envelope.fields.get("model")
    return {
        "id": f"cmpl-{make_id(state.line, state.envelope)}",
        "object": "text_completion",
        "created": form.created,
        "model": model if isinstance(model, str) and model else form.model_name,
    }


def _prompt_details(state: RequestState) -> dict[str, int]:
    cached = (len(p.ids) if state.leader else p.num_cached for p in state.prompts)
    details = {"cached_tokens": sum(cached)}
    num_cut = sum(prompt.encoded.num_cut for prompt in state.prompts)
    return details | ({"truncated_tokens": num_cut} if num_cut else {})


def _chosen(prompt: PromptState) -> list[Sequence]:
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


def _choice(sequence: Sequence, index: int, spelling: Spelling, is_batch: bool) -> dict[str, Any]:
    params = sequence.prompt.params
    text = sequence.prompt.encoded.text + sequence.text if params.echo else sequence.text
    choice: dict[str, Any] = {"text": text, "index": index}
    if params.logprobs is not None:
        choice["logprobs"] = _logprobs(sequence, params.logprobs, spelling)
    elif is_batch:  # its schema has the key always; HELM's client raises on a null
        choice["logprobs"] = None
    choice["finish_reason"] = sequence.finish_reason
    if sequence.stop_reason is not None:
        choice["stop_reason"] = sequence.stop_reason
    if params.return_token_ids or not spelling.has_words:
        choice["prompt_token_ids"] = sequence.prompt.ids
        choice["token_ids"] = [token.token_id for token in sequence.tokens]
    return choice


def _logprobs(sequence: Sequence, k: int, spelling: Spelling) -> dict[str, Any]:
    prompt, tokens = sequence.prompt, sequence.listed_tokens
    ids = [token.token_id for token in tokens]
    first = spelling.find_first(
        prompt.ids + ids, skip_special_tokens=prompt.params.skip_special_tokens
    )
    reports: list[TokenReport | None] = list(tokens)
    base = len(prompt.encoded.text)
    offsets = [base + token.offset for token in tokens]
    if prompt.params.echo:
        ids = prompt.ids + ids
        reports = [None, *prompt.reports, *reports]
        offsets = prompt.encoded.offsets + offsets
    else:
        first -= len(prompt.ids)
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


def _request_time(state: RequestState, finished_s: float) -> dict[str, float]:
    """Return seconds; HELM takes runtime = batch_time, and batch_time / batch_size a row."""
    times = state.times or RowTimes(finished_s, 0.0, finished_s=finished_s)
    first_token_s = times.first_token_s if times.first_token_s is not None else times.finished_s
    return {
        "batch_time": times.batch_time_s,
        "batch_size": times.batch_size,
        "queue_time": times.admitted_s - state.read_s,
        "prefill_time": first_token_s - times.admitted_s,
        "decode_time": times.finished_s - first_token_s,
    }
