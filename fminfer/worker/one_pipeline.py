"""One pipeline, whose first rank this process is, or another rank of it: load, and compute."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fminfer.core.config import EngineConfig
from fminfer.core.errors import PipelineError
from fminfer.core.messages import StepTrace
from fminfer.engine.answer import AnswerForm
from fminfer.engine.engine_core import Facts
from fminfer.engine.start import Starter
from fminfer.machine.device import (
    count_engines_on,
    end_openmp_threads,
    free_bytes,
    memory_name,
    use_device,
)
from fminfer.machine.out_of_memory import is_out_of_memory
from fminfer.models.checkpoint import Checkpoint
from fminfer.models.decode_graphs import find_graphs
from fminfer.models.layer_count import check_split
from fminfer.models.stage import Stage
from fminfer.pipeline.group import Group, require_no_group
from fminfer.pipeline.local import LocalPipeline, QueuedPipeline
from fminfer.pipeline.meeting import End
from fminfer.pipeline.ring import RingPipeline, serve
from fminfer.pipeline.watch import Fault
from fminfer.text.tokenizer import Tokenizer
from fminfer.worker.assembly import build_loop, find_ends
from fminfer.worker.forecast import name_of, require_room
from fminfer.worker.kv_size import _no_cache, most_kv_tokens
from fminfer.worker.loading import LoadedPart, load_part
from fminfer.worker.processes import Processes, start_ranks
from fminfer.worker.role import Manners, Spread
from fminfer.worker.step_memory import auto_budget, peak_bytes


def count_blocks(config: EngineConfig, loaded: LoadedPart, group: Group | None = None) -> int:
    """Return the size of the KV cache in blocks, the same on every rank.

    Of an automatic budget each rank allows what its memory, which it may share with other ranks,
    has room for beside the weights; the least counts.
    """
    budget, size = config.budget, config.block_size
    if budget is None:
        if group is not None:
            group.gather("loaded", True)  # every rank's weights are in memory
        local_size = 1 if group is None else group.local_size
        num_engines = count_engines_on(loaded.device, config, local_size)
        mine: dict[str, Any] = {
            "memory": memory_name(loaded.device, socket.gethostname()),
            "device": loaded.device.type,
            "free": free_bytes(loaded.device) // num_engines,
            "kv_bytes_per_token": loaded.kv_bytes_per_token,
            "work": loaded.step_bytes(config),
            "most": most_kv_tokens(config, loaded.checkpoint, loaded.device),
        }
        ranks = [mine] if group is None else group.gather("memory", mine)
        budget = min(
            auto_budget(
                _total(ranks, rank, "kv_bytes_per_token"),
                rank["most"],
                rank["free"],
                _total(ranks, rank, "work"),
                rank["device"],
            )
            for rank in ranks
        )
    return -(-budget // size)


def _total(ranks: list[dict[str, Any]], rank: dict[str, Any], what: str) -> int:
    """Return the sum over the ranks that share a rank's memory."""
    return sum(each[what] for each in ranks if each["memory"] == rank["memory"])


def build_stage(config: EngineConfig, loaded: LoadedPart, num_blocks: int) -> Stage:
    """Give a loaded part its KV cache.

    Raises:
        UsageError: there is no memory for it.
    """
    try:
        stage = _build_stage(config, loaded, num_blocks)
        if loaded.device.type == "cuda":
            stage.warm_up()
        return stage
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        num_tokens = num_blocks * config.block_size
        size = num_tokens * loaded.kv_bytes_per_token
        raise _no_cache(num_tokens, size, loaded.kv_dtype, loaded.device) from error


def _build_stage(config: EngineConfig, loaded: LoadedPart, num_blocks: int) -> Stage:
    most = config.step_sizes(loaded.device.type, loaded.part.num_stages).max_decode_rows
    return Stage(
        loaded.network,
        kv_dtype=loaded.kv_dtype,
        device=loaded.device,
        num_blocks=num_blocks,
        block_size=config.block_size,
        kernel=loaded.attention,
        ranker=loaded.ranker,
        drawer=loaded.drawer,
        head_kernel=loaded.head,
        threads=loaded.threads,
        graphs=find_graphs(config.kernels, loaded.network, loaded.attention, most, loaded.device),
    )


END_S = 3.0  # time for rank 0 to end by itself once another rank has failed


class OnePipeline:
    """A loaded model, and the loop that answers requests with it.

    Args:
        on_progress: called with (bytes read, bytes in all) while weights load.
        on_loaded: called when the weights are in memory, before the KV cache is, with a digest of
            each of their files if others must have the same.
        group: the ranks among which this process is rank 0; None: it runs the model alone.

    Raises:
        CheckpointError: the model cannot be loaded.
        PipelineError: the ranks were started with different options.
        UsageError: an option that cannot be.
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer,
        *,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        on_loaded: Callable[[dict[str, str]], None] = lambda digests: None,
        group: Group | None = None,
    ) -> None:
        why_slow = require_room(config, checkpoint, group)
        loaded = load_part(config, checkpoint, group, on_progress)
        on_loaded(loaded.file_digests)
        num_blocks = count_blocks(config, loaded, group)
        self._foreseen_bytes = loaded.weight_bytes + loaded.step_bytes(config)
        self._foreseen_bytes += num_blocks * config.block_size * loaded.kv_bytes_per_token
        num_threads = torch.get_num_threads()
        stage = build_stage(config, loaded, num_blocks)
        end_openmp_threads()  # steps are another thread's work
        self._group = group
        self.stages = _build_pipeline(stage, loaded, group)
        self._device = loaded.device
        sizes = config.step_sizes(loaded.device.type, loaded.part.num_stages)
        self.graphs = stage.graphs
        self._facts = Facts(
            str(loaded.device),
            name_of(loaded.dtype),
            name_of(loaded.kv_dtype),
            num_threads,
            is_alone=group is None,
            max_rows=sizes.max_rows,
            num_kv_blocks=num_blocks,
            weight_bytes=loaded.weight_bytes,
            kv_bytes_per_token=loaded.kv_bytes_per_token,
            has_kernel=stage.has_kernel,
            why_plain=loaded.why_plain,
            why_slower=why_slow or loaded.why_slower,
        )
        eos_ids = find_ends(checkpoint, tokenizer)
        self.core = build_loop(
            config,
            Starter(tokenizer, eos_ids, config.seed, checkpoint.config.vocab_size),
            self.stages,
            AnswerForm(tokenizer, config.token_format),
            sizes=sizes,
            num_blocks=num_blocks,
            num_stages=loaded.part.num_stages,
        )

    @property
    def facts(self) -> Facts:
        """What the pipeline is; it becomes slower where a graph cannot be captured."""
        if self.graphs is None or not self.graphs.why_not:
            return self._facts
        why = "; ".join(filter(None, (self._facts.why_slower, self.graphs.why_not)))
        return replace(self._facts, why_plain=why, why_slower=why)

    @property
    def gpu_memory(self) -> dict[str, int]:
        """Bytes of this process's GPU: the forecast, and the peak so far; {} on a CPU."""
        if self._device.type != "cuda":
            return {}
        return {"foreseen_bytes": self._foreseen_bytes, "peak_bytes": peak_bytes(self._device)}

    def follow(
        self, on_work: Callable[[int, int], None], on_step: Callable[[StepTrace], None] | None
    ) -> None:
        """Call functions after each step: with its numbers of tokens, and with the whole step."""

        def tell(trace: StepTrace) -> None:
            on_work(trace.num_prompt_tokens, len(trace.step.sampling.token_index))
            if on_step is not None:
                on_step(trace)

        self.core.on_step = tell

    def close(self) -> None:
        """End the stage's thread, and the other ranks."""
        group, self._group = self._group, None
        if group is not None and not self.stages.is_broken:
            group.watch.stop()
        self.stages.close()
        if group is None:
            return
        if self.stages.is_broken:
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


def start_own_ranks(config: EngineConfig) -> Group:
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
        return LocalPipeline(stage.run, partial(use_device, loaded.device))

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
