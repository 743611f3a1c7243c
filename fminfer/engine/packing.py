"""How large steps are; packs rows into one, whose columns say from which token each draws."""

from __future__ import annotations

from bisect import bisect_left
from collections import abc
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from fminfer.compute.values.step import DRAW, SCORE, Step, pack_masks
from fminfer.contract.field_table import COLUMNS
from fminfer.core.messages import Mask
from fminfer.engine.logit_edits import LogitEdits
from fminfer.engine.noise import make_step_noise
from fminfer.engine.sequence import PromptState, Sequence

# Measured on 2 CPU cores, llama of 12 × 768: 16 rows in one micro-batch took 0.62 of the time of
# two. From about 64 rows on, products set the pace, not the weights.
MIN_SPREAD_ROWS = 64
# About where products, not the weights, set the pace. Simulated, OPT-175B: stages of 8
# A100s work 60 % of the time with chunks of 512, 93 % with these; of 8 H200s 61 % and 98 %.
MIN_MIXED_TOKENS = 128


@dataclass(slots=True, frozen=True)
class StepShape:
    """The limits of a step, and what follows from them."""

    chunk_size: int  # most tokens
    micro_batches: int  # steps in flight
    num_stages: int  # of the pipeline
    has_long_steps: bool = False  # each streams layers: prompts are not cut for others

    def choose_max_tokens(self, num_decode_rows: int, *, is_decoding: bool) -> int:
        """Return how many tokens a step may have.

        Stages wait for each other when a long step comes between short ones; so while
        rows decode in a pipeline of several, prompts come in smaller chunks.
        """
        if self.num_stages == 1 or not is_decoding or self.has_long_steps:
            return self.chunk_size
        return min(self.chunk_size, max(MIN_MIXED_TOKENS, 2 * num_decode_rows))

    def choose_num_decode_rows(
        self, num_ready: int, num_drawing: int, num_decoding: int
    ) -> int:
        """Return how many of the ready rows the next step has.

        Rows are spread over one micro-batch for each stage, because every micro-batch reads all
        weights. They are spread over all micro-batches if that costs little. With
        several stages, each must then have MIN_SPREAD_ROWS rows. With one stage, one step
        must be too small for all rows. Rows that are left over wait for the next
        micro-batch that comes back. Steps in flight draw `num_drawing` rows now;
        `num_decoding` of these steps have decode rows.
        """
        num_rows = num_ready + num_drawing
        enough = (
            self.micro_batches * MIN_SPREAD_ROWS
            if self.num_stages > 1
            else self.chunk_size + 1
        )
        num_groups = self.micro_batches if num_rows >= enough else self.num_stages
        if num_decoding >= num_groups:
            return 0
        return min(num_ready, -(-num_rows // num_groups), self.chunk_size)


class Slots:
    """The slots of the sequences that hold KV blocks, with the constant part of their draws."""

    def __init__(self) -> None:
        self._draws = np.zeros(0, DRAW)
        self.clear()

    def clear(self) -> None:
        self._free = list(range(len(self._draws) - 1, -1, -1))
        self.num_used = 0

    def allocate(self, sequence: Sequence) -> None:
        """Give a sequence a slot, and its encoder output one; no block table is sent yet."""
        sequence.slot = self._allocate_slot()
        sequence.num_sent = 0
        if sequence.cross_table:
            sequence.cross_slot = self._allocate_slot()
        self.num_used += 1
        draw = self._draws[sequence.slot]
        params = sequence.prompt.params
        for name in COLUMNS:
            draw[name] = getattr(params, name)
        draw["num_top"] = sequence.prompt.num_top
        draw["mask"] = -1

    def free(self, sequence: Sequence) -> None:
        """Free a sequence's slots; a step in flight may still name them."""
        self._free.append(sequence.slot)
        if sequence.cross_slot >= 0:
            self._free.append(sequence.cross_slot)
            sequence.cross_slot = -1
        self.num_used -= 1

    def _allocate_slot(self) -> int:
        if not self._free:
            size = len(self._draws)
            self._draws = np.concatenate([self._draws, np.zeros(max(16, size), DRAW)])
            self._free = list(range(len(self._draws) - 1, size - 1, -1))
        return self._free.pop()

    def copy_draws(self, slots: list[int]) -> np.ndarray:
        """Return the constant part of draws, (slots,) of DRAW, as a copy."""
        return self._draws[slots]


BlockCopies = list[tuple[int, int]]  # of blocks: (from, to)
Places = abc.Sequence[int]  # of tokens in a row


@dataclass(slots=True)
class PackedRow:
    """A row of a step: the tokens of one sequence that are fed."""

    owner: Sequence  # whose block table it has
    token_ids: list[int]
    position: int  # of the first of them in the sequence
    sequences: list[Sequence]  # draw from the row's last token
    is_prompt: bool = False
    encoder_output: np.ndarray | None = None  # of its prompt, to be stored by this step

    @property
    def num_tokens(self) -> int:
        """Of it and its encoder output: what a step has to compute."""
        return len(self.token_ids) + self.num_encoder_tokens

    @property
    def num_encoder_tokens(self) -> int:
        return 0 if self.encoder_output is None else len(self.owner.prompt.ids_to_read)

    def list_copies_after(self, block_size: int) -> BlockCopies:
        """List the copies of a prompt's last, unfilled block that its other sequences need.

        The next step makes them at its start. The pipeline keeps order, so the block is
        written by then, and no other sequence has it in between.
        """
        end = self.position + len(self.token_ids)
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


@dataclass(slots=True, frozen=True)
class ObservedPrompt:
    """A prompt that owns scores of its masks."""

    prompt: PromptState


ScoreOwner = PromptState | ObservedPrompt
StepMasks = dict[bytes, tuple[int, Mask]]  # by their bits: place in the step


@dataclass(slots=True)
class PlannedStep:
    """A step, and the owners of its draws and scores, in order."""

    step: Step
    num_prompt_tokens: int
    num_decode_rows: int
    sequences: list[Sequence] = field(default_factory=list)
    # of prompts, or of their branches
    scored_prompts: list[ScoreOwner] = field(default_factory=list)
    read_prompts: list[PromptState] = field(default_factory=list)  # by the encoder


def pack_prompts(step_id: int, prompts: list[PromptState]) -> PlannedStep:
    """Pack whole prompts into a step for the encoder."""
    ids = [prompt.ids_to_read for prompt in prompts]
    step = Step(
        step_id,
        lengths=np.array([len(each) for each in ids], np.int64),
        token_ids=np.array([*chain.from_iterable(ids)], np.int64),
    )
    types = [(prompt.source or prompt.encoded).types for prompt in prompts]
    if any(types):
        padded = (
            row_types or [0] * len(row_ids)
            for row_types, row_ids in zip(types, ids, strict=True)
        )
        step.token_types = np.array([*chain.from_iterable(padded)], np.int8)
    return PlannedStep(step, step.num_tokens, 0, read_prompts=prompts)


def pack_rows(
    step_id: int, rows: list[PackedRow], copies: BlockCopies, slots: Slots
) -> PlannedStep:
    """Pack these rows into a step, in this order; copies of blocks are made before."""
    lengths = np.array([len(row.token_ids) for row in rows], np.int64)
    step = Step(
        step_id,
        slots=np.array([row.owner.slot for row in rows], np.int32),
        positions=np.array([row.position for row in rows], np.int64),
        lengths=lengths,
        token_ids=np.array(
            [*chain.from_iterable(row.token_ids for row in rows)], np.int64
        ),
    )
    if rows[0].owner.cross_table:
        _add_encoder_outputs(step, rows)
    if copies:
        step.block_copies = np.array(copies, np.int64)
    if new := [entry for row in rows for entry in _list_new_blocks(row.owner)]:
        step.new_blocks = np.array(new, np.int32)
    num_prompt_tokens = sum(len(row.token_ids) for row in rows if row.is_prompt)
    planned = PlannedStep(
        step, num_prompt_tokens, sum(not row.is_prompt for row in rows)
    )
    planned.sequences = [*chain.from_iterable(row.sequences for row in rows)]
    ends = lengths.cumsum()
    masks: StepMasks = {}
    _add_scores(planned, rows, ends - lengths, masks)
    if planned.sequences:
        step.draws = slots.copy_draws([sequence.slot for sequence in planned.sequences])
        counts = [len(row.sequences) for row in rows]
        step.draws["token_index"] = np.repeat(ends - 1, counts)
        _add_draws(step, planned.sequences, masks)
    if masks:
        for name, column in pack_masks([mask for _, mask in masks.values()]).items():
            setattr(step, name, column)
    return planned


def _add_encoder_outputs(step: Step, rows: list[PackedRow]) -> None:
    """Add where each row finds its encoder output, and those that are to be stored."""
    step.cross_slots = np.array([row.owner.cross_slot for row in rows], np.int32)
    lengths = [len(row.owner.prompt.ids_to_read) for row in rows]
    step.cross_lengths = np.array(lengths, np.int64)
    step.encoder_output_lengths = np.array(
        [row.num_encoder_tokens for row in rows], np.int64
    )
    if outputs := [
        row.encoder_output for row in rows if row.encoder_output is not None
    ]:
        step.encoder_output = np.concatenate(outputs)


def _list_new_blocks(sequence: Sequence) -> list[tuple[int, int, int]]:
    """Return the blocks of a table that stages lack, as (slot, place, block); mark them sent."""
    num_sent = sequence.num_sent
    table = sequence.block_table
    if num_sent == len(table):
        return []
    sequence.num_sent = len(table)
    new = [
        (sequence.slot, place, table[place]) for place in range(num_sent, len(table))
    ]
    if num_sent == 0:
        blocks = enumerate(sequence.cross_table)
        new += [(sequence.cross_slot, place, block) for place, block in blocks]
    return new


def _add_draws(step: Step, sequences: list[Sequence], masks: StepMasks) -> None:
    """Add what differs from step to step: noise, changes of logits, bans and masks."""
    if noise := {
        place: make_step_noise(each.noise_key, len(each.tokens))
        for place, each in enumerate(sequences)
        if each.noise_key
    }:
        step.draws["noise"][[*noise]] = [*noise.values()]
    edits = list[LogitEdits]()
    banned_ids = list[int]()
    for place, sequence in enumerate(sequences):
        mask = sequence.mask
        bans = sequence.prompt.bans
        if sequence.edits is None and mask is None and bans is None:
            continue  # it draws from the model's logits
        draw = step.draws[place]
        if sequence.edits is not None:
            edits.append(sequence.edits)
            draw["num_edits"] = len(sequence.edits.columns["edit_ids"])
        if mask is None and bans is not None:
            banned = sequence.banned_ids
            mask = bans.mask
            banned_ids += banned
            draw["num_banned"] = len(banned)
        if mask is not None:
            draw["mask"] = _place_mask(mask, masks)
    if edits:
        for name in edits[0].columns:
            setattr(
                step,
                name,
                np.concatenate([np.array(each.columns[name]) for each in edits]),
            )
    if banned_ids:
        step.banned_ids = np.array(banned_ids, np.int64)


def _place_mask(mask: Mask, masks: StepMasks) -> int:
    """Return a mask's place in its step; equal ones stand there once.

    They are found by their bits: bytes keep their hash.
    """
    return masks.setdefault(mask.bits, (len(masks), mask))[0]


def _add_scores(
    planned: PlannedStep, rows: list[PackedRow], firsts: np.ndarray, masks: StepMasks
) -> None:
    """Add the scores of a step: the logprobs of the prompt tokens behind each scored row's.

    Masks are scored behind the last token of a prompt under observation.
    """
    parts = list[np.ndarray]()
    owners = list[ScoreOwner]()
    for place, row in enumerate(rows):
        if not row.is_prompt:
            continue
        prompt = row.owner.prompt
        first = int(firsts[place])

        places, targets = _list_targets(row)
        if targets:
            part = np.zeros(len(targets), SCORE)
            part["token_index"] = np.array(places) + first
            part["target_id"] = targets
            part["num_top"] = prompt.num_top
            part["mask"] = -1
            parts.append(part)
            owners += [prompt] * len(targets)

        if (observed_prompt := _find_observed(row)) is not None:
            part = np.zeros(len(observed_prompt.observed_masks), SCORE)
            part["token_index"] = first + len(observed_prompt.ids) - 1 - row.position
            part["num_top"] = observed_prompt.num_likeliest
            part["mask"] = [
                _place_mask(mask, masks) for mask in observed_prompt.observed_masks
            ]
            parts.append(part)
            owners += [ObservedPrompt(observed_prompt)] * len(part)

    if parts:
        scores = np.concatenate(parts)
        order = scores["token_index"].argsort(kind="stable")
        planned.step.scores = scores[order]
        planned.scored_prompts = [owners[place] for place in order.tolist()]


def _find_observed(row: PackedRow) -> PromptState | None:
    """Return the prompt whose masks are scored behind one of a row's tokens, or None.

    That is its last token, before it has drawn any. Of labels, the first branch feeds it.
    """
    branch = row.owner.prompt.branch
    prompt = row.owner.prompt if branch is None else branch.parent
    if not prompt.observed_masks or any(each.tokens for each in prompt.sequences):
        return None
    last = len(prompt.ids) - 1
    if branch is not None and branch.positions[0] != last:
        return None
    return prompt if 0 <= last - row.position < len(row.token_ids) else None


def _list_targets(row: PackedRow) -> tuple[Places, list[int]]:
    """List the tokens that are scored behind a row's: after which of them, and their ids."""
    prompt = row.owner.prompt
    start = row.position
    end = start + len(row.token_ids)
    if prompt.branch is not None:
        positions = prompt.branch.positions
        first = bisect_left(positions, start)
        last = bisect_left(positions, end)
        places = [position - start for position in positions[first:last]]
        return places, prompt.branch.target_ids[first:last]
    if row.is_prompt and prompt.wants_scores:
        targets = prompt.ids[start + 1 : end + 1]
        return range(len(targets)), targets
    return (), []
