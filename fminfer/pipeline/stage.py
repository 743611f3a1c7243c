"""One stage's compute: its layers, its KV cache, and on the last stage the sampling.

It knows steps, not requests; which rows run and why is the engine's business.
"""

from __future__ import annotations

import importlib
import sys
from array import array
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from fminfer.attention import AttentionKernel, PagedAttention, plan_attention
from fminfer.head import Head
from fminfer.head_kernel import HeadKernel
from fminfer.host_memory import use_small_pages
from fminfer.memory import SizeLimit
from fminfer.messages import SamplingRows, Step, StepResult, StepRow, TokenLogprobs
from fminfer.models.families import Family
from fminfer.models.transformer import Step as OwnStep
from fminfer.models.transformer import Transformer
from fminfer.pipeline.step_clock import StepClock
from fminfer.sampling import (
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
from fminfer.soft_cap import soft_cap

ATTENTION_NAME = "fminfer_paged"
# Elements of logits that exist at once. Above 32 MB glibc asks the system for fresh, zeroed memory
# each time, which costs more than a smaller product does. A GPU reads the whole head each time, and
# what it drew must be waited for.
MAX_LOGITS = {"cpu": 6 << 20, "cuda": 64 << 20}  # 24 and 256 MB in float32


class Stage:
    """A loaded model, or a part of one, over a paged KV cache.

    Args:
        model: transformers' causal LM, weights loaded.
        family: where its parts are.
        dtype, device: of its weights, its hidden states and the KV cache.
        num_blocks, block_size: the size of the KV cache.
        kernel: the compiled attention kernel; None: plain tensor operations.
        ranker: finds normalizers and the best of logits.
        drawer: draws tokens.
        head_kernel: the compiled head; None: plain torch.
    """

    def __init__(
        self,
        model: Any,
        family: Family,
        *,
        dtype: torch.dtype,
        device: torch.device,
        num_blocks: int,
        block_size: int,
        kernel: AttentionKernel | None = None,
        ranker: Ranker = rank,
        drawer: Drawer = draw,
        head_kernel: HeadKernel | None = None,
    ) -> None:
        self._block_size = block_size
        self._device = device
        self._dtype = dtype
        self._kernel = kernel
        self._ranker = ranker
        self._drawer = drawer
        self.clock = StepClock(device)
        self._token_limit = SizeLimit("tokens")
        self._logit_limit = SizeLimit("tokens' logits")
        self._caches: list[PagedAttention] = []
        self._own: Transformer | None = None
        if isinstance(model, Transformer):
            self._use_own(model, num_blocks, head_kernel)
            return
        self._decoder = model.get_submodule(family.decoder)
        layer = model.get_output_embeddings()
        self._is_last = not isinstance(layer, nn.Identity)
        self._head = Head(layer, head_kernel) if self._is_last else None
        self._takes_positions = family.takes_positions
        self._wants_mask = family.wants_mask
        self._logit_cap: float | None = getattr(model.config, "final_logit_softcapping", None)
        AttentionInterface.register(ATTENTION_NAME, _paged_forward)
        # transformers asks the config at each call; an unknown name also means "make no mask".
        model.config._attn_implementation = ATTENTION_NAME
        self._decoder.config._attn_implementation = ATTENTION_NAME  # a stage's may be a copy
        self._kv_heads, head_dim = kv_shape(model.config)
        layers = self._decoder.get_submodule(family.layers)
        self._last_layer: Any = layers[-1]
        # Whether the last layer can be told which tokens are wanted behind it (fused_layers).
        self._keeps_early = kernel is not None and hasattr(self._last_layer, "kept")
        for layer in layers:
            cache = PagedAttention(
                num_blocks,
                block_size,
                self._kv_heads,
                head_dim,
                dtype=self._dtype,
                device=self._device,
                kernel=kernel,
            )
            self._caches.append(cache)
            attention = layer.get_submodule(family.attention)
            attention.paged_attention = cache
            if family.adapter is not None:
                importlib.import_module(f"fminfer.models.adapters.{family.adapter}").adapt(
                    attention, model.config
                )

    def _use_own(
        self, network: Transformer, num_blocks: int, head_kernel: HeadKernel | None
    ) -> None:
        self._own = network
        self._is_last = network.head is not None
        self._head = Head(network.head, head_kernel) if network.head is not None else None
        self._logit_cap = network.model.logit_cap
        attention = network.own[0].attention
        self._kv_heads, head_dim = attention.cache_shape
        shape = (len(network.own), 2, num_blocks, self._kv_heads, self._block_size, head_dim)
        self._kv = torch.empty(shape, dtype=self._dtype, device=self._device)
        if self._device.type == "cpu":
            use_small_pages(self._kv.data_ptr(), self._kv.nbytes)
        self._slopes = [
            None if how is None else torch.tensor(how.slopes, device=self._device)
            for how in (each.attention.alibi for each in network.own)
        ]
        for kept_in in self._kv:
            cache = PagedAttention(
                num_blocks,
                self._block_size,
                self._kv_heads,
                head_dim,
                dtype=self._dtype,
                device=self._device,
                kernel=self._kernel,
                kept_in=kept_in,
            )
            self._caches.append(cache)

    def _attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        assert self._own is not None, "a transformer of our own"
        how = self._own.own[layer].attention
        has_slopes = how.alibi is not None and not how.alibi.is_rounded
        out = self._caches[layer](
            *(part.transpose(0, 1)[None] for part in (query, key, value)),
            scaling=how.scaling,
            sliding_window=how.window,
            alibi_slopes=self._slopes[layer] if has_slopes else None,
            softcap=how.softcap,
        )
        return out[0]

    def _run_own(
        self,
        network: Transformer,
        rows: list[StepRow],
        before: torch.Tensor | None,
        index: torch.Tensor | None,
        plan: Any,
    ) -> torch.Tensor:
        positions = torch.tensor(
            [
                position
                for row in rows
                for position in range(row.position, row.position + len(row.token_ids))
            ],
            device=self._device,
        )
        if before is None:
            ids = [token_id for row in rows for token_id in row.token_ids]
            before = network.embed(torch.tensor(ids, device=self._device), positions)
        last = len(self._caches) - 1
        attend = self._attend
        if index is not None and self._kernel is not None:
            self._caches[last].plan = plan.keep(index)
        elif index is not None:

            def attend(  # plain torch attends from all tokens
                layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
            ) -> torch.Tensor:
                out = self._attend(layer, query, key, value)
                return out[index] if layer == last else out

        return network.run(before, OwnStep(positions, attend, index))

    def run(self, step: Step) -> StepResult:
        """Compute one step of a whole model: forward, then sampling and scoring."""
        self.clock.start()
        sampled, scored = self.finish(step, self.forward(step, None))
        is_awaited = bool(sampled.ids or scored.ids)
        span = self.clock.stop(is_awaited=is_awaited, max_tokens=self.max_tokens)
        return StepResult(step.step_id, sampled, scored, [span])

    @property
    def has_kernel(self) -> bool:
        """Whether attention is compiled."""
        return self._kernel is not None

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
        if step.block_copies:
            self._copy_blocks(step.block_copies)
        wanted = step.wanted if self._is_last else range(step.num_tokens)

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

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        sources, targets = torch.tensor(copies, device=self._device).T
        if self._own is not None:
            self._kv[:, :, targets] = self._kv[:, :, sources]
            return
        for cache in self._caches:
            cache.copy_blocks(sources, targets)

    def _forward(
        self, rows: list[StepRow], before: torch.Tensor | None, kept: list[int]
    ) -> torch.Tensor:
        """Run the layers over rows' tokens and return what they give for those to be kept."""
        index = None
        if len(kept) < sum(len(row.token_ids) for row in rows):
            index = torch.tensor(kept, device=self._device)
        plan: Any
        if self._kernel is not None:
            plan = self._kernel.plan(rows, self._block_size)
        else:
            plan = plan_attention(rows, self._block_size, self._kv_heads, self._device)
        for cache in self._caches:
            cache.plan = plan
        if self._own is not None:
            return self._run_own(self._own, rows, before, index, plan)
        if self._keeps_early:
            self._last_layer.kept = index
            if index is not None:
                self._caches[-1].plan = plan.keep(index)
        if before is None:
            ids = [token_id for row in rows for token_id in row.token_ids]
            inputs = {"input_ids": torch.tensor([ids], device=self._device)}
        else:
            inputs = {"inputs_embeds": before[None]}
        if self._takes_positions:
            positions = [
                position
                for row in rows
                for position in range(row.position, row.position + len(row.token_ids))
            ]
            inputs["position_ids"] = torch.tensor([positions], device=self._device)
        if self._wants_mask:  # four dimensions: transformers passes it on as it is
            inputs["attention_mask"] = torch.zeros((1, 1, 1, 1), device=self._device)
        hidden: torch.Tensor = self._decoder(**inputs, use_cache=False).last_hidden_state
        return hidden[0] if index is None or self._keeps_early else hidden[0, index]

    def _sample(self, hidden: torch.Tensor, step: Step, place_of: dict[int, int]) -> TokenLogprobs:
        rows = step.sampling
        how = SamplingTensors(
            torch.tensor(rows.temperature, dtype=torch.float32, device=self._device),
            torch.tensor(rows.top_p, dtype=torch.float32, device=self._device),
            torch.tensor(rows.top_k, dtype=torch.int64, device=self._device),
            torch.tensor(rows.min_p, dtype=torch.float32, device=self._device),
            torch.tensor(rows.noise, dtype=torch.float64, device=self._device),
        )

        edits = _edit_tensors(rows, self._device)

        def choose(logits: torch.Tensor, part: slice) -> Draws:
            part_edits = None if edits is None else edits.part(part)
            num_top = rows.num_top_logprobs
            return sample(logits, how.rows(part), num_top, part_edits, self._ranker, self._drawer)

        return self._by_parts(hidden, [place_of[token] for token in rows.token_index], choose)

    def _score(self, hidden: torch.Tensor, step: Step, place_of: dict[int, int]) -> TokenLogprobs:
        rows = step.scoring
        targets = torch.tensor(rows.target_id, dtype=torch.int64, device=self._device)

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
            index = torch.tensor(places[part], device=self._device)
            logits = head(hidden[index])
            if self._logit_cap is not None:
                logits = soft_cap(logits, self._logit_cap)
            return use(logits, part)

        limit = self._logit_limit
        most = MAX_LOGITS[self._device.type] // head.vocab_size
        limit.most = min(limit.most, max(1, most))
        for draws in limit.run(len(places), use_part):
            result.ids += draws.ids.tolist()
            result.logprobs += draws.logprobs.tolist()
            result.top_ids += draws.top_ids.tolist()
            result.top_logprobs += draws.top_logprobs.tolist()
        return result


def _edit_tensors(rows: SamplingRows, device: torch.device) -> LogitEditTensors | None:
    if not (rows.edits.token_id or rows.banned_ids):
        return None

    def row_of(counts: list[int]) -> torch.Tensor:
        return torch.repeat_interleave(torch.tensor(counts)).to(device)

    def column(values: array[int] | array[float], dtype: torch.dtype) -> torch.Tensor:
        empty = torch.empty(0, dtype=dtype)
        return (torch.frombuffer(values, dtype=dtype) if values else empty).to(device)

    edits = rows.edits
    return LogitEditTensors(
        row_of(rows.num_edits),
        column(edits.token_id, torch.int64),
        column(edits.bias, torch.float32),
        column(edits.factor, torch.float32),
        column(edits.minus, torch.float32),
        row_of(rows.num_banned),
        torch.tensor(rows.banned_ids, dtype=torch.int64, device=device),
    )


def kv_shape(config: Any) -> tuple[int, int]:
    """Return a config's (KV heads, head dim)."""
    heads = config.num_attention_heads
    # Falcon's newer layout ignores multi_query; GPT-BigCode ignores num_key_value_heads.
    if getattr(config, "new_decoder_architecture", False):
        kv_heads = config.num_kv_heads
    elif hasattr(config, "multi_query"):
        kv_heads = 1 if config.multi_query else heads
    else:
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if config.model_type == "falcon" and config.alibi:
        return heads, head_dim + 1  # the bias is kept with the keys, see the adapter
    return kv_heads, head_dim


def _cut_rows(rows: list[StepRow], first: int, last: int) -> list[StepRow]:
    """Return the rows of a step's packed tokens from one place to another."""
    parts, start = [], 0
    for row in rows:
        cut = slice(max(0, first - start), max(0, last - start))
        if ids := row.token_ids[cut]:
            parts.append(StepRow(ids, row.position + cut.start, row.block_table))
        start += len(row.token_ids)
    return parts


def _paged_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Answer transformers' attention call from the module's own paged cache."""
    assert attention_mask is None, "a mask was made although rows are packed"
    cache = module.paged_attention
    assert isinstance(cache, PagedAttention)
    out = cache(query, key, value, scaling=scaling, sliding_window=sliding_window, softcap=softcap)
    return out, None
