"""Counts a file's equal lines as a run does, before the run has an engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from fminfer.core.config import EngineConfig
from fminfer.engine.intake import Intake
from fminfer.models.checkpoint import Checkpoint
from fminfer.worker.assembly import find_limits, load_tokenizer
from fminfer.worker.line_run.line_intake import LineIntake


def line_counting(config: EngineConfig, checkpoint: Checkpoint) -> Callable[[], LineIntake]:
    """Return a function that begins to count a file's lines; its first call loads the tokenizer."""

    @cache
    def load() -> Intake:
        tokenizer = load_tokenizer(config, checkpoint)
        return Intake(tokenizer, find_limits(config, checkpoint, tokenizer))

    return lambda: LineIntake(load())
