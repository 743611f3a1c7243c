"""The KV cache of a stage's layers, and attention over it as the spec of each layer says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fminfer.compute.attention.attention_plan import plan_attention
from fminfer.compute.attention.paged_attention import AttentionKernel, PagedAttention
from fminfer.compute.spec import Attention
from fminfer.core.messages import StepRow
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
        kernel: AttentionKernel | None,
    ) -> None:
        ((kept, kv_heads, head_dim),) = {how.cache_shape for how in layers}
        shape = (len(layers), kept, num_blocks, kv_heads, block_size, head_dim)
        # Not zeroed: the system then gives memory page by page, as blocks come into use.
        self._kv = torch.empty(shape, dtype=dtype, device=device)
        if device.type == "cpu":
            use_small_pages(self._kv.data_ptr(), self._kv.nbytes)
        self.layers = [
            PagedAttention(
                num_blocks,
                block_size,
                kv_heads,
                head_dim,
                dtype=dtype,
                device=device,
                kernel=kernel,
                kept_in=each,
            )
            for each in self._kv
        ]
        self._how = list(layers)
        self.slopes = [_slopes_of(how, device) for how in layers]
        self.num_blocks, self.block_size, self.device = num_blocks, block_size, device
        self._kernel, self._kv_heads = kernel, kv_heads
        self._kept: torch.Tensor | None = None

    def plan(self, rows: list[StepRow], kept: torch.Tensor | None) -> None:
        """Prepare attention for the rows of a step.

        Args:
            kept: (wanted,) int64, the tokens whose queries the last layer needs; None: all.
        """
        plan: Any
        if self._kernel is not None:
            plan = self._kernel.plan(rows, self.block_size)
        else:
            plan = plan_attention(rows, self.block_size, self._kv_heads, self.device)
        self.use(plan)
        if kept is not None and self._kernel is not None:
            self.layers[-1].plan = plan.keep(kept)
        self._kept = None if self._kernel is not None else kept

    def use(self, plan: Any) -> None:
        """Have all layers attend by a plan of the kernel's, with the outputs of all tokens."""
        for layer in self.layers:
            layer.plan = plan
        self._kept = None

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,  # (tokens, heads, head_dim)
        key: torch.Tensor,  # (tokens, KV heads, head_dim)
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,  # (heads,) float32
    ) -> torch.Tensor:  # (tokens, heads, head_dim); in the last layer only kept tokens
        """Store a step's new keys and values, then attend."""
        how = self._how[layer]
        out = self.layers[layer](
            *(part.transpose(0, 1)[None] for part in (query, key, value)),
            scaling=how.scaling,
            sliding_window=how.window,
            alibi_slopes=self.slopes[layer],
            softcap=how.softcap,
            sinks=sinks,
        )[0]
        if self._kept is not None and layer == len(self.layers) - 1:
            return out[self._kept]  # plain torch computes all queries
        return out

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks, given as pairs (from, to)."""
        sources, targets = torch.tensor(copies, device=self.device).T
        for kv in self._kv:  # all layers at once would need their blocks twice
            kv[:, targets] = kv[:, sources]


def _slopes_of(how: Attention, device: torch.device) -> torch.Tensor | None:
    """Return the slopes of ALiBi, (heads,) float32, if attention adds the bias."""
    if how.alibi is None or how.keeps_bias:
        return None
    return torch.tensor(how.alibi.slopes, device=device)
