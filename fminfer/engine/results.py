"""Applies a step's results to its prompts and sequences: scores, tokens, nan, the end."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from fminfer.compute.values.step import StepResult, TokenLogprobs
from fminfer.core.errors import RequestError
from fminfer.engine.label_walk import LabelWalk
from fminfer.engine.packing import ObservedPrompt, PlannedStep
from fminfer.engine.scheduler import Scheduler
from fminfer.engine.sequence import (
    ALTERNATIVE,
    Branch,
    PromptState,
    Sequence,
    TokenReport,
    Walk,
)
from fminfer.text.detokenizer import Detokenizer

MAX_UNFED = 32  # tokens of a row that drew some without an alternative


def apply_result(
    planned: PlannedStep, result: StepResult, scheduler: Scheduler
) -> Iterator[Sequence]:
    """Give a step's results to its prompts and sequences; yield the finished sequences."""
    _apply_encoder_result(planned, result, scheduler)
    scores = _make_reports(result.logprobs_of("prompt scores"))
    for owner, report in zip(planned.scored_prompts, scores, strict=True):
        if isinstance(owner, ObservedPrompt):
            owner.prompt.add_mask_report(report)
        elif owner.branch is None:
            yield from _add_score(owner, report, scheduler)
        else:
            yield from _add_label_score(owner, owner.branch, report, scheduler)
    draws = _make_reports(result.logprobs_of("tokens"))
    for sequence, report in zip(planned.sequences, draws, strict=True):
        # A prompt that is not fed at all: its first sequence had it fed again, just now.
        if not sequence.prompt.owner.is_cancelled and sequence.prompt.num_fed > 0:
            yield from _add_drawn_token(sequence, report, scheduler)


def _apply_encoder_result(
    planned: PlannedStep, result: StepResult, scheduler: Scheduler
) -> None:
    vectors = result.vectors
    first = 0
    now_s = time.perf_counter()
    for place, prompt in enumerate(planned.read_prompts):
        last = first + len(prompt.ids_to_read)
        hidden = vectors[first:last]
        first = last
        state = prompt.owner
        if state.is_cancelled:
            continue
        if not prompt.is_pooled:
            if not prompt.sequences:
                continue  # a branch that was given up
            scheduler.set_encoder_output(prompt, hidden.reshape(-1))
            continue
        prompt.vector = vectors[place].view(np.float32)
        if state.times is not None and state.times.first_token_s is None:
            state.times.first_token_s = now_s
        if not np.isfinite(prompt.vector).all() and state.error is None:
            state.error = _nan_error(f"prompt {prompt.index}", "numbers")


def _add_score(
    prompt: PromptState, report: TokenReport, scheduler: Scheduler
) -> Iterator[Sequence]:
    if prompt.shared_scores:
        prompt.copy_shared_scores()
    prompt.reports.append(report)
    is_last = len(prompt.reports) == len(prompt.ids) - 1
    if prompt.params.max_tokens > 0 or not is_last or prompt.owner.is_cancelled:
        return
    if not _judge_first_result(prompt, scheduler):
        for sequence in prompt.sequences:
            sequence.finish_reason = "length"
            yield sequence


def _add_label_score(
    prompt: PromptState, branch: Branch, report: TokenReport, scheduler: Scheduler
) -> Iterator[Sequence]:
    """Add a score of a branch; with its last one go on, or end the choices of its labels."""
    state = prompt.owner
    owners = branch.parent.sequences
    walk = owners[0].walk if owners else None
    if walk is None or prompt not in walk.running:
        return  # given up

    prompt.reports.append(report)
    if len(prompt.reports) < len(branch.positions):
        return
    if _judge_first_result(prompt, scheduler):
        return

    assert state.times is not None, "a branch ran before it was admitted"
    if state.times.first_token_s is None:
        state.times.first_token_s = time.perf_counter()
    if not prompt.is_inner_branch:
        branch.parent.num_cached = prompt.num_cached

    walk.finish_branch(prompt)
    if state.error is None and not walk.running:
        scheduler.add_branches(walk.make_wave())
    scheduler.release_sequence(prompt.sequences[0])
    prompt.sequences = []  # which point back at it
    if walk.running and state.error is None:
        return

    scheduler.end_walk(walk)
    for sequence in branch.parent.sequences:  # of one that thought, itself alone
        _end_at_label(sequence, walk)
        yield sequence


def _end_at_label(sequence: Sequence, walk: Walk) -> None:
    """End a choice at its label. If the request failed, add no tokens."""
    sequence.finish_reason = "stop"
    detokenizer = sequence.detokenizer
    if sequence.prompt.owner.error is not None or detokenizer is None:
        return
    label, reports = walk.choose_label(sequence)
    thought = sequence.text
    num_thought = len(sequence.tokens)
    for report in reports:
        sequence.tokens.append(report)
        _add_token_text(sequence, detokenizer)
    _add_text(sequence, detokenizer.flush())

    # Some tokenizers leave out a space at the beginning of all text.
    num_missing = len(thought) + len(label) - len(sequence.text)
    for token in sequence.tokens[num_thought + 1 :]:
        token.offset += num_missing
    sequence.text = thought + label
    if sequence.thought is not None:
        sequence.thought.reader.begin_answer(len(thought))


def _add_drawn_token(
    sequence: Sequence, report: TokenReport, scheduler: Scheduler
) -> Iterator[Sequence]:
    prompt = sequence.prompt
    thought = sequence.thought
    state = sequence.prompt.owner
    if prompt.shared_scores:
        prompt.copy_shared_scores()
    if math.isnan(report.logprob):
        prompt.nan_at = prompt.nan_at or f"generated token {len(sequence.tokens)}"
    if _judge_first_result(prompt, scheduler):
        return
    assert state.times is not None, "a row ran before it was admitted"
    if state.times.first_token_s is None:
        state.times.first_token_s = time.perf_counter()
    if prompt.nan_at:
        sequence.finish_reason = "stop"
    elif (
        thought is not None
        and thought.labels is not None
        and thought.begins_answer(report.token_id, sequence.num_draws_left)
    ):  # the token is left out
        _begin_walk(sequence, scheduler)
        return
    else:
        try:
            append_token(sequence, report)
            _prepare_next_draw(sequence, scheduler)
        except RequestError as error:
            state.error = error
            sequence.finish_reason = "stop"
    if sequence.finish_reason == "length" and thought and thought.leads_to_label:
        sequence.finish_reason = None
        _begin_walk(sequence, scheduler)
    elif sequence.finish_reason is None:
        scheduler.resume_sequence(sequence)
    else:
        yield sequence


def _begin_walk(sequence: Sequence, scheduler: Scheduler) -> None:
    """Compute the labels behind a sequence's thought, as if that stood in the prompt."""
    assert sequence.thought is not None and sequence.thought.labels is not None
    prompt = sequence.prompt
    # what looked like a tag, and is none, is not drawn: the label comes in its place
    num_chars = len(sequence.text) - len(sequence.thought.reader.held.lstrip())
    sequence.text = sequence.text[:num_chars]
    while sequence.tokens and sequence.tokens[-1].offset >= num_chars:
        del sequence.tokens[-1]
    drawn = [token.token_id for token in sequence.tokens]
    behind = PromptState(
        prompt.owner,
        prompt.index,
        replace(prompt.encoded, ids=prompt.ids + drawn),
        source=prompt.source,
        sequences=[sequence],
    )
    walk = LabelWalk(behind, sequence.thought.labels)
    sequence.own_walk = walk
    num_fed = len(behind.ids) - sequence.num_unfed
    scheduler.cache_drawn_tokens(sequence, behind.ids[:num_fed])
    scheduler.add_branches(walk.make_wave())
    scheduler.release_sequence(sequence)


def _prepare_next_draw(sequence: Sequence, scheduler: Scheduler) -> None:
    """Find what a sequence may draw next; tokens without an alternative are drawn at once.

    Those are fed together with the next one. Where logprobs are returned, or choose
    among candidates, the model must see each.
    """
    params = sequence.prompt.params
    bans = sequence.prompt.bans
    matcher = sequence.matcher
    if matcher is None:
        if bans is not None and sequence.finish_reason is None:
            bans.require_token(len(sequence.tokens), sequence.banned_ids)
        return
    max_unfed = min(MAX_UNFED, scheduler.shape.chunk_size)  # in one step
    needs_logprobs = params.logprobs is not None or params.best_of > params.n
    while sequence.finish_reason is None:
        matcher.advance(sequence.tokens[-1].token_id)
        sequence.update_mask()
        few = sequence.mask.few if sequence.mask is not None else None
        if (
            few is None
            or len(few) > 1
            or needs_logprobs
            or sequence.num_unfed >= max_unfed
        ):
            return
        append_token(sequence, TokenReport(few[0], 0.0))
    if sequence.finish_reason == "length":
        matcher.advance(sequence.tokens[-1].token_id)
        sequence.is_cut_off = not matcher.is_complete


def _judge_first_result(prompt: PromptState, scheduler: Scheduler) -> bool:
    """Judge a prompt by its first result since it was admitted; return whether it is fed again.

    Shared blocks may be the cause of nan, even if the row that computed them was sound. Then the
    prompt is fed again, alone, and judged by that result.
    """
    if prompt.is_unproven:
        prompt.is_unproven = False
        is_nan = [math.isnan(report.logprob) for report in prompt.reports]
        if any(is_nan):
            place = f"prompt token {is_nan.index(True) + 1}"
            prompt.nan_at = place if prompt.branch is None else "its labels"
        if not prompt.nan_at:
            scheduler.mark_sound(prompt)
        elif scheduler.requeue_apart(prompt):
            return True
    if prompt.nan_at and prompt.owner.error is None:
        prompt.owner.error = _nan_error(prompt.nan_at)
    return False


def _make_reports(columns: TokenLogprobs) -> Iterator[TokenReport]:
    ids = columns.ids.tolist()
    logprobs = columns.logprobs.tolist()
    if not columns.top_ids.shape[1]:
        return map(TokenReport, ids, logprobs)
    tops = np.empty(columns.top_ids.shape, "=i8,=f4")  # as ALTERNATIVE packs them
    tops["f0"] = columns.top_ids
    tops["f1"] = columns.top_logprobs
    packed = tops.view((np.void, ALTERNATIVE.size * tops.shape[1]))
    return map(TokenReport, ids, logprobs, packed.ravel().tolist())


def _nan_error(where: str, what: str = "logits") -> RequestError:
    return RequestError(
        "nan_logits",
        f"the model's {what} for {where} are not numbers (nan)",
    )


def append_token(sequence: Sequence, token: TokenReport) -> None:
    """Append a drawn token; `finish_reason` then says whether the sequence is done."""
    detokenizer = sequence.detokenizer
    assert detokenizer is not None, "a sequence that generates nothing drew a token"
    sequence.tokens.append(token)
    sequence.num_unfed += 1
    if sequence.edits is not None:
        sequence.edits.count_drawn(token.token_id)
    token_id = token.token_id
    if token_id in sequence.prompt.end_ids and _may_end_at(sequence, token_id):
        _end_at_token(sequence, token_id)
        return
    _add_token_text(sequence, detokenizer)
    if sequence.finish_reason is None and sequence.num_draws_left == 0:
        _add_text(sequence, detokenizer.flush(), is_last=True)
        sequence.finish_reason = sequence.finish_reason or "length"


def _may_end_at(sequence: Sequence, token_id: int) -> bool:
    """Tell whether one of its end tokens ends a sequence; in a thought no stop string does."""
    prompt = sequence.prompt
    if sequence.is_thinking and isinstance(prompt.stop_reasons.get(token_id), str):
        return False
    # A constraint's mask allows an end before min_tokens only if nothing else is left.
    is_late = sequence.num_answer_tokens > prompt.params.min_tokens
    return is_late or sequence.matcher is not None


def _end_at_token(sequence: Sequence, token_id: int) -> None:
    """Finish at EOS or a stop token, which has no part in the text unless that was asked for."""
    params = sequence.prompt.params
    detokenizer = sequence.detokenizer
    assert detokenizer is not None
    if params.include_stop_str_in_output:
        _add_token_text(sequence, detokenizer)
        rest = detokenizer.flush() if sequence.finish_reason is None else ""
        reason = sequence.prompt.stop_reasons.get(token_id)
        # a special token, which texts leave out
        rest += reason if isinstance(reason, str) else ""
    else:
        rest = detokenizer.flush()
        sequence.tokens[-1].offset = len(sequence.text) + len(rest)
    _add_text(sequence, rest, is_last=True)
    sequence.ended_by_token = True
    sequence.finish_reason = "stop"
    if sequence.stop_reason is None:
        sequence.stop_reason = sequence.prompt.stop_reasons.get(token_id)


def _add_token_text(sequence: Sequence, detokenizer: Detokenizer) -> None:
    """Append the newest token's text, and say where it and those before it start."""
    new = detokenizer.add(sequence.tokens[-1].token_id)
    starts = detokenizer.starts
    for token, start in zip(sequence.tokens[-len(starts) :], starts, strict=True):
        token.offset = start
    _add_text(sequence, new)


def _add_text(sequence: Sequence, new: str, *, is_last: bool = False) -> None:
    """Append text; at a stop string cut it, and the tokens that start at the cut or later."""
    if not (new or is_last):
        return
    params = sequence.prompt.params
    sequence.text += new
    start = 0
    num_new = len(new)
    if sequence.thought is not None:
        reader = sequence.thought.reader
        was_answer = reader.phase == "answer"
        reader.feed(new)
        if is_last and sequence.thought.labels is None:
            reader.finish()
        if reader.phase != "answer":
            return
        start = reader.answer_start
        num_new = num_new if was_answer else len(sequence.text) - start
    if not params.stop or sequence.num_answer_tokens <= params.min_tokens:
        return
    if params.min_tokens and num_new > len(new):
        # of what was held, a stop that was complete by min_tokens is none
        num_before = len(sequence.tokens) - sequence.num_answer_tokens
        first = sequence.tokens[num_before + params.min_tokens]
        num_new = min(num_new, len(sequence.text) - first.offset)
    match = find_stop(sequence.text, params.stop, num_new, start)
    if match is not None:
        cut, stop = match
        cut += len(stop) if params.include_stop_str_in_output else 0
        sequence.text = sequence.text[:cut]
        sequence.num_cut = sum(token.offset >= cut for token in sequence.tokens)
        sequence.finish_reason = "stop"
        sequence.stop_reason = stop


def find_stop(
    text: str, stops: tuple[str, ...], num_new: int, start: int = 0
) -> tuple[int, str] | None:
    """Return where the earliest stop string begins in `text`, and which it is, or None.

    If several begin at one place, the one listed first counts. Only the last `num_new`
    characters were not searched before, so that it ends there.

    Args:
        start: no stop begins before this place.
    """
    matches = []
    for stop in stops:
        at = text.find(stop, max(start, len(text) - num_new - len(stop) + 1))
        if at >= 0:
            matches.append((at, stop))
    return min(matches, key=lambda place: place[0], default=None)


def count_possible_stop_chars(
    text: str, stops: tuple[str, ...], num_certain: int = 0
) -> int:
    """Return how many characters at a text's end may be the beginning of a stop string.

    A complete stop string in the text was skipped under `min_tokens`, and stays so.

    Args:
        num_certain: first characters, which are known to be in no such beginning.
    """
    longest = max(map(len, stops), default=1) - 1
    for start in range(max(num_certain, len(text) - longest), len(text)):
        end = text[start:]
        if any(len(stop) > len(end) and stop.startswith(end) for stop in stops):
            return len(end)
    return 0
