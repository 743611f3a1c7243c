"""What a check found: for people, and as JSON. It knows counts, bytes and seconds only."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fminfer.core.quantities import counted, show_bytes, show_dtypes, show_seconds
from fminfer.estimate.line_checks import LineCounts
from fminfer.plan.forecast import Forecast

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

    model: str
    dtype: str
    kv_dtype: str  # of the KV cache
    weight_dtype: str  # in which most weights are held
    device: str
    context_length: int
    inputs: list[str]
    counts: LineCounts
    warnings: dict[str, int]
    first: FirstPrompt | None
    forecast: Forecast
    work: Work

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the errors of single lines."""
        counts = asdict(self.counts)
        counts["reserved_tokens"] = self.counts.reserved_tokens
        forecast = self.forecast
        used = forecast.used_kv_tokens(self.work.num_kv_tokens)
        memory = {
            "processes": [asdict(f) | {"total": f.total(used)} for f in forecast.footprints],
            "num_pipelines": forecast.layout.num_pipelines,
            "room": forecast.room_bytes,
            "is_shared": forecast.shares_memory,
            "kv_tokens": forecast.num_kv_tokens,
            "shortage": forecast.shortage,
        }
        found = {
            name: getattr(self, name)
            for name in (
                *("model", "dtype", "kv_dtype", "weight_dtype", "device"),
                *("context_length", "inputs", "warnings"),
            )
        }
        return found | {
            "counts": counts,
            "first_prompt": None if self.first is None else asdict(self.first),
            "memory": memory,
            "work": asdict(self.work),
        }

    def to_text(self) -> str:
        """Return the report for people."""
        counts = self.counts
        codes = ", ".join(f"{count} {code}" for code, count in counts.errors_by_code.items())
        wrong = f", {counts.num_wrong:,} wrong ({codes})" if codes else ""
        equal = f"; {counts.num_equal:,} have the answer of an equal one" * bool(counts.num_equal)
        of_cache = f", KV cache {self.kv_dtype}" * (self.kv_dtype != self.dtype)
        lines = [
            f"model     {self.model} ({show_dtypes(self.dtype, self.weight_dtype)}{of_cache} on "
            f"{self.device})",
            f"lines     {counts.num_right:,} right{wrong}{equal}",
            f"tokens    {counts.prompt_tokens:,} prompt + at most {counts.max_drawn_tokens:,} "
            f"generated = {counts.reserved_tokens:,} reserved; longest row "
            f"{counts.longest_row:,} of {self.context_length:,}",
            *self._prefix_lines(),
            *self._step_lines(),
            *self._memory_lines(),
            *self._time_lines(),
            *self._first_lines(),
        ]
        lines += [f"warning   {text} ({counted(n, 'row')})" for text, n in self.warnings.items()]
        return "\n".join(lines)

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

    def _step_lines(self) -> list[str]:
        work = self.work
        if not self.counts.num_right or self.forecast.shortage:
            return []
        return [
            f"steps     {counted(work.num_steps, 'micro-batch', 'micro-batches')} at most, up to "
            f"{counted(work.max_rows_running, 'row')} at once{self._sample_text}"
        ]

    def _memory_lines(self) -> list[str]:
        """Return a table of what each process takes, and how much KV cache fits."""
        forecast = self.forecast
        used = forecast.used_kv_tokens(self.work.num_kv_tokens)
        rows: list[tuple[str, ...]] = [
            ("rank", "layers", "libraries", "weights", "work", "KV cache", "together")
        ]
        for each in forecast.footprints:
            sizes = (each.libraries, each.weights, each.work, used * each.kv_token)
            shown = map(show_bytes, (*sizes, each.total(used)))
            rows.append((str(each.rank), str(each.num_layers), *shown))
        lines = ["".join(f"{cell:>11}" for cell in row).removeprefix(" " * 5) for row in rows]
        lines = [f"{'memory' * (i == 0):<10}{line}" for i, line in enumerate(lines)]
        return [*lines, *self._room_lines()]

    def _room_lines(self) -> list[str]:
        forecast, layout = self.forecast, self.forecast.layout
        used = forecast.used_kv_tokens(self.work.num_kv_tokens)
        total = layout.num_pipelines * sum(each.total(used) for each in forecast.footprints)
        num_ranks = layout.num_pipelines * len(forecast.footprints)
        ranks = f"{num_ranks} ranks"
        if layout.num_pipelines > 1:
            ranks += f", {layout.num_pipelines} pipelines of {len(forecast.footprints)}"
        if forecast.shares_memory:
            found = f"{show_bytes(forecast.room_bytes)} of memory are free here"
            found += f"; all {ranks} take {show_bytes(total)}" * (num_ranks > 1)
        else:
            found = f"{show_bytes(forecast.room_bytes)} for each of {ranks}"
        if forecast.shortage:
            return [f"room      {found}", f"KV cache  none fits: {forecast.shortage}"]
        each = "" if layout.num_pipelines == 1 else " of each pipeline"
        return [
            f"room      {found}",
            f"KV cache  {forecast.num_kv_tokens:,} tokens{each}, of which these lines use at most "
            f"{self.work.num_kv_tokens:,}",
        ]

    def _time_lines(self) -> list[str]:
        work = self.work
        if not self.counts.num_right or self.forecast.shortage:
            return []
        if work.seconds is None:
            return [f"time      not predicted: {work.why_not}"]
        return [
            f"time      {_show_estimate(work.seconds, work.seconds_range)} if every row draws all "
            f"of its max_tokens{self._sample_text}; loading is not counted"
        ]

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
    text = f"about {_show_short(seconds)}"
    if found is not None:
        text += f" ({_show_short(found[0])} to {_show_short(found[1])}, by calibration's own runs)"
    return text


def _show_short(seconds: float) -> str:
    return show_seconds(seconds) if seconds >= 60 else f"{seconds:.1f} s"
