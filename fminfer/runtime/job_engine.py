"""What a job over files needs of what answers its lines: a model here, or servers elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from fminfer.compute.values.step import StepTrace
from fminfer.engine.stats import ObservableEngine
from fminfer.runtime.lines.runs import Runs

# What sets the pace: the device, layers that are streamed, or servers elsewhere.
Pace = Literal["cpu", "cuda", "streamed", "elsewhere"]
# Called with the prompt tokens fed, the tokens drawn and the sequences in flight.
OnWork = Callable[[int, int, int], None]
OnStep = Callable[[StepTrace], None]


@dataclass(slots=True, frozen=True)
class EngineTraits:
    """What progress, summaries and timelines depend on."""

    pace: Pace
    num_stages: int = 1  # of all pipelines
    num_ranks: int = 1  # of all stages
    num_threads: int = 0  # that compute in this process; 0: others compute, too
    gives_vectors: bool = False  # and draws no tokens


class JobEngine(ObservableEngine, Protocol):
    """What answers the lines of a job."""

    runs: Runs

    @property
    def traits(self) -> EngineTraits:
        """What it is."""

    @property
    def warnings(self) -> dict[str, int]:
        """Warnings about requests that were answered, and how often each occurred."""

    def follow(
        self, on_work: OnWork | None = None, on_step: OnStep | None = None
    ) -> None:
        """Have what is done told as it ends."""

    def stop(self, grace_s: float) -> None:
        """End the run in good order, as `Engine.stop` does."""

    def close(self) -> None:
        """End all computing."""
