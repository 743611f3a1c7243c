"""Gives a loaded part its KV cache, as large as memory allows."""

from __future__ import annotations

import socket
from typing import Any

from fminfer.core.config import EngineConfig
from fminfer.machine.device import count_engines_on, free_bytes, memory_name
from fminfer.machine.out_of_memory import is_out_of_memory
from fminfer.models.stage import Stage
from fminfer.pipeline.group import Group
from fminfer.worker.kv_size import _no_cache, most_kv_tokens
from fminfer.worker.loading import LoadedPart
from fminfer.worker.step_memory import auto_budget


def count_blocks(config: EngineConfig, loaded: LoadedPart, group: Group | None = None) -> int:
    """Return the size of the KV cache in blocks, the same on every rank.

    Of an automatic budget each rank allows what its memory, which it may share with other ranks,
    has room for beside the weights; the least counts.
    """
    budget, size = config.budget, config.block_size
    if budget is None:
        if group is not None:
            group.gather("loaded", True)  # every rank's weights are in memory
        local_size = 1 if group is None else group.local_size
        num_engines = count_engines_on(loaded.device, config, local_size)
        mine: dict[str, Any] = {
            "memory": memory_name(loaded.device, socket.gethostname()),
            "device": loaded.device.type,
            "free": free_bytes(loaded.device) // num_engines,
            "kv_bytes_per_token": loaded.kv_bytes_per_token,
            "work": loaded.step_bytes(config),
            "most": most_kv_tokens(config, loaded.checkpoint, loaded.device),
        }
        ranks = [mine] if group is None else group.gather("memory", mine)
        budget = min(
            auto_budget(
                _total(ranks, rank, "kv_bytes_per_token"),
                rank["most"],
                rank["free"],
                _total(ranks, rank, "work"),
                rank["device"],
            )
            for rank in ranks
        )
    return -(-budget // size)


def _total(ranks: list[dict[str, Any]], rank: dict[str, Any], what: str) -> int:
    """Return the sum over the ranks that share a rank's memory."""
    return sum(each[what] for each in ranks if each["memory"] == rank["memory"])


def build_stage(config: EngineConfig, loaded: LoadedPart, num_blocks: int) -> Stage:
    """Give a loaded part its KV cache.

    Raises:
        UsageError: there is no memory for it.
    """
    try:
        stage = _build_stage(config, loaded, num_blocks)
        if loaded.device.type == "cuda":
            stage.warm_up()
        return stage
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        num_tokens = num_blocks * config.block_size
        size = num_tokens * loaded.kv_bytes_per_token
        raise _no_cache(num_tokens, size, loaded.kv_dtype, loaded.device) from error


def _build_stage(config: EngineConfig, loaded: LoadedPart, num_blocks: int) -> Stage:
    return Stage(
        loaded.network,
        kv_dtype=loaded.kv_dtype,
        device=loaded.device,
        num_blocks=num_blocks,
        block_size=config.block_size,
        kernel=loaded.attention,
        ranker=loaded.ranker,
        drawer=loaded.drawer,
        head_kernel=loaded.head,
        threads=loaded.threads,
    )
