"""A step and its results as columns, which are arrays. Each is declared once, here.

Packing fills them, the wire carries their bytes as they are, and stages compute with
them. Fields of requests that have a `Field.column` in the table of fields are columns
of each draw.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, TypedDict

import numpy as np

from fminfer.contract.field_table import COLUMNS
from fminfer.contract.request import DEFAULTS
from fminfer.core.messages import Mask, StageSpan, pack_token_ids

Column = Any  # an array; with numpy's own types every sum of two would need a cast
Phase = Literal["prefill", "decode", "mixed"]
# An entry a token to draw. A request's fields keep their names; temperature 0 or top_p
# 0: greedy.
DRAW = np.dtype(
    [
        *COLUMNS.items(),
        ("token_index", "i8"),  # packed token whose logits are used
        ("noise", "i8"),  # 64 random bits; 0: greedy
        ("num_top", "i4"),  # alternatives to report
        ("num_edits", "i4"),  # its entries of `Step.edit_…`
        ("num_banned", "i4"),  # and of `Step.banned_ids`
        ("mask", "i4"),  # its place in `Step.masks`; -1: it has none
    ]
)
# An entry a token whose logprob is wanted: the packed token before it, and its own id.
# Entries are in the order of packed tokens. Several may stand behind one, as labels' tokens do.
SCORE = np.dtype(
    [
        ("token_index", "i8"),
        ("target_id", "i8"),
        ("num_top", "i4"),
        # its place in `Step.masks`: the tokens that are scored together; -1: `target_id`
        ("mask", "i4"),
    ]
)
# An entry a mask: its part of `Step.mask_bits`, or its size in bytes and its part of `mask_ids`.
MASK = np.dtype([("num_bytes", "i4"), ("size", "i4"), ("num_ids", "i4")])


def _column_field(kind: Any, *width: int) -> Any:
    """Declare a column: the type of its numbers, and how many an entry has, if several."""
    empty = np.empty((0, *width), kind)
    return field(default_factory=lambda: empty, metadata={"empty": empty})


@dataclass(eq=False)
class Step:
    """One pass of a micro-batch through the pipeline. Tokens are packed row after row.

    Three rows, with blocks of 16 tokens: a prompt of 4 tokens, the newest token of a
    sequence, and a chunk of 2 tokens whose prompt goes on::

        row              0          1       2
        slots            7          2       5
        positions        0          9      16
        lengths          4          1       2
        token_ids        a b c d  | e    |  f g
        packed token     0 1 2 3    4       5 6

        new_blocks       (7, 0, 12), (5, 1, 3): block 12 is the first of slot 7
        draws            token_index 3 and 4: from the logits of d and e

    A step of whole prompts is the encoder's: its rows have no slots and no positions.
    """

    step_id: int
    # An entry a row:
    slots: Column = _column_field("i4")  # where stages keep its sequence's block table
    positions: Column = _column_field("i8")  # of its first token in the sequence
    # tokens: a chunk of its prompt, or the newest one
    lengths: Column = _column_field("i8")
    token_ids: Column = _column_field("i8")  # (tokens,), of all rows
    # (tokens,), for encoders; empty: all are 0
    token_types: Column = _column_field("i1")
    # Of a decoder behind an encoder, an entry a row: the slot of the block table of its
    # prompt's encoder output, and the tokens of that output.
    cross_slots: Column = _column_field("i4")
    cross_lengths: Column = _column_field("i8")
    # tokens of it that this step brings in `encoder_output`: all, or 0
    encoder_output_lengths: Column = _column_field("i8")
    # hidden states as bytes, in the order of rows
    encoder_output: Column = _column_field("u1")
    # (slot, place, block): new entries of block tables
    new_blocks: Column = _column_field("i4", 3)
    # (from, to), done before anything else
    block_copies: Column = _column_field("i8", 2)
    draws: Column = _column_field(DRAW)
    # Edits of single logits, draw after draw: bias is added first, the sum is divided
    # by factor if it is above 0, else multiplied, and minus is subtracted. Then tokens
    # that must not be drawn.
    edit_ids: Column = _column_field("i8")
    edit_bias: Column = _column_field("f4")
    edit_factor: Column = _column_field("f4")
    edit_minus: Column = _column_field("f4")
    banned_ids: Column = _column_field("i8")
    masks: Column = _column_field(MASK)  # equal ones once
    mask_bits: Column = _column_field("u1")
    mask_ids: Column = _column_field("i4")
    scores: Column = _column_field(SCORE)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def has_whole_prompts(self) -> bool:
        """Whether its rows are whole prompts, for the encoder."""
        return len(self.slots) < len(self.lengths)

    @cached_property  # asked when all columns are there
    def wanted(self) -> Column:
        """The packed tokens whose logits are drawn from or scored, (wanted,) int64,
        ascending."""
        drawn = self.draws["token_index"].copy()
        if not len(self.scores) and (drawn[1:] > drawn[:-1]).all():  # as mostly
            return drawn
        return np.unique(np.concatenate([drawn, self.scores["token_index"]]))


STEP_COLUMNS = {
    each.name: each.metadata["empty"]
    for each in fields(Step)
    if "empty" in each.metadata
}


def make_draws(token_index: Sequence[int], **columns: Any) -> Column:
    """Return draws from these packed tokens, by requests' defaults but for `columns`."""
    draws = np.zeros(len(token_index), DRAW)
    of_fields = {name: getattr(DEFAULTS, name) for name in COLUMNS}
    for name, column in (
        of_fields | {"token_index": token_index, "mask": -1} | columns
    ).items():
        draws[name] = column
    return draws


def pack_masks(masks: Sequence[Mask]) -> dict[str, np.ndarray]:
    """Return masks as columns of a step: few allowed tokens as their ids, others as bits."""
    kinds = [
        (0, len(m.bits), len(m.few)) if m.few else (len(m.bits), 0, 0) for m in masks
    ]
    return {
        "masks": np.array(kinds, MASK),
        "mask_bits": np.frombuffer(b"".join(m.bits for m in masks if not m.few), "u1"),
        "mask_ids": np.array(
            [token_id for m in masks for token_id in m.few or ()], "i4"
        ),
    }


def unpack_masks(step: Step) -> list[Mask]:
    """Return the masks of a step, as `pack_masks` was given them."""
    masks = []
    first_byte = 0
    first_id = 0
    for num_bytes, size, num_ids in step.masks.tolist():
        bits = step.mask_bits[first_byte : first_byte + num_bytes].tobytes()
        ids = step.mask_ids[first_id : first_id + num_ids].tolist()
        masks.append(
            Mask(bits or pack_token_ids(ids, size), tuple(ids) if ids else None)
        )
        first_byte = first_byte + num_bytes
        first_id = first_id + num_ids
    return masks


@dataclass(slots=True, eq=False)
class Rows:
    """The rows of a step as attention sees them, in packed order.

    Of the step that `Step` draws, with blocks of 16 tokens and a table for each slot::

        row  positions  lengths  table_of   tables[table_of]   holds
        0            0        4         7   12                 keys 0 … 3
        1            9        1         2   4                  keys 0 … 9
        2           16        2         5   8 3                keys 0 … 15, 16 and 17

        first_tokens   0 4 5
        blocks         12 4 8 3
        key_places     192 193 194 195  73  48 49      (token f: block 3 * 16 + place 0)
    """

    positions: Column  # (rows,) int64, of the first token in its sequence
    lengths: Column  # (rows,) int64, tokens
    table_of: Column  # (rows,) integers: which of `tables` is each row's
    # (tables, blocks) int32: KV blocks in the sequence's order, then anything
    tables: Column
    num_tokens: int  # of all rows
    # whose keys the step brings; None: those of the rows themselves
    stored: Rows | None = None

    @classmethod
    def from_tables(cls, *rows: tuple[int, int, Sequence[int]]) -> Rows:
        """Return rows that are given as (position, number of tokens, block table)."""
        tables = np.zeros(
            (len(rows), max((len(row[2]) for row in rows), default=0)), np.int32
        )
        for place, (_, _, table) in enumerate(rows):
            tables[place, : len(table)] = table
        positions, lengths = (
            np.array([row[:2] for row in rows], np.int64).reshape(-1, 2).T.copy()
        )
        return cls(positions, lengths, np.arange(len(rows)), tables, int(lengths.sum()))

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def is_decode(self) -> bool:
        """Whether each row is one token."""
        return self.num_tokens == len(self)

    @property
    def first_tokens(self) -> Column:  # (rows,) int64
        """The packed token that each row begins with."""
        return (
            np.arange(len(self))
            if self.is_decode
            else self.lengths.cumsum() - self.lengths
        )

    @property
    def token_positions(self) -> Column:  # (tokens,) int64
        """Where each token stands in its sequence."""
        return (
            self.positions
            if self.is_decode
            else join_ranges(self.positions, self.lengths)
        )

    def num_blocks(self, block_size: int) -> Column:  # (rows,) int64
        """Return how many blocks hold each row's keys."""
        return -(-(self.positions + self.lengths) // block_size)

    def blocks(self, block_size: int) -> Column:  # (blocks,) int32
        """Return the blocks that hold keys, row after row."""
        counts = self.num_blocks(block_size)
        return self.tables[
            np.repeat(self.table_of, counts), join_ranges(0 * counts, counts)
        ]

    def key_places(self, block_size: int) -> Column:  # (tokens,) int64
        """Return where each key of the step goes: block * block_size + place."""
        if self.stored is not None:
            return self.stored.key_places(block_size)
        blocks, places_in_block = np.divmod(self.token_positions, block_size)
        table_of = (
            self.table_of if self.is_decode else np.repeat(self.table_of, self.lengths)
        )
        row_blocks = self.tables[table_of, blocks]
        return row_blocks.astype(np.int64) * block_size + places_in_block

    def select(self, rows: Any) -> Rows:
        """Return some of the rows, given as a slice, as their places or as a bool each."""
        lengths = self.lengths[rows]
        return Rows(
            positions=self.positions[rows],
            lengths=lengths,
            table_of=self.table_of[rows],
            tables=self.tables,
            num_tokens=int(lengths.sum()),
            stored=self.stored,
        )

    @classmethod
    def from_prompts(cls, lengths: Column, block_size: int) -> Rows:
        """Return rows of whole prompts, each with blocks of its own, from block 0 on."""
        counts = -(-lengths // block_size)
        tables = np.zeros((len(lengths), int(counts.max(initial=0))), np.int32)
        tables[
            np.repeat(np.arange(len(lengths)), counts), join_ranges(0 * counts, counts)
        ] = np.arange(counts.sum())
        return cls(
            0 * lengths, lengths, np.arange(len(lengths)), tables, int(lengths.sum())
        )

    def cut(self, first: int, last: int) -> Rows:
        """Return the rows of packed tokens [first, last)."""
        if first == 0 and last == self.num_tokens:
            return self
        start, end = (
            np.clip(each - self.first_tokens, 0, self.lengths) for each in (first, last)
        )
        cut = Rows(
            self.positions + start,
            end - start,
            self.table_of,
            self.tables,
            last - first,
        )
        return cut.select(end > start)


def join_ranges(starts: Column, counts: Column) -> Column:
    """Return start, start + 1, … of each entry, count numbers each: (sum of counts,)."""
    offsets = np.repeat(starts - counts.cumsum() + counts, counts)
    return offsets + np.arange(len(offsets))


def compute_text_positions(
    ids: Column, lengths: Column, padding_id: int | None
) -> Column:
    """Return each token's position in its prompt, (tokens,) int64.

    Args:
        padding_id: tokens with this id get -1 and are not counted, as RoBERTa was trained. None:
            all tokens are counted.
    """
    if padding_id is None:
        return join_ranges(0 * lengths, lengths)
    is_text = ids != padding_id
    counts = is_text.cumsum()
    starts = lengths.cumsum() - lengths
    num_before = (counts - is_text)[starts]
    return np.where(is_text, counts - np.repeat(num_before, lengths) - 1, -1)


def find_last_tokens(ids: Column, lengths: Column, padding_id: int | None) -> Column:
    """Return the index of each prompt's last token but padding, else its first: (prompts,)."""
    starts = lengths.cumsum() - lengths
    places = np.arange(len(ids))
    if padding_id is not None:
        places = np.where(ids != padding_id, places, np.repeat(starts, lengths))
    return np.maximum.reduceat(places, starts)


class BlockTables:
    """The block tables of running sequences, by slot. A step brings new entries only."""

    def __init__(self) -> None:
        self._tables = np.zeros((16, 16), np.int32)

    def update(self, step: Step) -> Rows:
        """Note what is new, and return the step's rows."""
        if len(step.new_blocks):
            slots, places, blocks = step.new_blocks.T
            size = self._tables.shape
            needed = (int(slots.max()) + 1, int(places.max()) + 1)
            if needed[0] > size[0] or needed[1] > size[1]:
                pairs = zip(needed, size, strict=True)
                # Zeros: the system gives memory only for pages that are written.
                larger = np.zeros(
                    [2 * n if n > now else now for n, now in pairs], np.int32
                )
                larger[: size[0], : size[1]] = self._tables
                self._tables = larger
            self._tables[slots, places] = blocks
        return Rows(
            step.positions, step.lengths, step.slots, self._tables, step.num_tokens
        )

    def make_cross_rows(self, step: Step, first: int, last: int) -> Rows:
        """Return packed tokens [first, last) as rows of one token, which see all their memory.

        The first of them also store what the step brings.
        """
        token_rows = np.repeat(np.arange(len(step.lengths)), step.lengths)[first:last]
        brings = step.encoder_output_lengths > (0 if first == 0 else sys.maxsize)
        lengths = step.encoder_output_lengths[brings]
        stored = Rows(
            0 * lengths,
            lengths,
            step.cross_slots[brings],
            self._tables,
            int(lengths.sum()),
        )
        return Rows(
            positions=step.cross_lengths[token_rows] - 1,
            lengths=np.ones(last - first, np.int64),
            table_of=step.cross_slots[token_rows],
            tables=self._tables,
            num_tokens=last - first,
            stored=stored,
        )


ResultKind = Literal["tokens", "prompt scores"]


@dataclass(slots=True, eq=False)
class TokenLogprobs:
    """Columns, one entry a token: the token, its logprob, and the best alternatives.

    They are tensors, until `sampler.copy_to_host` makes arrays of them.
    """

    ids: Column  # (tokens,) int64
    logprobs: Column  # (tokens,) float32; nan where the logits were
    top_ids: Column  # (tokens, k) int64, best first
    top_logprobs: Column  # (tokens, k) float32

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def join(cls, parts: Sequence[TokenLogprobs]) -> TokenLogprobs:
        """Return the columns of parts, one part after another."""
        if len(parts) == 1:
            return parts[0]
        names = [each.name for each in fields(cls)]
        return cls(
            *(np.concatenate([getattr(part, name) for part in parts]) for name in names)
        )

    @classmethod
    def empty(cls, num_tokens: int = 0, num_top: int = 0) -> TokenLogprobs:
        """Return columns of this size, to be filled."""
        shape = (num_tokens, num_top)
        ids_and_logprobs = (
            np.empty(num_tokens, np.int64),
            np.empty(num_tokens, np.float32),
        )
        return cls(
            *ids_and_logprobs, np.empty(shape, np.int64), np.empty(shape, np.float32)
        )


NO_TOKENS = TokenLogprobs.empty()
NO_VECTORS: Column = np.empty((0, 0), np.uint8)
# What a step asks for. Vectors are the bytes of each: float32 of a prompt's, where the
# model pools; otherwise the hidden states of each of its tokens.
Results = TypedDict(
    "Results",
    {"tokens": TokenLogprobs, "prompt scores": TokenLogprobs, "vectors": Column},
    total=False,
)


@dataclass(slots=True)
class StepResult:
    """What the last stage found, in the order of the step's draws and scores."""

    step_id: int
    results: Results
    spans: list[StageSpan]  # one a stage

    def logprobs_of(self, kind: ResultKind) -> TokenLogprobs:
        """Return the results of a kind, without entries if the step asked for none."""
        return self.results.get(kind, NO_TOKENS)

    @property
    def vectors(self) -> Column:
        """(entries, bytes) uint8."""
        return self.results.get("vectors", NO_VECTORS)


@dataclass(slots=True, frozen=True)
class StepTrace:
    """A step that is done, and what a trace shows of it."""

    step_id: int
    num_prompt_tokens: int
    num_decode_rows: int
    spans: list[StageSpan]
    step: Step

    @property
    def phase(self) -> Phase:
        if not self.num_decode_rows:
            return "prefill"
        return "mixed" if self.num_prompt_tokens else "decode"
