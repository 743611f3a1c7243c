"""Packs rows into a step: which token each sampling and scoring row draws from, in flat arrays.

It knows sequences and a step's form, not which rows are chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fminfer.engine.noise import uniform
from fminfer.engine.sequence import PromptState, Sequence
from fminfer.messages import SamplingRows, ScoringRows, Step, StepRow


@dataclass(slots=True)
class PackedRow:
    """A row of a step before its place in it is known."""

    row: StepRow
    is_prompt: bool
    sequences: list[Sequence]  # draw from the row's last token
    scored: PromptState | None = None

    def copies_after(self, block_size: int) -> list[tuple[int, int]]:
        """List the copies of a prompt's last, unfilled block that its other sequences need.

        They are made at the start of the next step: the pipeline keeps order, so the block is
        written by then, and whoever owned it in between has not yet been given it.
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
    """Form a step of these rows, in this order.

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
        for sequence in row.sequences:
            _add_sample(sampling, sequence, last)
            planned.sequences.append(sequence)
        if row.scored is not None:
            count = _add_scores(scoring, row.scored, row.row, first)
            planned.scored_prompts += [row.scored] * count
        first = last + 1
    return planned


def _add_sample(sampling: SamplingRows, sequence: Sequence, token_index: int) -> None:
    params = sequence.prompt.params
    sampling.token_index.append(token_index)
    sampling.temperature.append(params.temperature)
    sampling.top_p.append(params.top_p)
    sampling.top_k.append(params.top_k)
    sampling.min_p.append(params.min_p)
    noise = 0.0 if params.is_greedy else uniform(sequence.noise_key, len(sequence.tokens))
    sampling.noise.append(noise)
    if sequence.edits is not None:
        sampling.edits.extend(sequence.edits.columns)
    sampling.num_edits.append(0 if sequence.edits is None else len(sequence.edits.columns.token_id))
    banned = sequence.prompt.end_ids if len(sequence.tokens) < params.min_tokens else ()
    sampling.banned_ids += banned
    sampling.num_banned.append(len(banned))
    sampling.num_top_logprobs = max(sampling.num_top_logprobs, sequence.prompt.num_top)


def _add_scores(scoring: ScoringRows, prompt: PromptState, row: StepRow, first: int) -> int:
    """Ask for the logprobs of the prompt tokens that follow this row's; return how many."""
    targets = prompt.ids[row.position + 1 : row.position + 1 + len(row.token_ids)]
    scoring.token_index += range(first, first + len(targets))
    scoring.target_id += targets
    scoring.num_top_logprobs = max(scoring.num_top_logprobs, prompt.num_top)
    return len(targets)
