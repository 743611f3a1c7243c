"""What the answers of servers cost, over all runs of their outputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fminfer.client.remote_options import RemoteOptions
from fminfer.core.errors import StoppedError
from fminfer.engine.stats import EngineStats
from fminfer.files.run_facts import parse_runs
from fminfer.files.status_file import read_status

MILLION = 10**6
BILLED_BEFORE = (
    "billed_before"  # in a run's facts: tokens that runs before it were billed
)


@dataclass(slots=True, frozen=True)
class Tokens:
    """Tokens that servers have counted in their answers."""

    num_prompt: int = 0
    num_generated: int = 0

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(
            self.num_prompt + other.num_prompt,
            self.num_generated + other.num_generated,
        )

    @classmethod
    def of_stats(cls, stats: EngineStats) -> Tokens:
        """Return those of a run."""
        num_prompt = stats.num_prompt_tokens + stats.num_cached_tokens
        return cls(num_prompt, stats.num_generated_tokens)


def read_billed_tokens(outputs: Iterable[Path]) -> Tokens:
    """Return the tokens that earlier runs of these outputs were billed.

    A status file names its last runs, and each of them tells of those before it.
    """
    runs = {
        str(run.get("id")): run
        for output in outputs
        for run in parse_runs(read_status(output))
        if isinstance(run.get(BILLED_BEFORE), list)
    }
    befores = {name: _read_before(run) for name, run in runs.items()}
    base = max(befores.values(), key=_count_all, default=Tokens())
    # Earlier runs are in the base; those that began beside each other are not.
    later = (
        runs[name] for name in runs if _count_all(befores[name]) >= _count_all(base)
    )
    return sum(map(_read_own, later), base)


def _count_all(tokens: Tokens) -> int:
    return tokens.num_prompt + tokens.num_generated


def _read_before(run: dict[str, Any]) -> Tokens:
    counts = [*map(_read_count, run[BILLED_BEFORE]), 0, 0]
    return Tokens(*counts[:2])


def _read_own(run: dict[str, Any]) -> Tokens:
    """Return what one run was billed."""
    stats = run.get("stats") or {}
    num_fed, num_cached, num_generated = (
        _read_count(stats.get(f"num_{name}_tokens"))
        for name in ("prompt", "cached", "generated")
    )
    return Tokens(num_fed + num_cached, num_generated)


def _read_count(value: Any) -> int:
    return value if isinstance(value, int) else 0


@dataclass(slots=True, frozen=True)
class Costs:
    """What tokens cost, and how much they may."""

    price_in: float  # of a million prompt tokens
    price_out: float
    limit: float | None
    before: Tokens  # of earlier runs

    @classmethod
    def of_options(cls, options: RemoteOptions, before: Tokens) -> Costs | None:
        """Return the costs of a run; None: no price is known."""
        if options.price_in is None is options.price_out:
            return None
        prices = options.price_in or 0.0, options.price_out or 0.0
        return cls(*prices, options.stop_at_cost, before)

    def compute(self, tokens: Tokens) -> float:
        """Return what tokens cost."""
        cost_in = self.price_in * tokens.num_prompt
        return (cost_in + self.price_out * tokens.num_generated) / MILLION

    def find_end(self, stats: EngineStats) -> StoppedError | None:
        """Return why a run with these counts is to end; None: it may go on."""
        cost = self.compute(self.before + Tokens.of_stats(stats))
        if self.limit is None or cost < self.limit:
            return None
        return StoppedError(
            f"The answers have cost {cost:,.4g}, and --stop-at-cost is {self.limit:g}; "
            "a higher one goes on.",
            "out_of_time",
        )

    def describe(self, stats: EngineStats) -> str:
        """Say what a run has cost, and all runs together."""
        tokens = Tokens.of_stats(stats)
        text = f"{self.compute(tokens):,.4g}"
        if self.before != Tokens():
            total = self.compute(self.before + tokens)
            text += f"; all runs of these outputs {total:,.4g}"
        return text
