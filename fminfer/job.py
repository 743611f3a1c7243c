"""One run of the command: files in, engine, files out, and what is told about it.

It knows paths and counts; the engine does the answering.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fminfer.errors import UsageError
from fminfer.input.lines import Line, read_lines
from fminfer.output.progress import Progress, ProgressBar, show_seconds
from fminfer.output.writer import PARTIAL, OutputFile, errors_path, traces
from fminfer.worker import Engine


@dataclass(slots=True)
class JobSummary:
    """What a run did; `--stats` writes it as JSON."""

    model: str
    dtype: str
    device: str
    inputs: list[str]
    outputs: list[str]
    start_to_ready_s: float
    num_rows: int = 0
    num_errors: int = 0
    errors_by_code: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0  # as in usage: of answered rows
    completion_tokens: int = 0
    wall_s: float = 0.0  # of answering, loading left out
    engine: dict[str, Any] = field(default_factory=dict)
    warnings: dict[str, int] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        total = self.prompt_tokens + self.completion_tokens
        return total / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def generated_per_s(self) -> float:
        return self.completion_tokens / self.wall_s if self.wall_s > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        rates = {"tokens_per_s": self.tokens_per_s, "generated_per_s": self.generated_per_s}
        return asdict(self) | rates

    def _prefix_line(self) -> str:
        """Tell what the prefix cache saved, beside what the best possible one would have."""
        stats = self.engine
        total = stats["num_prompt_tokens"] + stats["num_cached_tokens"]
        line = f"prefix    {stats['num_cached_tokens']:,} of {total:,} prompt tokens were shared "
        line += "and not computed again"
        if stats["num_counted_shareable"]:
            share = stats["num_counted_cached"] / stats["num_counted_shareable"]
            counted = (
                "" if stats["num_counted_tokens"] == total else ", counted over the first rows"
            )
            line += f"; {share:.1%} of what a trie over the file allows{counted}"
        return line

    def to_text(self) -> str:
        """Return the summary for people."""
        codes = ", ".join(f"{count} {code}" for code, count in self.errors_by_code.items())
        lines = [
            f"model     {self.model} ({self.dtype} on {self.device})",
            f"rows      {self.num_rows:,} answered, {self.num_errors:,} in error"
            + (f" ({codes})" if codes else ""),
            f"tokens    {self.prompt_tokens:,} prompt + {self.completion_tokens:,} generated",
            f"speed     {self.tokens_per_s:,.0f} tokens/s, of them {self.generated_per_s:,.0f} "
            f"generated; stage busy {self.engine['stage_busy_s'] / max(self.wall_s, 1e-9):.0%}",
            f"time      ready after {self.start_to_ready_s:.1f} s, then "
            f"{show_seconds(self.wall_s) if self.wall_s >= 60 else f'{self.wall_s:.1f} s'}",
        ]
        if self.engine["num_cached_tokens"]:
            lines.insert(3, self._prefix_line())
        lines += [f"warning   {text} ({count} rows)" for text, count in self.warnings.items()]
        lines += [f"output    {path}" for path in self.outputs]
        if self.num_errors:
            lines += [
                f"errors    {p}" for o in self.outputs if (p := errors_path(Path(o))).exists()
            ]
        return "\n".join(lines)


@dataclass(slots=True)
class _File:
    """One input being answered."""

    path: Path
    output: OutputFile
    num_read: int = 0
    is_read: bool = False
    is_finished: bool = False

    def finish_if_complete(self) -> None:
        """Give the output its final name once every line of the input has its record."""
        if self.is_read and not self.is_finished and self.output.num_records == self.num_read:
            self.output.finish()
            self.is_finished = True


def plan_outputs(inputs: list[Path], output: Path | None, *, restart: bool) -> list[Path]:
    """Return where each input's answers go.

    Args:
        output: a file (for one input), a folder, or None for `output_<name>` beside each input.
        restart: answer again what is already answered.

    Raises:
        UsageError: one file for several inputs, two inputs for one file, or an output that exists.
    """
    if output is not None and (output.is_file() or output.suffix == ".jsonl"):
        if len(inputs) > 1:
            raise UsageError(
                f"--output {output} is one file, and there are {len(inputs)} inputs; give a folder"
            )
        outputs = [output]
    else:
        outputs = [(output or path.parent) / f"output_{path.name}" for path in inputs]
    taken = {path.resolve(): f"is the input {path}" for path in inputs}
    for source, path in zip(inputs, outputs, strict=True):
        for trace in traces(path):
            if trace.resolve() in taken:
                raise UsageError(
                    f"the answers to {source} would be written to {trace}, which "
                    f"{taken[trace.resolve()]}; run it apart, or give another --output"
                )
            taken[trace.resolve()] = f"also belongs to the answers to {source}"
            if trace.exists() and not restart:
                raise UsageError(_what_exists(source, trace))
    return outputs


def _what_exists(source: Path, trace: Path) -> str:
    what = "is already answered"
    if trace.name.endswith(PARTIAL):
        what = "is being answered by another run, or was by one that was interrupted"
    return (
        f"{trace} exists: {source} {what}. Give --restart to answer it again from the start, or "
        "another --output"
    )


def count_rows(inputs: list[Path]) -> int:
    """Count the lines to answer, for the progress bar."""
    return sum(1 for path in inputs for _ in read_lines(path, 0))


def run_job(
    engine: Engine,
    inputs: list[Path],
    outputs: list[Path],
    *,
    start_to_ready_s: float,
    is_quiet: bool,
) -> JobSummary:
    """Answer every line of the inputs into the outputs."""
    summary = JobSummary(
        engine.model_name,
        str(engine.dtype).removeprefix("torch."),
        str(engine.device),
        [str(path) for path in inputs],
        [str(path) for path in outputs],
        start_to_ready_s,
    )
    for path in outputs:
        path.parent.mkdir(parents=True, exist_ok=True)
        for trace in traces(path):  # plan_outputs asked for --restart; answers stay till the end
            if trace.name.endswith(PARTIAL):
                trace.unlink(missing_ok=True)
    files = [_File(i, OutputFile(o)) for i, o in zip(inputs, outputs, strict=True)]
    bar = ProgressBar(count_rows(inputs), is_quiet=is_quiet)
    started = time.perf_counter()
    try:
        for record in engine.run(_lines(files)):
            file = files[record.line.source]
            is_error = record.error is not None
            file.output.append(record.line.number, record.to_json(), is_error=is_error)
            _count(summary, record.error.code if record.error is not None else None)
            summary.prompt_tokens += record.num_prompt_tokens
            summary.completion_tokens += record.num_completion_tokens
            file.finish_if_complete()
            bar.update(_progress(summary, engine))
    finally:
        bar.close()
        for file in files:
            if not file.is_finished:
                file.output.close()
    summary.wall_s = time.perf_counter() - started
    summary.engine = asdict(engine.stats)
    summary.warnings = engine.warnings
    return summary


def _lines(files: list[_File]) -> Iterator[Line]:
    for source, file in enumerate(files):
        for line in read_lines(file.path, source):
            file.num_read += 1
            yield line
        file.is_read = True
        file.finish_if_complete()  # its last record may have come before its end was seen


def _count(summary: JobSummary, error_code: str | None) -> None:
    if error_code is None:
        summary.num_rows += 1
        return
    summary.num_errors += 1
    summary.errors_by_code[error_code] = summary.errors_by_code.get(error_code, 0) + 1


def _progress(summary: JobSummary, engine: Engine) -> Progress:
    stats = engine.stats
    return Progress(
        num_rows=summary.num_rows + summary.num_errors,
        num_errors=summary.num_errors,
        num_tokens=stats.num_prompt_tokens + stats.num_generated_tokens,
        num_finished_tokens=summary.prompt_tokens + summary.completion_tokens,
    )
