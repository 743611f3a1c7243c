"""The phases of `scripts/try_gpu`, in their order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Phase:
    """One group of cases.

    Args:
        name: of this package's module whose `cases` says what is done.
        planned_s: what it should take on one H100.
        limit_s: after which it is ended; what is not done then is told.
        num_workers: processes that share its cases, on a GPU; it compiles many kernels.
        what: for people.
    """

    number: int
    name: str
    planned_s: int
    limit_s: int
    num_workers: int
    what: str

    @property
    def module(self) -> str:
        return self.name if "." in self.name else f"benchmarks.gpu.{self.name}"


PHASES = (
    Phase(0, "machine", 10, 90, 1, "imports, versions, memory; roofs of copies and products"),
    Phase(1, "check_attention", 70, 150, 8, "attention and store beside float64"),
    Phase(2, "check_parts", 30, 120, 4, "norms, rotary positions and gates beside float64"),
    Phase(3, "check_families", 110, 240, 8, "every family beside transformers, kernels required"),
    Phase(4, "check_draws", 20, 60, 1, "draws and rankings beside the CPU's"),
    Phase(5, "time_kernels", 60, 120, 1, "attention and products at many sizes"),
    Phase(6, "time_model", 110, 200, 1, "steps of a whole model, profiled"),
    Phase(7, "break_ranks", 40, 120, 1, "two ranks on one device; one killed; too large a budget"),
    Phase(8, "time_peers", 240, 480, 1, "whole runs beside transformers' own"),
)
BY_NUMBER = {phase.number: phase for phase in PHASES}
