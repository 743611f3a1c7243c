"""One run of the command: files in, engine, files out, and what is told about it.

It knows paths and counts; the engine does the answering.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from fminfer.engine.stats import EngineStats
from fminfer.errors import InUseError, StoppedError, UsageError
from fminfer.input.lines import Line
from fminfer.line_run.runner import LOOKAHEAD, WINDOW, LineRunner
from fminfer.other_work import OtherWork
from fminfer.output.claims import Claim, Claims
from fminfer.output.job_file import JobFile, JournaledInput, StreamedInput
from fminfer.output.journal import Fingerprint
from fminfer.output.places import STDOUT, Plan
from fminfer.output.progress import ProgressBar, write_beside_bar
from fminfer.output.records import Record
from fminfer.output.shared_files import SharedFiles
from fminfer.output.stream import OrderedStream
from fminfer.output.summary import JobSummary
from fminfer.output.trace import TraceFile
from fminfer.stopping import Stopper
from fminfer.threads import affine_cores
from fminfer.worker import Engine

WAIT_S = 0.02  # for a line, where nothing else is to be done


@dataclass(slots=True, frozen=True)
class NamedFiles:
    """The inputs of a run that answers all of them itself, one after another."""

    files: list[JobFile]
    num_rows: int | None  # left to answer; None: not known before the end of the inputs

    @property
    def is_finished(self) -> bool:
        return all(file.is_settled for file in self.files)

    def turns(self) -> Iterator[JobFile]:
        return iter(self.files)

    def check_kept(self) -> None:
        """See that no other run is answering an output that it has taken over.

        Raises:
            InUseError: one is.
        """
        for file in self.files:
            if isinstance(file, JournaledInput) and file.is_lost and not file.is_finished:
                file.see_completed()
        lost = [str(file.path) for file in self.files if file.is_lost and not file.is_finished]
        if lost:
            raise InUseError(
                f"another run has taken over {', '.join(lost)}, since this one slept or did not "
                "reach the disk for a minute; what it had finished is kept. Run the same command "
                "again when the other has ended"
            )


def open_files(
    inputs: list[Path],
    outputs: list[Path],
    fingerprint: Fingerprint,
    *,
    model: str,
    restart: bool,
    limit: int | None = None,
) -> NamedFiles:
    """See what earlier runs have done of each input; nothing is written if anything is wrong.

    Args:
        fingerprint: of the run: what must be the same for rows to be kept.
        model: its name, for people.
        restart: keep no rows.
        limit: of each input, answer the first so many lines.

    Raises:
        UsageError: an output is another run's.
    """
    stream = OrderedStream(sys.stdout.buffer, write_beside_bar)
    started_s = time.time()
    files: list[JobFile] = []
    claims = Claims()
    for source, (path, output) in enumerate(zip(inputs, outputs, strict=True)):
        if output == STDOUT:
            files.append(StreamedInput(path, source, stream, limit))
        else:
            file = JournaledInput(
                *(path, source, output, model, fingerprint),
                claims=claims,
                restart=restart,
                started_s=started_s,
                limit=limit,
            )
            files.append(file)
    for each in files:
        each.begin()
    left = [file.num_left for file in files]
    return NamedFiles(files, None if None in left else sum(n or 0 for n in left))


def share_files(
    find: Callable[[], Plan],
    fingerprint: Fingerprint,
    *,
    model: str,
    restart: bool,
    is_watching: bool,
    limit: int | None = None,
) -> SharedFiles:
    """Prepare to answer files together with other runs; nothing is opened yet.

    Args:
        find: lists the inputs and the output of each, as they are now.
        is_watching: wait for more files when all are answered.
        limit: of each input, answer the first so many lines.
    """
    claims, started_s = Claims(), time.time()

    def open_file(path: Path, source: int, output: Path, claim: Claim) -> JournaledInput:
        return JournaledInput(
            *(path, source, output, model, fingerprint),
            claims=claims,
            claim=claim,
            restart=restart,
            started_s=started_s,
            limit=limit,
        )

    return SharedFiles(
        *(find, open_file, claims, fingerprint),
        restart=restart,
        is_watching=is_watching,
        started_s=started_s,
        limit=limit,
    )


def run_job(
    engine: Engine | None,
    inputs: NamedFiles | SharedFiles,
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
    other_work = (
        OtherWork(engine.facts.num_threads, affine_cores) if engine.facts.is_alone else None
    )
    is_slowed = other_work.is_notable if other_work is not None else lambda: False
    bar = ProgressBar(inputs.num_rows, is_quiet=is_quiet, is_slowed=is_slowed)
    trace_file = None if trace is None else TraceFile(trace)

    def on_work(num_fed: int, num_drawn: int) -> None:
        bar.add_step(num_fed, num_drawn)
        _show(bar, summary, inputs, engine)

    engine.follow(on_work, None if trace_file is None else trace_file.add)
    runner = engine.start_run(read_ahead)
    lines = _lines(inputs, runner, stopper)
    try:
        with stopper.telling(engine.stop, lambda: bar.drawing_s(engine.num_draws_left)):
            while runner.has_work:
                _feed(runner, lines)
                for record in runner.step():
                    if inputs.files[record.line.source].add(record):
                        _count(summary, record)
                    _show(bar, summary, inputs, engine)
        if stopper.reason is not None and not inputs.is_finished:
            raise stopper.reason
        inputs.check_kept()
    except StoppedError as error:
        if not inputs.is_finished:
            reason = stopper.reason or error
            abandon(inputs, reason)
            raise reason from None
    except BaseException as error:
        abandon(inputs, error)
        raise
    finally:
        bar.close()
        runner.close()
        if trace_file is not None:
            trace_file.close()
    summary.wall_s = time.perf_counter() - started
    if other_work is not None:
        other_work.look()
        summary.other_work_s, summary.other_work_share = other_work.held_up_s, other_work.share
        summary.is_beside_other_work = other_work.is_notable()
    summary.warnings = engine.warnings
    return _sum_up(summary, inputs, engine.stats)


def abandon(inputs: NamedFiles | SharedFiles, error: BaseException) -> None:
    """Stop without finishing; each status file says why."""
    for file in inputs.files:
        file.abandon(error)


def _feed(runner: LineRunner, lines: Iterator[Line | None]) -> None:
    """Add lines as long as more are wanted, and are there."""
    for _ in range(runner.num_wanted):
        if not runner.wants_more:
            return
        try:
            line = next(lines)
        except StopIteration:
            runner.end_input()
            return
        if line is None:  # not there yet
            if not runner.is_busy:
                time.sleep(WAIT_S)
            return
        runner.add(line)


def _lines(
    inputs: NamedFiles | SharedFiles, runner: LineRunner, stopper: Stopper
) -> Iterator[Line | None]:
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
                if isinstance(inputs, NamedFiles) or isinstance(file, StreamedInput):
                    raise
                inputs.give_up(file, error)  # a folder's other files go on
                break
            if line is None:
                break
            yield line


def _sum_up(
    summary: JobSummary, inputs: NamedFiles | SharedFiles, stats: EngineStats
) -> JobSummary:
    summary.engine = asdict(stats)
    if isinstance(inputs, SharedFiles):
        mine = [file for file in inputs.files if not file.is_lost]
        summary.inputs = [file.path for file in mine]
        summary.outputs = [file.output for file in mine]
        summary.num_files_elsewhere = inputs.num_elsewhere
        summary.num_kept_rows, summary.num_kept_errors = (
            inputs.num_kept_rows,
            inputs.num_kept_errors,
        )
        summary.refused = inputs.refused
    for file in inputs.files:
        if isinstance(file, JournaledInput) and file.is_lost and file.is_finished:
            summary.completed_elsewhere.append(str(file.output))
        summary.num_kept_rows += file.num_kept_rows
        summary.num_kept_errors += file.num_kept_errors
        summary.num_damaged_rows += file.num_damaged_rows
        summary.num_tried_rows += file.num_tried_rows
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
    inputs: NamedFiles | SharedFiles,
    engine: Engine,
) -> None:
    bar.total_rows = inputs.num_rows
    bar.update(summary.num_rows + summary.num_errors, summary.num_errors, engine.stats)
