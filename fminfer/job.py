"""One run of the command: files in, engine, files out, and what is told about it.

It knows paths and counts; the engine does the answering.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from fminfer.engine.loop import LOOKAHEAD
from fminfer.engine.planner import WINDOW
from fminfer.engine.stats import EngineStats
from fminfer.errors import StoppedError, UsageError
from fminfer.input.lines import Line
from fminfer.messages import StepTrace
from fminfer.other_work import OtherWork
from fminfer.output.progress import ProgressBar
from fminfer.output.records import Record
from fminfer.output.run_inputs import RunInputs
from fminfer.output.summary import JobSummary
from fminfer.output.trace import TraceFile
from fminfer.stopping import Stopper
from fminfer.team.team import Team
from fminfer.threads import affine_cores
from fminfer.worker import Engine


def run_job(
    engine: Engine | Team | None,
    inputs: RunInputs,
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
    started = time.perf_counter()
    if engine is None:
        return _sum_up(summary, inputs, EngineStats())
    stopper = stopper or Stopper(0.0)
    left = [file.num_left for file in inputs.files]
    # Whoever writes a stream may wait.
    read_ahead = LOOKAHEAD if None in left else WINDOW
    other_work = OtherWork(engine.num_threads, affine_cores) if engine.is_alone else None
    is_slowed = other_work.is_notable if other_work is not None else lambda: False
    bar = ProgressBar(inputs.num_rows, is_quiet=is_quiet, is_slowed=is_slowed)
    trace_file = None if trace is None else TraceFile(trace)

    def on_work(num_fed: int, num_drawn: int) -> None:
        bar.add_step(num_fed, num_drawn)
        _show(bar, summary, inputs, engine)

    _follow_steps(engine, on_work, trace_file)
    try:
        with stopper.telling(engine.stop, lambda: bar.drawing_s(engine.num_draws_left)):
            for record in engine.run(_lines(inputs, engine, stopper), read_ahead):
                if inputs.files[record.line.source].add(record):
                    _count(summary, record)
                _show(bar, summary, inputs, engine)
        if stopper.reason is not None and not inputs.is_finished:
            raise stopper.reason
        inputs.check_kept()
    except StoppedError as error:
        if not inputs.is_finished:
            reason = stopper.reason or error
            inputs.abandon(reason)
            raise reason from None
    except BaseException as error:
        inputs.abandon(error)
        raise
    finally:
        bar.close()
        if trace_file is not None:
            trace_file.close()
    summary.wall_s = time.perf_counter() - started
    if other_work is not None:
        other_work.look()
        summary.other_work_s, summary.other_work_share = other_work.held_up_s, other_work.share
        summary.is_beside_other_work = other_work.is_notable()
    summary.warnings = engine.warnings
    return _sum_up(summary, inputs, engine.stats)


def _follow_steps(
    engine: Engine | Team, on_work: Callable[[int, int], None], trace_file: TraceFile | None
) -> None:
    """Have `on_work` told how many tokens were fed and drawn, and each step traced."""

    def on_step(step: StepTrace) -> None:
        on_work(step.num_prompt_tokens, len(step.step.sampling.token_index))
        if trace_file is not None:
            trace_file.add(step)

    if isinstance(engine, Team):  # whose steps are its pipelines'
        engine.on_work = on_work
    else:
        engine.trace(on_step)


def _lines(inputs: RunInputs, engine: Engine | Team, stopper: Stopper) -> Iterator[Line | None]:
    for file in inputs.turns():
        if file is None:
            yield None
            continue
        lines = file.lines(engine.pass_over)
        while True:
            try:
                with stopper.reading():
                    line = next(lines, None)
            except StoppedError:
                return  # rows that run may go on
            except UsageError as error:
                inputs.give_up(file, error)  # a folder's other files go on
                break
            if line is None:
                break
            yield line


def _sum_up(summary: JobSummary, inputs: RunInputs, stats: EngineStats) -> JobSummary:
    summary.engine = asdict(stats)
    inputs.add_to(summary)
    return summary


def _count(summary: JobSummary, record: Record) -> None:
    summary.prompt_tokens += record.num_prompt_tokens
    summary.completion_tokens += record.num_completion_tokens
    if record.error is None:
        summary.num_rows += 1
        return
    summary.num_errors += 1
    code = record.error.code
    summary.errors_by_code[code] = summary.errors_by_code.get(code, 0) + 1


def _show(
    bar: ProgressBar,
    summary: JobSummary,
    inputs: RunInputs,
    engine: Engine | Team,
) -> None:
    bar.total_rows = inputs.num_rows
    bar.update(summary.num_rows + summary.num_errors, summary.num_errors, engine.stats)
