"""What a KV cache takes, and how large one may be."""

from __future__ import annotations

import math

import torch

from fminfer.core.config import EngineConfig
from fminfer.core.errors import UsageError
from fminfer.core.partition import Part
from fminfer.machine.device import (
    choose_kv_dtype,
    free_bytes,
)
from fminfer.machine.out_of_memory import is_out_of_memory
from fminfer.models.checkpoint import Checkpoint


def kv_token_bytes(checkpoint: Checkpoint, part: Part, kv_dtype: torch.dtype) -> int:
    """Return what one token's keys and values take in the layers of a part."""
    shape = checkpoint.model.layers[0].attention.cache_shape
    return part.num_layers * math.prod(shape) * kv_dtype.itemsize


def most_kv_tokens(config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> int:
    """Return the tokens of KV cache beyond which more is of no use."""
    size = config.block_size
    return config.step_sizes(device.type, 1).max_rows * -(-checkpoint.context_length // size) * size


def require_cache(
    config: EngineConfig, checkpoint: Checkpoint, part: Part, dtype: torch.dtype
) -> None:
    """Refuse a --budget for which the CPU's system gives no memory, before weights are read.

    It asks for that memory and gives it back. Nothing touches it, so that this costs no time.

    Raises:
        UsageError: there is no memory for it.
    """
    if config.budget is None:
        return
    num_tokens = -(-config.budget // config.block_size) * config.block_size
    kv_dtype = choose_kv_dtype(config.kv_dtype, dtype)
    size = num_tokens * kv_token_bytes(checkpoint, part, kv_dtype)
    cpu = torch.device("cpu")
    try:
        torch.empty(size, dtype=torch.uint8, device=cpu)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise _no_cache(num_tokens, size, kv_dtype, cpu) from error


def _no_cache(
    num_tokens: int, size: int, kv_dtype: torch.dtype, device: torch.device
) -> UsageError:
    """Return the error of a KV cache for which there is no memory."""
    narrower = ", or --kv-dtype bfloat16" * (kv_dtype == torch.float32)
    return UsageError(
        f"a KV cache of {num_tokens} tokens takes {size / 2**30:.1f} GiB beside the weights, "
        f"and {free_bytes(device) / 2**30:.1f} GiB are free; give a smaller --budget{narrower}"
    )
