"""One run of the command: files in, engine, files out, and what is told about it.

It knows paths and counts; the engine does the answering.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fminfer.input.lines import Line, count_rows, read_lines
from fminfer.output.places import STDOUT
from fminfer.output.progress import Progress, ProgressBar, write_beside_bar
from fminfer.output.records import Record
from fminfer.output.status import Counts, StatusFile
from fminfer.output.stream import OrderedStream
from fminfer.output.summary import JobSummary
from fminfer.output.trace import TraceFile
from fminfer.output.writer import PARTIAL, OutputFile, traces
from fminfer.worker import Engine


@dataclass(slots=True)
class _Input:
    """One input being answered."""

    path: Path
    source: int
    expected_rows: int | None
    output: OutputFile | OrderedStream
    counts: Counts = field(default_factory=Counts)
    status: StatusFile | None = None  # stdout has none
    num_read: int = 0
    is_read: bool = False
    is_finished: bool = False

    def lines(self) -> Iterator[Line]:
        """Read it, and keep the books of what was read."""
        if self.status is not None:
            self.status.move("in_progress")
        for line in read_lines(self.path, self.source):
            self.num_read += 1
            self.counts.num_rows = max(self.expected_rows or 0, self.num_read)
            if isinstance(self.output, OrderedStream):
                self.output.expect(self.source, line.number)
            yield line
        self.counts.num_rows = self.num_read
        self.is_read = True
        self.finish_if_complete()  # its last record may have come before its end was seen

    def add(self, record: Record) -> None:
        """Write a record at once."""
        is_error, counts = record.error is not None, self.counts
        counts.num_failed += is_error
        counts.num_completed += not is_error
        counts.input_tokens += record.num_prompt_tokens
        counts.cached_tokens += record.num_cached_tokens
        counts.output_tokens += record.num_completion_tokens
        line, number = record.to_json(), record.line.number
        if isinstance(self.output, OrderedStream):
            self.output.append(self.source, number, line, is_error=is_error)
        else:
            self.output.append(number, line, is_error=is_error)
        if self.status is not None:
            self.status.update()
        self.finish_if_complete()

    def finish_if_complete(self) -> None:
        """Give the output its final name once every line of the input has its record."""
        if self.is_finished or not self.is_read or self.counts.num_done < self.num_read:
            return
        if self.status is not None:
            self.status.move("finalizing")
        if isinstance(self.output, OutputFile):
            self.output.finish()
        if self.status is not None:
            self.status.move("completed")
        self.is_finished = True

    def abandon(self, error: BaseException) -> None:
        """Stop without finishing; what was answered stays in the partial files."""
        if self.is_finished:
            return
        if isinstance(self.output, OutputFile):
            self.output.close()
        if self.status is not None and isinstance(error, KeyboardInterrupt):
            self.status.move("cancelled")
        elif self.status is not None:
            self.status.move("failed", f"{type(error).__name__}: {error}")


def run_job(
    engine: Engine,
    inputs: list[Path],
    outputs: list[Path],
    *,
    start_to_ready_s: float,
    is_quiet: bool,
    trace: Path | None = None,
) -> JobSummary:
    """Answer every line of the inputs into the outputs.

    Args:
        trace: where to write what each rank did when.
    """
    summary = JobSummary(
        engine.model_name,
        str(engine.dtype).removeprefix("torch."),
        str(engine.device),
        [str(path) for path in inputs],
        [str(path) for path in outputs],
        start_to_ready_s,
    )
    files = _open(inputs, outputs, engine.model_name)
    expected = [file.expected_rows for file in files]
    total = None if None in expected else sum(count or 0 for count in expected)
    bar = ProgressBar(total, is_quiet=is_quiet)
    trace_file = None if trace is None else TraceFile(trace)
    if trace_file is not None:
        engine.trace(trace_file.add)
    started = time.perf_counter()
    try:
        for record in engine.run(line for file in files for line in file.lines()):
            files[record.line.source].add(record)
            _count(summary, record)
            bar.update(_progress(summary, engine))
    except BaseException as error:
        for file in files:
            file.abandon(error)
        raise
    finally:
        bar.close()
        if trace_file is not None:
            trace_file.close()
    summary.wall_s = time.perf_counter() - started
    summary.engine = asdict(engine.stats)
    summary.warnings = engine.warnings
    return summary


def _open(inputs: list[Path], outputs: list[Path], model: str) -> list[_Input]:
    """Make ready what will be written; `plan_outputs` has asked for --restart where need be."""
    stream = OrderedStream(sys.stdout.buffer, write_beside_bar)
    files = []
    for source, (path, output) in enumerate(zip(inputs, outputs, strict=True)):
        expected = count_rows(path)
        if output == STDOUT:
            files.append(_Input(path, source, expected, stream))
            continue
        output.parent.mkdir(parents=True, exist_ok=True)
        for trace in traces(output):  # finished answers of an earlier run stay till the end
            if trace.name.endswith(PARTIAL):
                trace.unlink(missing_ok=True)
        file = _Input(path, source, expected, OutputFile(output), Counts(expected or 0))
        file.status = StatusFile(path, output, model, file.counts)
        file.status.move("validating")
        files.append(file)
    return files


def _count(summary: JobSummary, record: Record) -> None:
    summary.prompt_tokens += record.num_prompt_tokens
    summary.completion_tokens += record.num_completion_tokens
    if record.error is None:
        summary.num_rows += 1
        return
    summary.num_errors += 1
    code = record.error.code
    summary.errors_by_code[code] = summary.errors_by_code.get(code, 0) + 1


def _progress(summary: JobSummary, engine: Engine) -> Progress:
    stats = engine.stats
    return Progress(
        num_rows=summary.num_rows + summary.num_errors,
        num_errors=summary.num_errors,
        num_tokens=stats.num_prompt_tokens + stats.num_generated_tokens,
        num_finished_tokens=summary.prompt_tokens + summary.completion_tokens,
    )
