"""Variants of a config: how long its sequences may be, and which settings are refused by name.

What transformers' own code ignores or computes for a whole sequence at once would come out wrong
here without a word. It reads configs and knows no weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fminfer.errors import CheckpointError

LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len")
BLOOM_LENGTH = 2048  # BLOOM's newer configs state no length; this is what it was trained on

# model_type ("" for all) -> a setting's path -> the values that run; a setting left out runs.
# MPT's are those of the authors' code that transformers' MPT does not look at.
_RUNNABLE: dict[str, dict[str, tuple[object, ...]]] = {
    "": {"use_bidirectional_attention": (False, None), "quantization_config": (None,)},
    # transformers then adds products up in slices of the weights, and leaves their biases out.
    "bloom": {"slow_but_exact": (False,)},
    "mpt": {
        "attn_config.alibi": (True,),
        "attn_config.attn_type": ("multihead_attention",),
        "attn_config.attn_uses_sequence_id": (False,),
        "attn_config.prefix_lm": (False,),
        "attn_config.qk_ln": (False,),
        "attn_config.rope": (False,),
        "expansion_ratio": (4,),
        "logit_scale": (None,),
        "no_bias": (True,),
        "norm_type": ("low_precision_layernorm", "layernorm"),
    },
}


def check_variant(config: Any) -> None:
    """Refuse a config whose results would be wrong.

    Raises:
        CheckpointError: a setting has a value that does not run; it names both.
    """
    rules = _RUNNABLE[""] | _RUNNABLE.get(config.model_type, {})
    for path, runnable in rules.items():
        for found in _find(config, path):
            if found not in runnable:
                raise CheckpointError(
                    f"config.json sets {path} to {found!r}, and a {config.model_type} model is "
                    f"computed only with {' or '.join(map(repr, runnable))}; use a checkpoint "
                    "that has that"
                )


def _find(config: Any, path: str) -> Iterator[object]:
    for name in path.split("."):
        if not hasattr(config, name):
            return
        config = getattr(config, name)
    yield config


def context_length(config: Any) -> int:
    """Return the most tokens of one sequence that are computed as transformers computes them.

    Two kinds of rotary scaling choose their frequencies by the length of the whole sequence, which
    rows packed into one step do not share. Up to the length of the original training the choice
    is always the same, so that is the limit: `max_position_embeddings` for `dynamic`, as
    transformers counts it, and `original_max_position_embeddings` for `longrope`.
    """
    stated = (getattr(config, field, None) for field in LENGTH_FIELDS)
    length = next((int(value) for value in stated if value), BLOOM_LENGTH)
    for rope in _ropes(config):
        if rope.get("rope_type") == "longrope":
            length = min(length, int(rope["original_max_position_embeddings"]))
    return length


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Return a config's rotary settings: one, or one for each kind of layer (Gemma 3)."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [value for value in rope.values() if isinstance(value, dict)] or [rope]
