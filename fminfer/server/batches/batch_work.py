"""Starts the runs of batches, and starts those that paused again."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import suppress

from fminfer.core.errors import InUseError, OutputError
from fminfer.server.batches.batch_ends import MODEL_CHANGED, drop_journal
from fminfer.server.batches.batch_run import BatchContext, BatchRun
from fminfer.server.batches.stored_batches import Progress, StoredBatch

# batches that are answered together; others wait for one of them to end
MOST_AT_ONCE = 32
LOOK_S = 1.0  # between looks for what is due
RETRY_S = 30.0  # after which a batch that paused is tried again
END_S = 5.0  # for runs to put their rows on the disk
NEVER = float("inf")


class BatchWork:
    """The runs of all open batches, each in a thread of its own."""

    def __init__(self, context: BatchContext) -> None:
        self.done = context.done
        self._context = context
        self._files = context.state.files
        self._batches = context.state.batches
        self._news = threading.Condition()
        self._runs: dict[str, tuple[BatchRun, threading.Thread]] = {}
        self._paused_until_s: dict[str, float] = {}  # in time.monotonic()
        self._is_stopped = False
        self._thread = threading.Thread(
            target=self._start_due_runs, name="batches", daemon=True
        )

    @property
    def num_open(self) -> int:
        """Batches that are not over."""
        return len(self._batches.open_batches)

    def start(self) -> None:
        """Go on with the batches that are open."""
        self._context.engine.runs.lanes.is_closed = False
        self._thread.start()

    def wake(self, batch: StoredBatch) -> None:
        """Start a new batch's run, or wake the run of one to be cancelled."""
        with self._news:
            self._paused_until_s.pop(batch.id, None)
            if batch.id in self._runs:
                run, _ = self._runs[batch.id]
                run.wake()
            self._news.notify_all()

    def progress_of(self, batch: StoredBatch) -> Progress | None:
        """Return how far a running batch is; None: its own progress is the newest."""
        running = self._runs.get(batch.id)
        return None if running is None or not batch.is_open else running[0].progress

    def drain(self) -> None:
        """Add no more lines to the engine; what runs goes on."""
        self._context.engine.runs.lanes.is_closed = True

    def stop(self) -> None:
        """End all runs, which keep what they have."""
        with self._news:
            self._is_stopped = True
            self._news.notify_all()
            runs = [*self._runs.values()]
        end_s = time.monotonic() + END_S
        for run, _ in runs:
            run.stop()
        for thread in [self._thread, *(thread for _, thread in runs)]:
            if thread.is_alive():
                thread.join(max(0.0, end_s - time.monotonic()))

    def _start_due_runs(self) -> None:
        for ended in self._batches.ended_batches:
            with suppress(OSError):  # it is not in the way
                # a server died just before that
                drop_journal(self._batches.output_path(ended))
        while not self._is_stopped:
            self._delete_expired_files()
            with self._news:
                while (
                    not self._is_stopped
                    and (batch := self._find_next_batch()) is not None
                ):
                    self._start_run(batch)
                if not self._is_stopped:
                    self._news.wait(LOOK_S)

    def _delete_expired_files(self) -> None:
        files = self._files
        for stored in files.expired_files:
            # those that cannot be removed are hidden, and removed later
            with files.lock, suppress(OutputError, InUseError):
                if self._batches.find_batch_using(stored.id) is None:
                    files.remove(stored)

    def _find_next_batch(self) -> StoredBatch | None:
        """Return the batch to begin: the oldest one that is due of the owner with the fewest."""
        has_room = len(self._runs) < MOST_AT_ONCE
        open_batches = self._batches.open_batches
        due = [
            b for b in open_batches if (has_room or _is_to_end(b)) and self._is_due(b)
        ]
        num_running = Counter(run.batch.owner for run, _ in self._runs.values())
        return min(due, key=lambda batch: num_running[batch.owner], default=None)

    def _is_due(self, batch: StoredBatch) -> bool:
        if batch.id in self._runs:
            return False
        paused_until_s = self._paused_until_s.get(batch.id, 0.0)
        if paused_until_s == NEVER and time.time() >= batch.expires_at:
            return True
        return time.monotonic() >= paused_until_s

    def _start_run(self, batch: StoredBatch) -> None:
        self._paused_until_s.pop(batch.id, None)
        run = BatchRun(batch, self._context)
        thread = threading.Thread(
            target=self._run_batch, args=(run,), name=batch.id, daemon=True
        )
        self._runs[batch.id] = run, thread
        thread.start()

    def _run_batch(self, run: BatchRun) -> None:
        is_left = True
        try:
            run.run()
            is_left = run.trouble is not None
        finally:  # also where it could not even say what is wrong
            with self._news:
                del self._runs[run.batch.id]
                if is_left:  # what changed with the model stays until a server starts
                    is_lasting = (
                        run.trouble is not None and run.trouble.code == MODEL_CHANGED
                    )
                    until_s = NEVER if is_lasting else time.monotonic() + RETRY_S
                    self._paused_until_s[run.batch.id] = until_s
                self._news.notify_all()


def _is_to_end(batch: StoredBatch) -> bool:
    """Whether a batch only has to be ended, which takes little and waits for no other."""
    return batch.status == "cancelling" or time.time() >= batch.expires_at
