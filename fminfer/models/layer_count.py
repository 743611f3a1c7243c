"""Checks a split of layers before any rank is started: from config.json, without torch."""

from __future__ import annotations

import json
from pathlib import Path

from fminfer.core.config import EngineConfig, ModelOptions
from fminfer.core.impostors import is_gguf
from fminfer.core.partition import split_layers
from fminfer.models.known_sizes import folder_of, size_fields

LAYER_NAMES = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def check_split(config: EngineConfig, num_stages: int) -> None:
    """Refuse a split of layers that cannot be, if the model's layers can be counted from here.

    Raises:
        UsageError: a rank without work, or layers without a rank.
    """
    num_layers = _count_layers(config)
    if num_layers is not None:
        split_layers(
            num_layers,
            num_stages,
            head_cost=0.0,
            each=config.num_layers,
            most=config.max_layers,
            counts=config.stage_layers,
        )


def _count_layers(config: ModelOptions) -> int | None:
    """Return None for a model that is not here, or a config.json that is not plain."""
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
    counts = [fields[name] for name in LAYER_NAMES if isinstance(fields.get(name), int)]
    return counts[0] if len(set(counts)) == 1 else None
