"""Runs the engine's own loop over a pipeline that only pretends to compute: counts of steps."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import replace

import numpy as np

from fminfer.compute.values.step import BlockTables, Step, StepResult, TokenLogprobs
from fminfer.engine.sequence import PreparedRequest, RequestState
from fminfer.engine.start import RequestStarter
from fminfer.estimate.cost_model import (
    IS_SPREAD,
    PROMPTS,
    ROWS,
    Counts,
    StepWork,
    no_counts,
)
from fminfer.plan.pass_time import StepLoad
from fminfer.text.detokenizer import Detokenizer

DRAWN_ID = 0  # any


def num_rows_of(counts: Counts) -> float:
    """Return the rows of one token in some steps."""
    return float(counts[ROWS].sum())


def num_tokens_of(counts: Counts) -> float:
    """Return the tokens that some steps compute."""
    return num_rows_of(counts) + float(counts[PROMPTS].sum())


def average_of(counts: Counts) -> StepLoad:
    """Return the average of some steps."""
    each = counts / counts[0]
    keys = each[3] + each[8], each[4] + each[8]
    return StepLoad(num_tokens_of(each), num_rows_of(each), keys[1], keys[0], each[10])


class PretendPipeline:
    """What the engine sees of a pipeline: every row draws the same token. It counts steps."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._tables = BlockTables()
        self._steps: deque[Step] = deque()
        self.num_in_flight = 0
        # The steps up to the last one that feeds several tokens of a row, grouped by
        # their tokens.
        self.kinds: dict[int, Counts] = defaultdict(no_counts)
        self.rest = no_counts()  # those after it, in which rows end and none comes
        # the KV blocks that were ever written, which are the first ones
        self.num_blocks_used = 0

    def submit(self, step: Step) -> None:
        """Take note of a step."""
        self._steps.append(step)
        self.num_in_flight += 1
        counts = StepWork.of(step).counts
        if counts[PROMPTS].any():
            # steps since the last prompt, and this one
            for part in (self.rest, counts):
                self.kinds[int(num_tokens_of(part) / max(1, part[0])).bit_length()] += (
                    part
                )
            self.rest = no_counts()
        else:
            self.rest += counts
        if step.has_whole_prompts:
            return
        rows = [self._tables.update(step)]
        if step.encoder_output_lengths.any():
            rows.append(self._tables.make_cross_rows(step, 0, step.num_tokens))
        last = max(int(each.key_places(self._block_size).max()) for each in rows)
        self.num_blocks_used = max(self.num_blocks_used, last // self._block_size + 1)

    def collect(self) -> StepResult:
        """Return the oldest step's result."""
        step = self._steps.popleft()
        self.num_in_flight -= 1
        if step.has_whole_prompts:  # of vectors of one number, or of a byte a token
            return StepResult(
                step.step_id, {"vectors": np.zeros((step.num_tokens, 4), np.uint8)}, []
            )
        drawn, scored = map(TokenLogprobs.empty, (len(step.draws), len(step.scores)))
        for tokens in (drawn, scored):
            tokens.ids[:] = DRAWN_ID
            tokens.logprobs[:] = 0.0
        return StepResult(step.step_id, {"tokens": drawn, "prompt scores": scored}, [])

    def drop_steps(self) -> None:
        """Forget the steps in flight."""
        self._steps.clear()
        self.num_in_flight = 0

    def scaled(self, scale: float, most_rows: int) -> Counts:
        """Return the steps of a file so many times as long, of which these lines are
        the beginning.

        Once only do the last rows end without others that take their places. All other
        times what the rest draws is drawn in steps of as many rows as ever ran here.
        """
        return sum(self.parts(scale, most_rows), no_counts())

    def parts(self, scale: float, most_rows: int) -> list[Counts]:
        """Return the same steps, grouped by about how many tokens they have."""
        parts = [each * scale for each in self.kinds.values()] + [self.rest]
        # the same rows in steps of most, without prompts
        if num_rows := num_rows_of(self.rest):
            step = StepWork(0, 0, 0, most_rows, 0, most_rows, 0).counts
            more = np.where(IS_SPREAD, self.rest, step * (num_rows / most_rows))
            parts.append((scale - 1) * more)
        return [each for each in parts if each[0]]


class _Silent(Detokenizer):
    """Detokenizes nothing: no text is looked at."""

    num_open = 0

    def __init__(self) -> None:
        self.starts = [0]  # the newest token's

    def add(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class LongestRows(RequestStarter):
    """Starts requests so that nothing but max_tokens ends them."""

    def start_request(self, request_id: int, prepared: PreparedRequest) -> RequestState:
        most = prepared.params.max_tokens
        params = replace(prepared.params, min_tokens=most, constraint=None)
        state = super().start_request(request_id, replace(prepared, params=params))
        for prompt in state.prompts:
            prompt.end_ids = frozenset()
            prompt.bans = None
            for sequence in prompt.sequences:
                sequence.detokenizer = sequence.detokenizer and _Silent()
        return state
