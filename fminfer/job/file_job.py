"""One run of the command: files in, engine, files out, progress and summary."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import orjson

from fminfer.compute.step import StepTrace
from fminfer.contract.envelope import Line
from fminfer.contract.record import Record
from fminfer.core.errors import StoppedError, UsageError
from fminfer.engine.stats import EngineStats
from fminfer.files.run_facts import RunFacts
from fminfer.job.progress import ProgressBar
from fminfer.job.run_inputs import RunInputs
from fminfer.job.run_summary import JobSummary
from fminfer.job.time_left import TimeLeft
from fminfer.machine.other_work import OtherWork
from fminfer.machine.stopper import Stopper
from fminfer.machine.threads import affine_cores
from fminfer.runtime.engine_api import Engine
from fminfer.runtime.lines.runner import LOOKAHEAD, WINDOW, LineRunner

# Counts of the engine that a status file tells.
TOLD_STATS = (
    *("num_steps", "num_prompt_tokens", "num_generated_tokens", "num_again_tokens"),
    *("num_cached_tokens", "num_counted_tokens", "num_counted_cached", "num_counted_shareable"),
    *("num_copied_requests", "num_put_back", "num_cut_off", "max_rows_running", "num_kv_tokens"),
)
WAIT_S = 0.02  # wait for a line when there is nothing else to do


def run_job(
    engine: Engine | None,
    inputs: RunInputs,
    summary: JobSummary,
    *,
    stopper: Stopper | None = None,
    is_quiet: bool,
    trace: Path | None = None,
    run_facts: RunFacts | None = None,
) -> JobSummary:
    """Answer every line that is left of the inputs.

    Args:
        engine: None: every line was answered before.
        summary: filled in, and returned.
        stopper: tells when to stop.
        trace: where to write what each rank did when.
        run_facts: filled in as the run goes on; they stand in each output's status file.

    Raises:
        StoppedError: it was told to stop; finished rows are kept.
        FminferError: it cannot go on; finished rows are kept.
    """
    started = time.perf_counter()
    if engine is None:
        return _sum_up(summary, inputs, EngineStats())
    facts, run_facts = engine.facts, run_facts or RunFacts()
    run_facts.read_stats = lambda: {name: getattr(engine.stats, name) for name in TOLD_STATS}
    run_facts.begin()
    other_work = OtherWork(facts.num_threads, affine_cores) if facts.is_alone else None
    is_slowed = other_work.is_notable if other_work is not None else lambda: False
    time_left = TimeLeft(
        "streamed" if engine.facts.streaming else engine.device.type, facts.num_stages
    )
    bar = ProgressBar(inputs.num_rows, time_left, is_quiet=is_quiet, is_slowed=is_slowed)
    trace_file = None
    if trace is not None:
        trace_file = TraceFile(trace, facts.num_ranks // facts.num_stages)

    def on_work(num_fed: int, num_drawn: int, num_running: int) -> None:
        bar.add_work(engine.stats, num_fed, num_drawn)
        run_facts.add_step(num_fed, num_drawn, num_running)
        _show(bar, summary, inputs, engine)

    engine.follow(on_work, None if trace_file is None else trace_file.add)
    try:
        _answer(engine, inputs, summary, stopper or Stopper(0.0), bar, run_facts)
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
    summary.gives_vectors = engine.intake.limits.vectors is not None
    return _sum_up(summary, inputs, engine.stats)


def _answer(
    engine: Engine,
    inputs: RunInputs,
    summary: JobSummary,
    stopper: Stopper,
    bar: ProgressBar,
    run_facts: RunFacts,
) -> None:
    """Have the engine answer lines, and hand each record to its input, until all are done.

    Raises:
        StoppedError: it was told to stop, and lines are left.
    """
    left = [file.num_left for file in inputs.files]
    # Whoever writes a stream may wait.
    runner = engine.runs.start(
        LOOKAHEAD if None in left else WINDOW,
        lambda line: _name_line(line, inputs, summary),
        is_only_run=True,
    )
    lines = _lines(inputs, runner, stopper)
    try:
        with stopper.telling(engine.stop, lambda: bar.drawing_s(engine)):
            while runner.has_work:
                runner.read_from(lines)
                if runner.has_work and not runner.is_busy:  # no line is there yet
                    time.sleep(WAIT_S)
                for record in runner.step():
                    run_facts.add_row()  # before the output may be complete
                    if inputs.files[record.line.source].add(record):
                        _count(summary, record)
                    _show(bar, summary, inputs, engine)
    except StoppedError as error:
        if not inputs.is_finished:
            raise (stopper.reason or error) from None
        return
    finally:
        runner.close()
    if stopper.reason is not None and not inputs.is_finished:
        raise stopper.reason
    inputs.check_kept()


def _name_line(line: Line, inputs: RunInputs, summary: JobSummary) -> str:
    """Say which line it is, and of which file if there are several."""
    is_only = len(inputs.files) == len(summary.inputs) == 1
    return f"line {line.number}" + ("" if is_only else f" of {inputs.files[line.source].path}")


def _lines(inputs: RunInputs, runner: LineRunner, stopper: Stopper) -> Iterator[Line | None]:
    """Yield the lines that are left; None where none is there at the moment."""
    for file in inputs.turns():
        if file is None:
            yield None
            continue
        lines = file.lines(runner.pass_over)
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
    engine: Engine,
) -> None:
    bar.total_rows = inputs.num_rows
    bar.update(summary.num_rows + summary.num_errors, summary.num_errors, engine)


LAYERS = 1000  # added to a rank's number: the line of its streamed layers


class TraceFile:
    """Writes a trace.

    Args:
        path: a .json file; an older one is replaced.
        num_shards: ranks of a stage; the first one stands for all.
    """

    def __init__(self, path: Path, num_shards: int = 1) -> None:
        self._num_shards = num_shards
        self._file = path.open("wb")
        self._file.write(b"[\n")
        self._start_s: float | None = None
        self._tids: set[int] = set()

    def add(self, step: StepTrace) -> None:
        """Write what each stage did for one step; its first rank stands for it."""
        if self._start_s is None:
            self._start_s = step.spans[0].start_s
        for stage, span in enumerate(step.spans):
            rank = stage * self._num_shards
            args: dict[str, object] = {
                "step": step.step_id,
                "prompt_tokens": step.num_prompt_tokens,
                "decode_rows": step.num_decode_rows,
                "sent_bytes": span.sent_bytes,
            }
            self._name(rank, f"rank {rank}")
            self._add_span(rank, step.phase, (span.start_s, span.end_s), args)
            if span.brought:
                args |= {"read_bytes": span.read_bytes, "read_s": span.read_s}
                self._name(rank + LAYERS, f"rank {rank}: streamed layers")
            for number, (asked_s, came_s, done_s) in enumerate(span.brought):
                of = {"step": step.step_id, "number": number}  # of the streamed ones
                self._add_span(rank + LAYERS, "wait", (asked_s, came_s), of)
                self._add_span(rank + LAYERS, "compute", (came_s, done_s), of)

    def _add_span(
        self, tid: int, name: str, times: tuple[float, float], args: Mapping[str, object]
    ) -> None:
        assert self._start_s is not None, "a step"
        self._write(
            {
                "name": name,  # Perfetto colours by name
                "cat": name,
                "ph": "X",
                "pid": 0,
                "tid": tid,
                "ts": round((times[0] - self._start_s) * 1e6, 1),
                "dur": round((times[1] - times[0]) * 1e6, 1),
                "args": args,
            }
        )

    def close(self) -> None:
        """End the file."""
        self._file.write(b"{}]\n")
        self._file.close()

    def _name(self, tid: int, name: str) -> None:
        if tid not in self._tids:
            event = {"name": "thread_name", "ph": "M", "pid": 0, "tid": tid, "args": {"name": name}}
            self._write(event)
            self._tids.add(tid)

    def _write(self, event: dict[str, object]) -> None:
        self._file.write(orjson.dumps(event) + b",\n")
