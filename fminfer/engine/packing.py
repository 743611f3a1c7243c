"""Packs rows into a step: flat arrays say from which token each sampling and scoring row draws."""

from __future__ import annotations

from dataclasses import dataclass, field

from fminfer.core.messages import SamplingRows, ScoringRows, Step, StepRow
from fminfer.engine.noise import step_noise
from fminfer.engine.sequence import PromptState, Sequence


@dataclass(slots=True)
class PackedRow:
    """A row of a step before its place in it is known."""

    row: StepRow
    is_prompt: bool
    sequences: list[Sequence]  # draw from the row's last token
    scored: PromptState | None = None

    def copies_after(self, block_size: int) -> list[tuple[int, int]]:
        """List the copies of a prompt's last, unfilled block that its other sequences need.

        The next step makes them at its start. The pipeline keeps order, so the block is written by
        then, and nobody else has got it in between.
        """
        end = self.row.position + len(self.row.token_ids)
        if len(self.sequences) < 2 or end % block_size == 0:
            return []
        index = end // block_size
        first, *others = self.sequences
        # A sequence that can draw only one token feeds none, and has no block of its own there.
        return [
            (first.block_table[index], sequence.block_table[index])
            for sequence in others
            if sequence.prompt.params.max_tokens > 1
        ]


@dataclass(slots=True)
class PlannedStep:
    """A step, and whose its sampling and scoring rows are, in order."""

    step: Step
    num_prompt_tokens: int
    num_decode_rows: int
    sequences: list[Sequence] = field(default_factory=list)
    scored_prompts: list[PromptState] = field(default_factory=list)


def pack(step_id: int, rows: list[PackedRow], copies: list[tuple[int, int]]) -> PlannedStep:
    """Pack these rows into a step, in this order.

    Args:
        copies: of blocks, made before the rows are computed.
    """
    sampling, scoring = SamplingRows(), ScoringRows()
    planned = PlannedStep(
        Step(step_id, [row.row for row in rows], copies, sampling, scoring),
        num_prompt_tokens=sum(len(row.row.token_ids) for row in rows if row.is_prompt),
        num_decode_rows=sum(not row.is_prompt for row in rows),
    )
    first = 0
    for row in rows:
        last = first + len(row.row.token_ids) - 1
        planned.sequences += row.sequences
        sampling.token_index += [last] * len(row.sequences)
        if row.scored is not None:
            count = _add_scores(scoring, row.scored, row.row, first)
            planned.scored_prompts += [row.scored] * count
        first = last + 1
    _add_samples(sampling, planned.sequences)
    return planned


def _add_samples(sampling: SamplingRows, sequences: list[Sequence]) -> None:
    """Set how each sequence's token is drawn, a column at a time: there are hundreds of rows."""
    params = [sequence.prompt.params for sequence in sequences]
    sampling.temperature = [each.temperature for each in params]
    sampling.top_p = [each.top_p for each in params]
    sampling.top_k = [each.top_k for each in params]
    sampling.min_p = [each.min_p for each in params]
    sampling.num_top_logprobs = max((each.logprobs or 0 for each in params), default=0)
    sampling.noise = [0] * len(params)
    sampling.num_edits = [0] * len(params)
    sampling.num_banned = [0] * len(params)
    masks: dict[bytes, int] = {}  # by their bits: an object of bytes is hashed once
    mask_of = [-1] * len(params)
    for place, (sequence, each) in enumerate(zip(sequences, params, strict=True)):
        num_drawn = len(sequence.tokens)
        if not each.is_greedy:
            sampling.noise[place] = step_noise(sequence.noise_key, num_drawn)
        if sequence.edits is not None:
            sampling.edits.extend(sequence.edits.columns)
            sampling.num_edits[place] = len(sequence.edits.columns.token_id)
        mask, bans = sequence.mask, sequence.prompt.bans
        if mask is None and bans is not None:
            banned, mask = sequence.banned_ids, bans.mask
            sampling.banned_ids += banned
            sampling.num_banned[place] = len(banned)
        if mask is not None:
            mask_of[place] = masks.setdefault(mask.bits, len(masks))
            if mask_of[place] == len(sampling.masks):
                sampling.masks.append(mask)
    if masks:
        sampling.mask_of = mask_of


def _add_scores(scoring: ScoringRows, prompt: PromptState, row: StepRow, first: int) -> int:
    """Ask for the logprobs of the prompt tokens that follow this row's; return how many."""
    targets = prompt.ids[row.position + 1 : row.position + 1 + len(row.token_ids)]
    scoring.token_index += range(first, first + len(targets))
    scoring.target_id += targets
    scoring.num_top_logprobs = max(scoring.num_top_logprobs, prompt.num_top)
    return len(targets)
