"""Runs the engine's own loop over a pipeline that only pretends to compute, and counts its steps.

Steps come out as in a run in which every row draws all of its max_tokens. It knows no weights and
no seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from fminfer.compute.step import BlockTables, Step, StepResult, TokenLogprobs
from fminfer.contract.line import Line
from fminfer.core.config import StepSizes
from fminfer.engine.answer import AnswerForm
from fminfer.engine.intake import Intake, RequestLimits
from fminfer.engine.sequence import Prepared, RequestState
from fminfer.engine.start import Starter
from fminfer.engine.stats import EngineStats
from fminfer.estimate.cost_model import COSTS, SPREAD_COSTS, StepWork
from fminfer.plan.pass_time import StepLoad
from fminfer.runtime.build.assembly import build_loop
from fminfer.runtime.lines.asked import RecordForm
from fminfer.runtime.lines.line_intake import LineIntake
from fminfer.runtime.lines.runner import LineRunner
from fminfer.text.detokenizer import Detokenizer
from fminfer.text.tokenizer import Tokenizer

DRAWN_ID = 0  # any


@dataclass(slots=True)
class StepCounts:
    """What several steps are, together."""

    num_steps: float = 0
    num_rows: float = 0  # of one token
    costs: list[float] = field(default_factory=lambda: [0.0] * len(COSTS))  # how often each

    @classmethod
    def of(cls, shape: StepWork) -> StepCounts:
        """Count one step."""
        return cls(1, shape.num_rows, [*shape.counts])

    @property
    def num_tokens(self) -> float:
        """Tokens that these steps compute."""
        return self.num_rows + self.costs[1] + self.costs[2]

    @property
    def average(self) -> StepLoad:
        """The average of these steps."""
        num, costs = self.num_steps, [each / self.num_steps for each in self.costs]
        num_tokens, num_rows = self.num_tokens / num, self.num_rows / num
        return StepLoad(num_tokens, num_rows, costs[4] + costs[8], costs[3] + costs[8], costs[10])

    def add(self, other: StepCounts, times: float = 1.0) -> None:
        """Add other steps, so many times."""
        self.num_steps += other.num_steps * times
        self.num_rows += other.num_rows * times
        for place, count in enumerate(other.costs):
            self.costs[place] += count * times

    def in_steps_of(self, num_rows: int) -> StepCounts:
        """Return the same rows of one token in steps of so many, without prompts."""
        step = StepCounts.of(StepWork(0, 0, 0, num_rows, 0, num_rows, 0))
        full = StepCounts()
        full.add(step, self.num_rows / num_rows)
        for place, cost in enumerate(COSTS):
            if cost in SPREAD_COSTS:
                full.costs[place] = self.costs[place]
        return full


class PretendPipeline:
    """What the engine sees of a pipeline: every row draws the same token, at once.

    Args:
        block_size: tokens a KV block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size, self._tables = block_size, BlockTables()
        self._steps: deque[Step] = deque()
        self.num_in_flight = 0
        # The steps up to the last one that feeds several tokens of a row, grouped by their tokens.
        self.kinds: dict[int, StepCounts] = {}
        self.rest = StepCounts()  # those after it, in which rows end and none comes
        self.num_blocks_used = 0  # the KV blocks that were ever written, which are the first ones

    def submit(self, step: Step) -> None:
        """Take note of a step."""
        self._steps.append(step)
        self.num_in_flight += 1
        shape = StepWork.of(step)
        counts = StepCounts.of(shape)
        if shape.num_prompt_tokens:
            for part in (self.rest, counts):  # steps since the last prompt, and this one
                kind = int(part.num_tokens / max(1, part.num_steps)).bit_length()
                self.kinds.setdefault(kind, StepCounts()).add(part)
            self.rest = StepCounts()
        else:
            self.rest.add(counts)
        if step.is_whole:
            return
        rows = [self._tables.take(step)]
        if step.memory_lengths.any():
            rows.append(self._tables.cross(step, 0, step.num_tokens))
        last = max(int(each.slots(self._block_size).max()) for each in rows)
        self.num_blocks_used = max(self.num_blocks_used, last // self._block_size + 1)

    def collect(self) -> StepResult:
        """Return the oldest step's result."""
        step = self._steps.popleft()
        self.num_in_flight -= 1
        drawn, scored = map(TokenLogprobs.empty, (len(step.draws), len(step.scores)))
        for found in (drawn, scored):
            found.ids[:], found.logprobs[:] = DRAWN_ID, 0.0
        if step.is_whole:  # of vectors of one number, or of a byte a token
            return StepResult(
                step.step_id, {"vectors": np.zeros((step.num_tokens, 4), np.uint8)}, []
            )
        return StepResult(step.step_id, {"tokens": drawn, "prompt scores": scored}, [])

    def drop(self) -> None:
        """Forget the steps in flight."""
        self._steps.clear()
        self.num_in_flight = 0


class _Silent(Detokenizer):
    """Detokenizes nothing: no text is looked at."""

    num_open = 0

    def __init__(self) -> None:
        self.starts = [0]  # the newest token's

    def add(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class _LongestRows(Starter):
    """Starts requests so that nothing but max_tokens ends them."""

    def start(self, request_id: int, prepared: Prepared) -> RequestState:
        most = prepared.params.max_tokens
        params = replace(prepared.params, min_tokens=most, constraint=None)
        state = super().start(request_id, replace(prepared, params=params))
        for prompt in state.prompts:
            prompt.end_ids, prompt.bans = frozenset(), None
            for sequence in prompt.sequences:
                sequence.detokenizer = sequence.detokenizer and _Silent()
        return state


@dataclass(slots=True, frozen=True)
class Simulation:
    """What the engine did."""

    kinds: list[StepCounts]  # the steps up to the last one that feeds several tokens of a row
    rest: StepCounts  # those after it
    num_blocks_used: int
    stats: EngineStats

    def scaled(self, scale: float) -> StepCounts:
        """Return the steps of a file so many times as long, of which these lines are the beginning.

        Once only do the last rows end without others that take their places. All other times what
        the rest draws is drawn in steps of as many rows as ever ran here.
        """
        steps = StepCounts()
        for part in self.parts(scale):
            steps.add(part)
        return steps

    def parts(self, scale: float) -> list[StepCounts]:
        """Return the same steps, grouped by about how many tokens they have."""
        parts = [(each, scale) for each in self.kinds] + [(self.rest, 1.0)]
        if self.rest.num_rows:
            parts.append((self.rest.in_steps_of(self.stats.max_rows_running), scale - 1))
        found = [StepCounts() for _ in parts]
        for total, (each, times) in zip(found, parts, strict=True):
            total.add(each, times)
        return [each for each in found if each.num_steps]


def simulate(
    lines: Iterator[Line],
    tokenizer: Tokenizer,
    limits: RequestLimits,
    *,
    sizes: StepSizes,
    num_blocks: int,
    num_stages: int,
    read_ahead: int,
    is_only_run: bool,
    has_memories: bool = False,
) -> Simulation:
    """Answer lines without a model.

    Args:
        num_blocks: the size of the KV cache.
        num_stages: of the pipeline.
        read_ahead: prompts that a run reads before there is room for them.
        is_only_run: the lines are all that the engine answers.
        has_memories: a decoder attends to what an encoder has read.
    """
    config, pipeline = limits.config, PretendPipeline(limits.config.block_size)
    loop = build_loop(
        config,
        _LongestRows(tokenizer, limits.eos_ids, config.seed),
        pipeline,
        AnswerForm(tokenizer, config.token_format),
        sizes=sizes,
        num_blocks=num_blocks,
        num_stages=num_stages,
        has_memories=has_memories,
    )
    runner = LineRunner(
        loop,
        LineIntake(Intake(tokenizer, limits)),
        RecordForm("", 0),
        engine=loop,
        read_ahead=read_ahead,
        has_long_steps=sizes.micro_batches > 0,
        joins_equal=config.prefix_cache,
        is_only_run=is_only_run,
    )
    for record in runner.run(lines):
        assert record.error is None, record.error
    kinds = [*pipeline.kinds.values()]
    return Simulation(kinds, pipeline.rest, pipeline.num_blocks_used, loop.stats)
