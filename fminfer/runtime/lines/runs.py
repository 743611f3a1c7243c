"""The runs over lines of one engine: one that has it for itself, or several behind all others."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

from fminfer.contract.envelope import Envelope
from fminfer.contract.line import Line, as_line
from fminfer.contract.record import Record
from fminfer.core.config import EngineConfig
from fminfer.core.errors import UsageError
from fminfer.engine.engine_core import EngineCore
from fminfer.engine.events import Event
from fminfer.engine.intake import Intake
from fminfer.runtime.lines.asked import RecordForm
from fminfer.runtime.lines.lanes import Lane, Lanes
from fminfer.runtime.lines.line_intake import LineIntake, NameLine
from fminfer.runtime.lines.runner import LOOKAHEAD as LOOKAHEAD
from fminfer.runtime.lines.runner import LineRunner
from fminfer.runtime.result_cache import ResultCache

AnyRequest = Mapping[str, Any] | Line  # the fields of a request, or an input line


class Runs:
    """Starts runs, and keeps their events apart from those of other requests."""

    def __init__(
        self, core: EngineCore, intake: Intake, config: EngineConfig, model_name: str
    ) -> None:
        self.cache: ResultCache | None = None  # has answers; whoever sets it closes it
        self.lanes = Lanes(core)  # of runs behind all other requests
        self._core, self._intake, self._config = core, intake, config
        self._model_name = model_name
        self._runner: LineRunner | None = None  # of the run that goes on
        self.left: deque[Event] = deque()  # of others' requests, that a run met and did not need

    def start(
        self,
        read_ahead: int = LOOKAHEAD,
        name_line: NameLine | None = None,
        *,
        is_only_run: bool = False,
    ) -> LineRunner:
        """Start a run over lines: add them to what is returned, and step that.

        Args:
            read_ahead: lines that may be read before there is room for them.
            name_line: says with what a line's warning is told; None: its number.
            is_only_run: prefixes need not be kept for another run of the engine.

        Raises:
            UsageError: an earlier run is not finished.
        """
        if read_ahead < 1:
            raise UsageError(f"read_ahead is {read_ahead}; it must be at least 1")
        if self._runner is not None and self._runner.is_busy:
            raise UsageError("the engine is in the middle of a run; finish or close that one first")
        self._intake.warnings.clear()
        self._runner = LineRunner(
            self._core,
            LineIntake(self._intake, name_line=name_line),
            RecordForm(self._model_name, int(time.time())),
            engine=self._core,
            read_ahead=read_ahead,
            joins_equal=self._config.prefix_cache,
            is_only_run=is_only_run,
            cache=self.cache,
            on_others=self.left.extend,
        )
        return self._runner

    def start_behind(
        self,
        form: RecordForm,
        check: Callable[[Envelope], None],
        read_ahead: int = LOOKAHEAD,
        name_line: NameLine | None = None,
    ) -> tuple[LineRunner, Lane]:
        """Start a run over lines behind all other requests, in a thread of the caller's own.

        There may be several. Whoever answers the other requests calls `step` in its own thread.
        Step the run as one of `start`; while it has nothing to tell, wait on the lane.

        Args:
            form: of the records.
            check: raises a RequestError for a line that does not belong into this run, in place
                of the check of its model.
            read_ahead, name_line: as for `start`.
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

    def run(self, requests: Iterable[AnyRequest], read_ahead: int) -> Generator[Record, None, None]:
        """Answer requests and lines, as `Engine.run` does."""
        lines = (
            request if isinstance(request, Line) else as_line(number, request)
            for number, request in enumerate(requests, start=1)
        )
        yield from self.start(read_ahead).run(lines)

    def stop(self, grace_s: float) -> None:
        """Let the run of `start` end, as `Engine.stop` says."""
        if self._runner is not None:
            self._runner.stop(grace_s)

    def step(self) -> list[Event]:
        """Compute a step, and return the events of requests that are of no run."""
        self.lanes.feed()
        left = [self.left.popleft() for _ in range(len(self.left))]
        try:
            return self.lanes.take(left or self._core.step())
        except BaseException as error:
            self.lanes.fail(error)
            raise
