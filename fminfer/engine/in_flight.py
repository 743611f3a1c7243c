"""The steps in flight, and the sequences to which their results belong."""

from __future__ import annotations

from collections import deque

from fminfer.engine.packing import PlannedStep
from fminfer.engine.sequence import Sequence


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
            sequence in planned.sequences or sequence.prompt in planned.scored_prompts
            for planned in self._steps
        )
