"""A stage's decode step with its CUDA graph, and launched kernel by kernel."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu import results
from benchmarks.gpu.cases import Figures, expect
from benchmarks.gpu.stopwatch import call_s, median_s
from fminfer.compute.attention.kv_cache import KvCache
from fminfer.compute.values.step import Step, make_draws
from fminfer.forward.decode_graphs import choose_graphs
from fminfer.forward.stage import Stage
from fminfer.runtime.load.builder import LoadedPart

BLOCK = 32
TURNS = {"cuda": 20, "cpu": 2}


def make_stage(part: LoadedPart, rows: int, tokens: int) -> Stage:
    """Return a stage with a KV cache of random numbers."""
    attention = part.kernels.attention
    graphs = choose_graphs("require", part.network, attention, rows, part.device)
    cache = KvCache(
        [layer.attention for layer in part.network.layer_specs],
        num_blocks=rows * -(-tokens // BLOCK),
        block_size=BLOCK,
        dtype=part.plan.kv_dtype,
        device=part.device,
        kernel=attention,
    )
    stage = Stage(part.network, cache, replace(part.kernels, graphs=graphs))
    for keys, values in stage.cache.layers:
        keys.normal_()
        values.normal_()
    return stage


def make_step(rows: int, tokens: int) -> Step:
    """Return a greedy step of `tokens` keys a row."""
    each = -(-tokens // BLOCK)
    slots, places = np.divmod(np.arange(rows * each, dtype=np.int32), each)
    blocks = np.random.default_rng(0).permutation(rows * each)
    return Step(
        0,
        slots=np.arange(rows, dtype=np.int32),
        positions=np.full(rows, tokens - 1),
        lengths=np.ones(rows, np.int64),
        token_ids=np.arange(rows),
        new_blocks=np.stack([slots, places, blocks.astype(np.int32)], 1),
        draws=make_draws(range(rows), temperature=0),
    )


def time_step(
    path: Path, part: LoadedPart, rows: int, tokens: int, weights: int
) -> Figures:
    """Time a step with a graph and without; both must find the same tokens.

    Args:
        path: of the results, which have the roofs.
        weights: bytes of weights that a step reads.
    """
    device = part.device
    stage = make_stage(part, rows, tokens)
    step = make_step(rows, tokens)
    before = _driver_bytes(device)
    ids = stage.run(step).logprobs_of("tokens").ids
    kept = _driver_bytes(device) - before
    layers = partial(stage.forward, step, None)
    figures: Figures = {}
    for name in ("graph", "eager"):
        if name == "eager":
            graphs = {} if stage.graphs is None else stage.graphs.graphs
            expect(
                graphs.get(rows) is not None or device.type == "cpu",
                "nothing was captured",
            )
            stage.graphs = None
            others = stage.run(step).logprobs_of("tokens").ids
            expect(np.array_equal(others, ids), "a graph finds other tokens", figures)
        figures[f"{name} ms"] = 1000 * median_s(layers, device, TURNS[device.type])
        figures[f"{name} host ms"] = 1000 * call_s(layers, device, TURNS[device.type])
        figures[f"{name} step ms"] = 1000 * _wall_s(
            partial(stage.run, step), TURNS[device.type]
        )
    read = weights + rows * tokens * part.plan.this_rank.takes.kv_token
    rate = 1000 * read / float(figures["graph step ms"] or 1)
    figures |= {"GB/s": rate / 1e9, "driver MiB": kept / 2**20}
    return figures | results.share_of(path, rate, "copy")


def _driver_bytes(device: torch.device) -> int:
    """Return what the GPU has beside torch's memory."""
    if device.type == "cpu":
        return 0
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free - torch.cuda.memory_reserved(device))


def _wall_s(work: Callable[[], object], turns: int) -> float:
    """Return the seconds of work that ends with what the host has read."""
    took = []
    for _ in range(turns + 1):
        started = time.perf_counter()
        work()
        took.append(time.perf_counter() - started)
    return statistics.median(took[1:])
