"""The KV cache of a stage's layers, and attention over it as the spec of each layer says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fminfer.compute.attention.paged_attention import AttentionKernel, PlainAttention
from fminfer.compute.attention.scoring import AttentionCall, Scoring
from fminfer.compute.values.spec import Attention
from fminfer.compute.values.step import Rows
from fminfer.machine.host_memory import advise_small_pages


class KvCache:
    """One tensor for all layers, in blocks that sequences share or copy.

    Of latent attention keys alone are kept: values are read where keys are.
    """

    def __init__(
        self,
        layers: Sequence[Attention],  # whose keys have one shape
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,  # what is stored is rounded to it
        device: torch.device,
        kernel: AttentionKernel | None,  # None: plain torch
    ) -> None:
        # Of an encoder alone there are no layers, and what is empty may be of any shape.
        ((kept, kv_heads, head_dim),) = {spec.cache_shape for spec in layers} or {
            (2, 1, 1)
        }
        self._shape = [len(layers), kept, num_blocks, kv_heads, block_size, head_dim]
        self.block_size = block_size
        self.device = device
        self._dtype = dtype
        self.kernel = kernel or PlainAttention(device)
        self._allocate(num_blocks)

    def _allocate(self, num_blocks: int) -> None:
        """Have so many blocks, without values; without memory for them all stays as it is."""
        shape = [*self._shape[:2], num_blocks, *self._shape[3:]]
        # Not zeroed: the system then gives memory page by page, as blocks come into use.
        self._kv = torch.empty(shape, dtype=self._dtype, device=self.device)
        self.num_blocks = num_blocks
        self.layers = [(each[0], each[-1]) for each in self._kv]
        if self.device.type == "cpu":
            advise_small_pages(self._kv.data_ptr(), self._kv.nbytes)

    def make_cross_attention(
        self, rows: Rows, kept: np.ndarray | None
    ) -> StepAttention:
        """Return the attention of tokens to what the encoder gave, as
        `BlockTables.cross` has them.

        The last layer has the queries of the tokens `kept` alone.
        """
        layout = self.kernel.lay_out(rows, self.block_size)
        last_layout = (
            layout
            if kept is None
            else self.kernel.lay_out(rows.select(kept), self.block_size)
        )
        return StepAttention(self.kernel, self.layers, layout, last_layout)

    def make_attention(
        self, rows: Rows, kept: torch.Tensor | None = None
    ) -> StepAttention:
        """Return the attention of a step's rows, of whose queries the last layer keeps some."""
        layout = self.kernel.lay_out(rows, self.block_size)
        last_layout = layout if kept is None else self.kernel.skip_tokens(layout, kept)
        return StepAttention(self.kernel, self.layers, layout, last_layout, kept)

    def make_prompt_attention(
        self, lengths: np.ndarray, num_layers: int, kept: torch.Tensor | None
    ) -> StepAttention:
        """Return the attention of prompts of these lengths; `kept` as in `make_attention`.

        Each of `num_layers` overwrites the only keys and values that there are.
        """
        rows = Rows.from_prompts(lengths, self.block_size)
        num_blocks = int(rows.num_blocks(self.block_size).sum())
        if num_blocks > self.num_blocks:
            self._allocate(num_blocks)
        return replace(self.make_attention(rows, kept), layers=self.layers * num_layers)

    def copy_blocks(self, copies: np.ndarray) -> None:
        """Copy whole blocks, given as pairs (from, to): (copies, 2) int64."""
        sources, targets = torch.from_numpy(copies).to(self.device).T
        for kv in self._kv:  # all layers at once would need memory for a copy of all
            kv[:, targets] = kv[:, sources]


@dataclass(slots=True, frozen=True)
class StepAttention:
    """Attention of one step over the cache of all layers."""

    kernel: AttentionKernel
    # Keys of each layer, (blocks, KV heads, block_size, head_dim), and values; or the very keys
    layers: Sequence[tuple[torch.Tensor, torch.Tensor]]
    layout: Any  # made by the body
    last_layout: Any
    # int64: the tokens whose outputs the last layer gives
    kept: torch.Tensor | None = None

    def layout_of(self, layer: int) -> Any:
        """Return the plan by which a layer attends."""
        return self.last_layout if layer == len(self.layers) - 1 else self.layout

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,  # (tokens, heads, head_dim)
        key: torch.Tensor,  # (tokens, KV heads, head_dim)
        value: torch.Tensor,
        scoring: Scoring,
    ) -> torch.Tensor:  # (tokens, heads, head_dim); in the last layer only kept tokens
        """Store a step's new keys and values, then attend."""
        q, k, v = (part.transpose(0, 1)[None] for part in (query, key, value))
        call = AttentionCall(
            q, k, v, *self.layers[layer], self.layout_of(layer), scoring
        )
        out = self.kernel(call)[0]
        is_last = layer == len(self.layers) - 1
        return out[self.kept] if is_last and self.kept is not None else out
