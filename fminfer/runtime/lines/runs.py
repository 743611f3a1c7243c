"""Runs over lines on one engine: one that has it for itself, or several behind other
requests."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

from fminfer.answers.answer_index import AnswerIndex
from fminfer.contract.envelope import Envelope, Line, make_line
from fminfer.contract.record import Record
from fminfer.core.errors import UsageError
from fminfer.engine.engine_core import EngineCore, Event
from fminfer.engine.intake import LineParser
from fminfer.runtime.lines.constraint_watch import ConstraintWatch
from fminfer.runtime.lines.lanes import Lane, Lanes
from fminfer.runtime.lines.line_intake import LineIntake, NameLine, RecordForm
from fminfer.runtime.lines.runner import LOOKAHEAD as LOOKAHEAD
from fminfer.runtime.lines.runner import LineRunner

AnyRequest = Mapping[str, Any] | Line  # the fields of a request, or an input line


class Runs:
    """Starts runs, and keeps their events apart from those of other requests."""

    def __init__(
        self,
        core: EngineCore,
        intake: LineParser,
        model_name: str,
        *,
        has_long_steps: bool,
    ) -> None:
        self.cache: AnswerIndex | None = None  # has answers; whoever sets it closes it
        self.lanes = Lanes(core)  # of runs behind all other requests
        self._core = core
        self._intake = intake
        self._config = intake.limits.config
        self._model_name = model_name
        self._has_long_steps = has_long_steps
        self._runner: LineRunner | None = None  # of the run of `start`
        # of others' requests, which a run's steps have returned
        self.left: deque[Event] = deque()

    def start(
        self,
        read_ahead: int = LOOKAHEAD,
        name_line: NameLine | None = None,
        *,
        is_only_run: bool = False,
    ) -> LineRunner:
        """Start a run over lines: let the runner read them, and step it.

        Args:
            read_ahead: lines that may be read before there is room for them.
            name_line: names a line in its warnings; None: by its number.
            is_only_run: keep no prefixes for another run of the engine.

        Raises:
            UsageError: an earlier run is not finished, or `read_ahead` is below 1.
        """
        if read_ahead < 1:
            raise UsageError(f"read_ahead is {read_ahead}; it must be at least 1")
        if self._runner is not None and self._runner.is_busy:
            if not _was_interrupted():
                raise UsageError(
                    "the engine is in the middle of a run; finish or close that one first"
                )
            self._runner.end()
        self._intake.warnings.clear()
        keeps_vectors_apart = is_only_run and self._config.embeddings == "npy"
        line_intake = LineIntake(self._intake, name_line=name_line)
        self._runner = LineRunner(
            self._core,
            line_intake,
            RecordForm(self._model_name, int(time.time()), keeps_vectors_apart),
            engine=self._core,
            read_ahead=read_ahead,
            has_long_steps=self._has_long_steps,
            joins_equal=self._config.prefix_cache,
            is_only_run=is_only_run,
            watch=ConstraintWatch(self._intake, line_intake.name_line),
            cache=self.cache,
            on_other=self.left.append,
        )
        return self._runner

    def start_behind(
        self,
        form: RecordForm,
        check: Callable[[Envelope], None],
        read_ahead: int = LOOKAHEAD,
        name_line: NameLine | None = None,
    ) -> tuple[LineRunner, Lane]:
        """Start a run over lines behind all other requests; there may be several.

        Step the runner in a thread of its own. While it has no events, wait on the
        lane. The thread that answers the other requests calls `step`.

        Args:
            check: raises a RequestError for a line that is not of this run, in place of
            the check
                of the line's model.
        """
        lane = self.lanes.open()
        runner = LineRunner(
            lane,
            LineIntake(self._intake, check, name_line),
            form,
            read_ahead=read_ahead,
            joins_equal=self._config.prefix_cache,
            cache=self.cache,
        )
        return runner, lane

    def run(
        self, requests: Iterable[AnyRequest], read_ahead: int
    ) -> Generator[Record, None, None]:
        """Answer requests and lines, as `Engine.run` does."""
        lines = (
            request if isinstance(request, Line) else make_line(number, request)
            for number, request in enumerate(requests, start=1)
        )
        yield from self.start(read_ahead).run(lines)

    def stop(self, grace_s: float) -> None:
        """End the run of `start`, as `Engine.stop` does."""
        if self._runner is not None:
            self._runner.stop(grace_s)

    def step(self) -> list[Event]:
        """Compute a step, and return the events of requests that belong to no run."""
        self.lanes.feed()
        left = [self.left.popleft() for _ in range(len(self.left))]
        try:
            return self.lanes.sort_events(left or self._core.step())
        except BaseException as error:
            self.lanes.fail(error)
            raise


def _was_interrupted() -> bool:
    """Tell whether the last error that a shell or notebook has shown is Ctrl-C.

    The shell then keeps the frame of the run's loop, which never goes on.
    """
    return getattr(sys, "last_type", None) is KeyboardInterrupt
