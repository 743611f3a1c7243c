"""The pipeline of one stage: `submit` and `collect` over a thread of this process.

The engine sees nothing else of a pipeline; one of several ranks has the same two verbs.
"""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable

from fminfer.errors import UsageError
from fminfer.messages import Step, StepResult


class _Mark:
    """Goes through the pipeline behind the steps, and comes out when they are done."""


class LocalPipeline:
    """Runs steps in order on a thread of its own, while the caller prepares the next.

    Args:
        run: the stage's `run`.
    """

    def __init__(self, run: Callable[[Step], StepResult]) -> None:
        self._run = run
        self._steps: queue.SimpleQueue[Step | _Mark | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult | _Mark | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="stage-0", daemon=True)
        self._thread.start()
        # Before Python ends, which stops daemon threads wherever they are: a run that is still
        # open would wait for this one for ever.
        atexit.register(self.close)
        self._is_closed = False
        self.num_in_flight = 0

    def submit(self, step: Step) -> None:
        """Send a step in; steps are done in the order of their submission.

        Raises:
            UsageError: the pipeline was closed.
        """
        if self._is_closed:
            raise UsageError("the engine is closed; make a new one")
        self.num_in_flight += 1
        self._steps.put(step)

    def collect(self) -> StepResult:
        """Wait for the oldest step's result; what the stage raised is raised here."""
        assert self.num_in_flight, "nothing is in flight"
        result = self._results.get()
        assert not isinstance(result, _Mark), "drop() waits for its own mark"
        self.num_in_flight -= 1
        if isinstance(result, BaseException):
            raise result
        return result

    def drop(self) -> None:
        """Wait for the steps in flight and throw their results away.

        It relies on no count: an interrupt (KeyboardInterrupt) can fall between a result's arrival
        and its counting, and waiting for one more would then last for ever.
        """
        if not self._is_closed:
            mark = _Mark()
            self._steps.put(mark)
            while self._results.get() is not mark:
                pass
        self.num_in_flight = 0

    def close(self) -> None:
        """End the thread once the steps in flight are done."""
        self._is_closed = True
        atexit.unregister(self.close)
        self._steps.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (step := self._steps.get()) is not None:
            if isinstance(step, _Mark):
                self._results.put(step)
                continue
            try:
                self._results.put(self._run(step))
            except BaseException as error:
                self._results.put(error)
