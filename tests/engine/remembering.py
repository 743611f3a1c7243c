"""A model without weights: its KV cache holds what it was given, its outputs hash what they see.

So a block that is wrong, stale, given away too early or not yet written shows in an answer. What
it draws and scores depends on nothing else, and `ModelAlone` says it without a cache.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fminfer.compute.values.step import (
    BlockTables,
    Results,
    Step,
    StepResult,
    TokenLogprobs,
    unpack_masks,
)
from fminfer.contract.field_table import COLUMNS
from fminfer.core.messages import Mask, StageSpan
from fminfer.machine.out_of_memory import SizeLimit
from tests.steps import Row, StepReader, make_logprobs

VOCAB = 256
NAN = -(2**62) - 7  # in place of a hash: what was computed is not a number
MEMORY_BYTES = 8  # of what an encoder gives for a token
# (token, bias, factor, minus), by token
Edits = tuple[tuple[int, float, float, float], ...]
NO_SPAN = StageSpan(0.0, 0.0)


def hash_of(view: tuple[int, ...], memory: tuple[int, ...] = ()) -> int:
    """Return what a stage gives for a token that sees these values, and a prompt's memory."""
    if NAN in view or NAN in memory:
        return NAN
    return hash((view, memory)) if memory else hash(view)


def logprob_of(seen: int, token_id: int) -> float:
    """Return that of a token behind what the last stage gave; float32 has it exactly."""
    return float("nan") if seen == NAN else -1 - hash((seen, token_id)) % 1000 / 128


def top_of(seen: int, count: int, vocab: int) -> list[tuple[int, float]]:
    """Return alternatives, which have nothing to do with the token that is drawn."""
    return [
        ((seen + place) % vocab, float(np.float32(-place / 1000 - seen % 7)))
        for place in range(count)
    ]


def draw_of(
    seen: int,
    noise: int,
    columns: tuple[float, ...],
    edits: Edits,
    allows: Callable[[int], bool],
    vocab: int,
) -> int:
    """Return the token that is drawn: a hash of all that may change it, then the next
    allowed."""
    if seen == NAN:
        return 0
    place = hash((seen, noise, columns, edits)) if noise or edits else seen
    return next(token for i in range(vocab) if allows(token := (place + i) % vocab))


def encode_prompt(given: Sequence[int]) -> list[int]:
    """Return what an encoder's stage gives for the tokens of a prompt, which see each other."""
    seen = hash_of(tuple(given))
    return [NAN if seen == NAN else hash((seen, place)) for place in range(len(given))]


def vector_of(hidden: Sequence[int]) -> np.ndarray:
    """Return a prompt's vector, (2,) float32."""
    seen = hash_of(tuple(hidden))
    if seen == NAN:
        return np.full(2, np.nan, np.float32)
    return np.array([seen % 1009, seen % 10007], np.float32)


class ModelAlone:
    """What the model gives for one sequence, token by token."""

    def __init__(self, num_stages: int, memory: tuple[int, ...] = ()) -> None:
        self._given: list[list[int]] = [[] for _ in range(num_stages)]
        self._memory = memory

    def feed(self, token_id: int) -> int:
        value = token_id
        for given in self._given:
            given.append(value)
            value = hash_of(tuple(given), self._memory)
        return value


def has_bit(mask: Mask, token_id: int) -> bool:
    if mask.few is not None:
        return token_id in mask.few
    last = 8 * len(mask.bits) - 1
    place = min(token_id, last)
    return bool(mask.bits[place >> 3] >> (place & 7) & 1)


class RememberingStage:
    """A stage of that model, as a pipeline's ranks have it.

    Args:
        may_spoil: asked for each token of a step; True: what is computed of it is nan.
        has_memory: asked whether so many tokens can be computed at once.
        nan_id: a token that is always nan.
    """

    def __init__(
        self,
        block_size: int,
        *,
        is_first: bool = True,
        is_last: bool = True,
        is_pooled: bool = False,
        vocab: int = VOCAB,
        may_spoil: Callable[[], bool] = lambda: False,
        has_memory: Callable[[int], bool] = lambda size: True,
        nan_id: int = -1,
    ) -> None:
        self.block_size = block_size
        self.cache: dict[tuple[int, int], int] = {}  # (block, place) -> what was given
        self.clock: Any = self  # a stage's clock, which measures nothing
        self._is_first = is_first
        self._is_last = is_last
        self._is_pooled = is_pooled
        self._vocab = vocab
        self._may_spoil = may_spoil
        self._has_memory = has_memory
        self._nan_id = nan_id
        self._reader = StepReader()
        self._tables = BlockTables()
        self._limit = SizeLimit("tokens")

    def start(self) -> None:
        """Begin a step."""

    def stop(self, **told: Any) -> StageSpan:
        return NO_SPAN

    @property
    def max_tokens(self) -> int:
        return self._limit.most if self._limit.most < sys.maxsize else 0

    def forward(self, step: Step, hidden: torch.Tensor | None) -> torch.Tensor:
        assert (hidden is None) == self._is_first
        given = step.token_ids.tolist() if hidden is None else hidden[:, 0].tolist()
        if hidden is None:
            given = [NAN if value == self._nan_id else value for value in given]
        given = [NAN if self._may_spoil() else value for value in given]
        if step.has_whole_prompts:
            return _column(self._encode(step, given))
        self._copy(step)
        rows = self._reader.rows(step)
        slots = self._tables.update(step).key_places(self.block_size)
        places = [divmod(slot, self.block_size) for slot in slots.tolist()]
        assert places == [
            (row.block_table[i // self.block_size], i % self.block_size)
            for row in rows
            for i in range(row.position, row.position + len(row.token_ids))
        ]
        memories = self._memories(step)

        def compute(first: int, last: int) -> list[int]:
            self.cache.update(zip(places[first:last], given[first:last], strict=True))
            if not self._has_memory(last - first):
                raise MemoryError("no memory for that much at once")
            return self._views(rows, memories, first, last)

        parts = self._limit.run(step.num_tokens, compute)
        seen = _column([value for part in parts for value in part])
        return seen[torch.from_numpy(step.wanted)] if self._is_last else seen

    def finish(self, step: Step, hidden: torch.Tensor) -> Results:
        seen = hidden[:, 0].tolist()
        if step.has_whole_prompts:
            return {"vectors": self._vectors(step, seen)}
        results: Results = {}
        wanted = {
            token: seen[place] for place, token in enumerate(step.wanted.tolist())
        }
        if len(step.draws):
            of_draws = [wanted[token] for token in step.draws["token_index"].tolist()]
            ids = self._draw(step, of_draws)
            results["tokens"] = self._report(of_draws, ids, step.draws["num_top"])
        if len(step.scores):
            of_scores = [wanted[token] for token in step.scores["token_index"].tolist()]
            ids = step.scores["target_id"].tolist()
            results["prompt scores"] = self._report(
                of_scores, ids, step.scores["num_top"]
            )
        return results

    def _copy(self, step: Step) -> None:
        copies = step.block_copies.tolist()
        targets = [target for _, target in copies]
        assert len(set(targets)) == len(targets), (
            "two copies into one block: which one wins?"
        )
        self.cache |= {
            (target, i): self.cache[source, i]
            for source, target in copies
            for i in range(self.block_size)
            if (source, i) in self.cache
        }

    def _memories(self, step: Step) -> list[tuple[int, ...]]:
        """Store the memories that a step brings; return that of each row."""
        if not len(step.cross_slots):
            return []
        brought = step.encoder_output.view(np.int64).tolist()
        memories = []
        columns = (step.cross_slots, step.cross_lengths, step.encoder_output_lengths)
        for slot, length, num_brought in zip(
            *(each.tolist() for each in columns), strict=True
        ):
            table = self._reader.table(slot)
            places = [
                (table[i // self.block_size], i % self.block_size)
                for i in range(length)
            ]
            if num_brought:
                assert num_brought == length, "a memory comes whole"
                self.cache.update(zip(places, brought[:length], strict=True))
                brought = brought[length:]
            memories.append(places)
        assert not brought
        return [tuple(self.cache[place] for place in places) for places in memories]

    def _views(
        self, rows: list[Row], memories: list[tuple[int, ...]], first: int, last: int
    ) -> list[int]:
        """Return what the tokens from `first` to `last` of a step give, all of them stored."""
        seen: list[int] = []
        start = 0
        size = self.block_size
        cache = self.cache
        for place, row in enumerate(rows):
            end = start + len(row.token_ids)
            begin = max(start, first)
            until = min(end, last)
            if begin < until:
                length = row.position + until - start
                whole = tuple(
                    cache[row.block_table[i // size], i % size] for i in range(length)
                )
                memory = memories[place] if memories else ()
                ends = range(row.position + begin - start, length)
                seen += [hash_of(whole[: each + 1], memory) for each in ends]
            start = end
        return seen

    def _encode(self, step: Step, given: list[int]) -> list[int]:
        ends = step.lengths.cumsum().tolist()
        prompts = [
            given[end - size : end]
            for end, size in zip(ends, step.lengths, strict=True)
        ]
        return [value for prompt in prompts for value in encode_prompt(prompt)]

    def _vectors(self, step: Step, hidden: list[int]) -> np.ndarray:
        if not self._is_pooled:
            return np.array(hidden, np.int64).view(np.uint8).reshape(-1, MEMORY_BYTES)
        ends = step.lengths.cumsum().tolist()
        pairs = zip(ends, step.lengths.tolist(), strict=True)
        vectors = np.array([vector_of(hidden[end - size : end]) for end, size in pairs])
        return vectors.view(np.uint8)

    def _draw(self, step: Step, seen: list[int]) -> list[int]:
        edit_columns = (
            step.edit_ids,
            step.edit_bias,
            step.edit_factor,
            step.edit_minus,
        )
        edits = [*zip(*(each.tolist() for each in edit_columns), strict=True)]
        banned = step.banned_ids.tolist()
        masks = unpack_masks(step)
        ids = []
        for draw, value in zip(step.draws, seen, strict=True):
            own = edits[: draw["num_edits"]]
            edits = edits[draw["num_edits"] :]
            held = banned[: draw["num_banned"]]
            banned = banned[draw["num_banned"] :]
            mask = masks[draw["mask"]] if draw["mask"] >= 0 else None

            def allows(
                token: int, held: list[int] = held, mask: Mask | None = mask
            ) -> bool:
                return token not in held and (mask is None or has_bit(mask, token))

            columns = tuple(float(draw[name]) for name in COLUMNS)
            noise = int(draw["noise"])
            ids.append(
                draw_of(value, noise, columns, tuple(sorted(own)), allows, self._vocab)
            )
        assert not (edits or banned), "all of these are some draw's"
        return ids

    def _report(
        self, seen: list[int], ids: list[int], num_top: np.ndarray
    ) -> TokenLogprobs:
        tops = [top_of(value, int(num_top.max()), self._vocab) for value in seen]
        return make_logprobs(
            ids,
            [*map(logprob_of, seen, ids)],
            [[token_id for token_id, _ in top] for top in tops],
            [[logprob for _, logprob in top] for top in tops],
        )


def _column(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).reshape(-1, 1)


class RememberingPipeline:
    """Stages of that model, one after another, without threads.

    Args:
        is_ready: asked when a step was sent in: whether the oldest is computed now, or later.
    """

    def __init__(
        self,
        block_size: int,
        stages: Sequence[RememberingStage] = (),
        *,
        is_ready: Callable[[], bool] = lambda: True,
    ) -> None:
        self.stages = stages or [RememberingStage(block_size)]
        self.num_in_flight = 0
        self._is_ready = is_ready
        self._steps: deque[Step] = deque()
        self._results: deque[StepResult | Exception] = deque()
        self._num_dropped = 0  # of the steps that are not computed yet, the oldest

    def submit(self, step: Step) -> None:
        self.num_in_flight += 1
        self._steps.append(step)
        while self._steps and self._is_ready():
            self._compute()

    def collect(self) -> StepResult:
        while not self._results:
            self._compute()
        self.num_in_flight -= 1
        result = self._results.popleft()
        if isinstance(result, Exception):
            raise result
        return result

    def drop_steps(self) -> None:
        """Forget the results; the steps are computed, as nobody can call them back."""
        self._results.clear()
        self._num_dropped = len(self._steps)
        self.num_in_flight = 0

    def run(self, step: Step) -> StepResult:
        """Compute one step."""
        hidden = None
        for stage in self.stages:
            hidden = stage.forward(step, hidden)
        assert hidden is not None
        results = self.stages[-1].finish(step, hidden)
        return StepResult(step.step_id, results, [NO_SPAN] * len(self.stages))

    def _compute(self) -> None:
        step = self._steps.popleft()
        try:
            result: StepResult | Exception = self.run(step)
        except Exception as error:
            result = error
        if self._num_dropped:
            self._num_dropped -= 1
        else:
            self._results.append(result)
