"""Tells from a config how long the sequences of a model may be."""

from __future__ import annotations

from typing import Any

LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len")
BLOOM_LENGTH = 2048  # BLOOM's newer configs state no length; this is what it was trained on


def context_length(config: Any) -> int:
    """Return the most tokens of one sequence that are computed as transformers computes them.

    Two kinds of rotary scaling choose their frequencies by the length of the whole sequence, which
    rows packed into one step do not share. Up to the length of the original training the choice
    is always the same, so that is the limit: `max_position_embeddings` for `dynamic`, as
    transformers counts it, and `original_max_position_embeddings` for `longrope`. Beyond the latter
    queries of Ministral 3 grow with their positions (`llama_4_scaling_beta`), so it has this limit.
    """
    stated = (getattr(config, field, None) for field in LENGTH_FIELDS)
    length = next((int(value) for value in stated if value), BLOOM_LENGTH)
    for rope in _ropes(config):
        if rope.get("rope_type") == "longrope" or rope.get("llama_4_scaling_beta"):
            length = min(length, int(rope["original_max_position_embeddings"]))
    return length


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Return a config's rotary settings: one, or one for each kind of layer (Gemma 3)."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [value for value in rope.values() if isinstance(value, dict)] or [rope]
