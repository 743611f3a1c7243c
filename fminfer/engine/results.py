"""Applies a step's results to its prompts and sequences: scores, tokens, nan, the end."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from fminfer.core.errors import RequestError
from fminfer.core.messages import StepResult, TokenLogprobs
from fminfer.engine.advance import advance
from fminfer.engine.packing import PlannedStep
from fminfer.engine.scheduler import Scheduler
from fminfer.engine.sequence import PromptState, Sequence, TokenReport


def take_result(
    planned: PlannedStep, result: StepResult, scheduler: Scheduler
) -> Iterator[Sequence]:
    """Give a step's scores and tokens to their prompts and sequences; yield finished sequences."""
    scores = _reports(result.scored)
    for prompt, report in zip(planned.scored_prompts, scores, strict=True):
        yield from _take_score(prompt, report, scheduler)
    draws = _reports(result.sampled)
    for sequence, report in zip(planned.sequences, draws, strict=True):
        # One that is not fed at all: its first sequence had it fed again, just now.
        if not sequence.prompt.owner.is_cancelled and sequence.prompt.num_fed > 0:
            yield from _take_token(sequence, report, scheduler)


def _take_score(
    prompt: PromptState, report: TokenReport, scheduler: Scheduler
) -> Iterator[Sequence]:
    if prompt.shared_scores:
        _take_shared_scores(prompt)
    prompt.reports.append(report)
    if math.isnan(report.logprob):
        prompt.nan_at = prompt.nan_at or f"prompt token {len(prompt.reports)}"
    is_last = len(prompt.reports) == len(prompt.ids) - 1
    if prompt.params.max_tokens > 0 or not is_last or prompt.owner.is_cancelled:
        return
    if not _feeds_again(prompt, scheduler):
        for sequence in prompt.sequences:
            sequence.finish_reason = "length"
            yield sequence


def _take_token(
    sequence: Sequence, report: TokenReport, scheduler: Scheduler
) -> Iterator[Sequence]:
    prompt, state = sequence.prompt, sequence.prompt.owner
    if prompt.shared_scores:
        _take_shared_scores(prompt)
    if math.isnan(report.logprob):
        prompt.nan_at = prompt.nan_at or f"generated token {len(sequence.tokens)}"
    if _feeds_again(prompt, scheduler):
        return
    assert state.times is not None, "a row ran before it was admitted"
    if state.times.first_token_s is None:
        state.times.first_token_s = time.perf_counter()
    if prompt.nan_at:
        sequence.finish_reason = "stop"
    else:
        advance(sequence, report)
    if sequence.finish_reason is None:
        scheduler.resume(sequence)
    else:
        yield sequence


def _take_shared_scores(prompt: PromptState) -> None:
    prompt.take_shared_scores()
    for place, report in enumerate(prompt.reports, start=1):
        if math.isnan(report.logprob):
            prompt.nan_at = prompt.nan_at or f"prompt token {place}"


def _feeds_again(prompt: PromptState, scheduler: Scheduler) -> bool:
    """Judge a prompt by its first result since it was admitted.

    Shared blocks may be the cause of nan, even if the row that computed them was sound. Then the
    prompt is fed again, alone, and judged by that result.
    """
    if prompt.is_unproven:
        prompt.is_unproven = False
        if not prompt.nan_at:
            scheduler.vouch(prompt)
        elif scheduler.put_apart(prompt):
            return True
    if prompt.nan_at and prompt.owner.error is None:
        prompt.owner.error = _nan_error(prompt.nan_at)
    return False


def _reports(columns: TokenLogprobs) -> Iterator[TokenReport]:
    for token_id, logprob, top_ids, top_logprobs in zip(
        columns.ids, columns.logprobs, columns.top_ids, columns.top_logprobs, strict=True
    ):
        yield TokenReport(token_id, logprob, list(zip(top_ids, top_logprobs, strict=True)))


def _nan_error(where: str) -> RequestError:
    return RequestError(
        "nan_logits",
        f"the model's logits for {where} are not numbers (nan); its weights or dtype overflow. "
        "Try --dtype float32 or bfloat16",
    )
