"""The size of a step, the number of running rows that it takes, and the steps in flight."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from fminfer.engine.packing import PlannedStep
from fminfer.engine.sequence import Sequence

# Measured on 2 CPU cores, llama of 12 × 768: 16 rows in one micro-batch took 0.62 of the time of
# two. From about 64 rows on, products set the pace, not the weights.
MIN_SHARE = 64
# About where products, not the weights, set the pace. Simulated, OPT-175B: stages of 8 A100s work
# 60 % of the time with pieces of 512, 93 % with these; of 8 H200s 61 % and 98 %.
MIXED_STEP = 128


@dataclass(slots=True, frozen=True)
class StepShape:
    """The limits of a step, and what follows from them."""

    chunk_size: int  # most tokens
    micro_batches: int  # steps in flight
    num_stages: int  # of the pipeline
    has_long_steps: bool = False  # each streams layers: prompts are not cut for others

    def max_tokens(self, num_decode_rows: int, *, is_decoding: bool) -> int:
        """Return the most tokens of a step.

        Stages wait for each other when a long step comes between short ones; so while rows decode
        in a pipeline of several, prompts come in smaller pieces (docs/pipeline.md has figures).
        """
        if self.num_stages == 1 or not is_decoding or self.has_long_steps:
            return self.chunk_size
        return min(self.chunk_size, max(MIXED_STEP, 2 * num_decode_rows))

    def num_decode_rows(self, num_ready: int, num_drawing: int, num_decoding: int) -> int:
        """Return how many of the running rows the next step takes.

        Rows are spread over one micro-batch for each stage, because every micro-batch reads all
        weights. They are spread over all micro-batches if that costs little. With several stages,
        each must then have MIN_SHARE rows. With one stage, one step must be too small for all rows.
        Rows that are left over wait for the next micro-batch that comes back.

        Args:
            num_ready: rows that could be taken.
            num_drawing: rows in steps in flight.
            num_decoding: steps in flight that have decode rows.
        """
        num_rows = num_ready + num_drawing
        enough = self.micro_batches * MIN_SHARE if self.num_stages > 1 else self.chunk_size + 1
        num_groups = self.micro_batches if num_rows >= enough else self.num_stages
        if num_decoding >= num_groups:
            return 0
        return min(num_ready, -(-num_rows // num_groups), self.chunk_size)


class StepsInFlight:
    """Steps in the order in which they were formed, which is that of their results."""

    def __init__(self) -> None:
        self._steps: deque[PlannedStep] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def drawing(self) -> list[Sequence]:
        """Sequences that draw a token in one of the steps."""
        return [sequence for planned in self._steps for sequence in planned.sequences]

    @property
    def num_drawing(self) -> int:
        return sum(len(planned.sequences) for planned in self._steps)

    @property
    def num_decoding(self) -> int:
        """Steps that have decode rows."""
        return sum(planned.num_decode_rows > 0 for planned in self._steps)

    def add(self, planned: PlannedStep) -> None:
        """Record a step that is about to be computed."""
        self._steps.append(planned)

    def collect(self, planned: PlannedStep) -> None:
        """Record that the oldest step is back."""
        oldest = self._steps.popleft()
        assert oldest is planned, "steps came back in another order"

    def has_result_for(self, sequence: Sequence) -> bool:
        """Return whether a step draws a token of a sequence, or scores its prompt."""
        return any(
            sequence in planned.sequences
            or sequence.prompt in planned.scored_prompts
            or sequence.prompt in planned.read_prompts
            for planned in self._steps
        )
