"""Calls the GPU's attention kernels, for all rows of a step at once. Importing it needs
triton."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton

from fminfer.compute.attention.paged_attention import AttentionKernel
from fminfer.compute.attention.scoring import (
    AttentionCall,
    Scoring,
    make_rows_contiguous,
)
from fminfer.compute.kernels.triton_kernels import (
    attend_kernel,
    join_kernel,
    store_kernel,
)
from fminfer.compute.values.step import Rows, join_ranges
from fminfer.machine.device import send_columns

NO_WINDOW = 2**31 - 1
# of a program: what small GPUs have; what ours use, at most
SHARED_BYTES = (99 << 10, 163 << 10)
SPLIT = 256
SPLITS = 32  # keys of a split, at least; splits of a row, at most
# elements of a key: keys of 576 (DeepSeek) compile for minutes, and do not fit
MAX_DIM = 256
Biases = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # slopes, sinks, relative


@dataclass(slots=True, frozen=True)
class TileRows:
    """The rows of a step, as the kernels read them; all int32, on the device."""

    # (tiles, 5): first packed token, tokens, position, start of the row's table in `blocks`, and
    # the row's keys
    prompt_tiles: torch.Tensor
    decode_tiles: torch.Tensor  # those of one token, of rows that have no other
    blocks: torch.Tensor  # (blocks,): the rows' block tables, one after another
    # (tokens,): block * block_size + place, of each token's key; -1: no token
    slots: torch.Tensor


@dataclass(slots=True, frozen=True)
class TileShape:
    """What one program computes, and how."""

    queries: int  # tokens times the heads of a KV head, at most
    keys: int  # of a piece, as are their values
    warps: int
    ahead: int  # pieces that are on their way while one is computed


class TritonAttention(AttentionKernel):
    """The kernels, as a function of tensors."""

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        # of queries; cached keys and values become it as they are read
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None = None,  # of the KV cache; None: the same
    ) -> None:
        self.heads = heads
        self.group = heads // kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = device
        self._dim = max(16, triton.next_power_of_2(head_dim))
        if self._dim > MAX_DIM:
            raise ValueError(
                f"keys of {head_dim} elements need more shared memory than a GPU has; "
                f"the kernel serves up to {MAX_DIM}"
            )
        key_bytes = self._dim * max(dtype.itemsize, (kv_dtype or dtype).itemsize)
        self.prompt = self._choose_prompt_shape(key_bytes)
        self.decode = self._choose_decode_shape(key_bytes)
        # So many rows of one token fill the GPU. The splits of fewer have programs of their own.
        self.full_rows = -(-2 * _count_processors(device) // kv_heads)
        parts = (self.full_rows - 1) * SPLITS * heads
        self._parts = torch.empty(parts * head_dim, dtype=torch.float32, device=device)
        self._marks = torch.empty(parts * 2, dtype=torch.float32, device=device)
        self._no_slopes = torch.zeros(heads, dtype=torch.float32, device=device)

    def _choose_prompt_shape(self, key_bytes: int) -> TileShape:
        """Return the best of a sweep over an H200 that fits; docs/performance.md has figures."""
        size = self.dtype.itemsize
        room = _find_shared_bytes(self.device) - 1024
        queries = 128 if self._dim <= 64 else 64
        most = 64
        if size > 2:  # without tensor cores, and with fewer registers
            queries = 16
            most = (16 << 10) // key_bytes
        queries = max(queries, triton.next_power_of_2(self.group))
        warps = 8 if queries * self._dim > 8192 and size == 2 else 4
        room -= queries * self._dim * size
        sizes = [
            (keys, ahead) for keys in (64, 32, 16) if keys <= most for ahead in (2, 1)
        ]
        fitting = (
            each for each in sizes if (each[1] + 1) * 2 * each[0] * key_bytes <= room
        )
        keys, ahead = next(fitting, sizes[-1])
        return TileShape(queries, keys, warps, ahead)

    def _choose_decode_shape(self, key_bytes: int) -> TileShape:
        queries = max(16, triton.next_power_of_2(self.group))
        keys = 32 if key_bytes <= 512 else 16
        warps = max(
            2 if self.dtype.itemsize == 2 else 4, min(8, queries * self._dim // 1024)
        )
        return TileShape(
            queries, keys, warps, min(3, (64 << 10) // (2 * keys * key_bytes))
        )

    def attend_constants(self, block_size: int, *, is_one: bool) -> dict[str, int]:
        """Return what `attend_kernel` is compiled for, but for what layers differ in."""
        tile = self.decode if is_one else self.prompt
        return {
            **self.shape_constants(block_size),
            "GROUP": self.group,
            "QUERIES": tile.queries,
            "KEYS": tile.keys,
            "IS_ONE": is_one,
            "SPLIT": SPLIT,
            "SPLITS": SPLITS,
            # block ids are on their way before their pieces
            "num_stages": 2 * tile.ahead + 1,
            # Rounding must not depend on what is fused: where a row's splits are merged differs
            # from step to step.
            "enable_fp_fusion": not is_one,
            "num_warps": tile.warps,
        }

    def join_constants(self) -> dict[str, int]:
        """Return the same of `join_kernel`."""
        return {
            "HEADS": self.heads,
            "HEAD_DIM": self.head_dim,
            "DIM": self._dim,
            "KEYS": self.decode.keys,
            "SPLIT": SPLIT,
            "SPLITS": SPLITS,
            "num_warps": 1,
            "enable_fp_fusion": False,
        }

    def shape_constants(self, block_size: int) -> dict[str, int]:
        """Return what keys and values are stored by."""
        return {
            "KV_HEADS": self.heads // self.group,
            "HEAD_DIM": self.head_dim,
            "BLOCK_SIZE": block_size,
            "DIM": self._dim,
        }

    def lay_out(self, rows: Rows, block_size: int) -> TileRows:
        """Lay out a step's rows, in packed order."""
        tiles = _make_tiles(rows, block_size)
        is_one = rows.lengths == 1
        most = self.prompt.queries // self.group
        # The tiles of each prompt, one after another: the places where they begin in their row.
        num_tiles = np.where(is_one, 0, -(-rows.lengths // most))
        starts = join_ranges(0 * num_tiles, num_tiles) * most
        prompts = np.repeat(tiles, num_tiles, 0)
        prompts[:, 0] += starts
        prompts[:, 1] = np.minimum(most, prompts[:, 1] - starts)
        prompts[:, 2] += starts
        # short ones fill the end
        prompts = prompts[np.argsort(-prompts[:, 2], kind="stable")]
        columns = (
            prompts.ravel(),
            tiles[is_one].ravel(),
            rows.blocks(block_size),
            rows.key_places(block_size),
        )
        first, second, *others = send_columns(
            [each.astype(np.int32) for each in columns], self.device
        )
        return TileRows(first.view(-1, 5), second.view(-1, 5), *others)

    def lay_out_decode_numbers(
        self, rows: Rows, block_size: int, size: int
    ) -> list[np.ndarray]:
        """Lay out rows of one token each, and none up to `size`.

        `make_decode_layout` reads these numbers.
        """
        num = len(rows)
        # without tokens; none has another's place in `out`
        tiles = np.zeros((size, 5), np.int32)
        tiles[:, 0] = np.arange(size)
        tiles[:num] = _make_tiles(rows, block_size)
        slots = np.full(size, -1, np.int32)
        slots[:num] = rows.key_places(block_size)
        return [tiles.ravel(), slots, rows.blocks(block_size)]

    def make_decode_layout(self, numbers: torch.Tensor, size: int) -> TileRows:
        """Return the plan of so many rows of one token, whatever `numbers`, int32, come
        to hold."""
        tiles, slots, blocks = numbers.tensor_split([5 * size, 6 * size])
        return TileRows(tiles[:0].view(-1, 5), tiles.view(-1, 5), blocks, slots)

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        """Attend as `AttentionKernel` says."""
        self._check_call(call)
        query = make_rows_contiguous(call.query[0])
        heads, tokens, head_dim = query.shape
        out = torch.empty(
            (1, tokens, heads, head_dim), dtype=query.dtype, device=call.keys.device
        )
        biases = self._make_biases(call.scoring)

        # Triton launches on the current device of the thread.
        with torch.cuda.device_of(call.keys):  # type: ignore[no-untyped-call]
            self._store_new_keys(call)
            if len(call.layout.prompt_tiles):
                self._attend_tiles(call, query, out, biases, is_one=False)
            if len(call.layout.decode_tiles):
                self._attend_tiles(call, query, out, biases, is_one=True)
        return out

    def _check_call(self, call: AttentionCall) -> None:
        """Check what the kernels trust."""
        heads, _, head_dim = call.query.shape[1:]
        kv_heads = call.keys.shape[1]
        new_shape = (1, kv_heads, len(call.layout.slots), head_dim)
        assert call.new_keys.shape == call.new_values.shape == new_shape, (
            "keys of a step"
        )
        assert head_dim == call.keys.shape[3] and heads == self.heads, "heads"

    def _make_biases(self, scoring: Scoring) -> Biases:
        """Return slopes, sinks and relative biases; zeros stand for those that are none."""
        slopes, sinks, relative = (
            self._no_slopes if each is None else each.float().contiguous()
            for each in (scoring.slopes, scoring.sinks, scoring.relative)
        )
        return slopes, sinks, relative

    def _store_new_keys(self, call: AttentionCall) -> None:
        """Put a step's keys and values where they belong in the cache."""
        _, kv_heads, block_size, _ = call.keys.shape
        new_keys, new_values = (
            make_rows_contiguous(new[0].to(call.keys.dtype))
            for new in (call.new_keys, call.new_values)
        )
        num_new = len(call.layout.slots)
        if num_new:
            store_kernel[(num_new, kv_heads)](
                call.keys,
                call.values,
                new_keys,
                new_values,
                call.layout.slots,
                *new_keys.stride()[:2],
                *new_values.stride()[:2],
                **self.shape_constants(block_size),
                num_warps=1,
            )

    def _attend_tiles(
        self,
        call: AttentionCall,
        query: torch.Tensor,  # (heads, tokens, head_dim)
        out: torch.Tensor,
        biases: Biases,
        *,
        is_one: bool,  # tiles of one token
    ) -> None:
        """Attend from the tiles of prompts, or of rows of one token."""
        layout: TileRows = call.layout
        scoring = call.scoring
        _, kv_heads, block_size, _ = call.keys.shape
        tiles = layout.decode_tiles if is_one else layout.prompt_tiles
        num_splits = SPLITS if is_one and len(tiles) < self.full_rows else 1
        slopes, sinks, relative = biases
        window = min(scoring.window or NO_WINDOW, NO_WINDOW)
        has = {
            "HAS_SINKS": scoring.sinks is not None,
            "HAS_WINDOW": scoring.window is not None,
        }

        attend_kernel[(len(tiles) * kv_heads, num_splits)](
            query,
            out,
            call.keys,
            call.values,
            tiles,
            layout.blocks,
            slopes,
            sinks,
            relative,
            self._parts,
            self._marks,
            *query.stride()[:2],
            window,
            scoring.ahead,
            scoring.reach,
            scoring.scaling,
            scoring.softcap or 1.0,
            **self.attend_constants(block_size, is_one=is_one),
            HAS_CAP=scoring.softcap is not None,
            HAS_SLOPES=scoring.slopes is not None,
            HAS_RELATIVE=scoring.relative is not None,
            **has,
        )
        if num_splits > 1:
            join_kernel[(len(tiles), self.heads)](
                out,
                tiles,
                sinks,
                self._parts,
                self._marks,
                window,
                scoring.ahead,
                **self.join_constants(),
                **has,
            )


def _make_tiles(rows: Rows, block_size: int) -> np.ndarray:
    """Return each row as one tile, (rows, 5) int64; see `TileRows`."""
    num_blocks = rows.num_blocks(block_size)
    tables = num_blocks.cumsum() - num_blocks
    num_keys = rows.positions + rows.lengths
    return np.stack(
        [rows.first_tokens, rows.lengths, rows.positions, tables, num_keys], 1
    )


def _find_shared_bytes(device: torch.device) -> int:
    """Return the shared memory that a program may use."""
    num_bytes: int = SHARED_BYTES[0]
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        num_bytes = getattr(properties, "shared_memory_per_block_optin", num_bytes)
    return min(num_bytes, SHARED_BYTES[1])


def _count_processors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU; the interpreter has one."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
