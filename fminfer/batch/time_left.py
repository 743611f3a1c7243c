"""How long a run still takes, told from its own steps and from the rows that are left."""

from __future__ import annotations

from typing import Protocol

from fminfer.batch.rows_left import WorkLeft, work_left
from fminfer.batch.step_costs import StepCosts
from fminfer.engine.facts import Facts
from fminfer.engine.stats import EngineStats, RunningRows

# A step of few tokens takes as long as reading the weights half as often again: measured on CPUs
# with a llama of 12 × 768. A GPU is assumed to start a step's kernels in the time of so many bytes.
WEIGHTS_READ, STEP_BYTES = 1.5, 20e9


class Answering(Protocol):
    """An engine, as far as it is looked at."""

    @property
    def stats(self) -> EngineStats: ...

    @property
    def running_rows(self) -> RunningRows: ...


class TimeLeft:
    """Learns what steps take, and tells how long those that are left take.

    Args:
        device_type: cpu or cuda.
        num_ranks: processes that compute; a row draws once while each of them makes a step.
        key_share: the time to read a token's KV cache, as a share of a step's.
    """

    def __init__(
        self, device_type: str = "cpu", num_ranks: int = 1, key_share: float = 0.0
    ) -> None:
        self._costs = StepCosts(device_type)
        self._num_ranks = num_ranks
        self._key_share = key_share
        self._num_reads = 0.0
        self._most_fed = 1

    @classmethod
    def of(cls, facts: Facts, num_ranks: int) -> TimeLeft:
        """Return one for an engine of which nothing is known yet but its sizes."""
        device_type = facts.device.partition(":")[0]
        step_bytes = STEP_BYTES if device_type == "cuda" else 0.0
        step_bytes = max(1.0, step_bytes, WEIGHTS_READ * facts.weight_bytes)
        return cls(device_type, num_ranks, facts.kv_bytes_per_token / step_bytes)

    def add(self, seconds: float, stats: EngineStats, num_fed: int, num_drawn: int) -> None:
        """Take note of steps that have just ended, and are counted in the statistics."""
        num_reads = stats.num_steps + self._key_share * stats.num_keys
        self._costs.add(seconds, num_reads - self._num_reads, num_fed, num_drawn)
        self._num_reads = num_reads
        self._most_fed = max(self._most_fed, num_fed)

    def running_s(self, running: RunningRows) -> float | None:
        """Estimate how long running rows take to end; None: none runs, or it is not known yet."""
        num_draws = sum(running.num_left)
        return self._seconds(WorkLeft(max(running.num_left), 0, num_draws)) if num_draws else None

    def all_s(self, engine: Answering, total_rows: int) -> float | None:
        """Estimate how long all rows take that are left; None: it is not known yet."""
        stats = engine.stats
        if not stats.read.num_rows:
            return None
        return self._seconds(work_left(stats, engine.running_rows, total_rows, self._most_fed))

    def is_most(self, engine: Answering, total_rows: int) -> bool:
        """Whether rows may take far less: all were read, and none has ended."""
        read = engine.stats.read
        return read.num_rows >= total_rows and sum(read.ends.num_open) == sum(read.ends.num_read)

    def _seconds(self, work: WorkLeft) -> float | None:
        costs = self._costs.fit()
        if costs is None:
            return None
        step_s, fed_s, drawn_s = costs
        num_reads = work.num_steps * self._num_ranks + self._key_share * work.num_keys
        return step_s * num_reads + fed_s * work.num_fed + drawn_s * work.num_drawn
