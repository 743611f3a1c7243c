"""How long a run still takes: the rate of its last minute, the tokens left, the longest row."""

from __future__ import annotations

import math
from collections import deque

from fminfer.engine.stats import EngineStats, Observed

# A step takes as long as so many of its tokens: its weights are read, its kernels started.
# The CPU's figure is that of llamas of 12 × 768. The others are assumed. "streamed": some layers
# are (--offload).
STEP_TOKENS = {"cpu": 40.0, "cuda": 300.0, "streamed": 500.0}
MINUTE_S, MARK_EVERY_S = 60.0, 1.0


class TimeLeft:
    """Learns the rate of the last minute, and tells how long what is left takes.

    Args:
        kind: of the device, cpu or cuda; or "streamed".
        num_stages: of all pipelines; a row draws once while each of them makes a step.
    """

    def __init__(self, kind: str = "cpu", num_stages: int = 1) -> None:
        self._step_tokens, self._num_stages = STEP_TOKENS[kind], num_stages
        self._is_warm = False
        self._elapsed_s = self._num_units = 0.0
        self._most_fed = 1.0
        self._num_steps = 0
        self._marks: deque[tuple[float, float]] = deque([(0.0, 0.0)])

    def add(self, seconds: float, stats: EngineStats, num_fed: int, num_drawn: int) -> None:
        """Take note of steps that have just ended, and are counted in the statistics."""
        num_steps, self._num_steps = stats.num_steps - self._num_steps, stats.num_steps
        self._most_fed = max(self._most_fed, num_fed / max(1, num_steps))
        units = num_fed + num_drawn + self._step_tokens * num_steps
        if not self._is_warm:  # the first step waited for the first lines, and for memory
            self._is_warm = units > 0
            return
        self._elapsed_s += seconds
        self._num_units += units
        if self._elapsed_s - self._marks[-1][0] >= MARK_EVERY_S:
            self._marks.append((self._elapsed_s, self._num_units))
        while len(self._marks) > 1 and self._elapsed_s - self._marks[1][0] >= MINUTE_S:
            self._marks.popleft()

    def running_s(self, engine: Observed) -> float | None:
        """Estimate how long running rows take at most; None: none runs, or it is not known yet."""
        state = engine.state
        num_turns = state.longest_row
        num_tokens = num_turns * state.num_running
        return self._seconds(num_turns * self._num_stages, num_tokens) if num_tokens else None

    def all_s(self, engine: Observed, total_rows: int) -> float | None:
        """Estimate how long all rows take that are left; None: it is not known yet."""
        stats, read = engine.stats, engine.stats.read
        if not read.num_rows:
            return None
        times = max(1.0, total_rows / read.num_rows)  # unread rows are like those read
        num_fed = stats.num_prompt_tokens - stats.num_again_tokens
        num_met = num_fed + stats.num_cached_tokens
        fed_left = max(0.0, read.num_tokens * times - num_met) * num_fed / max(1, num_met)
        num_open = max(1.0, read.num_sequences * times - stats.num_ended)
        most_drawn = read.max_draws * times - stats.num_generated_tokens - stats.num_undrawn
        stops = stats.num_stopped / max(1, stats.num_generated_tokens)
        drawn_left = num_open * _expected(max(0.0, most_drawn) / num_open, stops)
        num_places = max(1, stats.max_rows_running)
        # The longest of rows that may stop at any draw is so many times the usual one.
        times_usual = 1 + math.log(min(num_open, num_places))
        longest_row = engine.state.longest_row
        usual, longest = _expected(longest_row, stops), _expected(longest_row, stops / times_usual)
        num_turns = max(longest, drawn_left / num_places + longest - usual)
        num_steps = num_turns * self._num_stages + fed_left / self._most_fed
        return self._seconds(num_steps, fed_left + drawn_left)

    def is_most(self, engine: Observed, total_rows: int) -> bool:
        """Whether rows may take far less: all were read, and none has ended."""
        return engine.stats.read.num_rows >= total_rows and not engine.stats.num_ended

    def _seconds(self, num_steps: float, num_tokens: float) -> float | None:
        first_s, first = self._marks[0]
        seconds, units = self._elapsed_s - first_s, self._num_units - first
        if not units or seconds <= 0:
            return None
        return (self._step_tokens * num_steps + num_tokens) * seconds / units


def _expected(most: float, stops: float) -> float:
    """Return the draws of a row that may draw so many, if each ends it with a probability."""
    return -math.expm1(-most * stops) / stops if stops else most
