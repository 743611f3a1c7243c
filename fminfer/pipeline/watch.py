"""Notices ranks that die, fail or fall silent; every other one knows it within seconds.

Each rank beats in the store, with its peak memory. Rank 0 watches all; all watch rank 0
and one key for faults. Silence is counted in this process's own turns, so a run that
was suspended as a whole can go on.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass

from typing_extensions import Self

from fminfer.core.errors import FminferError, PipelineError, make_error
from fminfer.core.messages import MemoryPeak
from fminfer.machine.device import measure_peak_memory
from fminfer.machine.liveness import start_repeating
from fminfer.pipeline.store import Store

TURN_S = 0.5
HEAR_S = 2 * TURN_S  # time for the others to read a fault
FAULT = "fault"
PARENT_IS_GONE = (
    "rank 0, which started this rank, is gone (the system ends processes when memory "
    "runs out)"
)


@dataclass(slots=True, frozen=True)
class Fault:
    """What ends a run: reported to all its ranks."""

    text: str
    kind: str = PipelineError.__name__  # of an error

    @classmethod
    def from_error(
        cls, error: BaseException, before: str = "", after: str = ""
    ) -> Self:
        """Return the fault that an error is, with words before and after its text."""
        kind = error.kind if isinstance(error, FminferError) else PipelineError.__name__
        return cls(f"{before}{error}{after}", kind)

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Parse the fault that another rank has reported."""
        fields = json.loads(data)
        return cls(str(fields["text"]), str(fields["kind"]))

    def to_error(self) -> FminferError:
        """Return the error again."""
        return make_error(self.kind, self.text)


class Watch:
    """Watches over the ranks, on threads of its own.

    Args:
        store: a connection that nobody else uses.
        timeout_s: silence that counts as death.
        parent: process id of rank 0, if it started this rank; its death ends this one.
        on_fault: called with the fault, once; it may end the process.
        find_trouble: called in each turn; says what is wrong that no rank reports; "": nothing.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        timeout_s: float,
        parent: int | None,
        on_fault: Callable[[Fault], None],
        find_trouble: Callable[[], str] = lambda: "",
    ) -> None:
        self._store = store
        self._rank = rank
        self._parent = parent
        self._timeout_s = timeout_s
        self._max_turns = max(2, round(timeout_s / TURN_S))
        self.on_fault = on_fault
        self._find_trouble = find_trouble
        # of this rank's device, once known
        self.measure: Callable[[], MemoryPeak] = measure_peak_memory
        self._stop = threading.Event()
        self._fault_lock = threading.Lock()  # held for ever once a fault was handed on
        self._lock = threading.Lock()  # of the store's connection
        self._turns_since_answer = 0
        self._silent_turns = [0] * world_size
        self._beats = [b""] * world_size
        self._watched = range(1, world_size) if rank == 0 else range(1)
        self._num_beats = 0
        self.all_joined = threading.Event()
        self._set_beat()  # before anyone reads it
        start_repeating(TURN_S, self._run_turn, "beat", self._stop)
        start_repeating(TURN_S, self._check_rank_0, "guard", self._stop)

    def report_fault(self, fault: Fault) -> Fault:
        """Make a fault known to all ranks; return the fault that was known first."""
        if not self._lock.acquire(timeout=4 * TURN_S):
            return fault  # the store does not answer
        try:
            return self._publish_fault(fault)
        except Exception:
            return fault
        finally:
            self._lock.release()

    def announce_fault(self, fault: Fault) -> None:
        """Report a fault, and wait so long that the others know it before this rank is gone."""
        self._fault_lock.acquire(blocking=False)  # this rank knows, and says it itself
        self.report_fault(fault)
        time.sleep(HEAR_S)

    def stop(self) -> None:
        """Watch no longer; the run is over."""
        self._stop.set()

    def beat_last(self) -> None:
        """Stop, and beat a last time, with this rank's final peak of memory."""
        self.stop()
        with suppress(FminferError), self._lock:
            self._set_beat()

    def read_last_beats(self) -> None:
        """Read the last beats of ranks that have ended; on rank 0."""
        with suppress(FminferError), self._lock:
            self._beats[1:] = self._read_beats()

    def find_peaks(self) -> dict[int, MemoryPeak]:
        """Return the peaks of other ranks, as last reported; on rank 0, in any thread."""
        beats = {rank: [*map(int, self._beats[rank].split())] for rank in self._watched}
        return {rank: MemoryPeak(*each[1:]) for rank, each in beats.items() if each}

    def disconnect(self) -> None:
        """Stop, and hang up."""
        self.stop()
        self._store.disconnect()

    def _run_turn(self) -> None:
        try:
            with self._lock:
                fault = self._check_ranks()
        except Exception as error:
            fault = Fault(str(error))
        self._turns_since_answer = 0
        if fault is not None:
            self._hand_on_fault(fault)

    def _publish_fault(self, fault: Fault) -> Fault:
        known = self._store.compare_set(FAULT, "", json.dumps(asdict(fault)))
        return Fault.from_json(known)

    def _check_ranks(self) -> Fault | None:
        self._set_beat()
        if self._store.check([FAULT]):
            if self._rank == 0 and self.all_joined.is_set():
                # the last peak of the one that failed
                self._beats[1:] = self._read_beats()
            return Fault.from_json(self._store.get(FAULT))
        if why := self._find_trouble():
            return self._publish_fault(Fault(why))
        if not self.all_joined.is_set():
            return None
        for rank, beat in zip(self._watched, self._read_beats(), strict=True):
            is_silent = beat == self._beats[rank]
            self._silent_turns[rank] = self._silent_turns[rank] + 1 if is_silent else 0
            self._beats[rank] = beat
            if self._silent_turns[rank] > self._max_turns:
                text = f"rank {rank} has not answered for {self._timeout_s:g} s (--rank-timeout)"
                return self._publish_fault(Fault(text))
        return None

    def _set_beat(self) -> None:
        """Report that this rank lives, and its peak memory."""
        numbers = self._num_beats, *astuple(self.measure())
        self._store.set(f"beat/{self._rank}", " ".join(map(str, numbers)))
        self._num_beats += 1

    def _read_beats(self) -> Sequence[bytes]:
        return self._store.multi_get([f"beat/{rank}" for rank in self._watched])

    def _check_rank_0(self) -> None:
        """Notice a store that does not even answer, and a parent that is gone."""
        self._turns_since_answer += 1
        if self._parent is not None and os.getppid() != self._parent:
            self._hand_on_fault(Fault(PARENT_IS_GONE))
        elif self._turns_since_answer > self._max_turns + 2:
            silence = (
                f"rank 0 has not answered for {self._timeout_s:g} s (--rank-timeout)"
            )
            self._hand_on_fault(Fault(f"{silence}: the ranks' common store is in it"))

    def _hand_on_fault(self, fault: Fault) -> None:
        if not self._stop.is_set() and self._fault_lock.acquire(blocking=False):
            self.on_fault(fault)
