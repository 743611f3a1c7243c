"""What a run over lines needs of that which answers them: a whole engine, or a lane of one."""

from __future__ import annotations

from typing import Protocol

from fminfer.engine.engine_core import Origin
from fminfer.engine.events import Event
from fminfer.engine.sequence import Prepared


class LineCore(Protocol):
    """The part of `EngineCore` that a `LineRunner` calls."""

    def add(self, prepared: Prepared, *, is_counted: bool = False) -> int:
        """Queue a request; return the id by which events name it."""

    def cancel(self, request_id: int) -> None:
        """Forget a request."""

    def step(self) -> list[Event]:
        """Return the next events."""

    def start_run(self) -> None:
        """Begin a run; no longer drain."""

    def drain(self, until_s: float) -> None:
        """Let no more requests begin; those whose rows run go on."""

    def expect_no_more(self) -> None:
        """Note that no more requests come."""

    def check_idle(self) -> None:
        """Prove the books once nothing is left to do."""

    def count_row(self, prepared: Prepared | None, origin: Origin = "computed") -> None:
        """Count a line that was read, for progress."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""

    @property
    def num_waiting(self) -> int:
        """Prompts that have not begun."""

    @property
    def is_computing(self) -> bool:
        """Whether computing goes on while the caller does other things."""

    @property
    def has_begun(self) -> bool:
        """Whether rows run, or have run and are to run again."""
