#!/usr/bin/env python
"""How long the layers of models with experts take: each product for itself, and in one call.

Two random models, like mixtral and like qwen3_moe, in steps of decoding rows and of one
prompt. The sides take turns in one process.

    python benchmarks/experts.py
    FMINFER_CPU=avx2 python benchmarks/experts.py --held bfloat16 --dtype float32

A table comes first, one JSON line last.
"""

from __future__ import annotations

import json
import os
import statistics

# as the command does, before torch is imported
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
import time
from collections.abc import Iterator
from typing import Any

import click

WIDTH = 768
BLOCK = 16
CONTEXT = 64
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 1024,
    },
    "qwen3_moe": {
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 256,
        "head_dim": 64,
        "norm_topk_prob": True,
    },
}
SHAPE = {"hidden_size": WIDTH, "num_attention_heads": 12, "num_key_value_heads": 4}
SHAPE |= {"vocab_size": 1000, "max_position_embeddings": 4096, "sliding_window": None}


class InMemory:
    """A source of layers' weights that are there already."""

    num_bytes = 0

    def __init__(self, weights: list[Any], dtype: Any) -> None:
        self._weights = weights
        self.dtype = dtype

    def load_layer(self, number: int) -> Any:
        return self._weights[number]

    def load_layers(self) -> Iterator[Any]:
        return iter(self._weights)

    def load_entry(self) -> Any:
        return {}

    def load_exit(self, entry: Any) -> Any:
        return {}


def build(model: Any, held: Any, dtype: Any, *, in_one_call: bool) -> Any:
    """Return a model's layers; both sides have the same weights."""
    import torch

    from fminfer.compute.formats.dense import Dense
    from fminfer.compute.values.weights import Weight
    from fminfer.forward.layer_step import PartBuilder
    from fminfer.forward.registry import open_registry
    from fminfer.forward.transformer import Transformer
    from fminfer.forward.whole_layers import WholeLayers
    from fminfer.models.tensor_specs import layer_specs

    registry = open_registry("require", dtype, torch.device("cpu"))
    if not in_one_call:
        registry.of_experts.clear()
    layers = []
    generator = torch.Generator().manual_seed(0)
    for how in model.layers:
        weights = {}
        for name, spec in layer_specs(how, WIDTH).items():
            tensor = torch.empty(spec.shape).normal_(0, 0.02, generator=generator)
            is_norm = spec.use == "norm"
            tensor = torch.ones(spec.shape, dtype=dtype) if is_norm else tensor.to(held)
            tensor = tensor.to(dtype) if spec.is_precise else tensor
            weights[name] = Weight(spec, Dense(tensor.dtype), (tensor,))
        layers.append(weights)
    join = WholeLayers(registry).join_layer if in_one_call else None
    source: Any = InMemory(layers, dtype)
    return Transformer(model, source, builder=PartBuilder(registry, 4096), join=join)


def time_step(network: Any, model: Any, dtype: Any, rows: int, tokens: int) -> float:
    """Return the seconds of a step: so many rows, with so many new tokens each."""
    import torch

    from fminfer.compute.attention.kernel_attention import CpuAttention
    from fminfer.compute.attention.kv_cache import KvCache
    from fminfer.compute.values.step import Rows
    from fminfer.forward.layer_step import LayerStep
    from fminfer.forward.registry import find_library

    each = (CONTEXT + tokens) // BLOCK + 1
    library = find_library("require", torch.device("cpu"))
    assert library is not None
    cache = KvCache(
        [layer.attention for layer in model.layers],
        num_blocks=rows * each,
        block_size=BLOCK,
        dtype=dtype,
        device=torch.device("cpu"),
        kernel=CpuAttention(library),
    )
    begin = CONTEXT if tokens == 1 else 0
    cache._kv.zero_()
    plan = Rows.from_tables(
        *((begin, tokens, range(r * each, (r + 1) * each)) for r in range(rows))
    )
    positions = torch.arange(begin, begin + tokens).repeat(rows)
    x = torch.randn(
        rows * tokens, WIDTH, generator=torch.Generator().manual_seed(1)
    ).to(dtype)
    start = time.perf_counter()
    with torch.inference_mode():
        network.run(x.clone(), LayerStep(positions, cache.make_attention(plan)))
    return time.perf_counter() - start


@click.command()
@click.option("--held", default="float32", help="the dtype of weights")
@click.option("--dtype", default="float32", help="the dtype of hidden states")
@click.option(
    "--model", "names", multiple=True, default=MODELS, type=click.Choice([*MODELS])
)
@click.option("--layers", default=12)
@click.option("--turns", default=7)
def main(
    held: str, dtype: str, names: tuple[str, ...], layers: int, turns: int
) -> None:
    from fminfer.machine import processor

    processor.cap_libraries()
    import torch
    from transformers import AutoConfig

    from fminfer.models.config_fields import architecture_of
    from fminfer.models.tensor_specs import layer_specs

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    results = []
    of_weights = getattr(torch, held)
    of_rows = getattr(torch, dtype)
    print(" ".join(processor.describe_processor().splitlines()[1:]))
    print(
        f"weights of {held}, hidden states of {dtype}; ms of a step, medians of {turns}"
    )
    print(
        f"{'model':12} {'rows':>5} {'tokens':>6} {'one by one':>11} {'one call':>9}  ratio"
    )
    for name in names:
        config = AutoConfig.for_model(
            name, num_hidden_layers=layers, **SHAPE | MODELS[name]
        )
        model = architecture_of(config).model
        sizes = [
            s.size for how in model.layers for s in layer_specs(how, WIDTH).values()
        ]
        print(f"{name}: {sum(sizes) / 1e6:.0f} million parameters")
        sides = [
            build(model, of_weights, of_rows, in_one_call=in_one_call)
            for in_one_call in (False, True)
        ]
        for rows, tokens in ((1, 1), (4, 1), (16, 1), (64, 1), (1, 512), (1, 2000)):
            times: list[list[float]] = [[], []]
            for turn in range(turns + 1):
                for taken, side in zip(times, sides, strict=True):
                    seconds = time_step(side, model, of_rows, rows, tokens)
                    taken += [seconds] * (turn > 0)
            before, now = (1e3 * statistics.median(taken) for taken in times)
            results.append({"model": name, "rows": rows, "tokens": tokens})
            results[-1] |= {"before_ms": before, "now_ms": now}
            ratio = now / before
            print(
                f"{name:12} {rows:5} {tokens:6} {before:11.1f} {now:9.1f} {ratio:6.2f}",
                flush=True,
            )
        del sides
    print(json.dumps(results))


if __name__ == "__main__":
    main()
