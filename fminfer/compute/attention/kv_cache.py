"""The KV cache of a stage's layers, and attention over it as the spec of each layer says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fminfer.compute.attention.paged_attention import AttentionBody, PagedAttention, PlainAttention
from fminfer.compute.attention.scoring import Scoring
from fminfer.compute.spec import Attention
from fminfer.compute.step import Rows
from fminfer.machine.host_memory import use_small_pages


class KvCache:
    """One tensor for all layers, in blocks that sequences share or copy.

    Of latent attention keys alone are kept: values are read where keys are.

    Args:
        layers: the attention of each layer; their keys have the same shape.
        num_blocks, block_size: the size of the cache.
        dtype: of the cache; what is stored is rounded to it.
        kernel: the compiled attention; None: plain torch.
    """

    def __init__(
        self,
        layers: Sequence[Attention],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kernel: AttentionBody | None,
    ) -> None:
        ((kept, kv_heads, head_dim),) = {how.cache_shape for how in layers}
        shape = (len(layers), kept, num_blocks, kv_heads, block_size, head_dim)
        # Not zeroed: the system then gives memory page by page, as blocks come into use.
        self._kv = torch.empty(shape, dtype=dtype, device=device)
        if device.type == "cpu":
            use_small_pages(self._kv.data_ptr(), self._kv.nbytes)
        body = kernel or PlainAttention(kv_heads, device)
        self.layers = [PagedAttention(each[0], each[-1], body) for each in self._kv]
        self.num_blocks, self.block_size, self.device = num_blocks, block_size, device

    def plan(self, rows: Rows, kept: torch.Tensor | None = None) -> StepAttention:
        """Return the attention of a step's rows.

        Args:
            kept: (wanted,) int64, the tokens whose queries the last layer needs; None: all.
        """
        plan = self.layers[0].body.plan(rows, self.block_size)
        return StepAttention(self.layers, plan, plan if kept is None else plan.keep(kept))

    def copy_blocks(self, copies: np.ndarray) -> None:
        """Copy whole blocks, given as pairs (from, to): (copies, 2) int64."""
        sources, targets = torch.from_numpy(copies).to(self.device).T
        for kv in self._kv:  # all layers at once would need memory for a copy of all
            kv[:, targets] = kv[:, sources]


@dataclass(slots=True, frozen=True)
class StepAttention:
    """Attention of one step over the cache of all layers."""

    layers: Sequence[PagedAttention]
    plan: Any  # made by the body
    plan_of_last: Any  # of the last layer, which computes outputs of wanted tokens only

    def plan_of(self, layer: int) -> Any:
        """Return the plan by which a layer attends."""
        return self.plan_of_last if layer == len(self.layers) - 1 else self.plan

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,  # (tokens, heads, head_dim)
        key: torch.Tensor,  # (tokens, KV heads, head_dim)
        value: torch.Tensor,
        how: Scoring,
    ) -> torch.Tensor:  # (tokens, heads, head_dim); in the last layer only kept tokens
        """Store a step's new keys and values, then attend."""
        q, k, v = (part.transpose(0, 1)[None] for part in (query, key, value))
        return self.layers[layer](self.plan_of(layer), q, k, v, how)[0]
