"""Shapes for `--random-init SIZE`: config fields of known models, for benches without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

DEMO_MODEL = Path(__file__).parent.parent / "demo_model"

# Shapes as published in each model's config.json; `llama-160m` is the benchmarks' own.
SIZES: dict[str, dict[str, Any]] = {
    "llama-160m": {
        "model_type": "llama",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "bloom-560m": {
        "model_type": "bloom",
        "hidden_size": 1024,
        "n_layer": 24,
        "n_head": 16,
        "vocab_size": 250880,
    },
    "bloom-7b1": {
        "model_type": "bloom",
        "hidden_size": 4096,
        "n_layer": 30,
        "n_head": 32,
        "vocab_size": 250880,
    },
    "gpt-j-6b": {"model_type": "gptj"},
    "opt-125m": {"model_type": "opt"},
}
