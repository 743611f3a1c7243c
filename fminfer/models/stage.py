"""One stage's compute: its layers, its KV cache, and on the last stage the sampling.

It knows steps, not requests; which rows run and why is the engine's business.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from fminfer.compute.attention.kv_cache import KvCache
from fminfer.compute.attention.paged_attention import AttentionBody
from fminfer.compute.sampling.masks import make_masks
from fminfer.compute.sampling.sampler import (
    Drawer,
    Draws,
    LogitEditTensors,
    Ranker,
    SamplingTensors,
    draw,
    rank,
    sample,
    score,
)
from fminfer.compute.soft_cap import soft_cap
from fminfer.core.messages import (
    SamplingRows,
    ScoringRows,
    StageSpan,
    Step,
    StepResult,
    StepRow,
    TokenLogprobs,
)
from fminfer.machine.device import send
from fminfer.machine.out_of_memory import SizeLimit
from fminfer.machine.threads import ThreadCount
from fminfer.models.decode_graphs import GraphsOf
from fminfer.models.layer_step import LayerStep
from fminfer.models.transformer import Transformer

Pair = tuple[torch.cuda.Event, torch.cuda.Event]  # before and after a step's work


class StepClock:
    """Times the steps of one stage.

    A GPU works on when the call that gave it work returns. A step that nobody waits for, such as a
    prompt's chunk of which nothing is drawn, has its time told with the next one that is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._untold: list[Pair] = []
        self._start_s = 0.0

    def start(self) -> None:
        """Begin a step."""
        self._start_s = time.time()
        if self._on_gpu:
            self._untold.append((_new_event(), _new_event()))
            self._untold[-1][0].record()

    def stop(self, *, is_awaited: bool, sent_bytes: int = 0, max_tokens: int = 0) -> StageSpan:
        """End the step that was begun, and return when it was.

        Args:
            is_awaited: a GPU has done its work, for somebody has read what it gave.
        """
        end_s = time.time()
        if not self._on_gpu:
            return StageSpan(self._start_s, end_s, sent_bytes, max_tokens)
        last = self._untold[-1][1]
        last.record()
        if not is_awaited:
            return StageSpan(end_s, end_s, sent_bytes, max_tokens)
        last.synchronize()
        *earlier, own_s = (first.elapsed_time(last) / 1000 for first, last in self._untold)
        self._untold.clear()
        return StageSpan(end_s - own_s, end_s, sent_bytes, max_tokens, sum(earlier))


def _new_event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event


# Elements of logits that exist at once. Above 32 MB glibc asks the system for fresh, zeroed memory
# each time, which costs more than a smaller product does. A GPU reads the whole head each time, and
# what it drew must be waited for.
MAX_LOGITS = {"cpu": 6 << 20, "cuda": 64 << 20}  # 24 and 256 MB in float32


class Stage:
    """A model, or the layers of one stage, over a paged KV cache.

    Args:
        network: weights loaded.
        kv_dtype: of the KV cache.
        device: of its weights, its hidden states and the KV cache.
        num_blocks, block_size: the size of the KV cache.
        kernel: the compiled attention kernel; None: plain tensor operations.
        ranker: finds normalizers and the best of logits.
        drawer: draws tokens.
        threads: how many compute; looked at before each step. None: torch's own number.
        graphs: makes what replays decode steps; None: each is launched kernel by kernel.
    """

    def __init__(
        self,
        network: Transformer,
        *,
        kv_dtype: torch.dtype,
        device: torch.device,
        num_blocks: int,
        block_size: int,
        kernel: AttentionBody | None = None,
        ranker: Ranker = rank,
        drawer: Drawer = draw,
        threads: ThreadCount | None = None,
        graphs: GraphsOf | None = None,
    ) -> None:
        self._threads = threads
        self._network = network
        self._head = network.head
        self._device = device
        self.has_kernel = kernel is not None  # attention is compiled
        self._ranker = ranker
        self._drawer = drawer
        self.clock = StepClock(device)
        self._token_limit = SizeLimit("tokens")
        self._logit_limit = SizeLimit("tokens' logits")
        self.cache = KvCache(
            [layer.attention for layer in network.own],
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=kv_dtype,
            device=device,
            kernel=kernel,
        )
        self.graphs = None if graphs is None else graphs(self.cache)

    def warm_up(self) -> None:
        """Compute a prompt and a token, so that a GPU's kernels are compiled before the first step.

        The largest graph is captured first: others use its memory again. What the tokens leave in
        the KV cache is overwritten before it is read.
        """
        table = [0, 0]  # two blocks, as a block may hold one token
        rows = [StepRow([0, 0], 0, table), StepRow([0], 0, table)]
        sampling = SamplingRows([1, 2], [0.0, 1.0], [1.0, 1.0], [0, 0], [0.0, 0.0], [0, 1])
        step = Step(0, rows, [], sampling, ScoringRows([0], [0]))
        size = (step.num_tokens, self._network.model.hidden_size)
        before = torch.zeros(size, dtype=self._network.dtype, device=self._device)
        hidden = self.forward(step, None if self._network.is_first else before)
        if self._head is not None:
            self.finish(step, hidden)
        if self.graphs is not None:
            self.graphs.warm_up()
        # Forget limits that were found here: compiling needs memory that later steps have.
        self._token_limit, self._logit_limit = SizeLimit("tokens"), SizeLimit("tokens' logits")

    def run(self, step: Step) -> StepResult:
        """Compute one step of a whole model: forward, then sampling and scoring."""
        self.clock.start()
        sampled, scored = self.finish(step, self.forward(step, None))
        is_awaited = bool(sampled.ids or scored.ids)
        span = self.clock.stop(is_awaited=is_awaited, max_tokens=self.max_tokens)
        return StepResult(step.step_id, sampled, scored, [span])

    @property
    def max_tokens(self) -> int:
        """Most tokens computed at once since memory ran out; 0: it has not."""
        return self._token_limit.most if self._token_limit.most < sys.maxsize else 0

    @torch.inference_mode()
    def forward(self, step: Step, hidden: torch.Tensor | None) -> torch.Tensor:
        """Run the stage's layers over a step's packed tokens.

        Args:
            hidden: (tokens, hidden) of the stage before; None on the first stage.

        Returns:
            (tokens, hidden); on the last stage normed, and of the tokens in `step.wanted` only.
        """
        if self._threads is not None:
            self._threads.follow()
        if step.block_copies:
            self.cache.copy_blocks(step.block_copies)
        wanted = step.wanted if self._head is not None else range(step.num_tokens)

        def run_part(first: int, last: int) -> torch.Tensor:
            before = None if hidden is None else hidden[first:last]
            kept = [token - first for token in wanted if first <= token < last]
            is_whole = last - first == step.num_tokens
            rows = step.rows if is_whole else _cut_rows(step.rows, first, last)
            return self._forward(rows, before, kept or [last - first - 1])[: len(kept)]

        parts = self._token_limit.run(step.num_tokens, run_part)
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    @torch.inference_mode()
    def finish(self, step: Step, hidden: torch.Tensor) -> tuple[TokenLogprobs, TokenLogprobs]:
        """Sample and score a step, on the last stage.

        Args:
            hidden: what `forward` returned, (wanted tokens, hidden).
        """
        place_of = {token: place for place, token in enumerate(step.wanted)}
        return self._sample(hidden, step, place_of), self._score(hidden, step, place_of)

    def _forward(
        self, rows: list[StepRow], before: torch.Tensor | None, kept: list[int]
    ) -> torch.Tensor:
        """Run the layers over rows' tokens and return what they give for those to be kept."""
        numbers = [
            position
            for row in rows
            for position in range(row.position, row.position + len(row.token_ids))
        ]
        is_all = len(kept) == len(numbers)
        if self.graphs is not None and is_all:
            found = self.graphs.run(rows, before)
            if found is not None:
                return found
        ids = [token_id for row in rows for token_id in row.token_ids]
        columns = [np.array(each, np.int64) for each in (numbers, ids, kept)]
        positions, sent_ids, sent_kept = send(columns, self._device)
        index = None if is_all else sent_kept
        self.cache.plan(rows, index)
        if before is None:
            before = self._network.embed(sent_ids, positions)
        return self._network.run(before, LayerStep(positions, self.cache, index))

    def _sample(self, hidden: torch.Tensor, step: Step, place_of: dict[int, int]) -> TokenLogprobs:
        rows = step.sampling
        columns = [np.array(each, np.int64) for each in (rows.noise, rows.top_k)]
        others = (rows.temperature, rows.top_p, rows.min_p)
        columns += [np.array(each, np.float32) for each in others]
        noise, top_k, temperature, top_p, min_p = send(columns, self._device)
        how = SamplingTensors(
            temperature, top_p, top_k, min_p, noise, is_greedy=not any(rows.temperature)
        )
        assert self._head is not None, "only the last stage has a head"
        edits = _edit_tensors(rows, self._device, self._head.vocab_size)

        def choose(logits: torch.Tensor, part: slice) -> Draws:
            part_edits = None if edits is None else edits.part(part)
            num_top = rows.num_top_logprobs
            return sample(logits, how.rows(part), num_top, part_edits, self._ranker, self._drawer)

        return self._by_parts(hidden, [place_of[token] for token in rows.token_index], choose)

    def _score(self, hidden: torch.Tensor, step: Step, place_of: dict[int, int]) -> TokenLogprobs:
        rows = step.scoring
        (targets,) = send([np.array(rows.target_id, np.int64)], self._device)

        def judge(logits: torch.Tensor, part: slice) -> Draws:
            return score(logits, targets[part], rows.num_top_logprobs, self._ranker)

        return self._by_parts(hidden, [place_of[token] for token in rows.token_index], judge)

    def _by_parts(
        self,
        hidden: torch.Tensor,
        places: list[int],
        use: Callable[[torch.Tensor, slice], Draws],
    ) -> TokenLogprobs:
        """Run the head and `use` its logits a bounded number of rows at a time."""
        result, head = TokenLogprobs([], [], [], []), self._head
        assert head is not None, "only the last stage has a head"

        def use_part(first: int, last: int) -> Draws:
            part = slice(first, last)
            start, asked = places[first], places[part]
            if asked == list(range(start, start + len(asked))):  # as of decode rows
                kept = hidden[start : start + len(asked)]
            else:
                kept = hidden[send([np.array(asked)], self._device)[0]]
            logits, cap = head(kept), self._network.model.logit_cap
            if cap is not None:
                logits = soft_cap(logits, cap)
            return use(logits, part)

        limit = self._logit_limit
        most = MAX_LOGITS[self._device.type] // head.vocab_size
        limit.most = min(limit.most, max(1, most))
        for draws in limit.run(len(places), use_part):
            if self._device.type != "cpu":
                draws = draws.to_host()
            result.ids += draws.ids.tolist()
            result.logprobs += draws.logprobs.tolist()
            result.top_ids += draws.top_ids.tolist()
            result.top_logprobs += draws.top_logprobs.tolist()
        return result


def _edit_tensors(rows: SamplingRows, device: torch.device, vocab: int) -> LogitEditTensors | None:
    if not (rows.edits.token_id or rows.banned_ids or rows.masks):
        return None

    edits, counts = rows.edits, (rows.num_edits, rows.num_banned)
    columns = [np.repeat(np.arange(len(each)), each) for each in counts]
    columns += [np.array(each, np.int64) for each in (edits.token_id, rows.banned_ids)]
    floats = (edits.bias, edits.factor, edits.minus)
    columns += [np.array(each, np.float32) for each in floats]
    of_edits, of_banned, ids, banned_ids, bias, factor, minus = send(columns, device)
    return LogitEditTensors(
        of_edits,
        ids,
        bias,
        factor,
        minus,
        of_banned,
        banned_ids,
        rows.num_edits,
        rows.num_banned,
        make_masks(rows.masks, rows.mask_of, vocab, device) if rows.masks else None,
    )


def _cut_rows(rows: list[StepRow], first: int, last: int) -> list[StepRow]:
    """Return the rows of a step's packed tokens from one place to another."""
    parts, start = [], 0
    for row in rows:
        cut = slice(max(0, first - start), max(0, last - start))
        if ids := row.token_ids[cut]:
            parts.append(StepRow(ids, row.position + cut.start, row.block_table))
        start += len(row.token_ids)
    return parts
