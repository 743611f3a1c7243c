"""Known sizes, folders and counts of layers, by a model's name and config.json alone.

Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fminfer.core.config import EngineConfig, ModelOptions
from fminfer.core.errors import UsageError
from fminfer.core.impostors import is_gguf
from fminfer.core.partition import split_layers

Fields = dict[str, Any]
DEMO_MODEL = Path(__file__).parent.parent / "demo_model"
DEMO_NAMES = ("fminfer-demo", "demo")  # the first one stands in records
# The fields of config.json that count layers, those of decoders of models with an
# encoder, heads.
LAYER_NAMES = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
DECODER_NAMES = ("num_decoder_layers", "decoder_layers")
HEAD_NAMES = ("num_attention_heads", "n_head", "n_heads", "num_heads")
# The fields of a size, in the order of their values below.
_FIELDS = {
    "bloom": "hidden_size n_layer n_head",
    "gpt2": "n_embd n_layer n_head n_positions",
    "llama": "hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads vocab_size max_position_embeddings",
    "opt": "hidden_size word_embed_proj_dim ffn_dim num_hidden_layers num_attention_heads",
    "t5": "d_model d_ff num_layers num_heads d_kv",
}
_OF_ALL: dict[str, Fields] = {
    "bloom": {"vocab_size": 250880},
    "llama": {"tie_word_embeddings": False},
}


def _make_fields(model_type: str, *values: int, **more: Any) -> Fields:
    fields = zip(_FIELDS[model_type].split(), values, strict=True)
    return {
        "model_type": model_type,
        **_OF_ALL.get(model_type, {}),
        **dict(fields),
    } | more


OF_LLAMA3: Fields = {"rms_norm_eps": 1e-5, "rope_theta": 500000.0}
# `llama-160m` is the benchmarks' own; a made-up text of it has no end.
SIZES: dict[str, Fields] = {
    "llama-160m": _make_fields("llama", 768, 3072, 12, 12, 12, 32000, 2048)
    | {"bos_token_id": None, "eos_token_id": None},
    "llama-7b": _make_fields(
        "llama", 4096, 11008, 32, 32, 32, 32000, 4096, rms_norm_eps=1e-5
    ),
    "llama-8b": _make_fields(
        "llama", 4096, 14336, 32, 32, 8, 128256, 8192, **OF_LLAMA3
    ),
    "llama-70b": _make_fields(
        "llama", 8192, 28672, 80, 64, 8, 128256, 8192, **OF_LLAMA3
    ),
    "llama-405b": _make_fields(
        "llama", 16384, 53248, 126, 128, 8, 128256, 8192, **OF_LLAMA3
    ),
    "bloom-560m": _make_fields("bloom", 1024, 24, 16),
    "bloom-7b1": _make_fields("bloom", 4096, 30, 32),
    "bloom-176b": _make_fields("bloom", 14336, 70, 112),
    "bert-base": {"model_type": "bert"},
    "deepseek-v3": {"model_type": "deepseek_v3"},
    "gpt-j-6b": {"model_type": "gptj"},
    "gpt-neox-20b": {"model_type": "gpt_neox"},
    "gpt3-175b": _make_fields("gpt2", 12288, 96, 96, 2048),
    "opt-125m": _make_fields("opt", 768, 768, 3072, 12, 12),
    "opt-1.3b": _make_fields("opt", 2048, 2048, 8192, 24, 32),
    "opt-6.7b": _make_fields("opt", 4096, 4096, 16384, 32, 32),
    "opt-30b": _make_fields("opt", 7168, 7168, 28672, 48, 56),
    "opt-66b": _make_fields("opt", 9216, 9216, 36864, 64, 72),
    "opt-175b": _make_fields("opt", 12288, 12288, 49152, 96, 96),
    "t5-small": _make_fields("t5", 512, 2048, 6, 8, 64),
    "t5-11b": _make_fields("t5", 1024, 65536, 24, 128, 128),
    "ul2": _make_fields("t5", 4096, 16384, 32, 16, 256)
    | {"feed_forward_proj": "gated-silu", "tie_word_embeddings": False},
}
# What the users of earlier systems type.
ALIASES = {
    "560m": "bloom-560m",
    "7b1": "bloom-7b1",
    "175b": "bloom-176b",
    "176b": "bloom-176b",
}


def find_size_fields(name: str | None) -> Fields | None:
    """Return a copy of the config's fields of a size; None: there is no such size."""
    fields = SIZES.get(ALIASES.get(name or "", name or ""))
    return None if fields is None else dict(fields)


def find_model_folder(name: str | None) -> Path | None:
    """Return a model's folder or GGUF file, or the demo model's; None: a model of the hub."""
    is_demo = name in DEMO_NAMES and not (Path(str(name)) / "config.json").exists()
    if name is not None and (Path(name).is_dir() or is_gguf(name)) and not is_demo:
        return Path(name)
    return DEMO_MODEL if name is None or name in DEMO_NAMES else None


def short_name(name: str) -> str:
    """Return a model's name: the last part of a path, or the whole hub id or known size.

    A folder of the hub's cache is called by its model's id.
    """
    path = Path(os.path.abspath(name))
    if not path.exists():
        return name
    cached = path.parent.parent.name
    if path.parent.name == "snapshots" and cached.startswith("models--"):
        return cached.removeprefix("models--").replace("--", "/")
    return path.parent.name if path.name == "config.json" else path.name


def check_split(config: EngineConfig, num_stages: int) -> None:
    """Raise a UsageError for an impossible split, by config.json, before any rank starts."""
    num_layers = _read_count(config, DECODER_NAMES) or _read_count(config, LAYER_NAMES)
    num_heads = _read_count(config, HEAD_NAMES)
    num_shards = config.tensor_parallel_size
    if num_heads is not None and num_shards > num_heads:
        raise UsageError(
            f"--tensor-parallel-size {num_shards}: {num_heads} heads cannot be divided among "
            f"{num_shards} ranks. Use {num_heads} or less; --pipeline-group-size uses more ranks"
        )
    if num_layers is not None:
        split_layers(
            num_layers,
            num_stages,
            head_cost=0.0,
            each=config.num_layers,
            most=config.max_layers,
            counts=config.stage_layers,
        )


def _read_count(config: ModelOptions, names: tuple[str, ...]) -> int | None:
    """Read the number under one of these names in config.json.

    None: there is no such file here, or its numbers differ.
    """
    name = config.random_init or config.model_config
    fields = find_size_fields(name)
    if fields is None:
        path = Path(name or find_model_folder(config.model) or str(config.model))
        if is_gguf(path):
            return None
        try:
            fields = json.loads(
                (path / "config.json" if path.is_dir() else path).read_text()
            )
        except (OSError, ValueError, RecursionError):
            return None
    if isinstance(fields.get("text_config"), dict):  # the model reads images, too
        fields = fields["text_config"]
    counts = [fields[name] for name in names if isinstance(fields.get(name), int)]
    return counts[0] if len(set(counts)) == 1 else None
