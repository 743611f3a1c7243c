"""Clocks: how long a row took, and how many shared the machine.

Times are seconds of time.perf_counter.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RowClock:
    """Accounts the wall time fairly among the rows in flight: each of n is charged dt/n.

    So batch_time / batch_size adds up, over all rows, to the time during which any row ran. HELM
    divides `request_time` this way.
    """

    num_rows: int = 0
    charged_s: float = 0.0
    _last_s: float = 0.0

    def _advance(self, now_s: float) -> None:
        if self.num_rows:
            self.charged_s += (now_s - self._last_s) / self.num_rows
        self._last_s = now_s

    def start(self, now_s: float) -> RowTimes:
        """Put one more row in flight; return its times."""
        self._advance(now_s)
        self.num_rows += 1
        return RowTimes(admitted_s=now_s, charged_at_start_s=self.charged_s)

    def stop(self, row: RowTimes, now_s: float) -> None:
        """Take a row out of flight; its times are final then."""
        self._advance(now_s)
        self.num_rows -= 1
        row.finished_s = now_s
        row.share_s = self.charged_s - row.charged_at_start_s


@dataclass(slots=True)
class RowTimes:
    """The moments of one row's life, seconds on one clock."""

    admitted_s: float
    charged_at_start_s: float
    first_token_s: float | None = None
    finished_s: float = 0.0
    share_s: float = 0.0

    def to_dict(self, added_s: float) -> dict[str, float]:
        """Return seconds, as records have them.

        HELM takes runtime = batch_time, and batch_time / batch_size a row.
        """
        first_token_s = self.first_token_s
        if first_token_s is None:
            first_token_s = self.finished_s
        return {
            "batch_time": self.batch_time_s,
            "batch_size": self.batch_size,
            "queue_time": self.admitted_s - added_s,
            "prefill_time": first_token_s - self.admitted_s,
            "decode_time": self.finished_s - first_token_s,
        }

    @property
    def batch_time_s(self) -> float:
        return self.finished_s - self.admitted_s

    @property
    def batch_size(self) -> float:
        """Harmonic mean of the rows in flight during this row's life, at least 1."""
        return max(1.0, self.batch_time_s / self.share_s) if self.share_s > 0 else 1.0
