"""How long a run still takes, told from its own steps and from the rows that are left."""

from __future__ import annotations

from typing import Protocol

from fminfer.batch.rows_left import WorkLeft, work_left
from fminfer.engine.engine_core import Facts
from fminfer.engine.stats import EngineStats, RunningRows

Costs = tuple[float, float, float]

# A step takes about as long as so many tokens of it: its weights are read, its kernels started.
# The CPU's figure is that of llamas of 12 × 768. The GPU's is assumed.
STEP_TOKENS = {"cpu": 40.0, "cuda": 300.0}
# How firm the usual costs are, as about so many steps would make them.
FIRM_STEP, FIRM_PROMPT, FIRM_DRAW = 10.0, 1.0, 20.0


class StepCosts:
    """Costs that are learned from the steps of a run so far.

    Args:
        device_type: cpu or cuda.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        self._step_tokens = STEP_TOKENS[device_type]
        self._is_warm = False
        self._elapsed_s = 0.0
        self._num_units = 0.0  # what the usual costs count
        self._products = [[0.0] * 3 for _ in range(3)]
        self._targets = [0.0] * 3

    def add(self, seconds: float, num_reads: float, num_fed: float, num_drawn: float) -> None:
        """Take note of steps, all together.

        Args:
            num_reads: of steps, and of as many bytes of KV cache as a step takes to read.
        """
        counts = (num_reads, num_fed, num_drawn)
        units = self._step_tokens * num_reads + num_fed + num_drawn
        if not units:
            return
        if not self._is_warm:  # the first step waited for the first lines, and for memory
            self._is_warm = True
            return
        self._elapsed_s += seconds
        self._num_units += units
        # With these weights the fitted total is the measured one.
        for row, count in zip(self._products, counts, strict=True):
            for place, other in enumerate(counts):
                row[place] += count * other / units
        for place, count in enumerate(counts):
            self._targets[place] += count * seconds / units

    def fit(self) -> Costs | None:
        """Return the seconds of a step, of a prompt token and of a drawn one; None: not known."""
        if not self._num_units or self._elapsed_s <= 0:
            return None
        usual = self._elapsed_s / self._num_units
        start = (usual * self._step_tokens, usual, usual)
        matrix = [[*row] for row in self._products]
        rest = [
            target - sum(a * b for a, b in zip(row, start, strict=True))
            for row, target in zip(matrix, self._targets, strict=True)
        ]
        # A drawn token takes about as long as a prompt token beside it.
        matrix[0][0] += FIRM_STEP / self._step_tokens**2
        matrix[1][1] += FIRM_PROMPT + FIRM_DRAW
        matrix[2][2] += FIRM_DRAW
        matrix[1][2] -= FIRM_DRAW
        matrix[2][1] -= FIRM_DRAW
        change = _solve(matrix, rest)
        step, prompt, draw = (max(0.0, a + b) for a, b in zip(start, change, strict=True))
        return self._scaled(step, prompt, draw)

    def _scaled(self, step: float, prompt: float, draw: float) -> Costs:
        """Return costs with which the steps so far take as long as they did."""
        # So many of the first equation and one of each other are the sum over all steps.
        weights = (self._step_tokens, 1.0, 1.0)
        costs = (step, prompt, draw)
        fitted = sum(
            weight * sum(a * b for a, b in zip(row, costs, strict=True))
            for weight, row in zip(weights, self._products, strict=True)
        )
        scale = self._elapsed_s / fitted if fitted > 0 else 1.0
        return step * scale, prompt * scale, draw * scale


def _solve(matrix: list[list[float]], targets: list[float]) -> list[float]:
    """Solve three equations, which are positive definite, in place."""
    for place in range(3):
        for below in range(place + 1, 3):
            times = matrix[below][place] / matrix[place][place]
            for column in range(place, 3):
                matrix[below][column] -= times * matrix[place][column]
            targets[below] -= times * targets[place]
    found = [0.0] * 3
    for place in (2, 1, 0):
        known = sum(matrix[place][column] * found[column] for column in range(place + 1, 3))
        found[place] = (targets[place] - known) / matrix[place][place]
    return found


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
