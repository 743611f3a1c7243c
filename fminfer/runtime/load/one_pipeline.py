"""One pipeline, whose first rank this process is, or another rank of it: load, and compute."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from fminfer.compute.values.step import StepTrace
from fminfer.core.errors import FminferError, OutOfMemoryError, PipelineError
from fminfer.core.messages import RankMemory
from fminfer.engine.answer import AnswerStyle
from fminfer.engine.start import RequestStarter
from fminfer.forward.stage import Stage
from fminfer.machine.device import (
    end_openmp_threads,
    measure_free_bytes,
    measure_peak_memory,
    trim_memory,
    use_device,
)
from fminfer.models.layer_source import OnProgress
from fminfer.pipeline.group import Group
from fminfer.pipeline.local import LocalPipeline, QueuedPipeline
from fminfer.pipeline.ranks import ALONE, Spread
from fminfer.pipeline.ring import RingPipeline, serve_stage
from fminfer.pipeline.watch import Fault
from fminfer.plan.pass_time import limit_step
from fminfer.plan.run_plan import RunPlan
from fminfer.runtime.job_engine import OnStep, OnWork
from fminfer.runtime.load.agreement import END_S
from fminfer.runtime.load.assembly import build_loop, find_end_ids, make_nan_explanation
from fminfer.runtime.load.builder import LoadedPart, build
from fminfer.runtime.load.properties import (
    LoadedPipeline,
    Measured,
    PipelineProperties,
)
from fminfer.text.tokenizer import Tokenizer


class OnePipeline:
    """A loaded model, and the loop that answers requests with it.

    Args:
        on_loaded: as of `build`.
        group: the ranks among which this process is rank 0; None: it runs the model alone.
        spread: it has this engine's place among those on the machine.
    """

    def __init__(
        self,
        plan: RunPlan,
        tokenizer: Tokenizer,
        on_progress: OnProgress = lambda done, total: None,
        *,
        on_loaded: Callable[[dict[str, str]], None] = lambda digests: None,
        group: Group | None = None,
        spread: Spread = ALONE,
    ) -> None:
        loaded, stage, why = build(
            plan,
            group,
            spread,
            on_progress=on_progress,
            on_loaded=on_loaded,
        )
        self.plan = plan = loaded.plan
        config = plan.config
        checkpoint = plan.checkpoint
        num_threads = torch.get_num_threads()
        end_openmp_threads()  # steps are another thread's work
        self._group = group
        self._watch = None if group is None else group.watch
        self._stage: Stage | None = stage  # None once it is closed
        self.stages = _build_pipeline(stage, loaded, group)
        self.stages.limit_s = limit_step(plan)
        self.graphs = stage.graphs
        self._stream = stream = loaded.network.stream
        self._measured = Measured(
            num_threads,
            loaded.network.weight_bytes,
            stage.has_kernel,
            why.plain,
            why.slower,
            disk_speed=0.0 if stream is None else stream.reads.bytes_per_s,
            why_dependent=why.dependent,
        )
        self.core = build_loop(
            config,
            RequestStarter(
                tokenizer,
                find_end_ids(checkpoint, tokenizer),
                config.seed,
                checkpoint.config.vocab_size,
            ),
            self.stages,
            AnswerStyle(
                tokenizer,
                config.token_format,
                make_nan_explanation(checkpoint, plan.dtype),
            ),
            sizes=plan.sizes,
            num_blocks=plan.num_kv_tokens // config.block_size,
            num_stages=loaded.part.num_stages,
            most_read=_find_max_read(loaded),
        )

    @property
    def facts(self) -> PipelineProperties:
        """What the pipeline is."""
        return PipelineProperties(self.plan, self.measured)

    @property
    def measured(self) -> Measured:
        """What was measured so far; a graph that cannot be captured makes it slower."""
        measured = self._measured
        why_not = self.graphs.why_not if self.graphs else ""
        if why_not in measured.why_plain:  # nothing, or the start knew it
            return measured
        why = "; ".join(filter(None, (measured.why_slower, why_not)))
        return replace(measured, why_plain=why, why_slower=why)

    @property
    def loaded(self) -> LoadedPipeline:
        """What the run is told of it."""
        plan = self.plan
        return LoadedPipeline(
            plan.machine, plan.num_kv_tokens, plan.chunk_size, self.measured
        )

    @property
    def memory(self) -> list[RankMemory]:
        """The peak of each rank so far, as it last reported it, beside its forecast."""
        plan = self.plan
        peaks = {0: measure_peak_memory(plan.device)}
        if self._watch is not None:
            peaks |= self._watch.find_peaks()
        used = plan.used_kv_tokens(self.core.stats.max_kv_tokens)
        is_on_gpu = plan.device.type == "cuda"
        return [
            RankMemory(each.rank, is_on_gpu, each.takes.total(used), peaks[each.rank])
            for each in plan.ranks
            if each.rank in peaks
        ]

    def follow(
        self, on_work: OnWork | None = None, on_step: OnStep | None = None
    ) -> None:
        """Call functions after each step, as `Computing.follow` says."""

        def report_step(trace: StepTrace) -> None:
            if on_work is not None:
                on_work(
                    trace.num_prompt_tokens,
                    len(trace.step.draws),
                    self.core.num_running,
                )
            if on_step is not None:
                on_step(trace)

        self.core.on_step = report_step

    def close(self) -> None:
        """End the stage's thread and the other ranks, and free the weights and the KV cache."""
        if self._stage is None:
            return
        group = self._group
        self._group = None
        self.stages.close()
        # A pipeline that failed without other ranks hangs, and closing the stream might block.
        if self._stream is not None and (
            group is not None or self.stages.failure is None
        ):
            self._stream.close()

        # taken before the graphs are freed, which have a part of them
        self._measured = self.measured
        self._stage.free()
        self._stage = self._stream = self.graphs = None
        trim_memory(self.plan.device)
        if group is None:
            return
        group.watch.stop()
        if self.stages.failure is None:
            group.watch.read_last_beats()
        group.close(has_failed=self.stages.failure is not None)


def _find_max_read(loaded: LoadedPart) -> int:
    """Return how many tokens an encoder reads at once, at most, by the memory that is left."""
    plan = loaded.plan
    left = measure_free_bytes(loaded.device)
    if loaded.device.type == "cpu":  # a GPU's KV cache has its memory already
        left -= plan.num_kv_tokens * plan.this_rank.takes.kv_token
    return plan.most_read(left)


def serve_rank(group: Group, plan_run: Callable[[Group], RunPlan]) -> None:
    """Be a rank other than 0 until rank 0 says stop; what goes wrong ends the run."""
    try:
        loaded, stage, _ = build(plan_run(group), group, group.spread)
        serve_stage(
            stage,
            loaded.part,
            loaded.form,
            group.watch.beat_last,
            _make_release(loaded),
        )
        if loaded.network.stream is not None:
            loaded.network.stream.close()
    except Exception as error:
        group.fail_rank(error)
    group.close()


def _build_pipeline(
    stage: Stage, loaded: LoadedPart, group: Group | None
) -> QueuedPipeline:
    if group is None:
        return LocalPipeline(stage.run, partial(use_device, loaded.device))

    def explain(text: str) -> FminferError:
        return _make_error(group.explain_fault(group.watch.report_fault(Fault(text))))

    ring = RingPipeline(
        stage,
        loaded.part,
        loaded.form,
        explain,
        group.watch.stop,
        _make_release(loaded),
    )

    def fail(fault: Fault) -> None:
        group.fault = fault
        ring.fail(_make_error(fault))
        time.sleep(END_S)
        # whoever was to hear of it waits for something else, such as stdin
        group.end_rank(fault)

    group.watch.on_fault = fail
    return ring


def _make_error(fault: Fault) -> FminferError:
    """Return rank 0's error for a rank's fault; a lack of memory keeps its class."""
    kind = (
        OutOfMemoryError if fault.kind == OutOfMemoryError.__name__ else PipelineError
    )
    return kind(fault.text)


def _make_release(loaded: LoadedPart) -> Callable[[], None]:
    """Return what lets a stage wait for no other rank any longer."""
    shards = loaded.network.shards
    return (lambda: None) if shards is None else shards.stop
