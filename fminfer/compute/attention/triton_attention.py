"""Calls the GPU's attention kernels, for all rows of a step at once.

Importing it needs triton, which torch brings where it is built for CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch

from fminfer.compute.attention.kernel_attention import token_slots
from fminfer.compute.kernels.triton_kernels import attend_kernel, store_kernel
from fminfer.core.messages import StepRow
from fminfer.machine.device import send

NO_WINDOW = 2**31 - 1
LARGE_TILE_BYTES = 128 << 10  # 112 KB are used; A100 and H100 have these, smaller GPUs do not
MAX_DIM = 256  # elements of a key: keys of 576 (DeepSeek) compile for minutes, and do not fit


@dataclass(slots=True, frozen=True)
class TileRows:
    """The rows of a step, as the kernels read them; all int32, on the device."""

    # (tiles, 4): first packed token, tokens, position, start of the row's table in `blocks`
    prompt_tiles: torch.Tensor
    decode_tiles: torch.Tensor  # those of one token, of rows that have no other
    blocks: torch.Tensor  # (blocks,): the rows' block tables, one after another
    slots: torch.Tensor  # (tokens,): block * block_size + place, of each token's key; -1: no token
    kept: torch.Tensor | None = None  # int64: the tokens whose output is wanted; None: all

    def keep(self, tokens: torch.Tensor) -> TileRows:
        """Return rows whose keys and values are all stored, and whose outputs are some tokens'."""
        return replace(self, kept=tokens)


class TritonAttention:
    """The kernels, as a function of tensors.

    Args:
        heads, kv_heads, head_dim: of the model.
        dtype: of queries. Keys and values of the KV cache become it as they are read.
        kv_dtype: of the KV cache; None: the same.
        device: where all tensors are.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.heads, self.group, self.head_dim = heads, heads // kv_heads, head_dim
        self.dtype, self.device = dtype, device
        self._dim = max(16, power_of_2(head_dim))
        if self._dim > MAX_DIM:
            raise ValueError(
                f"keys of {head_dim} elements need more shared memory than a GPU has; the kernel "
                f"serves up to {MAX_DIM}"
            )
        # As many as registers hold the sums of, and shared memory the keys to come; in float32
        # there are no tensor cores, and few registers.
        width = self._dim * max(dtype.itemsize, (kv_dtype or dtype).itemsize)
        self._keys = 64 if width <= 256 else 32 if width <= 512 else 16
        self.decode_queries = max(16, power_of_2(self.group))
        rows = 16 if dtype.itemsize > 2 else 64
        if rows == 64 and self._dim == 128 and _shared_bytes(device) >= LARGE_TILE_BYTES:
            rows = 128  # a row's keys are read half as often
        self.queries = max(rows, self.decode_queries)
        self._no_slopes = torch.zeros(heads, dtype=torch.float32, device=device)

    def shape(self, block_size: int) -> dict[str, int]:
        """Return what both kernels are compiled for."""
        kv_heads = self.heads // self.group
        sizes = {"KV_HEADS": kv_heads, "HEAD_DIM": self.head_dim, "BLOCK_SIZE": block_size}
        return {**sizes, "DIM": self._dim}

    def tile(self, queries: int) -> dict[str, int]:
        """Return what a kernel that attends from so many queries is compiled for beside it."""
        return {"GROUP": self.group, "QUERIES": queries, "KEYS": self._keys}

    def warps(self, queries: int) -> int:
        """Return the warps of a program: with 4 the sums of many wide queries spill."""
        return 8 if queries >= 64 and self._dim >= 128 and self.dtype.itemsize == 2 else 4

    def plan(self, rows: Sequence[StepRow], block_size: int) -> TileRows:
        """Lay out a step's rows, in packed order."""
        prompts: list[int] = []
        decodes: list[int] = []
        blocks: list[int] = []
        first = 0
        for row in rows:
            num, table = len(row.token_ids), len(blocks)
            most = self.queries // self.group if num > 1 else 1
            for start in range(0, num, most):
                tile = (first + start, min(most, num - start), row.position + start, table)
                (prompts if num > 1 else decodes).extend(tile)
            blocks += row.block_table[: -(-(row.position + num) // block_size)]
            first += num
        parts = (prompts, decodes, blocks, token_slots(rows, block_size))
        columns = [np.array(part, np.int32) for part in parts]
        tiles, others, tables, slots = send(columns, self.device)
        return TileRows(tiles.view(-1, 4), others.view(-1, 4), tables, slots)

    def decode_numbers(
        self, rows: Sequence[StepRow], block_size: int, size: int
    ) -> list[np.ndarray]:
        """Lay out rows of one token each, and as many that are none as `size` asks for.

        Returns:
            Numbers of int32; behind each other they are what `decode_plan` reads.
        """
        num = len(rows)
        positions = np.array([row.position for row in rows], np.int32)
        used = positions // block_size + 1
        ends = used.cumsum(dtype=np.int32)
        tables = [row.block_table[:count] for row, count in zip(rows, used.tolist(), strict=True)]
        blocks = np.array(list(chain.from_iterable(tables)), np.int32)
        tiles = np.zeros((size, 4), np.int32)  # without tokens; none has another's place in `out`
        tiles[:, 0] = np.arange(size)
        tiles[:num, 1:] = np.stack([np.ones_like(used), positions, ends - used], 1)
        slots = np.full(size, -1, np.int32)
        slots[:num] = blocks[ends - 1] * block_size + positions % block_size
        return [tiles.ravel(), slots, blocks]

    def decode_plan(self, numbers: torch.Tensor, size: int) -> TileRows:
        """Return the plan of so many rows of one token, whatever `numbers`, int32, come to hold."""
        tiles, slots, blocks = numbers.tensor_split([4 * size, 5 * size])
        return TileRows(tiles[:0].view(-1, 4), tiles.view(-1, 4), blocks, slots)

    def __call__(
        self,
        query: torch.Tensor,  # (1, heads, tokens, head_dim)
        new_keys: torch.Tensor,  # (1, kv_heads, tokens, head_dim)
        new_values: torch.Tensor,
        keys: torch.Tensor,  # (pool, kv_heads, block_size, head_dim)
        values: torch.Tensor,
        rows: TileRows,
        *,
        scaling: float,
        sliding_window: int | None,
        alibi_slopes: torch.Tensor | None,  # (heads,) float32
        softcap: float | None,
        sinks: torch.Tensor | None = None,  # (heads,) float32
    ) -> torch.Tensor:  # (1, tokens, heads, head_dim), of the tokens that are kept
        """Put the new keys and values into the cache, then attend from the tokens of a step."""
        asked = _with_rows(query[0])
        key, value = (_with_rows(new[0].to(keys.dtype)) for new in (new_keys, new_values))
        heads, tokens, head_dim = asked.shape
        _, kv_heads, block_size, _ = keys.shape
        # The kernels trust what they are given.
        assert key.shape == value.shape == (kv_heads, tokens, head_dim), "keys of a step"
        assert head_dim == keys.shape[3] and heads == self.heads, "heads"
        assert len(rows.slots) == tokens, "tokens of a step"
        out = torch.empty((1, tokens, heads, head_dim), dtype=query.dtype, device=keys.device)
        slopes, of_sinks = (
            self._no_slopes if each is None else each.float().contiguous()
            for each in (alibi_slopes, sinks)
        )
        shape = self.shape(block_size)
        # Triton launches on the current device of the thread.
        with torch.cuda.device_of(keys):  # type: ignore[no-untyped-call]
            store_kernel[(tokens, kv_heads)](
                *(keys, values, key, value, rows.slots),
                *(step for t in (key, value) for step in t.stride()[:2]),
                **shape,
                num_warps=1,
            )
            for tiles, queries in (
                (rows.prompt_tiles, self.queries),
                (rows.decode_tiles, self.decode_queries),
            ):
                if len(tiles):
                    attend_kernel[(len(tiles), kv_heads)](
                        *(asked, out, keys, values, tiles, rows.blocks, slopes, of_sinks),
                        *asked.stride()[:2],
                        min(sliding_window or NO_WINDOW, NO_WINDOW),
                        scaling,
                        softcap or 1.0,
                        HAS_CAP=softcap is not None,
                        HAS_SINKS=sinks is not None,
                        **shape,
                        **self.tile(queries),
                        num_warps=self.warps(queries),
                    )
        if rows.kept is not None:
            out = out[:, rows.kept]
        return out


def power_of_2(number: int) -> int:
    """Return the lowest power of two that is no less."""
    return 1 << (number - 1).bit_length()


def _shared_bytes(device: torch.device) -> int:
    """Return the shared memory that one program may have; 0: there is no GPU."""
    if device.type != "cuda":
        return 0
    facts = torch.cuda.get_device_properties(device)
    found: int = getattr(facts, "shared_memory_per_block_optin", 0)
    return found


def _with_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with its last dimension in one piece."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
