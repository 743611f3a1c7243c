"""How many requests a server gets at a time: as many as bring the most answers a second.

It climbs. It measures the rate of answers at one number of requests, tries another number,
and stays where the rate is better:

    4 → 8 → 16 → 32 → 64        doubled while each brings a tenth more
                      32        the last one did not: back
                      40, 26 …  up and down by smaller steps, with pauses between

Only rates that follow each other are compared. So a server that becomes slower is measured
anew, and no old record binds it.
"""

from __future__ import annotations

FIRST_LIMIT = 4
# as far as it grows while a server's first answers are under way
LIMIT_WITHOUT_ANSWERS = 16
# A step is the part of the limit by which a try differs.
DOUBLING = 1.0
LARGE_STEP = 0.25
LEAST_STEP = 0.06
# A try upwards, or to fewer, must bring so much of the rate before.
GAIN_OF_DOUBLING = 1.1
GAIN_OF_MORE = 1.03
GAIN_OF_FEWER = 0.99
CHANGED_RATE = 0.15  # a rate that differs so much means that the server has changed
MOST_PAUSES = 8  # measured rates between two tries
# Seconds of a measurement, at least: a rate needs many answers.
DOUBLING_S = 0.4
MEASURING_S = 1.5
MEASURED = 32  # answers, the same


class Flow:
    """One server's limit. Times are seconds on one clock, which the caller has."""

    def __init__(self, most: int, now_s: float) -> None:
        self.limit = min(FIRST_LIMIT, most)  # requests that it may have now
        self._most = most
        self._base = self.limit  # the best number so far
        self._base_rate = 0.0  # answers a second with it; 0: not measured
        self._step = DOUBLING
        self._is_upward = True  # the next try
        self._num_pauses = 0  # measurements before the next try
        self._num_failed_tries = 0  # one after another
        self._has_answers = False
        self._num_answers: int
        self._num_starved: int  # answers behind which no request waited
        self._restart(now_s)

    def count_data(self) -> None:
        """Count a request whose answer begins to come."""
        if not self._has_answers:
            most = min(LIMIT_WITHOUT_ANSWERS, self._most)
            self.limit = self._base = max(self.limit, min(most, self.limit + 1))

    def count_answer(self, now_s: float, *, is_full: bool) -> None:
        """Count an answer; `is_full`: another request waits for the room."""
        self._has_answers = True
        self._num_answers += 1
        self._num_starved += not is_full
        if self._num_answers == 0:
            self._started_s = now_s
        # Whole rounds: answers may come in bursts of as many as there are requests.
        elif self._num_answers > 0 == self._num_answers % self.limit:
            elapsed_s = now_s - self._started_s
            is_doubling = self._step == DOUBLING
            if is_doubling:
                is_enough = elapsed_s >= DOUBLING_S
            else:
                is_enough = elapsed_s >= MEASURING_S and self._num_answers >= MEASURED
            if is_enough:
                # With fewer requests than it may have, a rate says nothing.
                if self._num_starved * 20 <= self._num_answers:
                    self._judge(self._num_answers / elapsed_s)
                self._restart(now_s)

    def count_trouble(self, now_s: float) -> None:
        """Count a request that the server did not answer, while it answers others."""
        self._num_troubles += 1
        if self.limit > self._base:
            self._end_failed_try()
            # a smaller step may still be right
            self._is_upward = True
            self._restart(now_s)
        # Once a round trip, and not for the few requests that no server can answer.
        elif self._num_answers >= 0 and self._num_troubles * 20 >= self.limit:
            self.limit = self._base = max(1, int(self._base * 0.7))
            self._base_rate = 0.0
            self._step = min(self._step, LARGE_STEP)
            self._restart(now_s)

    def _restart(self, now_s: float) -> None:
        """Measure anew, once as many answers have come as there are requests."""
        self._started_s = now_s
        self._num_answers = -max(self.limit, self._base)
        self._num_troubles = 0
        self._num_starved = 0

    def _judge(self, rate: float) -> None:
        """Decide what a measured rate of the present limit means."""
        if self.limit == self._base:
            if abs(rate - self._base_rate) > CHANGED_RATE * self._base_rate > 0:
                self._step = LARGE_STEP
                self._is_upward = rate > self._base_rate
                self._num_pauses = self._num_failed_tries = 0
            self._base_rate = rate
            self._num_pauses -= 1
            if self._num_pauses < 0:
                self._try_next()
            return
        gain = GAIN_OF_MORE if self._is_upward else GAIN_OF_FEWER
        if rate < self._base_rate * (
            GAIN_OF_DOUBLING if self._step == DOUBLING else gain
        ):
            self._end_failed_try()
            return
        self._base = self.limit
        self._base_rate = rate
        self._num_failed_tries = 0
        self._step = max(self._step, min(LARGE_STEP, self._step * 2))
        self._try_next()

    def _try_next(self) -> None:
        factor = 1 + self._step
        if self._is_upward:
            self.limit = min(
                self._most, max(self._base + 1, round(self._base * factor))
            )
        else:
            self.limit = max(1, min(self._base - 1, round(self._base / factor)))
        if self.limit == self._base:  # there is nothing to try on this side
            self._end_failed_try()

    def _end_failed_try(self) -> None:
        self.limit = self._base
        self._num_failed_tries += 1
        self._num_pauses = min(MOST_PAUSES, 2 ** (self._num_failed_tries - 1))
        if self._step == DOUBLING:
            self._step = LARGE_STEP
            self._num_pauses = 0
        else:
            self._step = max(LEAST_STEP, self._step / 2)
        self._is_upward = not self._is_upward
