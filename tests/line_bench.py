"""Runs over lines on an engine's loop whose pipeline a test has made."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from typing import Any

import pytest

from fminfer.contract.envelope import Line
from fminfer.contract.record import Record
from fminfer.engine.answer import AnswerStyle
from fminfer.engine.intake import Intake
from fminfer.engine.loop import EngineLoop, Pipeline
from fminfer.engine.prompt_fit import RequestLimits
from fminfer.engine.scheduler import Scheduler
from fminfer.engine.start import RequestStarter
from fminfer.job.journaled_input import JournaledInput
from fminfer.runtime.lines.line_intake import LineIntake, RecordForm
from fminfer.runtime.lines.runner import LOOKAHEAD, LineRunner
from fminfer.text.tokenizer import Tokenizer


class LineBench:
    """A loop over a pipeline, and runs over lines."""

    def __init__(
        self,
        limits: RequestLimits,
        scheduler: Scheduler,
        pipeline: Pipeline,
        *,
        is_only_run: bool = False,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.tokenizer = tokenizer or Tokenizer(None)
        self.scheduler = scheduler
        self.intake = Intake(self.tokenizer, limits)
        self.loop = EngineLoop(
            RequestStarter(self.tokenizer, limits.eos_ids, 1, limits.vocab_size),
            scheduler,
            pipeline,
            AnswerStyle(self.tokenizer, "auto"),
        )
        self._is_only_run = is_only_run

    def add(
        self, priority: int = 0, *, is_streamed: bool = False, **request: Any
    ) -> int:
        """Add a request to the loop, as the engine does."""
        prepared = self.intake.prepare(self.intake.parse(request))
        return self.loop.add(prepared, priority=priority, is_streamed=is_streamed)

    def start_run(self, read_ahead: int = LOOKAHEAD) -> LineRunner:
        return over_lines(
            self.loop, self.intake, read_ahead=read_ahead, is_only_run=self._is_only_run
        )

    def run_lines(
        self, lines: Iterable[Line], read_ahead: int = LOOKAHEAD
    ) -> Generator[Record, None, None]:
        return self.start_run(read_ahead).run(lines)


def with_options(limits: RequestLimits, **options: Any) -> RequestLimits:
    """Return limits in which some fields, of their own or of the config, are others."""
    own = {name: options.pop(name) for name in [*options] if hasattr(limits, name)}
    return replace(limits, config=replace(limits.config, **options), **own)


def over_lines(
    loop: EngineLoop,
    intake: Intake,
    *,
    read_ahead: int = LOOKAHEAD,
    is_only_run: bool = False,
    joins_equal: bool = False,
) -> LineRunner:
    """Start a run over lines, in which equal ones are all computed unless they are joined."""
    return LineRunner(
        loop,
        LineIntake(intake),
        RecordForm("scripted", int(time.time())),
        engine=loop,
        read_ahead=read_ahead,
        joins_equal=joins_equal,
        is_only_run=is_only_run,
    )


def before_each_record(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[int], None]
) -> None:
    """Have a function called before each record of a run over files is written, with
    its number."""
    add = JournaledInput.add
    numbers = itertools.count()

    def add_later(file: JournaledInput, record: Record) -> bool:
        call(next(numbers))
        return add(file, record)

    monkeypatch.setattr(JournaledInput, "add", add_later)
