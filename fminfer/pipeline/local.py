"""The pipeline of one stage: `submit` and `collect` over a thread of this process."""

from __future__ import annotations

import atexit
import queue
import statistics
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from fminfer.compute.values.step import Step, StepResult
from fminfer.core.errors import PipelineError, UsageError
from fminfer.core.quantities import describe_short_time

# the epoch in which its step was submitted, and what came
Result = tuple[int, StepResult | BaseException]
LAST_EPOCH = sys.maxsize  # of what ends a pipeline
WAIT_S = 0.5
# A step hangs after the longer of these: this time, and 100 times the median of recent steps.
STEP_LIMIT_S = 1800.0
LIMIT_MEDIANS = 100


class QueuedPipeline(ABC):
    """Runs steps in order on a thread of its own, while the caller prepares the next."""

    def __init__(self, on_start: Callable[[], None]) -> None:
        self._on_start = on_start
        self._epoch = (
            0  # `drop_steps` begins another; results of older ones are dropped
        )
        self._steps: queue.SimpleQueue[tuple[int, Step] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run_thread, name="stage-0", daemon=True
        )
        # Before Python ends, which stops daemon threads wherever they are: a run that is still
        # open would wait for this one for ever.
        atexit.register(self.close)
        self._is_closed = False
        # of a rank; no result will come any more
        self.failure: BaseException | None = None
        self.num_in_flight = 0
        # the least time without a result that counts as a hang
        self.limit_s = STEP_LIMIT_S
        self._step_times: deque[float] = deque(maxlen=64)

    def submit(self, step: Step) -> None:
        """Send a step in, behind earlier ones; raise what has ended the pipeline."""
        if self._is_closed:
            raise UsageError("the engine is closed; make a new one")
        if self.failure is not None:
            raise self.failure
        self.num_in_flight += 1
        self._steps.put((self._epoch, step))

    def collect(self) -> StepResult:
        """Wait for the oldest step's result; what a stage raised is raised here.

        Raises:
            PipelineError: no result came within the deadline.
        """
        assert self.num_in_flight, "nothing is in flight"
        epoch = -1
        while epoch < self._epoch:
            epoch, result = self._await_result()
        self.num_in_flight -= 1
        if epoch == LAST_EPOCH:
            self._results.put((epoch, result))  # every later call raises it, too
        if isinstance(result, BaseException):
            raise result
        self._step_times.append(sum(span.end_s - span.start_s for span in result.spans))
        return result

    def _await_result(self) -> Result:
        """Return the next result, or the pipeline's failure once a step hangs.

        Waits are counted in place of time, so that a suspended run can go on afterwards.
        """
        num_waits = 0
        while True:
            try:
                return self._results.get(timeout=WAIT_S)
            except queue.Empty:
                num_waits += 1
            waited_s = num_waits * WAIT_S
            long_s = LIMIT_MEDIANS * statistics.median(self._step_times or [0.0])
            if waited_s > max(self.limit_s, long_s) and self.failure is None:
                self.fail(
                    PipelineError(
                        f"no result came for {describe_short_time(waited_s)}, so a "
                        "step hangs: a device, "
                        "its driver or a disk does not answer"
                    )
                )

    def fail(self, error: BaseException) -> None:
        """Raise an error in whoever waits for a result. No more results come."""
        if self.failure is None:
            self.failure = error
            self._results.put((LAST_EPOCH, error))

    def _deliver_result(self, epoch: int, result: StepResult | BaseException) -> None:
        """Hand a result on, unless the pipeline has failed: it may then hold wrong tokens.

        An aborted sum of NCCL returns as if it were done.
        """
        if self.failure is None:
            self._results.put((epoch, result))

    def drop_steps(self) -> None:
        """Drop the results of the steps in flight; later steps are done behind them.

        It relies on no count: an interrupt (KeyboardInterrupt) can fall between a
        result's arrival and its counting.
        """
        self._epoch += 1
        self.num_in_flight = 0

    def close(self) -> None:
        """End the thread once the steps in flight are done."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        self._steps.put(None)
        if self.failure is None:
            self._thread.join()

    def _run_thread(self) -> None:
        try:
            self._on_start()
        except BaseException as error:
            self.fail(error)
        else:
            self._run_steps()

    @abstractmethod
    def _run_steps(self) -> None:
        """Run what is in the queue of steps until a None, on the pipeline's thread."""


class LocalPipeline(QueuedPipeline):
    """The pipeline of a single stage, whose `run` it calls."""

    def __init__(
        self,
        run: Callable[[Step], StepResult],
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(on_start)
        self._run = run
        self._thread.start()

    def _run_steps(self) -> None:
        while (entry := self._steps.get()) is not None:
            epoch, step = entry
            try:
                self._deliver_result(epoch, self._run(step))
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)  # the frames hold weights
                self._deliver_result(epoch, error)
