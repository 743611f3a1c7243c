"""Several pipelines for one input: each takes rows as it gets free, and one that dies loses none.

To a run it is an engine; the engines are in processes of their own. It knows processes and lines,
nothing of steps.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from multiprocessing.connection import wait

import torch

from fminfer.assembly import find_limits
from fminfer.config import EngineConfig
from fminfer.engine.intake import Intake
from fminfer.engine.loop import LOOKAHEAD
from fminfer.engine.stats import EngineStats
from fminfer.errors import PipelineError, StoppedError, error_of, row_error
from fminfer.fingerprint import digest_files, name_differences
from fminfer.input.envelope import Envelope, as_text, open_envelope
from fminfer.input.lines import Line
from fminfer.models.checkpoint import Checkpoint
from fminfer.output.records import Record
from fminfer.team.process import Pipeline
from fminfer.team.wire import (
    END,
    GO_ON,
    Answered,
    Ended,
    Failed,
    Loaded,
    Ready,
    Report,
    Taken,
    receive,
)
from fminfer.tokenizer import Tokenizer

MOST_UNTAKEN = 16  # lines that wait at a pipeline's door
LINES_AT_ONCE = 4  # neighbours, which may share a prefix, go to the same one
POLL_S = 0.02
END_S = 4.0  # for pipelines to end by themselves


class Team:
    """Several pipelines that answer together.

    `on_work` is told now and then how many tokens were fed, and how many drawn.

    Args:
        start: starts the pipelines.
        say: tells the user of a pipeline that died.

    Raises:
        FminferError: no pipeline can be started.
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        start: Callable[[], list[Pipeline]],
        say: Callable[[str], None],
    ) -> None:
        self._say = say
        # Lines are checked and counted here, in the order of the input; each pipeline sees a part.
        no_words = Tokenizer(None)  # their tokens are the pipelines' work
        limits = find_limits(config, checkpoint, no_words)
        self._intake = Intake(no_words, limits, config.seed)
        self.on_work: Callable[[int, int], None] = lambda num_fed, num_drawn: None
        self._returned: deque[Line] = deque()  # of pipelines that died
        self._grace_s: float | None = None
        self._file_digests = digest_files(checkpoint)
        self._pipelines = start()
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        ready = [p.ready for p in self._pipelines if p.ready is not None]
        self.device = torch.device(ready[0].device)
        self.num_threads = ready[0].num_threads  # that compute in each process
        self.is_alone = False  # other processes compute
        self.num_draws_left = 0  # of rows that run: only the pipelines know
        self.why_plain = next((r.why_plain for r in ready if r.why_plain), "")
        self.why_slower = next((r.why_slower for r in ready if r.why_slower), "")

    @property
    def stats(self) -> EngineStats:
        """What all pipelines have counted, as they last said it."""
        total = EngineStats()
        for pipeline in self._pipelines:
            total.add(pipeline.stats)
        return total

    @property
    def gpu_memory(self) -> dict[str, int]:
        """Nothing: each pipeline has GPUs of its own."""
        return {}

    @property
    def warnings(self) -> dict[str, int]:
        """What was strange about requests that were answered all the same, and how often."""
        total: Counter[str] = Counter()
        for pipeline in self._pipelines:
            total.update({} if pipeline.ended is None else pipeline.ended.warnings)
        return self._intake.warnings.to_dict(total)

    def tell_warnings(self, tell: Callable[[str], None]) -> None:
        """Have a function told of each warning when it is first met."""
        self._intake.on_warning = tell

    def pass_over(self, line: Line) -> None:
        """Take note of a line that is not to be answered again."""
        self._intake.pass_over(line)

    def stop(self, grace_s: float) -> None:
        """End in good order; rows that run have so long. It may be called from a signal handler."""
        self._grace_s = grace_s

    def run(
        self, lines: Iterator[Line | None], read_ahead: int = LOOKAHEAD
    ) -> Generator[Record, None, None]:
        """Answer lines, as `Engine.run` does; once.

        Raises:
            StoppedError: as told.
            PipelineError: no pipeline is left.
        """
        self._intake.start_run()
        has_more, is_told = True, False
        while has_more or self._returned or any(pipeline.lines for pipeline in self._living):
            self._check_any_lives()
            if self._grace_s is not None and not is_told:
                has_more, is_told = False, True
                for pipeline in self._living:
                    pipeline.tell(float(self._grace_s))
            if not is_told:
                has_more = yield from self._feed(lines)
            yield from self._listen(POLL_S)
            if is_told and all(p.ended is not None for p in self._living):
                break
        if is_told:
            raise StoppedError("stopped as told, and rows are left")
        for pipeline in self._living:
            pipeline.tell(END)
        while any(pipeline.ended is None for pipeline in self._living):
            yield from self._listen(POLL_S)

    def close(self) -> None:
        """End all pipelines: those that have said so in peace, the others soon."""
        for pipeline in self._pipelines:
            if pipeline.ended is None:
                pipeline.close()
        deadline_s = time.monotonic() + END_S
        for pipeline in self._pipelines:
            pipeline.end(max(0.0, deadline_s - time.monotonic()))
            pipeline.close()

    @property
    def _living(self) -> list[Pipeline]:
        return [pipeline for pipeline in self._pipelines if pipeline.is_alive]

    def _start(self) -> None:
        """Wait until every pipeline has loaded, then until each has its KV cache."""
        waiting = {pipeline.number for pipeline in self._pipelines}
        while waiting:
            self._check_any_lives()
            for pipeline, report in self._reports(1.0):
                if isinstance(report, Loaded):
                    waiting.discard(pipeline.number)
                    pipeline.loaded = report
            waiting &= {pipeline.number for pipeline in self._living}
        self._compare_weights()
        for pipeline in self._living:
            pipeline.tell(GO_ON)
        while any(pipeline.ready is None for pipeline in self._living):
            list(self._listen(1.0))
        self._check_any_lives()

    def _compare_weights(self) -> None:
        """See that every pipeline has read the same weights: the folder may have changed."""
        for pipeline in self._living:
            digests = {} if pipeline.loaded is None else pipeline.loaded.file_digests
            if differences := name_differences(digests, self._file_digests):
                raise PipelineError(
                    f"the weights of pipeline {pipeline.number} are not those with which the run "
                    f"began: {differences} differ; leave the model's folder as it is while a run "
                    "starts"
                )

    def _feed(self, lines: Iterator[Line | None]) -> Generator[Record, None, bool]:
        """Give lines to those who have room; return False when there are no more."""
        while True:
            free = [p for p in self._living if p.num_untaken < MOST_UNTAKEN]
            if not free:
                return True
            chosen: list[Line] = []
            has_more = True
            while len(chosen) < LINES_AT_ONCE and has_more:
                if self._returned:
                    chosen.append(self._returned.popleft())
                    continue
                try:
                    line = next(lines)
                except StopIteration:
                    has_more = False
                    break
                if line is None:
                    break
                checked = self._check(line)
                if isinstance(checked, Record):
                    yield checked
                else:
                    chosen.append(checked)
            if chosen:
                min(free, key=lambda pipeline: pipeline.cost).send(chosen)
            if not has_more or not chosen:
                return has_more

    def _check(self, line: Line) -> Line | Record:
        """Return the line with its number among equal ones, or the record of what is wrong."""
        envelope = Envelope("bare", as_text(line.raw))
        try:
            envelope = open_envelope(line)
            request, _, num_equal = self._intake.identify(line, envelope)
            self._intake.note(line, *envelope.warnings, *request.warnings)
            return replace(line, num_equal=num_equal)
        except Exception as error:
            return Record(line, envelope, error=row_error(error, line.number))

    def _listen(self, timeout_s: float) -> Iterator[Record]:
        """Take note of what the pipelines say; yield the records that are among it."""
        for pipeline, report in self._reports(timeout_s):
            if isinstance(report, Ready):
                pipeline.ready = report
            elif isinstance(report, Taken):
                pipeline.num_untaken -= 1
            elif isinstance(report, Ended):
                pipeline.ended = report
            if isinstance(report, Answered | Ended) and report.stats is not None:
                self._take_stats(pipeline, report.stats)
            if isinstance(report, Answered) and pipeline.finish(report.record):
                yield report.record

    def _take_stats(self, pipeline: Pipeline, stats: EngineStats) -> None:
        before, pipeline.stats = pipeline.stats, stats
        num_fed = stats.num_prompt_tokens - before.num_prompt_tokens
        self.on_work(num_fed, stats.num_generated_tokens - before.num_generated_tokens)

    def _reports(self, timeout_s: float) -> Iterator[tuple[Pipeline, Report]]:
        """Yield what the pipelines say, and bury those that say no more."""
        living = [pipeline for pipeline in self._living if pipeline.ended is None]
        ready = wait([pipeline.connection for pipeline in living], timeout_s)
        for pipeline in living:
            if pipeline.connection not in ready:
                continue
            try:
                report: Report = receive(pipeline.connection)
            except (EOFError, OSError):
                self._bury(pipeline)
                continue
            if isinstance(report, Failed):
                pipeline.failure = report
            else:
                yield pipeline, report

    def _bury(self, pipeline: Pipeline) -> None:
        """Give a dead pipeline's lines to the others."""
        pipeline.is_alive = False
        lines = sorted(pipeline.lines.values(), key=lambda line: (line.source, line.number))
        pipeline.lines.clear()
        self._returned.extendleft(reversed(lines))
        why = "ended" if pipeline.failure is None else f"failed: {pipeline.failure.text}"
        self._say(
            f"Pipeline {pipeline.number} {why}; the others go on"
            + (f", and answer its {len(lines)} rows." if lines else ".")
        )

    def _check_any_lives(self) -> None:
        if self._living:
            return
        failures = [p.failure for p in self._pipelines if p.failure is not None]
        if not failures:
            raise PipelineError(
                "every pipeline has ended (the system kills processes when memory runs out). "
                "Finished rows are kept"
            )
        raise error_of(failures[0].kind, failures[0].text)
