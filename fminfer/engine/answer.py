"""Turns a finished request into its record: choices, logprobs, usage, times (contract, 6 and 8)."""

from __future__ import annotations

from typing import Any

from fminfer.engine.sequence import PromptState, RequestState, Sequence, TokenReport
from fminfer.output.records import Record
from fminfer.timing import RowTimes
from fminfer.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0  # what -inf and everything below it becomes


def build_record(state: RequestState, tokenizer: Tokenizer, finished_s: float) -> Record:
    """Build the record of a request whose prompts are all finished."""
    if state.error is not None:
        return Record(state.line, state.request.raw, error=state.error)
    choices: list[dict[str, Any]] = []
    for prompt in state.prompts:
        for sequence in _chosen(prompt):
            choices.append(_choice(sequence, len(choices), tokenizer))
    num_prompt = sum(len(prompt.ids) for prompt in state.prompts)
    num_completion = sum(_num_drawn(prompt) for prompt in state.prompts)
    result = {
        "choices": choices,
        "request_time": _request_time(state, finished_s),
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": _prompt_details(state),
        },
    }
    return Record(
        state.line,
        state.request.raw,
        result=result,
        num_prompt_tokens=num_prompt,
        num_completion_tokens=num_completion,
    )


def _prompt_details(state: RequestState) -> dict[str, int]:
    details = {"cached_tokens": sum(prompt.num_cached for prompt in state.prompts)}
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


def _choice(sequence: Sequence, index: int, tokenizer: Tokenizer) -> dict[str, Any]:
    params = sequence.prompt.params
    text = sequence.prompt.encoded.text + sequence.text if params.echo else sequence.text
    choice: dict[str, Any] = {"text": text, "index": index}
    if params.logprobs is not None:
        choice["logprobs"] = _logprobs(sequence, params.logprobs, tokenizer)
    choice["finish_reason"] = sequence.finish_reason
    if sequence.stop_reason is not None:
        choice["stop_reason"] = sequence.stop_reason
    if params.return_token_ids:
        choice["prompt_token_ids"] = sequence.prompt.ids
        choice["token_ids"] = [token.token_id for token in sequence.tokens]
    return choice


def _logprobs(sequence: Sequence, k: int, tokenizer: Tokenizer) -> dict[str, Any]:
    prompt, tokens = sequence.prompt, sequence.listed_tokens
    ids = [token.token_id for token in tokens]
    reports: list[TokenReport | None] = list(tokens)
    base = len(prompt.encoded.text)
    offsets = [base + token.offset for token in tokens]
    if prompt.params.echo:
        ids = prompt.ids + ids
        reports = [None, *prompt.reports, *reports]
        offsets = prompt.encoded.offsets + offsets
    return {
        "tokens": [tokenizer.piece(token_id) for token_id in ids],
        "token_logprobs": [None if r is None else _floor(r.logprob) for r in reports],
        "top_logprobs": None
        if k == 0
        else [None if r is None else _alternatives(r, k, tokenizer) for r in reports],
        "text_offset": offsets,
    }


def _alternatives(report: TokenReport, k: int, tokenizer: Tokenizer) -> dict[str, float]:
    """Return the k best, best first, then the chosen one; of equal spellings the better stays."""
    pairs = [*report.top[:k], (report.token_id, report.logprob)]
    found: dict[str, float] = {}
    for token_id, logprob in pairs:
        found.setdefault(tokenizer.piece(token_id), _floor(logprob))
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
