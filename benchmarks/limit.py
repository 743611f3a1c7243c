"""The least time a machine could answer rows in: peers.py's last line.

Every prompt token that no earlier prompt begins with goes through the layers once, at
the rate of the machine's products. Then all rows draw together. A step takes as long as
its products, or as reading weights, keys and values, whichever is longer. The head
counts where logits are needed. What attention itself computes is left out, as is all
else between products.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fminfer.compute.values.spec import Model, Moe
from fminfer.models.checkpoint import open_checkpoint
from fminfer.models.tensor_specs import exit_specs, layer_specs

# Tokens, in and out: one that suits two cores and a small model, one that fills a GPU.
GEMM = {"cpu": (512, 768, 3072), "cuda": (8192, 4096, 14336)}
READ_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}
ROOF_S = 1.0  # for each: a second thread may take some tenths to find its own core


@dataclass(frozen=True)
class Roof:
    """What a machine does in a second."""

    flop: float
    bytes: float


def measure_roof(dtype: str, device: str) -> Roof:
    """Time a product, and reading what no cache holds, as a step of few rows does with
    weights."""
    kind = torch.device(device).type
    tokens, width_in, width_out = GEMM[kind]
    left = torch.randn(tokens, width_in, dtype=getattr(torch, dtype), device=device)
    right = torch.randn(width_out, width_in, dtype=getattr(torch, dtype), device=device)
    product_s = _least_s(lambda: torch.nn.functional.linear(left, right), device)
    data = torch.ones(READ_BYTES[kind] // 4, device=device)
    read_s = _least_s(data.sum, device)
    return Roof(
        2 * tokens * width_in * width_out / product_s, READ_BYTES[kind] / read_s
    )


def _least_s(work: Callable[[], torch.Tensor], device: str) -> float:
    times = []
    end = time.perf_counter() + ROOF_S
    while (started := time.perf_counter()) < end:
        work()
        if device != "cpu":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times)


def least_s(folder: str, dtype: str, rows: list[dict[str, Any]], roof: Roof) -> float:
    """Return the seconds that the rows of a file would take at the roof.

    Args:
        folder: the checkpoint.
        rows: requests with `prompt`, a list of ids, and `max_tokens`; 0 scores the prompt.
    """
    model = open_checkpoint(str(folder)).model
    layers, active, head = count_weights(model)
    width = getattr(torch, dtype).itemsize
    kv_bytes = (
        len(model.layers) * math.prod(model.layers[0].attention.cache_shape) * width
    )
    scored = sum(len(row["prompt"]) - 1 for row in rows if not row["max_tokens"])
    drawing = [row for row in rows if row["max_tokens"]]
    flop = 2 * active * count_distinct([row["prompt"] for row in rows])
    seconds = (flop + 2 * head * (scored + len(drawing))) / roof.flop
    for step in range(1, max((row["max_tokens"] for row in drawing), default=0)):
        lengths = [
            len(row["prompt"]) + step for row in drawing if row["max_tokens"] > step
        ]
        products_s = 2 * (active + head) * len(lengths) / roof.flop
        read_s = ((layers + head) * width + kv_bytes * sum(lengths)) / roof.bytes
        seconds += max(products_s, read_s)
    return seconds


def count_weights(model: Model) -> tuple[int, int, int]:
    """Return how many weights a model's layers have, a token meets there, and its head has."""
    layers = active = 0
    for layer in model.layers:
        for spec in layer_specs(layer, model.hidden_size).values():
            if len(spec.shape) > 1:
                layers += spec.size
                is_expert = len(spec.shape) == 3 and isinstance(layer.mlp, Moe)
                share = layer.mlp.top_k / spec.shape[0] if is_expert else 1
                active += round(spec.size * share)
    return layers, active, exit_specs(model)["head.weight"].size


def count_distinct(prompts: list[list[int]]) -> int:
    """Count the tokens of a trie of prompts: those that must be computed if prefixes
    are shared."""
    count = 0
    before = []
    for prompt in sorted(prompts):
        num_shared = 0
        for token, other in zip(prompt, before, strict=False):
            if token != other:
                break
            num_shared += 1
        count += len(prompt) - num_shared
        before = prompt
    return count
