"""One stage's compute: its layers, its KV cache, and on the last stage the sampling."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch.cuda import Event

from fminfer.compute.attention.kv_cache import KvCache
from fminfer.compute.attention.paged_attention import AttentionKernel
from fminfer.compute.attention.scoring import apply_soft_cap
from fminfer.compute.sampling.masks import StepEdits
from fminfer.compute.sampling.sampler import (
    Drawer,
    Ranker,
    SamplingTensors,
    TokenSpan,
    copy_to_host,
    draw_tokens,
    rank_logits,
    sample_tokens,
    score_tokens,
)
from fminfer.compute.values.step import (
    SCORE,
    BlockTables,
    Results,
    Rows,
    Step,
    StepResult,
    TokenLogprobs,
    compute_text_positions,
    make_draws,
)
from fminfer.core.messages import StageSpan
from fminfer.forward.decode_graphs import GraphBuilder
from fminfer.forward.layer_step import LayerStep
from fminfer.forward.layer_stream import LayerStream
from fminfer.forward.transformer import Transformer
from fminfer.machine.device import send_columns
from fminfer.machine.out_of_memory import SizeLimit
from fminfer.machine.threads import ThreadCount

# Of (rows, vocab) logits, and which rows they are.
Use = Callable[[torch.Tensor, slice], TokenLogprobs]
Pair = tuple[Event, Event]  # before and after a step's work


class StepClock:
    """Times the steps of one stage, and adds the times of streamed layers.

    A GPU works on when the call that gave it work returns. A step that nobody waits
    for, such as a prompt's chunk of which nothing is drawn, has its time told with the
    next one that is done.
    """

    def __init__(self, device: torch.device, stream: LayerStream | None = None) -> None:
        self._on_gpu = device.type == "cuda"
        self._stream = stream
        self._unreported: list[Pair] = []
        self._start_s = 0.0

    def start(self) -> None:
        """Begin a step."""
        self._start_s = time.time()
        if self._on_gpu:
            self._unreported.append((_new_event(), _new_event()))
            self._unreported[-1][0].record()

    def stop(
        self, *, is_awaited: bool, sent_bytes: int = 0, max_tokens: int = 0
    ) -> StageSpan:
        """End the step that was begun, and return when it was; a GPU is done if it is
        awaited."""
        start_s = self._start_s
        end_s = time.time()
        earlier_s = 0.0
        if self._on_gpu:
            last = self._unreported[-1][1]
            last.record()
            start_s = end_s
            if is_awaited:
                last.synchronize()
                *earlier, own_s = (
                    first.elapsed_time(last) / 1000 for first, last in self._unreported
                )
                self._unreported.clear()
                start_s = end_s - own_s
                earlier_s = sum(earlier)
        span = StageSpan(start_s, end_s, sent_bytes, max_tokens, earlier_s)
        return span if self._stream is None else self._stream.add_reads(span)


def _new_event() -> Event:
    event: Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event


# Elements of logits that exist at once. Above 32 MB glibc asks the system for fresh,
# zeroed memory each time, which costs more than a smaller product does. A GPU reads the
# whole head each time, and what it drew must be waited for.
MAX_LOGITS = {"cpu": 6 << 20, "cuda": 64 << 20}  # 24 and 256 MB in float32


@dataclass(slots=True, frozen=True)
class StageKernels:
    """What a stage computes with, beside its layers; by default it is plain torch."""

    attention: AttentionKernel | None = None
    ranker: Ranker = rank_logits
    drawer: Drawer = draw_tokens
    # makes what replays decode steps; None: each is launched kernel by kernel
    graphs: GraphBuilder | None = None
    threads: ThreadCount | None = None  # None: as many as torch has


PLAIN = StageKernels()


class Stage:
    """A model, or the layers of one stage, over a paged KV cache.

    Args:
        tokens: whose logits the head gives; None: the whole vocabulary.
    """

    def __init__(
        self,
        network: Transformer,
        cache: KvCache,
        kernels: StageKernels = PLAIN,
        tokens: TokenSpan | None = None,
    ) -> None:
        self._threads = kernels.threads
        self._device = cache.device
        self._network = network
        self._head = network.head
        self.has_kernel = kernels.attention is not None  # attention is compiled
        tokens = tokens or TokenSpan(network.model.vocab_size)
        self._tokens = replace(tokens, ranker=kernels.ranker, drawer=kernels.drawer)
        self.clock = StepClock(cache.device, network.stream)
        self._set_limits()
        self.cache = cache
        # of one layer, which holds the prompts of a step
        self._whole: KvCache | None = None
        if network.encoder is not None and network.encoder.layer_specs:
            self._whole = KvCache(
                [network.encoder.layer_specs[0].attention],
                num_blocks=0,
                block_size=cache.block_size,
                dtype=network.dtype,
                device=cache.device,
                kernel=kernels.attention,
            )
        self._tables = BlockTables()
        self.graphs = None if kernels.graphs is None else kernels.graphs(cache)

    def warm_up(self) -> None:
        """Compute a prompt and a token, so that a GPU's kernels are compiled before the
        first step.

        The largest graph is captured first: others use its memory again. What the
        tokens leave in the KV cache is overwritten before it is read.
        """
        step = Step(
            0,
            slots=np.array([0, 0], np.int32),
            positions=np.array([0, 0]),
            lengths=np.array([2, 1]),
            token_ids=np.array([0, 0, 0]),
            # a block may hold one token
            new_blocks=np.array([[0, 0, 0], [0, 1, 0], [1, 0, 0]], np.int32),
            draws=make_draws([1, 2], temperature=[0, 1]),
            scores=np.zeros(1, SCORE),
        )
        size = (step.num_tokens, self._network.model.hidden_size)
        zeros = torch.zeros(size, dtype=self._network.dtype, device=self._device)
        before = None if self._network.is_first else zeros
        if self._network.encoder is not None:
            self.forward(
                Step(0, lengths=step.lengths, token_ids=step.token_ids), before
            )
            # A decoder behind it reads one token of the encoder's, which is all zeros.
            step.cross_slots = np.array([1, 1], np.int32)
            step.cross_lengths = np.array([1, 1])
            step.encoder_output_lengths = np.array([1, 0])
            step.encoder_output = zeros[0].cpu().view(torch.uint8).numpy()
        hidden = self.forward(step, before)
        if self._head is not None:
            self.finish(step, hidden)
        if self.graphs is not None:
            self.graphs.warm_up()
        # Forget limits that were found here: compiling needs memory that later steps have.
        self._set_limits()
        if self._network.stream is not None:
            self._network.stream.reset()

    def free(self) -> None:
        """Free weights, KV cache and graphs. The stage computes nothing afterwards."""
        del self._network, self._head, self.cache, self._whole, self.graphs, self.clock

    def _set_limits(self) -> None:
        is_shared = self._network.shards is not None
        self._token_limit = SizeLimit("tokens", is_shared=is_shared)
        self._prompt_limit = SizeLimit("prompts", is_shared=is_shared)
        self._logit_limit = SizeLimit("tokens' logits", is_shared=is_shared)

    def run(self, step: Step) -> StepResult:
        """Compute one step of a whole model: forward, then sampling and scoring."""
        self.clock.start()
        results = self.finish(step, self.forward(step, None))
        span = self.clock.stop(is_awaited=bool(results), max_tokens=self.max_tokens)
        return StepResult(step.step_id, results, [span])

    @property
    def max_tokens(self) -> int:
        """Most tokens computed at once since memory ran out; 0: it has not."""
        return self._token_limit.most if self._token_limit.most < sys.maxsize else 0

    @torch.inference_mode()
    def forward(self, step: Step, hidden: torch.Tensor | None) -> torch.Tensor:
        """Run the stage's layers over a step's packed tokens, (tokens, hidden); None:
        it is first.

        The last stage gives those of the tokens in `step.wanted` only, normed.
        """
        if self._threads is not None:
            self._threads.follow_cores()
        if step.has_whole_prompts:
            return self._encode(step, hidden)
        rows = self._tables.update(step)
        if len(step.block_copies):
            self.cache.copy_blocks(step.block_copies)
        wanted = step.wanted if self._head is not None else np.arange(step.num_tokens)

        run_part = partial(self._compute_part, step, rows, hidden, wanted)
        parts = self._token_limit.run(step.num_tokens, run_part)
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _compute_part(
        self,
        step: Step,
        rows: Rows,
        hidden: torch.Tensor | None,
        wanted: np.ndarray,
        first: int,
        last: int,
    ) -> torch.Tensor:
        """Run the layers over some of a step's tokens; give the wanted ones' hidden states."""
        if last - first < step.num_tokens:
            wanted = wanted[slice(*np.searchsorted(wanted, (first, last)))] - first
        kept = wanted if len(wanted) else np.array([last - first - 1])
        ids = step.token_ids[first:last]
        part = rows.cut(first, last)
        before = None if hidden is None else hidden[first:last]
        is_all = len(kept) == len(ids)
        if self.graphs is not None and is_all:
            replayed = self.graphs.run(part, ids, before)
            if replayed is not None:
                return replayed[: len(wanted)]
        positions, sent_ids, sent_kept = send_columns(
            (part.token_positions, ids, kept), self._device
        )
        index = None if is_all else sent_kept
        layer_step = LayerStep(positions, self.cache.make_attention(part, index), index)
        if before is None:
            before = self._network.embed(sent_ids, positions)
        if len(step.cross_slots):
            cross = self._tables.make_cross_rows(step, first, last)
            layer_step.cross = self.cache.make_cross_attention(
                cross, None if is_all else kept
            )
            if first == 0 and len(step.encoder_output):  # which the first part stores
                memory = torch.from_numpy(step.encoder_output).view(self._network.dtype)
                size = self._network.model.hidden_size
                layer_step.encoder_output = memory.view(-1, size).to(self._device)
        return self._network.run(before, layer_step)[: len(wanted)]

    @torch.inference_mode()
    def finish(self, step: Step, hidden: torch.Tensor) -> Results:
        """Sample and score a step, on the last stage, from what `forward` returned."""
        if step.has_whole_prompts:
            if self._network.pooling is not None:
                hidden = self._network.pooling(hidden, step.lengths)
            # as bytes
            return {"vectors": hidden.contiguous().cpu().view(torch.uint8).numpy()}
        results: Results = {}
        if len(step.draws):
            places = np.searchsorted(step.wanted, step.draws["token_index"])
            tokens = self._tokens
            most_top = int(step.draws["num_top"].max())
            edits = StepEdits(step, tokens.size, self._device, tokens.local_ids)

            def draw_part(logits: torch.Tensor, part: slice) -> TokenLogprobs:
                tensors = SamplingTensors.from_draws(step.draws[part], self._device)
                return sample_tokens(
                    logits, tensors, most_top, edits.make_tensors(part), tokens
                )

            results["tokens"] = self._compute_by_parts(hidden, places, draw_part)
        if len(step.scores):
            results["prompt scores"] = self._score(step, hidden)
        return results

    def _score(self, step: Step, hidden: torch.Tensor) -> TokenLogprobs:
        """Score a step's tokens. Logits are computed once for all that follow one token."""
        scores = step.scores
        scored, row_of = np.unique(scores["token_index"], return_inverse=True)
        targets, rows = send_columns([scores["target_id"].copy(), row_of], self._device)
        num_top = int(scores["num_top"].max())
        firsts = np.searchsorted(row_of, np.arange(len(scored) + 1))

        tokens = self._tokens
        masks = None
        if (scores["mask"] >= 0).any():
            edits = StepEdits(step, tokens.size, self._device, tokens.local_ids)
            masks = edits.make_score_masks()

        def score_part(logits: torch.Tensor, part: slice) -> TokenLogprobs:
            entries = slice(firsts[part.start], firsts[part.stop])
            part_rows = None
            if len(scored) < len(scores):
                part_rows = rows[entries] - part.start

            part_masks = None if masks is None else masks.select(entries)
            return score_tokens(
                logits, targets[entries], num_top, tokens, part_rows, part_masks
            )

        places = np.searchsorted(step.wanted, scored)
        return self._compute_by_parts(hidden, places, score_part)

    def _encode(self, step: Step, hidden: torch.Tensor | None) -> torch.Tensor:
        """Run the encoder's layers over whole prompts; the last one gives the tokens to pool."""
        encoder = self._network.encoder
        spec = self._network.model.encoder
        assert encoder is not None and spec is not None, "a step of whole prompts"
        ends = step.lengths.cumsum()
        pooling = self._network.pooling

        def run_rows(first: int, last: int) -> torch.Tensor:
            lengths = step.lengths[first:last]
            end = int(ends[last - 1])
            part = slice(end - int(lengths.sum()), end)
            prompt_ids = step.token_ids[part]
            positions = compute_text_positions(prompt_ids, lengths, spec.padding_id)
            kept = None if pooling is None else pooling.choose_kept(prompt_ids, lengths)
            columns = [positions, prompt_ids, step.token_types[part]]
            columns += [] if kept is None else [kept]
            sent_positions, ids, types, *of_kept = send_columns(columns, self._device)
            index = of_kept[0] if of_kept else None
            if hidden is None:
                of_types = types.long() if len(types) else None
                before = self._network.embed_for_encoder(ids, sent_positions, of_types)
            else:
                before = hidden[part]
            if self._whole is None:  # none of its layers is here
                return before
            attend = self._whole.make_prompt_attention(
                lengths, len(encoder.layer_specs), index
            )
            return encoder.run(
                before, LayerStep(sent_positions, attend, index, self._network.shards)
            )

        parts = self._prompt_limit.run(len(step.lengths), run_rows)
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _compute_by_parts(
        self, hidden: torch.Tensor, places: np.ndarray, use: Use
    ) -> TokenLogprobs:
        """Run the head and `use` its logits a bounded number of rows at a time."""
        head = self._head
        assert head is not None, "only the last stage has a head"

        def use_part(first: int, last: int) -> TokenLogprobs:
            part = slice(first, last)
            wanted_places = places[part]
            start = int(places[first])
            # as of decode rows
            if (wanted_places == np.arange(start, start + len(wanted_places))).all():
                kept = hidden[start : start + len(wanted_places)]
            else:
                kept = hidden[send_columns([wanted_places], self._device)[0]]
            logits = head(kept)
            cap = self._network.model.logit_cap
            if cap is not None:
                logits = apply_soft_cap(logits, cap)
            return use(logits, part)

        limit = self._logit_limit
        most = MAX_LOGITS[self._device.type] // self._tokens.max_local_tokens
        limit.most = min(limit.most, max(1, most))
        return TokenLogprobs.join(
            [copy_to_host(each) for each in limit.run(len(places), use_part)]
        )
