"""What a check found: for people, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from fminfer.core.quantities import (
    describe_bytes,
    describe_dtypes,
    describe_short_time,
    with_noun,
)
from fminfer.core.terminal import make_table_lines
from fminfer.estimate.line_checks import LineCounts
from fminfer.estimate.run_plans import PlanReport
from fminfer.plan.run_plan import RunPlan, name_of
from fminfer.plan.slowness import find_slowness

MAX_SHOWN = 1000  # characters of the first prompt


@dataclass(slots=True, frozen=True)
class FirstPrompt:
    """The first prompt that can be answered, as the model will see it."""

    file: str
    line: int
    text: str  # special tokens written out
    num_ids: int
    closing_tag: str | None = (
        None  # of the thought before the answer; None: it has none
    )
    tool_parser: str | None = (
        None  # the form of the answer's calls; None: they are text
    )

    def describe_answer(self) -> str:
        """Tell what the answer's text is read as, beside content."""
        parts = [
            self.closing_tag and f"thought up to {self.closing_tag}",
            self.tool_parser and f"calls in the form {self.tool_parser}",
        ]
        return "".join(f"; {part}" for part in parts if part)


@dataclass(slots=True, frozen=True)
class Work:
    """What a run will do at most: every row draws all of its max_tokens."""

    num_steps: int
    max_rows_running: int
    num_kv_tokens: int  # of the KV cache that are used
    seconds: float | None  # estimated, loading left out; None: not predicted
    # by how far calibration's own runs were off
    seconds_range: tuple[float, float] | None
    why_not: str  # predicted
    # the beginning of the input that this was found with; 0: all of it
    sample_lines: int


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
    why_no_plan: str = ""  # why --plan gives none

    @property
    def fits(self) -> bool:
        """Whether the run, or any of its other plans, fits the memory."""
        if self.plans is not None:
            return bool(self.plans.fitting)
        return bool(self.why_no_plan) or not self.plan.shortage

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the errors of single lines."""
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
            "counts": asdict(self.counts)
            | {"reserved_tokens": self.counts.reserved_tokens},
            "first_prompt": None if self.first is None else asdict(self.first),
            "memory": memory,
            "work": asdict(self.work),
            "why_slower": find_slowness(plan),
            "why_dependent": plan.dependence,
            "passes": self.passes,
            "plans": None if self.plans is None else self.plans.to_dict(),
            "why_no_plan": self.why_no_plan,
        }

    def to_text(self, *, is_all: bool = False, columns: int = 0) -> str:
        """Return the report for people.

        Args:
            is_all: print all plans, not only the best ones.
            columns: the terminal's width; 0: no limit.
        """
        plans = [f"plans     none: {self.why_no_plan}"] if self.why_no_plan else []
        if self.plans is not None:
            plans = [self.plans.to_text(is_all=is_all, columns=columns)]
        lines = [
            *self._describe_lines(),
            *(plans or self._describe_plan(columns)),
            *self._describe_first_line(),
            *(
                f"warning   {text} ({with_noun(n, 'row')})"
                for text, n in self.warnings.items()
            ),
        ]
        return "\n".join(lines)

    def _describe_lines(self) -> Iterator[str]:
        """Tell what the lines ask for, and of which model."""
        counts = self.counts
        plan = self.plan
        codes = ", ".join(
            f"{count} {code}" for code, count in counts.errors_by_code.items()
        )
        wrong = f", {counts.num_wrong:,} wrong ({codes})" if codes else ""
        equal = ""
        if counts.num_equal:
            equal = f"; {counts.num_equal:,} have the answer of an equal one"
        types = describe_dtypes(name_of(plan.dtype), plan.held_in)
        if plan.kv_dtype != plan.dtype:
            types += f", KV cache {name_of(plan.kv_dtype)}"
        yield f"model     {plan.checkpoint.name} ({types} on {plan.device.type})"
        if scheme := plan.checkpoint.architecture.scheme:
            yield f"          {scheme.describe(name_of(plan.dtype))}"
        yield f"lines     {counts.num_right:,} right{wrong}{equal}"
        yield (
            f"tokens    {counts.prompt_tokens:,} prompt + at most {counts.max_drawn_tokens:,} "
            f"generated = {counts.reserved_tokens:,} reserved; longest row "
            f"{counts.longest_row:,} of {plan.checkpoint.context_length:,}"
        )
        if counts.num_shared_tokens:
            the_first = (
                ""
                if counts.num_counted_tokens == counts.tokens_to_feed
                else "the first "
            )
            yield (
                f"prefix    {counts.num_shared_tokens:,} of {the_first}"
                f"{counts.num_counted_tokens:,} prompt tokens "
                f"({counts.shared_share:.0%}) are shared, and computed once"
            )

    def _describe_plan(self, columns: int) -> Iterator[str]:
        """Tell what the plan that the options give takes."""
        work = self.work
        is_run = self.counts.num_right and not self.plan.shortage
        num_lines = work.sample_lines
        sample = ""
        if num_lines:
            sample = f", estimated from the first {with_noun(num_lines, 'line')}"
        if is_run:
            yield (
                f"steps     {with_noun(work.num_steps, 'micro-batch', 'micro-batches')} "
                f"at most, up to {with_noun(work.max_rows_running, 'row')} at "
                f"once{sample}"
            )
        yield from self._describe_memory(columns)
        yield from (
            f"{'' if n else 'passes':<10}{text}" for n, text in enumerate(self.passes)
        )
        yield from (f"slower    {reason}" for reason in find_slowness(self.plan))
        if self.plan.dependence:
            yield f"answers   may depend on other rows: {self.plan.dependence}"
        if is_run and work.seconds is None:
            yield f"time      not predicted: {work.why_not}"
        elif is_run and work.seconds is not None:
            span = " to ".join(map(describe_short_time, work.seconds_range or ()))
            of_runs = f" ({span}, by calibration's own runs)" if span else ""
            yield (
                f"time      about {describe_short_time(work.seconds)}{of_runs} if "
                "every row draws "
                f"all of its max_tokens{sample}; loading is not counted"
            )

    def _describe_memory(self, columns: int) -> Iterator[str]:
        """Tell what each process takes in a table, and how much KV cache fits."""
        plan = self.plan
        num_pipelines = self.plan.machine.num_pipelines
        used = plan.used_kv_tokens(self.work.num_kv_tokens)
        rows: list[tuple[str, ...]] = [
            ("rank", "layers", "libraries", "weights", "work", "KV cache", "together")
        ]
        for rank in plan.ranks:
            takes = rank.takes
            sizes = (takes.libraries, takes.weights, takes.work, used * takes.kv_token)
            shown = map(describe_bytes, (*sizes, takes.total(used)))
            rows.append((str(rank.rank), str(rank.part.num_layers), *shown))
        for number, line in enumerate(make_table_lines(rows, columns and columns - 10)):
            yield f"{'' if number else 'memory':<10}{line}"
        num_ranks = num_pipelines * len(plan.ranks)
        ranks = f"{num_ranks} ranks"
        if num_pipelines > 1:
            ranks += f", {num_pipelines} pipelines of {len(plan.ranks)}"
        if plan.shares_memory:
            total = num_pipelines * sum(rank.takes.total(used) for rank in plan.ranks)
            others = ""
            if num_ranks > 1:
                others = f"; all {ranks} take {describe_bytes(total)}"
            yield f"room      {describe_bytes(plan.room_bytes)} of memory are free here{others}"
        else:
            yield f"room      {describe_bytes(plan.room_bytes)} for each of {ranks}"
        if plan.shortage:
            yield f"KV cache  none fits: {plan.shortage}"
            return
        each = "" if num_pipelines == 1 else " of each pipeline"
        yield (
            f"KV cache  {plan.num_kv_tokens:,} tokens{each}, of which these lines use at most "
            f"{self.work.num_kv_tokens:,}"
        )

    def _describe_first_line(self) -> Iterator[str]:
        if (first := self.first) is None:
            return
        text = first.text
        if len(text) > MAX_SHOWN:
            half = MAX_SHOWN // 2
            text = f"{text[:half]}\n[… {len(text) - 2 * half:,} characters …]\n{text[-half:]}"
        num_ids = with_noun(first.num_ids, "token")
        answer = first.describe_answer()
        yield f"first     {first.file}:{first.line}, {num_ids}{answer}:"
        yield from (f"    {line}" for line in text.split("\n"))
