"""The phases of `scripts/try_gpu`, and what a visit runs of them."""

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
    Phase(
        0,
        "machine",
        15,
        120,
        1,
        "imports, versions, memory; roofs of copies and products",
    ),
    Phase(1, "check_attention", 80, 150, 8, "attention and store beside float64"),
    Phase(
        2, "check_parts", 40, 120, 4, "norms, rotary positions and gates beside float64"
    ),
    Phase(
        3,
        "check_families",
        110,
        240,
        12,
        "families beside transformers; blocks, GGUF and constraints beside the CPU",
    ),
    Phase(4, "check_draws", 25, 60, 5, "draws and rankings beside the CPU's"),
    Phase(5, "time_kernels", 40, 120, 1, "attention and products at many sizes"),
    Phase(
        6,
        "time_model",
        115,
        240,
        1,
        "steps of whole models, profiled and captured; loading; streamed layers",
    ),
    Phase(
        7,
        "break_ranks",
        45,
        120,
        3,
        "two ranks on one device; one killed; too large a budget",
    ),
    Phase(8, "time_peers", 240, 480, 1, "whole runs beside transformers' own"),
)
BY_NUMBER = {phase.number: phase for phase in PHASES}
# A visit, in the order of what is learned, with the seconds of each group of phases.
# What a group leaves, the next ones may use.
VISIT = (
    ((0, 6), 130),
    ((5,), 40),
    ((1,), 80),
    ((4,), 25),
    ((3,), 110),
    ((7,), 45),
    ((2,), 40),
)
VISIT_S = sum(seconds for _, seconds in VISIT)


@dataclass(slots=True, frozen=True)
class Turn:
    """A phase, and how many seconds after the start it is ended; None: its limit alone
    counts."""

    phase: Phase
    end_s: float | None = None


def turns_of(numbers: tuple[int, ...]) -> list[Turn]:
    """Return phases in the order given, each once; all if none is given."""
    return [Turn(BY_NUMBER[number]) for number in dict.fromkeys(numbers or BY_NUMBER)]


def visit_turns(seconds: float) -> list[Turn]:
    """Return the phases of a visit that may take so long."""
    turns = list[Turn]()
    end_s = 0.0
    for numbers, own_s in VISIT:
        end_s += own_s * seconds / VISIT_S
        turns += [Turn(BY_NUMBER[number], end_s) for number in numbers]
    return turns
