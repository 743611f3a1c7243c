"""Checks a split before any rank is started: from config.json, without torch."""

from __future__ import annotations

import json
from pathlib import Path

from fminfer.core.config import EngineConfig, ModelOptions
from fminfer.core.errors import UsageError
from fminfer.core.impostors import is_gguf
from fminfer.core.partition import split_layers
from fminfer.models.known_sizes import folder_of, size_fields

LAYER_NAMES = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
DECODER_NAMES = ("num_decoder_layers", "decoder_layers")  # of models with an encoder, first
HEAD_NAMES = ("num_attention_heads", "n_head", "n_heads", "num_heads")


def check_split(config: EngineConfig, num_stages: int) -> None:
    """Refuse a split that cannot be, if the model's layers and heads can be counted from here.

    Raises:
        UsageError: a rank without work, or layers without a rank.
    """
    num_layers = _count(config, DECODER_NAMES) or _count(config, LAYER_NAMES)
    num_heads = _count(config, HEAD_NAMES)
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


def _count(config: ModelOptions, names: tuple[str, ...]) -> int | None:
    """Return the number that has one of these names in config.json.

    None: the model is not here, or its config.json is not plain.
    """
    name = config.random_init or config.model_config
    fields = size_fields(name)
    if fields is None:
        path = Path(name or folder_of(config.model) or str(config.model))
        if is_gguf(path):
            return None
        try:
            fields = json.loads((path / "config.json" if path.is_dir() else path).read_text())
        except (OSError, ValueError):
            return None
    if isinstance(fields.get("text_config"), dict):  # the model reads images, too
        fields = fields["text_config"]
    counts = [fields[name] for name in names if isinstance(fields.get(name), int)]
    return counts[0] if len(set(counts)) == 1 else None
