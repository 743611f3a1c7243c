"""A decode step with inputs at fixed addresses, so that a CUDA graph can capture it.

Beside the same step without a graph, it shows what graphs would gain.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu import results
from benchmarks.gpu.cases import Figures, expect
from benchmarks.gpu.stopwatch import call_s, median_s
from fminfer.compute.attention.kv_cache import KvCache
from fminfer.core.messages import StepRow
from fminfer.models.layer_step import LayerStep
from fminfer.runtime.build.loading import LoadedPart

BLOCK = 32
TURNS = {"cuda": 20, "cpu": 2}
Step = Callable[[], torch.Tensor]


def make_cache(part: LoadedPart, rows: int, tokens: int) -> KvCache:
    """Return a KV cache of random numbers with room for some rows."""
    cache = KvCache(
        [layer.attention for layer in part.network.own],
        num_blocks=rows * -(-tokens // BLOCK),
        block_size=BLOCK,
        dtype=part.plan.kv_dtype,
        device=part.device,
        kernel=part.attention,
    )
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    return cache


def make_step(part: LoadedPart, cache: KvCache, rows: int, tokens: int) -> Step:
    """Return a decode step of `tokens` keys a row, from the embedding to the greedy tokens.

    All that comes from the host is on the device before the first call.
    """
    each, network = -(-tokens // BLOCK), part.network
    assert network.head is not None, "a whole model"
    blocks = list(range(rows * each))
    random.Random(0).shuffle(blocks)
    tables = [blocks[at : at + each] for at in range(0, len(blocks), each)]
    cache.plan([StepRow([0], tokens - 1, table) for table in tables], None)
    ids = torch.arange(rows, device=part.device)
    positions = torch.full((rows,), tokens - 1, device=part.device)
    head = network.head

    def run() -> torch.Tensor:  # (rows,) int64
        before = network.embed(ids, positions)
        return head(network.run(before, LayerStep(positions, cache))).argmax(-1)

    return run


def capture(step: Step, device: torch.device) -> Step:
    """Return a step that a CUDA graph replays; on a CPU, which has none, the step itself."""
    if device.type != "cuda":
        return step
    own = torch.cuda.current_stream(device)
    aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    aside.wait_stream(own)
    with torch.cuda.stream(aside):  # warm up: first calls allocate and compile
        for _ in range(3):
            step()
    own.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return found

    return replay


@torch.inference_mode()
def time_step(
    path: Path, part: LoadedPart, cache: KvCache, rows: int, tokens: int, weights: int
) -> Figures:
    """Time a step launch by launch and as a graph; both must find the same tokens.

    Args:
        path: of the results, which have the roofs.
        weights: bytes of weights that a step reads.
    """
    device, turns = part.device, TURNS[part.device.type]
    step = make_step(part, cache, rows, tokens)
    right = step().clone()
    eager_s, host_s = median_s(step, device, turns), call_s(step, device, turns)
    graph = capture(step, device)
    graph().zero_()
    is_equal = torch.equal(graph(), right)
    graph_s = median_s(graph, device, turns)
    read = weights + rows * tokens * part.plan.own.takes.kv_token
    figures: Figures = {"eager ms": 1000 * eager_s, "graph ms": 1000 * graph_s}
    figures |= {"host ms": 1000 * host_s, "GB/s": read / graph_s / 1e9}
    figures |= results.share_of(path, read / graph_s, "copy")
    expect(is_equal, "a graph finds other tokens", figures)
    return figures
