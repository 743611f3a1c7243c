"""What travels between the engine and the pipeline: a Step down, a StepResult back.

Plain Python values and arrays only, so that they can cross a process and be read in a debugger.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["prefill", "decode", "mixed"]


@dataclass(slots=True)
class StepRow:
    """The tokens of one sequence in a step: a chunk of its prompt, or its one newest token."""

    token_ids: list[int]
    position: int  # of the first of them in the sequence
    block_table: list[int]  # KV blocks of the sequence from its start; may reach further


@dataclass(slots=True)
class EditColumns:
    """Changes of single logits: (logit + bias), its size times or over factor, less minus.

    Arrays, so that a step's can be joined and sent without a loop over tokens.
    """

    token_id: array[int] = field(default_factory=lambda: array("q"))
    bias: array[float] = field(default_factory=lambda: array("f"))  # logit_bias
    factor: array[float] = field(default_factory=lambda: array("f"))  # repetition_penalty
    minus: array[float] = field(default_factory=lambda: array("f"))  # frequency and presence

    def add(self, token_id: int) -> None:
        """Append an entry that changes nothing."""
        self.token_id.append(token_id)
        self.bias.append(0.0)
        self.factor.append(1.0)
        self.minus.append(0.0)

    def extend(self, other: EditColumns) -> None:
        """Append all entries of another."""
        self.token_id.extend(other.token_id)
        self.bias.extend(other.bias)
        self.factor.extend(other.factor)
        self.minus.extend(other.minus)


INVERTED = bytes(range(255, -1, -1))
MAX_FEW = 256  # allowed tokens, whose ids are listed


@dataclass(slots=True, frozen=True)
class Mask:
    """The tokens that may be drawn next."""

    # Bit i % 8 of byte i // 8 is of token i; the last bit is of all ids behind, too. Words of 64.
    bits: bytes
    few: tuple[int, ...] | None  # the ids in order where they are at most MAX_FEW, else None


def make_mask(bits: bytes) -> Mask:
    """Return the mask of these bits, which fill words of 64."""
    assert bits and len(bits) % 8 == 0, "a mask is whole words of 64 bits"
    if bits[-1] > 127 or int.from_bytes(bits, "little").bit_count() > MAX_FEW:
        return Mask(bits, None)
    import numpy as np  # not needed to start

    is_allowed = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").view(np.bool_)
    return Mask(bits, tuple(np.flatnonzero(is_allowed).tolist()))


def pack_ids(ids: Iterable[int], num_bytes: int) -> bytes:
    """Return the bits of these tokens, as a mask has them."""
    bits = bytearray(num_bytes)
    for token_id in ids:
        bits[token_id >> 3] |= 1 << (token_id & 7)
    return bytes(bits)


def invert(bits: bytes) -> bytes:
    """Return the bits of all other tokens."""
    return bits.translate(INVERTED)


@dataclass(slots=True)
class SamplingRows:
    """Columns, one entry a token to draw."""

    token_index: list[int] = field(default_factory=list)  # packed token whose logits are used
    temperature: list[float] = field(default_factory=list)  # 0: greedy
    top_p: list[float] = field(default_factory=list)
    top_k: list[int] = field(default_factory=list)  # 0: off
    min_p: list[float] = field(default_factory=list)
    noise: list[int] = field(default_factory=list)  # 64 random bits, signed; 0: greedy
    edits: EditColumns = field(default_factory=EditColumns)  # of all rows, row after row
    num_edits: list[int] = field(default_factory=list)
    banned_ids: list[int] = field(default_factory=list)  # of all rows, row after row
    num_banned: list[int] = field(default_factory=list)
    num_top_logprobs: int = 0  # the most any row asks for
    masks: list[Mask] = field(default_factory=list)  # each once; none: all rows may draw all
    mask_of: list[int] = field(default_factory=list)  # the place of each row's; -1: it has none


@dataclass(slots=True)
class ScoringRows:
    """Columns, one entry a prompt token whose logprob is wanted."""

    token_index: list[int] = field(default_factory=list)  # packed token before the scored one
    target_id: list[int] = field(default_factory=list)
    num_top_logprobs: int = 0


@dataclass(slots=True)
class Step:
    """One pass of a micro-batch through the pipeline. Tokens are packed row after row."""

    step_id: int
    rows: list[StepRow]
    block_copies: list[tuple[int, int]]  # (from, to), done before anything else
    sampling: SamplingRows
    scoring: ScoringRows

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)

    @property
    def wanted(self) -> list[int]:
        """The packed tokens whose logits someone wants, in order."""
        return sorted({*self.sampling.token_index, *self.scoring.token_index})


@dataclass(slots=True)
class TokenLogprobs:
    """Columns, one entry a token: the token, its logprob, and the best alternatives."""

    ids: list[int]
    logprobs: list[float]  # nan where the logits were
    top_ids: list[list[int]]  # best first, num_top_logprobs each
    top_logprobs: list[list[float]]


@dataclass(slots=True, frozen=True)
class StageSpan:
    """When one stage worked on a step, and what it then sent on."""

    start_s: float  # time.time() of its machine
    end_s: float
    sent_bytes: int = 0
    max_tokens: int = 0  # that the stage computes at once since memory ran out; 0: it has not
    earlier_s: float = 0.0  # what earlier steps took beyond their own spans, on a GPU


@dataclass(slots=True)
class StepResult:
    """What the last stage found, in the order of the step's sampling and scoring rows."""

    step_id: int
    sampled: TokenLogprobs
    scored: TokenLogprobs
    spans: list[StageSpan]  # one a stage


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
