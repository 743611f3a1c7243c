"""One run of the command: files in, engine, files out, and what is told about it.

It knows paths and counts; the engine does the answering.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from fminfer.engine.loop import LOOKAHEAD
from fminfer.engine.planner import WINDOW
from fminfer.engine.stats import EngineStats
from fminfer.errors import StoppedError
from fminfer.input.lines import Line
from fminfer.messages import StepTrace
from fminfer.output.job_file import JobFile, JournaledInput, StreamedInput
from fminfer.output.journal import Fingerprint
from fminfer.output.places import STDOUT
from fminfer.output.progress import ProgressBar, write_beside_bar
from fminfer.output.records import Record
from fminfer.output.stream import OrderedStream
from fminfer.output.summary import JobSummary
from fminfer.output.trace import TraceFile
from fminfer.stopping import Stopper
from fminfer.worker import Engine


def open_files(
    inputs: list[Path],
    outputs: list[Path],
    fingerprint: Fingerprint,
    *,
    model: str,
    restart: bool,
) -> list[JobFile]:
    """See what earlier runs have done of each input; nothing is written if anything is wrong.

    Args:
        fingerprint: of the run: what must be the same for rows to be kept.
        model: its name, for people.
        restart: keep no rows.

    Raises:
        UsageError: an output is another run's.
    """
    stream = OrderedStream(sys.stdout.buffer, write_beside_bar)
    files: list[JobFile] = []
    for source, (path, output) in enumerate(zip(inputs, outputs, strict=True)):
        if output == STDOUT:
            files.append(StreamedInput(path, source, stream))
        else:
            files.append(JournaledInput(path, source, output, model, fingerprint, restart=restart))
    for file in files:
        file.begin()
    return files


def run_job(
    engine: Engine | None,
    files: Sequence[JobFile],
    summary: JobSummary,
    *,
    stopper: Stopper | None = None,
    is_quiet: bool,
    trace: Path | None = None,
) -> JobSummary:
    """Answer every line that is left of the inputs.

    Args:
        engine: None: every line was answered before.
        summary: filled in, and returned.
        stopper: tells when to stop.
        trace: where to write what each rank did when.

    Raises:
        StoppedError: it was told to stop; finished rows are kept.
        FminferError: it cannot go on; finished rows are kept.
    """
    _count_kept(summary, files)
    started = time.perf_counter()
    if engine is None:
        summary.engine = asdict(EngineStats())
        return summary
    stopper = stopper or Stopper(0.0)
    left = [file.num_left for file in files]
    read_ahead = LOOKAHEAD if None in left else WINDOW  # whoever writes a stream may wait
    bar = ProgressBar(None if None in left else sum(n or 0 for n in left), is_quiet=is_quiet)
    trace_file = None if trace is None else TraceFile(trace)

    def on_step(step: StepTrace) -> None:
        bar.add_step(step.num_prompt_tokens, len(step.step.sampling.token_index))
        if trace_file is not None:
            trace_file.add(step)
        _show(bar, summary, engine)

    engine.trace(on_step)
    try:
        with stopper.telling(engine.stop):
            for record in engine.run(_lines(files, engine, stopper), read_ahead):
                files[record.line.source].add(record)
                _count(summary, record)
                _show(bar, summary, engine)
        if stopper.reason is not None and not all(file.is_finished for file in files):
            raise stopper.reason
    except StoppedError as error:
        if not all(file.is_finished for file in files):
            reason = stopper.reason or error
            abandon(files, reason)
            raise reason from None
    except BaseException as error:
        abandon(files, error)
        raise
    finally:
        bar.close()
        if trace_file is not None:
            trace_file.close()
    summary.wall_s = time.perf_counter() - started
    summary.engine = asdict(engine.stats)
    summary.warnings = engine.warnings
    return summary


def abandon(files: Sequence[JobFile], error: BaseException) -> None:
    """Stop without finishing; each status file says why."""
    for file in files:
        file.abandon(error)


def _lines(files: Sequence[JobFile], engine: Engine, stopper: Stopper) -> Iterator[Line]:
    for file in files:
        lines = file.lines(engine.pass_over)
        while True:
            try:
                with stopper.reading():
                    line = next(lines, None)
            except StoppedError:
                return  # rows that run may go on
            if line is None:
                break
            yield line


def _count_kept(summary: JobSummary, files: Sequence[JobFile]) -> None:
    for file in files:
        summary.num_kept_rows += file.num_kept_rows
        summary.num_kept_errors += file.num_kept_errors
        summary.num_damaged_rows += file.num_damaged_rows


def _count(summary: JobSummary, record: Record) -> None:
    summary.prompt_tokens += record.num_prompt_tokens
    summary.completion_tokens += record.num_completion_tokens
    if record.error is None:
        summary.num_rows += 1
        return
    summary.num_errors += 1
    code = record.error.code
    summary.errors_by_code[code] = summary.errors_by_code.get(code, 0) + 1


def _show(bar: ProgressBar, summary: JobSummary, engine: Engine) -> None:
    bar.update(summary.num_rows + summary.num_errors, summary.num_errors, engine.stats)
