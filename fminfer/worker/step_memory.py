"""What a step needs beside weights and KV cache, and how much KV cache is left room for."""

from __future__ import annotations

import torch

from fminfer.compute.spec import Layer, Mlp, Model, Moe
from fminfer.core.config import EngineConfig
from fminfer.core.partition import Part
from fminfer.models.decode_graphs import can_capture, graph_sizes, input_bytes
from fminfer.models.stage import MAX_LOGITS

# Of one logit, all copies that exist at once. Float32 logits, edited and ranked on the CPU; on a
# GPU torch draws from them with scores in float64 (not measured there).
LOGIT_BYTES = {"cpu": 3 * 4, "cuda": 40}
HIDDEN_COPIES, WIDE_COPIES = 8, 3  # copies of a step's hidden states, and of an MLP's inner ones
EXPERT_COPIES = 6  # for each expert of a token: four in the dtype, and a sum in float32
GRAPH_LAYER_BYTES = 1 << 18  # what the driver keeps of a layer in a CUDA graph: not measured
CPU_SHARE = 0.5  # share of the memory that is free after loading; others use it as well
GPU_RESERVE = 3 << 29  # kept free for cuBLAS, compiled kernels and holes in torch's memory


def step_bytes(
    config: EngineConfig, model: Model, dtype: torch.dtype, device: torch.device, part: Part
) -> int:
    """Return what the largest step takes in one stage.

    Graphs are captured as steps first need them, in memory of their own, which the KV cache must
    leave free.
    """
    layers = model.layers[part.first : part.last]
    widths = [max(sum(each.attention.qkv_sizes), _up_size(each.mlp)) for each in layers]
    sizes = config.step_sizes(device.type, part.num_stages)
    tokens = sizes.chunk_size
    hidden = (HIDDEN_COPIES + max(map(_copies, layers))) * model.hidden_size
    hidden += WIDE_COPIES * max(widths)
    logits = min(MAX_LOGITS[device.type], tokens * model.vocab_size) if part.is_last else 0
    graphs = 0
    if device.type == "cuda" and config.kernels != "off" and can_capture(layers):
        rows = sizes.max_decode_rows
        graphs = len(layers) * len(graph_sizes(rows)) * GRAPH_LAYER_BYTES + input_bytes(rows)
        tokens += rows  # the graphs' pool holds the hidden states of the largest one
    return tokens * hidden * dtype.itemsize + LOGIT_BYTES[device.type] * logits + graphs


def _copies(layer: Layer) -> int:
    """Return how often each hidden state is copied for experts: to each of them, and back."""
    return EXPERT_COPIES * layer.mlp.top_k if isinstance(layer.mlp, Moe) else 0


def _up_size(mlp: Mlp | Moe) -> int:
    if isinstance(mlp, Mlp):
        return mlp.up_size
    return max(mlp.expert.up_size, 0 if mlp.shared is None else mlp.shared.up_size)


def peak_bytes(device: torch.device) -> int:
    """Return the most memory that torch has taken of a GPU so far; 0 for a CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0


def auto_budget(
    kv_bytes_per_token: int, most_useful: int, free: int, work: int, device_type: str
) -> int:
    """Return the tokens of KV cache that a device has room for, at least 1.

    Args:
        kv_bytes_per_token, work: of all that share the memory; `work` is that of steps.
        most_useful: more tokens are of no use.
        free: bytes, once the weights are loaded.
    """
    room = int(free * CPU_SHARE) if device_type == "cpu" else free - work - GPU_RESERVE
    return max(1, min(most_useful, room // kv_bytes_per_token))
