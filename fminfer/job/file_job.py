"""One run of the command: files in, engine, files out, progress and summary."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import orjson

from fminfer.compute.values.step import StepTrace
from fminfer.contract.envelope import Line
from fminfer.core.errors import StoppedError, UsageError
from fminfer.engine.stats import EngineStats
from fminfer.files.disk import lock_file, raising_disk_errors
from fminfer.files.own_files import is_device
from fminfer.files.run_facts import CurrentRun
from fminfer.job.progress import ProgressBar, make_time_left
from fminfer.job.run_inputs import RunInputs
from fminfer.job.run_summary import JobSummary
from fminfer.machine.other_work import OtherWork
from fminfer.machine.stopper import Stopper
from fminfer.machine.threads import find_usable_cores
from fminfer.runtime.job_engine import JobEngine
from fminfer.runtime.lines.runner import LOOKAHEAD, WINDOW, LineRunner

# Counts of the engine that a status file holds.
STATUS_STATS = (
    "num_steps",
    "num_prompt_tokens",
    "num_generated_tokens",
    "num_again_tokens",
    "num_cached_tokens",
    "num_counted_tokens",
    "num_counted_cached",
    "num_counted_shareable",
    "num_copied_requests",
    "num_put_back",
    "num_cut_off",
    "max_rows_running",
    "num_kv_tokens",
)
WAIT_S = 0.02  # wait for a line when there is nothing else to do


def run_job(
    engine: JobEngine | None,
    inputs: RunInputs,
    summary: JobSummary,
    *,
    stopper: Stopper | None = None,
    is_quiet: bool,
    trace: Path | None = None,
    current_run: CurrentRun | None = None,
) -> JobSummary:
    """Answer every line that is left of the inputs; finished rows are kept whatever happens.

    Args:
        engine: None: every line was answered before.
        run_facts: filled in as the run goes on; they stand in each output's status file.
    """
    if engine is not None:
        facts = current_run or CurrentRun()
        job = _FileJob(
            engine, inputs, summary, stopper or Stopper(0.0), facts, is_quiet=is_quiet
        )
        job.run(trace)
    summary.engine = asdict(EngineStats() if engine is None else engine.stats)
    inputs.add_to_summary(summary)
    return summary


class _FileJob:
    """Lines that an engine answers, each for its input."""

    def __init__(
        self,
        engine: JobEngine,
        inputs: RunInputs,
        summary: JobSummary,
        stopper: Stopper,
        current_run: CurrentRun,
        *,
        is_quiet: bool,
    ) -> None:
        self._engine = engine
        self._inputs = inputs
        self._summary = summary
        self._stopper = stopper
        self._current_run = current_run
        current_run.read_stats = lambda: {
            name: getattr(engine.stats, name) for name in STATUS_STATS
        }
        traits = engine.traits
        self._other_work = (
            OtherWork(traits.num_threads, find_usable_cores)
            if traits.num_threads
            else None
        )
        self._bar = ProgressBar(
            inputs.num_rows,
            make_time_left(traits.pace, traits.num_stages),
            is_quiet=is_quiet,
            is_slowed=lambda: (
                self._other_work is not None and self._other_work.is_notable()
            ),
        )

    def run(self, trace: Path | None) -> None:
        """Answer every line that is left."""
        engine = self._engine
        summary = self._summary
        started_s = time.perf_counter()
        self._current_run.begin()
        trace_file = None
        try:
            if trace is not None:
                traits = engine.traits
                trace_file = TraceFile(trace, traits.num_ranks // traits.num_stages)
            engine.follow(self._on_work, None if trace_file is None else trace_file.add)
            self._answer_lines()
        except BaseException as error:
            self._inputs.abandon(error)
            raise
        finally:
            self._bar.close()
            if trace_file is not None:
                trace_file.close()
        summary.wall_s = time.perf_counter() - started_s
        if (other_work := self._other_work) is not None:
            other_work.measure()
            summary.other_work_s = other_work.held_up_s
            summary.other_work_share = other_work.share
            summary.is_beside_other_work = other_work.is_notable()
        summary.constraint_mass = self._current_run.read_mass()
        summary.warnings = engine.warnings
        summary.gives_vectors = engine.traits.gives_vectors

    def _answer_lines(self) -> None:
        """Let the engine answer lines until all are done; each record goes to its input."""
        engine = self._engine
        inputs = self._inputs
        stopper = self._stopper
        # Whoever writes a stream may wait.
        is_stream = any(file.num_left is None for file in inputs.files)
        runner = engine.runs.start(
            LOOKAHEAD if is_stream else WINDOW, self._name_line, is_only_run=True
        )
        watch = runner.watch
        assert watch is not None, "a run over files watches its constraints"
        self._current_run.read_mass = watch.summarize
        lines = read_remaining_lines(inputs, runner, stopper)
        try:
            with stopper.forwarding_stop(
                engine.stop, lambda: self._bar.predict_running_s(engine)
            ):
                while runner.has_work:
                    runner.read_from(lines)
                    if runner.has_work and not runner.is_busy:  # no line is there yet
                        time.sleep(WAIT_S)
                    for record in runner.step():
                        self._current_run.add_row()  # before the output may be complete
                        if inputs.files[record.line.source].add(record):
                            self._summary.count_record(record)
                        self._show_progress()
        except StoppedError as error:
            if not inputs.is_finished:
                raise (stopper.reason or error) from None
            return
        finally:
            runner.close()
        watch.judge_few()
        if stopper.reason is not None and not inputs.is_finished:
            raise stopper.reason
        inputs.check_none_lost()

    def _name_line(self, line: Line) -> str:
        """Say which line it is, and of which file if there are several."""
        files = self._inputs.files
        is_only = len(files) == len(self._summary.inputs) == 1
        return f"line {line.number}" + (
            "" if is_only else f" of {files[line.source].path}"
        )

    def _on_work(self, num_fed: int, num_drawn: int, num_running: int) -> None:
        self._bar.add_work(self._engine.stats, num_fed, num_drawn)
        self._current_run.add_step(num_fed, num_drawn, num_running)
        self._show_progress()

    def _show_progress(self) -> None:
        self._bar.total_rows = self._inputs.num_rows
        num_rows = self._summary.num_rows
        num_errors = self._summary.num_errors
        self._bar.update(num_rows + num_errors, num_errors, self._engine)


def read_remaining_lines(
    inputs: RunInputs, runner: LineRunner, stopper: Stopper
) -> Iterator[Line | None]:
    """Yield the lines that are left; None where none is there at the moment."""
    for file in inputs.iterate_files():
        if file is None:
            yield None
            continue
        lines = file.read_lines(runner.add_answered_line)
        while True:
            try:
                with stopper.interrupting_reads():
                    line = next(lines, None)
            except StoppedError:
                return  # rows that run may go on
            except UsageError as error:
                inputs.abandon_file(file, error)  # a folder's other files go on
                break
            if line is None:
                break
            yield line


LAYERS = 1000  # added to a rank's number: the line of its streamed layers


class TraceFile:
    """Writes a trace as JSON; of the ranks of a stage, the first one stands for all."""

    def __init__(self, path: Path, num_shards: int) -> None:
        self._path = path
        self._num_shards = num_shards
        with raising_disk_errors(path):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
            self._file = os.fdopen(fd, "wb")
            if not is_device(path):
                # another run's events among ours would break the JSON
                lock_file(fd, path, path)
                os.ftruncate(fd, 0)
        self._write_bytes(b"[\n")
        self._start_s: float | None = None
        self._lines: set[int] = set()  # that have their name

    def add(self, step: StepTrace) -> None:
        """Write what each stage did for one step."""
        if self._start_s is None:
            self._start_s = step.spans[0].start_s
        for stage, span in enumerate(step.spans):
            rank = stage * self._num_shards
            name = f"rank {rank}"
            args = {
                "step": step.step_id,
                "prompt_tokens": step.num_prompt_tokens,
                "decode_rows": step.num_decode_rows,
                "sent_bytes": span.sent_bytes,
            }
            self._add_span(rank, name, step.phase, (span.start_s, span.end_s), args)
            line = rank + LAYERS
            name = f"{name}: streamed layers"
            for number, (asked_s, came_s, done_s) in enumerate(span.brought):
                # the layer's number among the streamed ones
                layer_args = {"step": step.step_id, "number": number}
                self._add_span(line, name, "wait", (asked_s, came_s), layer_args)
                self._add_span(line, name, "compute", (came_s, done_s), layer_args)

    def close(self) -> None:
        """End the file."""
        with raising_disk_errors(self._path), self._file:
            self._file.write(b"{}]\n")

    def _write_bytes(self, data: bytes) -> None:
        with raising_disk_errors(self._path):
            self._file.write(data)

    def _add_span(
        self,
        line: int,
        title: str,
        name: str,
        times: tuple[float, float],
        args: Mapping[str, int],
    ) -> None:
        if line not in self._lines:
            self._lines.add(line)
            named = {"name": "thread_name", "ph": "M", "pid": 0, "tid": line}
            self._write_bytes(orjson.dumps(named | {"args": {"name": title}}) + b",\n")
        assert self._start_s is not None, "a step"
        start_us, end_us = ((time_s - self._start_s) * 1e6 for time_s in times)
        # Perfetto colours by name.
        event = {
            "name": name,
            "cat": name,
            "ph": "X",
            "pid": 0,
            "tid": line,
            "ts": round(start_us, 1),
            "dur": round(end_us - start_us, 1),
            "args": args,
        }
        self._write_bytes(orjson.dumps(event) + b",\n")
