"""Calls the compiled attention kernel of the CPU, for all rows of a step at once.

It knows the paged cache and which tokens are whose, nothing of layers or models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from fminfer.config import AttentionBody
from fminfer.errors import UsageError
from fminfer.kernel_build import KernelBuild, start_build
from fminfer.messages import StepRow

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Arguments(ctypes.Structure):
    """What the kernel is called with; attention.cpp says what each is."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("query", "out", "keys", "values")],
        *[(name, ctypes.c_void_p) for name in ("rows", "blocks", "slopes")],
        *[(name, ctypes.c_int64) for name in ("num_rows", "query_head", "query_token")],
        *[(name, ctypes.c_int64) for name in ("heads", "kv_heads", "head_dim", "block_size")],
        *[(name, ctypes.c_int64) for name in ("window", "type", "num_threads")],
        *[(name, ctypes.c_float) for name in ("scaling", "softcap")],
    )


@dataclass(slots=True, frozen=True)
class KernelRows:
    """The rows of a step, as the kernel reads them."""

    rows: torch.Tensor  # (rows, 4) int64: first packed token, tokens, position, start in `blocks`
    blocks: torch.Tensor  # (blocks,) int64: the rows' block tables, one after another


def plan_rows(rows: Sequence[StepRow], block_size: int) -> KernelRows:
    """Lay out a step's rows, in packed order."""
    table = []
    first = start = 0
    tables = []
    for row in rows:
        num = len(row.token_ids)
        table.append((first, num, row.position, start))
        used = row.block_table[: -(-(row.position + num) // block_size)]
        tables.append(used)
        first += num
        start += len(used)
    return KernelRows(torch.tensor(table), torch.tensor(list(chain.from_iterable(tables))))


class KernelAttention:
    """The kernel, as a function of tensors."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend = library.fminfer_attention
        self._attend.argtypes = [ctypes.POINTER(Arguments)]

    def __call__(
        self,
        query: torch.Tensor,  # (1, heads, tokens, head_dim)
        keys: torch.Tensor,  # (pool, kv_heads, block_size, head_dim)
        values: torch.Tensor,
        rows: KernelRows,
        *,
        scaling: float,
        sliding_window: int | None,
        alibi_slopes: torch.Tensor | None,  # (heads,) float32
        softcap: float | None,
    ) -> torch.Tensor:  # (1, tokens, heads, head_dim)
        """Attend from all tokens of a step; their keys and values are in the cache.

        Raises:
            MemoryError: there was none for the threads' working space.
        """
        wide = query.float()
        if wide.stride(-1) != 1:
            wide = wide.contiguous()
        _, heads, tokens, head_dim = wide.shape
        out = torch.empty((1, tokens, heads, head_dim))
        slopes = None if alibi_slopes is None else alibi_slopes.float().contiguous()
        failed = self._attend(
            Arguments(
                wide.data_ptr(),
                out.data_ptr(),
                keys.data_ptr(),
                values.data_ptr(),
                rows.rows.data_ptr(),
                rows.blocks.data_ptr(),
                None if slopes is None else slopes.data_ptr(),
                len(rows.rows),
                wide.stride(1),
                wide.stride(2),
                heads,
                keys.shape[1],
                head_dim,
                keys.shape[2],
                sliding_window or 0,
                TYPES[keys.dtype],
                torch.get_num_threads(),
                scaling,
                softcap or 0.0,
            )
        )
        if failed:
            raise MemoryError("no memory for the attention kernel's working space")
        return out.to(query.dtype)


def find_kernel(
    body: AttentionBody, device: torch.device, build: KernelBuild | None = None
) -> KernelAttention | None:
    """Return the kernel, waiting for its build; None: attention is to be eager.

    Raises:
        UsageError: it is asked for by name and cannot be.
    """
    if body == "eager" or (body == "auto" and device.type != "cpu"):
        return None
    if device.type != "cpu":
        raise UsageError(f"attention compiled needs a CPU, not {device.type}; use auto")
    build = build or start_build()
    library = build.library()
    if library is None and body == "compiled":
        raise UsageError(f"attention compiled cannot be: {build.error}; or use auto")
    return None if library is None else KernelAttention(library)
