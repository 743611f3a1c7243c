"""One rank: it loads the model, builds the stage, and on rank 0 runs the engine.

`Engine` is the public Python API; the command line stands on it too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

import torch
from typing_extensions import Unpack

from fminfer.assembly import build_loop, find_limits, load_tokenizer
from fminfer.config import EngineConfig
from fminfer.engine.answer import AnswerForm
from fminfer.engine.intake import Intake
from fminfer.engine.loop import LOOKAHEAD
from fminfer.engine.stats import EngineStats
from fminfer.engine_options import EngineOptions, make_config, shows_options
from fminfer.errors import PipelineError, UsageError
from fminfer.forecast import require_room
from fminfer.input.lines import Line
from fminfer.loading import LoadedPart, build_stage, count_blocks, load_part, open_model
from fminfer.messages import StepTrace
from fminfer.models.checkpoint import Checkpoint
from fminfer.models.layer_count import check_split
from fminfer.output.records import Record
from fminfer.pipeline.group import Group, require_no_group
from fminfer.pipeline.local import LocalPipeline, QueuedPipeline
from fminfer.pipeline.meeting import End
from fminfer.pipeline.ring import RingPipeline, serve
from fminfer.pipeline.stage import Stage
from fminfer.pipeline.watch import Fault
from fminfer.placement import end_openmp_threads
from fminfer.processes import Processes, start_ranks
from fminfer.role import Manners, Spread
from fminfer.step_memory import peak_bytes

END_S = 3.0  # for rank 0 to end by itself once another rank has failed


class Engine:
    """Answers completions requests with one model.

        engine = fminfer.Engine("path/to/model")
        for record in engine.run([{"prompt": "Hello", "max_tokens": 5}]):
            print(record.to_dict())

    Args:
        model: a folder or hub id, or a whole `EngineConfig`; None is the demo model of the package.
        on_progress: called with (bytes read, bytes in all) while weights load.
        on_loaded: called when the weights are in memory, before the KV cache is, with a digest of
            each of their files if others must have the same.
        group: the ranks among which this process is rank 0, if they are started already.
        checkpoint: the model, if it is opened already.
        options: fields of `EngineConfig`, which says what each means. Given with a config, they
            take the place of its own.

    With `world_size` the model's layers are spread over so many processes on this machine. They are
    started here, and end with the engine or with this process.

    Raises:
        CheckpointError: the model cannot be loaded.
        PipelineError: a rank failed, or the ranks were started with different options.
        UsageError: an option that cannot be.
    """

    @shows_options
    def __init__(
        self,
        model: str | EngineConfig | None = None,
        *,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        on_loaded: Callable[[dict[str, str]], None] = lambda digests: None,
        group: Group | None = None,
        checkpoint: Checkpoint | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        started = time.perf_counter()
        self.config = config = make_config(model, **options)
        if config.data_group_size > 1:
            raise UsageError(
                f"data_group_size is {config.data_group_size}; an engine is one pipeline. Make "
                "several engines, or use: fminfer run --data-group-size"
            )
        own = None
        if group is None and config.num_stages > 1:
            own = group = _start_ranks(config)
        try:
            checkpoint = (checkpoint or open_model(config)).with_weights()
            self._load(config, checkpoint, group, on_progress, on_loaded)
        except BaseException:
            if own is not None:
                own.abandon()
            raise
        self.load_s = time.perf_counter() - started

    def _load(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        group: Group | None,
        on_progress: Callable[[int, int], None],
        on_loaded: Callable[[dict[str, str]], None],
    ) -> None:
        self.model_name = checkpoint.name
        self.tokenizer = load_tokenizer(config, checkpoint)
        why_slow = require_room(config, checkpoint, group)
        loaded = load_part(config, checkpoint, group, on_progress)
        on_loaded(loaded.file_digests)
        self.context_length = checkpoint.context_length  # most tokens of prompt and completion
        self.vocab_size: int = checkpoint.config.vocab_size
        self.device, self.dtype, self.kv_dtype = loaded.device, loaded.dtype, loaded.kv_dtype
        self.weight_bytes = loaded.weight_bytes  # of this rank
        self.kv_bytes_per_token = loaded.kv_bytes_per_token  # of this rank
        num_blocks = count_blocks(config, loaded, group)
        self.num_threads = torch.get_num_threads()  # that compute in each process
        self.is_alone = group is None  # no other process has part in it
        self._foreseen_bytes = loaded.weight_bytes + loaded.step_bytes(config)
        self._foreseen_bytes += num_blocks * config.block_size * loaded.kv_bytes_per_token
        stage = build_stage(config, loaded, num_blocks)
        self.has_kernel = stage.has_kernel  # attention is compiled
        self.why_plain = loaded.why_plain  # why a kernel that was to be used is not
        self.why_slower = why_slow or loaded.why_slower  # why it is slower than it could be
        end_openmp_threads()  # steps are another thread's work
        self._group = group
        self._pipeline = _build_pipeline(stage, loaded, group)
        limits = find_limits(config, checkpoint, self.tokenizer)
        sizes = config.step_sizes(self.device.type, loaded.part.num_stages)
        self.max_rows = sizes.max_rows  # most sequences that run at once
        self._intake = Intake(self.tokenizer, limits, config.seed)
        self._loop = build_loop(
            config,
            self._intake,
            self._pipeline,
            AnswerForm(self.tokenizer, self.model_name, config.token_format),
            sizes=sizes,
            num_blocks=num_blocks,
            num_stages=loaded.part.num_stages,
        )

    @property
    def stats(self) -> EngineStats:
        """What was counted since the engine was made."""
        return self._loop.stats

    @property
    def num_draws_left(self) -> int:
        """The most tokens that rows which run may still draw, all of them together."""
        return self._loop.num_draws_left

    @property
    def gpu_memory(self) -> dict[str, int]:
        """Bytes of this process's GPU: what was foreseen, and the peak so far; {} on a CPU."""
        if self.device.type != "cuda":
            return {}
        return {"foreseen_bytes": self._foreseen_bytes, "peak_bytes": peak_bytes(self.device)}

    @property
    def warnings(self) -> dict[str, int]:
        """What was strange about requests that were answered all the same, and how often."""
        return self._intake.warnings.to_dict()

    @property
    def rows_by_warning(self) -> dict[str, int]:
        """The same by kind, without the names that belong to it."""
        return self._intake.warnings.rows

    def tell_warnings(self, tell: Callable[[str], None]) -> None:
        """Have a function told of each warning when it is first met."""
        self._intake.on_warning = tell

    def trace(self, on_step: Callable[[StepTrace], None]) -> None:
        """Have a function told of every step that is finished."""
        self._loop.on_step = on_step

    def run(
        self, requests: Iterable[Mapping[str, Any] | Line | None], read_ahead: int = LOOKAHEAD
    ) -> Generator[Record, None, None]:
        """Answer requests, reading them as room for them appears.

        Args:
            requests: dicts with the fields of a completions request, or input lines; None where the
                next one is not there yet, and is to be asked for later.
            read_ahead: prompts that may be read before there is room for them: more can be put in
                better order, and an iterable that waits for answers must not be asked for more.

        Yields:
            one Record a request, in the order in which they finish; `record.line.number` counts the
            requests from 1. A request that is wrong, or no dict at all, gives a record with `error`
            set. Closing the generator ends the run early.

        Raises:
            UsageError: an earlier run is not finished.
        """
        return self._loop.run(_as_lines(requests), read_ahead)

    def pass_over(self, line: Line) -> None:
        """Take note, in the middle of a run, of a line that is not to be answered again.

        Its lines, and only they, decide what equal lines after it draw.
        """
        self._loop.pass_over(line)

    def stop(self, grace_s: float) -> None:
        """End the run in good order: no more lines, and rows that run have so long to end.

        The run's generator then raises StoppedError. It may be called from a signal handler.
        """
        self._loop.stop(grace_s)

    def close(self) -> None:
        """End the stage's thread, and the other ranks. The engine cannot be used afterwards."""
        group, self._group = self._group, None
        if group is not None and not self._pipeline.is_broken:
            group.watch.stop()
        self._pipeline.close()
        if group is None:
            return
        if self._pipeline.is_broken:
            group.abandon()
        else:
            group.leave()


def lead_ranks(
    config: EngineConfig, ranks: Processes, spread: Spread, manners: Manners, end: End | None
) -> Group:
    """Be rank 0 of processes that this one has started.

    Args:
        end: ends this process at once; None: it is not ours to end.
    """
    return Group(
        ranks.become_ranks(config, spread, manners),
        join_timeout_s=spread.join_timeout_s,
        rank_timeout_s=spread.rank_timeout_s,
        end=end,
        children=ranks,
    )


def _start_ranks(config: EngineConfig) -> Group:
    """Start the other ranks of an engine, in somebody's program."""
    require_no_group()
    check_split(config, config.num_stages)
    ranks = start_ranks(config.num_stages)
    try:
        return lead_ranks(config, ranks, Spread(config.num_stages), Manners(), None)
    except BaseException:
        ranks.end()
        raise


def serve_rank(group: Group, config: EngineConfig, checkpoint: Checkpoint) -> None:
    """Be a rank other than 0: load its layers, and compute until rank 0 says stop.

    What goes wrong ends this process and the run.

    Args:
        config, checkpoint: as rank 0 has them.
    """
    try:
        checkpoint = checkpoint.with_weights()
        require_room(config, checkpoint, group)
        loaded = load_part(config, checkpoint, group)
        stage = build_stage(config, loaded, count_blocks(config, loaded, group))
        serve(stage, loaded.part, loaded.form, on_stop=group.watch.stop)
    except Exception as error:
        group.fail(error)
    group.leave()


def _build_pipeline(stage: Stage, loaded: LoadedPart, group: Group | None) -> QueuedPipeline:
    if group is None:
        return LocalPipeline(stage.run)

    def explain(text: str) -> str:
        return group.explain(group.watch.report(Fault(text))).text

    ring = RingPipeline(stage, loaded.part, loaded.form, explain)

    def fail(fault: Fault) -> None:
        group.fault = fault
        ring.fail(PipelineError(fault.text))
        time.sleep(END_S)
        group.die(fault)  # whoever was to hear of it waits for something else, such as stdin

    group.watch.on_fault = fail
    return ring


def _as_lines(requests: Iterable[Mapping[str, Any] | Line | None]) -> Iterator[Line | None]:
    number = 0
    for request in requests:
        number += request is not None
        if request is None or isinstance(request, Line):
            yield request
        else:
            yield _as_line(number, request)


def _as_line(number: int, request: object) -> Line:
    """Return a request as an input line; what is none costs this line only."""
    if not isinstance(request, Mapping):
        fault = f"request {number} is a {type(request).__name__}; give a dict"
        return Line(0, number, repr(request).encode(), fault=fault)
    try:
        raw = json.dumps(dict(request)).encode()  # nan stays nan, and is refused by name
    except (TypeError, ValueError, RecursionError) as error:
        fault = f"request {number} is no JSON: {error}"
        return Line(0, number, repr(request).encode(), fault=fault)
    return Line(0, number, raw)
