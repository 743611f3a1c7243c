"""What a quantized file holds, read by llama.cpp's Python package."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gguf_samples.random_models import rounded

NUM_VALUES = 16  # of each tensor
LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
OSS_LAYER = LAYER | {
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}
OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def read_tensors(path: Path) -> dict[str, tuple[str, Tensor]]:
    """Return each tensor's form and its values in float32."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    return {
        each.name: (
            each.tensor_type.name,
            torch.tensor(dequantize(each.data, each.tensor_type)).float(),
        )
        for each in GGUFReader(path).tensors
    }


def forms_of(path: Path) -> str:
    """Return how many tensors a file has of each form."""
    from gguf import GGUFReader

    counts = Counter(each.tensor_type.name for each in GGUFReader(path).tensors)
    return " ".join(f"{form}:{count}" for form, count in sorted(counts.items()))


def describe(tensors: dict[str, tuple[str, Tensor]]) -> dict[str, dict[str, Any]]:
    """Return each tensor's form and shape, and some of its values at equal distances."""
    described = {}
    for name, (form, values) in tensors.items():
        at = torch.linspace(0, values.numel() - 1, NUM_VALUES).long()
        described[name] = {
            "form": form,
            "shape": list(values.shape),
            "at": at.tolist(),
            "values": rounded(values.flatten()[at]),
        }
    return described


def load_weights(model: Any, tensors: dict[str, tuple[str, Tensor]]) -> None:
    """Put a file's weights into a llama or gpt_oss."""
    weights = {
        OUTSIDE[name]: values
        for name, (_, values) in tensors.items()
        if name in OUTSIDE
    }
    if model.config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    read = _oss_layer if model.config.model_type == "gpt_oss" else _llama_layer
    for layer in range(model.config.num_hidden_layers):
        start = f"blk.{layer}."
        inside = {
            name.removeprefix(start): values
            for name, (_, values) in tensors.items()
            if name.startswith(start)
        }
        part = read(inside, model.config)
        weights |= {
            f"model.layers.{layer}.{name}": values for name, values in part.items()
        }
    model.load_state_dict(weights)


def _llama_layer(tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Rename a llama's tensors. A head's two halves stand interleaved in queries and keys."""
    for name, heads in (
        ("q", config.num_attention_heads),
        ("k", config.num_key_value_heads),
    ):
        pairs = tensors[f"attn_{name}.weight"].unflatten(0, (heads, -1, 2))
        tensors[f"attn_{name}.weight"] = pairs.transpose(1, 2).flatten(0, 2)
    return {
        f"{LAYER[name.split('.')[0]]}.weight": values
        for name, values in tensors.items()
    }


def _oss_layer(tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Rename a gpt_oss's tensors. Gates and ups of experts stand in turn, inputs first."""
    weights = {}
    for kind, end in (("weight", ""), ("bias", "_bias")):
        gate, up, down = (
            tensors.pop(f"ffn_{part}_exps.{kind}") for part in ("gate", "up", "down")
        )
        both = torch.stack([gate, up], 2).flatten(1, 2)
        is_matrix = kind == "weight"
        weights[f"mlp.experts.gate_up_proj{end}"] = (
            both.transpose(1, 2) if is_matrix else both
        )
        weights[f"mlp.experts.down_proj{end}"] = (
            down.transpose(1, 2) if is_matrix else down
        )
    weights["self_attn.sinks"] = tensors.pop("attn_sinks.weight")
    for name, values in tensors.items():
        part, kind = name.split(".")
        weights[f"{OSS_LAYER[part]}.{kind}"] = values
    return weights
