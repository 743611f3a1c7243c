"""What a check found: for people, and as JSON. It knows counts, bytes and seconds only."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from fminfer.core.quantities import counted, show_bytes, show_dtypes, show_short
from fminfer.estimate.line_checks import LineCounts
from fminfer.estimate.run_plans import PlanReport
from fminfer.plan.run_plan import RunPlan, name_of

MAX_SHOWN = 1000  # characters of the first prompt


@dataclass(slots=True, frozen=True)
class FirstPrompt:
    """The first prompt that can be answered, as the model will see it."""

    file: str
    line: int
    text: str  # special tokens written out
    num_ids: int


@dataclass(slots=True, frozen=True)
class Work:
    """What a run will do at most: every row draws all of its max_tokens."""

    num_steps: int
    max_rows_running: int
    num_kv_tokens: int  # of the KV cache that are used
    seconds: float | None  # estimated, loading left out; None: not predicted
    seconds_range: tuple[float, float] | None  # by how far calibration's own runs were off
    why_not: str  # predicted
    sample_lines: int  # the beginning of the input that this was found with; 0: all of it


@dataclass(slots=True, frozen=True)
class CheckReport:
    """What a check found."""

    plan: RunPlan
    inputs: list[str]
    counts: LineCounts
    warnings: dict[str, int]
    first: FirstPrompt | None
    work: Work
    passes: list[str] = field(default_factory=list)  # of streamed layers
    plans: PlanReport | None = None  # other ways to run the lines

    @property
    def fits(self) -> bool:
        """Whether the run, or any of its other plans, fits the memory."""
        if self.plans is not None:
            return bool(self.plans.fitting)
        return not self.plan.shortage

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the errors of single lines."""
        counts = asdict(self.counts)
        counts["reserved_tokens"] = self.counts.reserved_tokens
        plan = self.plan
        used = plan.used_kv_tokens(self.work.num_kv_tokens)
        processes = [
            {"rank": rank.rank, "num_layers": rank.part.num_layers}
            | asdict(rank.takes)
            | {"total": rank.takes.total(used)}
            for rank in plan.ranks
        ]
        memory = {
            "processes": processes,
            "num_pipelines": plan.machine.num_pipelines,
            "room": plan.room_bytes,
            "is_shared": plan.shares_memory,
            "kv_tokens": plan.num_kv_tokens,
            "shortage": plan.shortage,
        }
        return {
            "model": plan.checkpoint.name,
            "dtype": name_of(plan.dtype),
            "kv_dtype": name_of(plan.kv_dtype),
            "weight_dtype": plan.held_in,
            "device": plan.device.type,
            "context_length": plan.checkpoint.context_length,
            "inputs": self.inputs,
            "warnings": self.warnings,
            "counts": counts,
            "first_prompt": None if self.first is None else asdict(self.first),
            "memory": memory,
            "work": asdict(self.work),
            "passes": self.passes,
            "plans": None if self.plans is None else self.plans.to_dict(),
        }

    def to_text(self, *, is_all: bool = False) -> str:
        """Return the report for people; `is_all`: with all plans, not the best alone."""
        counts, plan = self.counts, self.plan
        codes = ", ".join(f"{count} {code}" for code, count in counts.errors_by_code.items())
        wrong = f", {counts.num_wrong:,} wrong ({codes})" if codes else ""
        equal = f"; {counts.num_equal:,} have the answer of an equal one" * bool(counts.num_equal)
        types = show_dtypes(name_of(plan.dtype), plan.held_in)
        types += f", KV cache {name_of(plan.kv_dtype)}" * (plan.kv_dtype != plan.dtype)
        lines = [
            f"model     {plan.checkpoint.name} ({types} on {plan.device.type})",
            f"lines     {counts.num_right:,} right{wrong}{equal}",
            f"tokens    {counts.prompt_tokens:,} prompt + at most {counts.max_drawn_tokens:,} "
            f"generated = {counts.reserved_tokens:,} reserved; longest row "
            f"{counts.longest_row:,} of {plan.checkpoint.context_length:,}",
            *self._prefix_lines(),
            *(self._own_lines() if self.plans is None else [self.plans.to_text(is_all=is_all)]),
            *self._first_lines(),
        ]
        lines += [f"warning   {text} ({counted(n, 'row')})" for text, n in self.warnings.items()]
        return "\n".join(lines)

    def _own_lines(self) -> list[str]:
        """Return the plan that the options give."""
        passes = [f"{'passes' * (n == 0):<10}{text}" for n, text in enumerate(self.passes)]
        lines = [*self._memory_lines(), *passes]
        if self.counts.num_right and not self.plan.shortage:
            lines = [self._step_line(), *lines, self._time_line()]
        return lines

    def _prefix_lines(self) -> list[str]:
        counts = self.counts
        if not counts.num_shared_tokens:
            return []
        part = "" if counts.num_counted_tokens == counts.tokens_to_feed else " of the first"
        return [
            f"prefix    {counts.num_shared_tokens:,}{part} of {counts.num_counted_tokens:,} prompt "
            f"tokens ({counts.shared_share:.0%}) are shared, and computed once"
        ]

    @property
    def _sample_text(self) -> str:
        num_lines = self.work.sample_lines
        return f", estimated from the first {counted(num_lines, 'line')}" * bool(num_lines)

    def _step_line(self) -> str:
        work = self.work
        return (
            f"steps     {counted(work.num_steps, 'micro-batch', 'micro-batches')} at most, up to "
            f"{counted(work.max_rows_running, 'row')} at once{self._sample_text}"
        )

    def _memory_lines(self) -> list[str]:
        """Return a table of what each process takes, and how much KV cache fits."""
        used = self.plan.used_kv_tokens(self.work.num_kv_tokens)
        rows: list[tuple[str, ...]] = [
            ("rank", "layers", "libraries", "weights", "work", "KV cache", "together")
        ]
        for rank in self.plan.ranks:
            takes = rank.takes
            sizes = (takes.libraries, takes.weights, takes.work, used * takes.kv_token)
            shown = map(show_bytes, (*sizes, takes.total(used)))
            rows.append((str(rank.rank), str(rank.part.num_layers), *shown))
        lines = ["".join(f"{cell:>11}" for cell in row).removeprefix(" " * 5) for row in rows]
        lines = [f"{'memory' * (i == 0):<10}{line}" for i, line in enumerate(lines)]
        return [*lines, *self._room_lines()]

    def _room_lines(self) -> list[str]:
        plan, num_pipelines = self.plan, self.plan.machine.num_pipelines
        used = plan.used_kv_tokens(self.work.num_kv_tokens)
        total = num_pipelines * sum(rank.takes.total(used) for rank in plan.ranks)
        num_ranks = num_pipelines * len(plan.ranks)
        ranks = f"{num_ranks} ranks"
        if num_pipelines > 1:
            ranks += f", {num_pipelines} pipelines of {len(plan.ranks)}"
        if plan.shares_memory:
            found = f"{show_bytes(plan.room_bytes)} of memory are free here"
            found += f"; all {ranks} take {show_bytes(total)}" * (num_ranks > 1)
        else:
            found = f"{show_bytes(plan.room_bytes)} for each of {ranks}"
        if plan.shortage:
            return [f"room      {found}", f"KV cache  none fits: {plan.shortage}"]
        each = "" if num_pipelines == 1 else " of each pipeline"
        return [
            f"room      {found}",
            f"KV cache  {plan.num_kv_tokens:,} tokens{each}, of which these lines use at most "
            f"{self.work.num_kv_tokens:,}",
        ]

    def _time_line(self) -> str:
        work = self.work
        if work.seconds is None:
            return f"time      not predicted: {work.why_not}"
        return (
            f"time      {_show_estimate(work.seconds, work.seconds_range)} if every row draws all "
            f"of its max_tokens{self._sample_text}; loading is not counted"
        )

    def _first_lines(self) -> list[str]:
        if (first := self.first) is None:
            return []
        text = first.text
        if len(text) > MAX_SHOWN:
            half = MAX_SHOWN // 2
            text = f"{text[:half]}\n[… {len(text) - 2 * half:,} characters …]\n{text[-half:]}"
        head = f"first     {first.file}:{first.line}, {counted(first.num_ids, 'token')}:"
        return [head, *(f"    {line}" for line in text.split("\n"))]


def _show_estimate(seconds: float, found: tuple[float, float] | None) -> str:
    """Write an estimate with the error that was measured of such ones."""
    text = f"about {show_short(seconds)}"
    if found is not None:
        text += f" ({show_short(found[0])} to {show_short(found[1])}, by calibration's own runs)"
    return text
